# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The redeploy lab: run its playbooks, look at its nodes and gateways, put it back to where a test may begin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab import lab
from tests.lab.redeploy.client import Asked, Load

ROOT = lab.ROOT
INVENTORIES = os.environ.get("METALSERVE_REDEPLOY_INVENTORY", "tests/lab/redeploy/inventory").split(",")
"""A later one is laid over those before it."""
SOURCES = [word for path in INVENTORIES for word in ("-i", path)]
LAB = Path(os.environ.get("METALSERVE_REDEPLOY_LAB", lab.CHECKOUT / ".lab" / "redeploy"))
NAME = "metalserve-redeploy"
ENGINES = ("engine1", "engine2")
GATEWAYS = tuple(os.environ.get("METALSERVE_REDEPLOY_GATEWAYS", "gateway1 gateway2").split())
PREFIX = "172.30.79"
ADDRESSES = {
    "gateway1": f"{PREFIX}.10",
    "gateway2": f"{PREFIX}.13",
    "engine1": f"{PREFIX}.11",
    "engine2": f"{PREFIX}.12",
}


QUICK = ["-e", '{"release_soak_s": 0, "release_gate_requests": 8}']


def key() -> str:
    """Return the clients' key."""
    return (LAB / "secrets" / "api_key").read_text().strip()


def load(clients: int = 12, rate: float = 0.0, words: int = 8, tokens: int = 8, asked: Asked | None = None) -> Load:
    """Return clients of all gateways."""
    gateways = [(ADDRESSES[name], str(LAB / "tls" / f"{name}.crt")) for name in GATEWAYS]
    return Load(gateways, key(), clients, rate, words, tokens, asked)


class Playbook:
    """A playbook that runs, its output in a file: nothing waits for a pipe that nobody reads."""

    def __init__(self, name: str, *arguments: str) -> None:
        """Start ``playbooks/<name>.yml`` over the redeploy lab in a session of its own."""
        self.log = tempfile.NamedTemporaryFile("w+", prefix=f"{name}-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(lab.BIN / "ansible-playbook"), f"playbooks/{name}.yml", *SOURCES, *arguments],
            cwd=ROOT,
            env=lab.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        """What it said until now."""
        return Path(self.log.name).read_text(encoding="utf-8", errors="replace")

    def until(self, *words: str, seconds: float = 240) -> None:
        """Wait until a task begins whose name has one of ``words``."""
        ends = time.monotonic() + seconds
        while True:
            over = self.process.poll() is not None
            tasks = [line for line in self.output.splitlines() if line.startswith("TASK")]
            if any(word in line for line in tasks for word in words):
                return
            assert not over, f"it ended before {words}:\n{self.output[-3000:]}"
            assert time.monotonic() < ends, f"no task {words}:\n{self.output[-3000:]}"
            time.sleep(0.1)

    def finish(self, seconds: float = 600) -> lab.Run:
        """Wait for its end."""
        code = self.process.wait(seconds)
        return lab.Run(code, self.output)

    def kill(self) -> None:
        """Kill the controller as a power cut would: the run and every process below it, with sessions of their own."""
        for pid in family(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


def script(*arguments: str) -> subprocess.Popen[str]:
    """Start scripts/redeploy over the redeploy lab."""
    return subprocess.Popen(
        [sys.executable, "scripts/redeploy", *arguments, *SOURCES],
        cwd=ROOT,
        env=lab.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def spent(log: Path, hosts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return seconds by phase of each host's turn, from an event log: from its lock to the next one's, or the run's end."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found: dict[str, dict[str, float]] = {}
    for host in hosts:
        mine = [row for row in rows if row.get("host") == host and row["event"] == "phase"]
        first = next(number for number, row in enumerate(mine) if row["phase"] == "lock")
        mine = mine[first:]
        after = next(row["time"] for row in rows if row["time"] > mine[-1]["time"] and row.get("host") != host)
        ends = [row["time"] for row in mine[1:]] + [after]
        phases: dict[str, float] = {}
        for row, end in zip(mine, ends, strict=True):
            phases[row["phase"]] = phases.get(row["phase"], 0.0) + end - row["time"]
        found[host] = phases
    return found


def family(pid: int) -> list[int]:
    """Return a process and all below it."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def playbook(name: str, *arguments: str, timeout_s: float = 600) -> lab.Run:
    """Run a playbook to its end."""
    return Playbook(name, *arguments).finish(timeout_s)


def not_fine() -> set[tuple[str, str]]:
    """Return host and check of all that the audit does not find fine."""
    _, found, unjudged = lab.audit(*SOURCES[2:], inventory=INVENTORIES[0])
    assert not unjudged, unjudged
    return found


def on(node: str, text: str, check: bool = True) -> str:
    """Run a shell command as root on a node."""
    return lab.on(node, text, check, lab=NAME)


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


def container(node: str) -> str:
    """Return the name of the container that runs on a node."""
    return on(node, "docker ps --format '{{.Names}}'").strip()


def started(node: str) -> str:
    """Return when the containers that run on a node were started."""
    return on(node, "docker ps -q | xargs -r docker inspect -f '{{.Name}} {{.State.StartedAt}}'")


def all_serve() -> list[str]:
    """Return what keeps a replica from serving, as all gateways see it; empty where all do."""
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


def out_since(replica: str, began: float) -> float:
    """Wait until no gateway sends the replica requests; return for how many seconds one did after ``began``."""
    ends = time.monotonic() + 20
    while True:
        observed = [rotation(gateway)[replica]["observed"] for gateway in GATEWAYS]
        if not any(one["healthy"] for one in observed):
            return max(float(one["since"]) for one in observed) - began
        assert time.monotonic() < ends, observed
        time.sleep(0.2)


@contextmanager
def unnoticed(watching: Load | None = None) -> Iterator[None]:
    """Begin and end with all replicas in rotation, on the same releases and unlocked; a client gets every answer."""
    wait_until_all_serve()
    releases = [current(node) for node in ENGINES]
    with watching or load(clients=4, rate=40) as clients:
        clients.until(20)
        yield
        wait_until_all_serve()
        clients.until(clients.seen.good + 20)
    print(f"{clients.seen.good} answers at {clients.seen.rate:.0f}/s, failed {len(clients.seen.failed)}")
    assert clients.seen.failed == []
    assert [current(node) for node in ENGINES] == releases
    assert no_locks() == []


def release(name: str) -> list[str]:
    """Return the arguments that deploy a variant of the stand-in; "" is the plain one."""
    return ["-e", f"test_release={name}"]
