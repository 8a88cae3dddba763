# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What each node runs, as testinfra finds it there."""

from __future__ import annotations

import json

import pytest
import testinfra
from testinfra.host import Host

from tests.lab.lab import ENGINES, GATEWAY, NODES

pytestmark = pytest.mark.lab

SERVICES = {
    "gateway1": ["nginx", "prometheus", "prometheus-alertmanager", "prometheus-nginx-exporter", "mtail"],
    "engine1": ["docker", "metalserve-agent", "metalserve-firewall"],
    "engine2": ["docker", "metalserve-agent", "metalserve-firewall"],
}


def node(name: str) -> Host:
    """Return testinfra's view of a lab node."""
    return testinfra.get_host(f"docker://metalserve-lab-{name}")


@pytest.mark.parametrize("name", NODES)
def test_services_run_now_and_at_the_next_boot(name: str) -> None:
    for service in [*SERVICES[name], "prometheus-node-exporter", "ssh"]:
        assert node(name).service(service).is_running, service
        assert node(name).service(service).is_enabled, service


@pytest.mark.parametrize("name", NODES)
def test_no_unit_failed(name: str) -> None:
    assert node(name).check_output("systemctl list-units --failed --plain --no-legend") == ""


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_as_confined_as_planned(name: str) -> None:
    host = node(name)
    containers = json.loads(host.check_output("docker inspect $(docker ps -q)"))
    assert len(containers) == 1
    engine = containers[0]
    settings = engine["HostConfig"]
    assert "@sha256:" in engine["Config"]["Image"]
    assert settings["RestartPolicy"]["Name"] in ("no", "")
    assert settings["Init"] is True
    assert settings["CapDrop"] == ["ALL"]
    assert settings["Memory"] > 0
    assert settings["LogConfig"]["Config"]["max-size"]
    models = [mount for mount in engine["Mounts"] if "/models/" in mount["Source"]]
    assert models
    assert not any(mount["RW"] for mount in models)
    unit = f"metalserve-engine@{'short-0' if name == ENGINES[0] else 'long-0'}.service"
    assert host.service(unit).is_running
    assert host.service(unit).is_enabled


@pytest.mark.parametrize("name", ENGINES)
def test_a_release_is_whole_and_current(name: str) -> None:
    host = node(name)
    current = host.check_output("readlink -f /var/lib/metalserve/engines/*/current").split()
    assert len(current) == 1
    assert host.file(current[0]).is_directory
    assert host.check_output(f"ls {current[0]}")


def test_the_gateway_listens_where_it_should() -> None:
    host = node(GATEWAY)
    public = {
        line.split()[3].rsplit(":", 1)[1]
        for line in host.check_output("ss -Hltn").splitlines()
        if "127.0.0.1" not in line
    }
    assert "443" in public
    assert "8081" not in public, "the admin port is for this host alone"


def test_engine_ports_are_on_the_private_address_only() -> None:
    for name in ENGINES:
        listening = [line.split()[3] for line in node(name).check_output("ss -Hltn").splitlines()]
        engines = [address for address in listening if address.rsplit(":", 1)[1].startswith("81")]
        assert engines
        assert not any(address.startswith(("0.0.0.0", "*", "[::]")) for address in engines), engines
