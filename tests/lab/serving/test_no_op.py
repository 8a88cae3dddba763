# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""site.yml again: nothing changes, nothing restarts; a changed plan is reported, not applied."""

from __future__ import annotations

import json
import subprocess
import tempfile
from typing import Any

import pytest

from tests.lab.lab import (
    BIN,
    ENGINES,
    GATEWAY,
    NODES,
    ROOT,
    environment,
    on,
    owned_files,
    playbook,
    running_state,
    wait_until_serving,
)

pytestmark = pytest.mark.lab


def test_a_second_run_changes_nothing_and_restarts_nothing() -> None:
    before = {node: running_state(node) for node in NODES}
    run = playbook("site.yml")
    assert run.code == 0, run.end
    assert {host: count for host, count in run.changed.items() if count} == {}
    assert {node: running_state(node) for node in NODES} == before


def test_a_changed_plan_is_named_and_not_applied() -> None:
    before = {node: running_state(node) for node in ENGINES}
    pools = {"settings": {"max_num_seqs": 5}}
    run = playbook("site.yml", "-e", f"@{changed_pools(pools)}")
    assert run.code != 0
    assert "redeploy needed: engine1" in run.output, run.end
    assert "max_num_seqs" in run.output
    assert "Traceback" not in run.output
    after = {node: running_state(node) for node in ENGINES}
    assert after == before


def test_a_replica_that_would_move_stops_the_run_before_the_gateway() -> None:
    before = {node: running_state(node) for node in NODES}
    run = playbook("site.yml", "-e", f"@{changed_pools({'port': 8300})}")
    assert run.code != 0
    assert "short-0 (" in run.output, run.end
    assert ":8300)" in run.output
    assert {node: running_state(node) for node in NODES} == before


def changed_pools(change: dict[str, Any]) -> str:
    """Write the lab's pools with ``change`` laid over the pool ``short``; return the file's path."""
    shown = subprocess.run(
        [str(BIN / "ansible-inventory"), "-i", "inventory/lab", "--host", GATEWAY],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    # ansible-inventory sorts keys, and the order of pools is theirs by meaning.
    named = json.loads(shown.stdout)["metalserve_pools"]
    pools = {name: named[name] for name in sorted(named, key=lambda name: int(named[name]["max_model_len"]))}
    for key, value in change.items():
        pools["short"][key] = {**pools["short"].get(key, {}), **value} if isinstance(value, dict) else value
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({"metalserve_pools": pools}, file)
    return file.name


def test_a_gateway_alone_with_a_dead_node_keeps_its_files() -> None:
    """The gateway's files depend on the inventory alone: one stopped node of the pool changes no byte."""
    assert playbook("site.yml", "--limit", GATEWAY, "--skip-tags", "verify").code == 0
    before = owned_files(GATEWAY)
    digest = "find /etc/nginx /etc/prometheus /etc/metalserve -type f -exec sha256sum {} + | sort"
    content = on(GATEWAY, digest)
    subprocess.run(["docker", "stop", "-t", "30", "metalserve-lab-engine2"], check=True, capture_output=True)
    try:
        run = playbook("site.yml", "--limit", GATEWAY, "--skip-tags", "verify")
    finally:
        subprocess.run(["docker", "start", "metalserve-lab-engine2"], check=True, capture_output=True)
        wait_until_serving("engine2")
    assert run.code == 0, run.end
    assert on(GATEWAY, digest) == content
    assert owned_files(GATEWAY) == before
