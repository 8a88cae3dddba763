# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the lab's tests share: run a playbook as a person would, look into a node, compare states."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CHECKOUT = Path(os.environ.get("METALSERVE_CHECKOUT", ROOT))
"""Whose .lab the lab belongs to."""
ENGINES, GATEWAY = ("engine1", "engine2"), "gateway1"
NODES = (GATEWAY, *ENGINES)
INVENTORY, NAME = "inventory/lab", "metalserve-lab"
"""The default lab; the functions below take another's."""


@dataclass(frozen=True)
class Run:
    """How a playbook ended."""

    code: int
    output: str

    @property
    def changed(self) -> dict[str, int]:
        """Return changed tasks per host, from the recap."""
        rows = re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", self.output, flags=re.MULTILINE)
        return {host: int(count) for host, count in rows}

    @property
    def end(self) -> str:
        """Return the last lines, for a failing assertion."""
        return "\n".join(self.output.splitlines()[-60:])


def playbook_command(name: str, *arguments: str, inventory: str = INVENTORY) -> list[str]:
    """Return the command of ``ansible-playbook name -i inventory``."""
    return [str(BIN / "ansible-playbook"), name, "-i", inventory, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a playbook: this Python's tools first, no colour, the checkout that a lab belongs to."""
    own = {"PATH": f"{BIN}:{os.environ['PATH']}", "METALSERVE_CHECKOUT": str(CHECKOUT)}
    return {**os.environ, **own, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}


def playbook(name: str, *arguments: str, timeout_s: float = 900, inventory: str = INVENTORY) -> Run:
    """Run a playbook over a lab to its end."""
    done = subprocess.run(
        playbook_command(name, *arguments, inventory=inventory),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Run(done.returncode, done.stdout)


def audit(*arguments: str, inventory: str = INVENTORY) -> tuple[int, set[tuple[str, str]], dict[str, str]]:
    """Audit a lab; return the exit code, (host, check) of all that is not fine, and why hosts were not judged."""
    done = subprocess.run(
        [sys.executable, "scripts/audit", "-i", inventory, "--json", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    found = {
        (host["host"], item["id"])
        for host in report["hosts"]
        for item in host["verdicts"]
        if item["verdict"] not in ("pass", "not_applicable")
    }
    return done.returncode, found, {host["host"]: host["error"] for host in report["hosts"] if host["error"]}


def on(node: str, command: str, check: bool = True, lab: str = NAME, timeout_s: float = 120) -> str:
    """Run ``command`` with sh as root on a node of a lab and return its standard output."""
    done = subprocess.run(
        ["docker", "exec", f"{lab}-{node}", "sh", "-c", command],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout_s,
    )
    if check:
        assert done.returncode == 0, f"{node}: {command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def code_on(node: str, command: str) -> int:
    """Return the exit code of ``command`` on a lab node."""
    return subprocess.run(
        ["docker", "exec", f"metalserve-lab-{node}", "sh", "-c", command], capture_output=True, check=False, timeout=120
    ).returncode


def address(node: str) -> str:
    """Return the node's address on the lab's network."""
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    command = ["docker", "inspect", "-f", template, f"metalserve-lab-{node}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def fetch(source: str, url: str) -> str:
    """Return what ``url`` answers to the node ``source``; empty where nothing answers."""
    code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
    command = ["docker", "exec", f"metalserve-lab-{source}", "python3", "-c", code, url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def containers_of(node: str) -> dict[str, bool]:
    """Return container name -> whether it runs, of all containers on the node; nothing while Docker is not there."""
    ids = on(node, "docker ps -aq 2>/dev/null || true", check=False).split()
    if not ids:
        return {}
    found = json.loads(on(node, f"docker inspect {' '.join(ids)}"))
    return {one["Name"]: bool(one["State"]["Running"]) for one in found}


def serves(node: str) -> bool:
    """Say whether the node's agent has seen every replica of the node ready, as the monitor would hear it."""
    metrics = fetch(GATEWAY, f"http://{address(node)}:9600/metrics")
    states = [line.rsplit(" ", 1)[1] for line in metrics.splitlines() if line.startswith("metalserve_replica_ready{")]
    return bool(states) and all(float(state) == 1 for state in states)


def wait_until_serving(node: str, seconds: float = 300) -> None:
    """Wait until an engine node that comes up serves, with nobody's help; fails with its units' log where it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(containers_of(node).values()) and serves(node):
            return
        time.sleep(2)
    raise AssertionError(on(node, "journalctl --no-pager -q -u 'metalserve-engine@*' | tail -n 40"))


OWNED = "/etc /opt /var/lib/metalserve"
# What any use of a system writes by itself, or what a package manager or Docker owns below the owned folders.
NOT_OURS = re.compile(
    r"^/etc/(ld\.so\.cache|mtab|resolv\.conf|hosts|hostname|\.updated|\.pwd\.lock|machine-id|group-?|gshadow-?|passwd-?|shadow-?"
    r"|subuid-?|subgid-?|rc\d\.d/.*|systemd/system/.*\.wants/.*|ssl/certs/.*|alternatives/.*)$"
)


def owned_files(node: str) -> dict[str, str]:
    """Return path -> mtime of every regular file and link below the folders that site.yml writes to."""
    listing = on(node, f"find {OWNED} -xdev \\( -type f -o -type l \\) -printf '%p\\t%T@\\n' 2>/dev/null || true")
    pairs = (line.split("\t") for line in listing.splitlines())
    return {path: mtime for path, mtime in pairs if not NOT_OURS.match(path)}


def running_state(node: str) -> dict[str, Any]:
    """Return what a no-op run must leave as it is: container starts, service PIDs, nginx workers, file times."""
    services = on(
        node,
        "for unit in nginx metalserve-agent prometheus prometheus-alertmanager prometheus-node-exporter "
        "prometheus-nginx-exporter mtail docker metalserve-firewall ssh; do "
        "echo $unit $(systemctl show -p MainPID -p ActiveEnterTimestampMonotonic --value $unit.service); done",
    )
    state: dict[str, Any] = {"services": services, "files": owned_files(node)}
    state["nginx"] = sorted(on(node, "pgrep -f 'nginx: (master|worker) process' || true").split())
    if node in ENGINES:
        ids = on(node, "docker ps -aq").split()
        found = json.loads(on(node, f"docker inspect {' '.join(ids)}")) if ids else []
        state["containers"] = {one["Name"]: (one["Id"], one["State"]["StartedAt"]) for one in found}
    return state
