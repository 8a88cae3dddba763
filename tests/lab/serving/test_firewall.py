# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An engine port answers the gateway and nobody else, also after Docker has restarted."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.lab.lab import ENGINES, GATEWAY, address, on, running_state

pytestmark = pytest.mark.lab

ASK = 'python3 -c "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"'


def engine_ports() -> list[tuple[str, str]]:
    """Return (host, port) of every listening engine, as its node's kernel tells it, not the plan."""
    ports = []
    for node in ENGINES:
        listening = on(node, "ss -Hltn | awk '{print $4}'")
        ports += [(address(node), port) for port in re.findall(r":(8[1-9]\d\d)$", listening, flags=re.MULTILINE)]
    return ports


def reaches(source: str, host: str, port: str) -> bool:
    """Say whether a TCP connection from a container named ``source`` comes to be."""
    command = ["docker", "exec", source, "sh", "-c", f"{ASK} {host} {port}"]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


@pytest.fixture(scope="module")
def stranger() -> object:
    """A third machine on the nodes' own network, in neither group."""
    image = subprocess.run(
        ["docker", "inspect", "-f", "{{.Image}}", "metalserve-lab-gateway1"], capture_output=True, text=True, check=True
    ).stdout.strip()
    networks = subprocess.run(
        [
            "docker",
            "inspect",
            "-f",
            "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}",
            "metalserve-lab-gateway1",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    name = "metalserve-lab-stranger"
    subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=False)
    subprocess.run(
        ["docker", "run", "-d", "--name", name, "--network", networks, image, "sleep", "600"],
        check=True,
        capture_output=True,
    )
    yield name
    subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=False)


def test_engines_listen() -> None:
    assert len(engine_ports()) >= len(ENGINES)


def test_the_gateway_reaches_every_engine_and_a_stranger_none(stranger: str) -> None:
    for host, port in engine_ports():
        assert reaches(f"metalserve-lab-{GATEWAY}", host, port), (host, port)
        assert not reaches(stranger, host, port), (host, port)


def test_a_docker_restart_opens_nothing_and_keeps_the_engines(stranger: str) -> None:
    node = ENGINES[0]
    before = running_state(node)["containers"]
    on(node, "systemctl restart docker")
    assert running_state(node)["containers"] == before, "live-restore keeps containers over a daemon restart"
    for host, port in engine_ports():
        assert not reaches(stranger, host, port), (host, port)
        assert reaches(f"metalserve-lab-{GATEWAY}", host, port), (host, port)
