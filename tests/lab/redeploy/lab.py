# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The redeploy lab: run its playbooks, look at its nodes and gateways, put it back to where a test may begin."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.lab import lab
from tests.lab.redeploy.client import Load

ROOT = lab.ROOT
INVENTORY = "tests/lab/redeploy/inventory"
LAB = Path(os.environ.get("METALSERVE_REDEPLOY_LAB", ROOT / ".lab" / "redeploy"))
NAME = "metalserve-redeploy"
ENGINES, GATEWAYS = ("engine1", "engine2"), ("gateway1", "gateway2")
PREFIX = "172.30.79"
ADDRESSES = {
    "gateway1": f"{PREFIX}.10",
    "gateway2": f"{PREFIX}.13",
    "engine1": f"{PREFIX}.11",
    "engine2": f"{PREFIX}.12",
}


def key() -> str:
    """Return the clients' key."""
    return (LAB / "secrets" / "api_key").read_text().strip()


def load(clients: int = 12, pause_s: float = 0.0) -> Load:
    """Return clients of both gateways."""
    return Load([(ADDRESSES[name], str(LAB / "tls" / f"{name}.crt")) for name in GATEWAYS], key(), clients, pause_s)


def command(name: str, *arguments: str) -> list[str]:
    """Return the command of a playbook over the redeploy lab."""
    return [str(lab.BIN / "ansible-playbook"), f"playbooks/{name}.yml", "-i", INVENTORY, *arguments]


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a playbook in a process group of its own."""
    return subprocess.Popen(
        command(name, *arguments),
        cwd=ROOT,
        env=lab.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def playbook(name: str, *arguments: str, timeout_s: float = 600) -> lab.Run:
    """Run a playbook to its end."""
    with start(name, *arguments) as process:
        output, _ = process.communicate(timeout=timeout_s)
    return lab.Run(process.returncode, output)


def on(node: str, text: str, check: bool = True) -> str:
    """Run a shell command as root on a node."""
    done = subprocess.run(
        ["docker", "exec", f"{NAME}-{node}", "sh", "-c", text], capture_output=True, text=True, check=False, timeout=60
    )
    assert not check or done.returncode == 0, f"{node}: {text}: {done.stdout}{done.stderr}"
    return done.stdout


def rotation(gateway: str = "gateway1") -> dict[str, dict[str, Any]]:
    """Return what a gateway says of each replica, by host/replica."""
    state = json.loads(on(gateway, f'python3 -c "{FETCH}"'))
    return {item["replica"]: item for pool in state["pools"] for item in pool["replicas"]}


FETCH = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8081/state').read().decode())"


def workers(gateway: str) -> list[str]:
    """Return the PIDs of nginx's workers."""
    return sorted(on(gateway, "pgrep -f '^nginx: worker process'").split())


def current(node: str) -> str:
    """Return the release that runs on a node."""
    return on(node, "basename $(readlink /var/lib/metalserve/engines/short-0/current)").strip()


def all_serve() -> list[str]:
    """Return what keeps a replica from serving, as both gateways see it; empty where all do."""
    wrong = []
    for gateway in GATEWAYS:
        for name, item in rotation(gateway).items():
            if not item["desired"]["in"] or not item["observed"]["healthy"]:
                wrong.append(f"{gateway}: {name}: {item['desired']} {item['observed']}")
    return wrong


def wait_until_all_serve(seconds: float = 60) -> None:
    """Wait until every replica serves again."""
    ends = time.monotonic() + seconds
    while wrong := all_serve():
        assert time.monotonic() < ends, wrong
        time.sleep(0.5)


def no_locks() -> list[str]:
    """Return the hosts with a lock that was left."""
    hosts = (*ENGINES, *GATEWAYS)
    return [host for host in hosts if on(host, "ls /var/lib/metalserve/redeploy.lock 2>/dev/null || true").strip()]


def release(name: str) -> list[str]:
    """Return the arguments that deploy a variant of the stand-in; "" is the plain one."""
    return ["-e", f"test_release={name}"]
