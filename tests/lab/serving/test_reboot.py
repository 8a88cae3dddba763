# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A node that went down and came up serves again with nobody's help."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from tests.lab.lab import ENGINES, GATEWAY, address, fetch, on

pytestmark = pytest.mark.lab

NODE = ENGINES[1]
WAIT_S = 300


def running() -> dict[str, bool]:
    """Return container name -> whether it runs, of all containers on the node; nothing while Docker is not there."""
    ids = on(NODE, "docker ps -aq 2>/dev/null || true", check=False).split()
    if not ids:
        return {}
    found = json.loads(on(NODE, f"docker inspect {' '.join(ids)}"))
    return {one["Name"]: bool(one["State"]["Running"]) for one in found}


def ready() -> bool:
    """Say whether the node's agent has seen every replica of the node ready, as the monitor would hear it."""
    metrics = fetch(GATEWAY, f"http://{address(NODE)}:9600/metrics")
    states = [line.rsplit(" ", 1)[1] for line in metrics.splitlines() if line.startswith("metalserve_replica_ready{")]
    return bool(states) and all(float(state) == 1 for state in states)


def test_a_replica_comes_back_after_its_node_went_down() -> None:
    before = running()
    assert any(before.values()), "no engine runs before the test"
    subprocess.run(["docker", "restart", "-t", "60", f"metalserve-lab-{NODE}"], check=True, capture_output=True)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not (running() == before and ready()):
        time.sleep(2)
    assert running() == before
    assert ready(), on(NODE, "journalctl --no-pager -q -u 'metalserve-engine@*' | tail -n 40")
