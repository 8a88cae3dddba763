# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Everything else that a person does with a service that runs; a client that is there all the time notices nothing of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.lab.redeploy import lab

NODE = "engine1"


@pytest.fixture(autouse=True)
def nobody_notices() -> Iterator[None]:
    """A client sends its requests all the time, and gets each of them answered."""
    with lab.unnoticed():
        yield


def inside() -> dict[str, bool]:
    """Return whether each replica is wanted in, by every gateway."""
    views = [lab.rotation(gateway) for gateway in lab.GATEWAYS]
    return {name: all(view[name]["desired"]["in"] for view in views) for name in views[0]}


def test_drain_and_undrain() -> None:
    started = [lab.started(node) for node in lab.ENGINES]
    with lab.script("drain", "-l", NODE) as drain:
        output, _ = drain.communicate(timeout=300)
    assert drain.returncode == 0, output
    assert inside() == {"engine1/short-0": False, "engine2/short-0": True}
    audit = lab.playbook("audit", "-l", NODE)
    assert "desired out by" in audit.output, audit.end
    # The other one cannot be spared now.
    refused = lab.playbook("drain", "-l", "engine2")
    assert refused.code != 0
    assert "pool short: 1 replica, headroom 0" in refused.output, refused.end
    with lab.script("undrain", "-l", NODE) as undrain:
        output, _ = undrain.communicate(timeout=300)
    assert undrain.returncode == 0, output
    assert all(inside().values())
    assert [lab.started(node) for node in lab.ENGINES] == started


def test_a_redeploy_leaves_a_drained_node_out_and_brings_it_to_its_release() -> None:
    assert lab.playbook("drain", "-l", NODE).code == 0
    try:
        run = lab.playbook(
            "redeploy", *lab.release("next"), *lab.QUICK, "-e", "metalserve_allow_outage=false", "-l", NODE
        )
        assert run.code == 0, run.end
        assert not inside()["engine1/short-0"]
        assert lab.playbook("rollback", *lab.QUICK, "-l", NODE).code == 0
    finally:
        assert lab.playbook("undrain", "-l", NODE).code == 0


def test_maintain() -> None:
    commands = json.dumps({"release_maintain_commands": ["touch /root/maintained"]})
    run = lab.playbook("maintain", "-l", NODE, "-e", commands, *lab.QUICK)
    assert run.code == 0, run.end
    assert lab.on(NODE, "ls /root/maintained").strip()
    assert "Judge the node by the checklist" in run.output


def test_maintenance_that_spoils_a_node_leaves_it_out_and_named() -> None:
    """The audit finds what the commands did (a world-writable Docker socket, say), and the node gets no requests."""
    spoil = json.dumps({"release_maintain_commands": ["chmod 0666 /run/docker.sock"]})
    run = lab.playbook("maintain", "-l", NODE, "-e", spoil, *lab.QUICK)
    try:
        assert run.code != 0
        assert "engine1/short-0 is out of rotation" in run.output, run.end
        assert not inside()["engine1/short-0"]
    finally:
        lab.on(NODE, "chmod 0660 /run/docker.sock")
        assert lab.playbook("undrain", "-l", NODE).code == 0


def test_remove_node_and_back() -> None:
    run = lab.playbook("remove_node", "-l", NODE)
    try:
        assert run.code == 0, run.end
        assert not inside()["engine1/short-0"]
        unit = "metalserve-engine@short-0.service"
        assert lab.on(NODE, f"systemctl is-active {unit}", check=False).strip() == "inactive"
        assert lab.on(NODE, f"systemctl is-enabled {unit}", check=False).strip() == "disabled"
    finally:
        back = lab.playbook("engines", "-l", NODE)
        assert back.code == 0, back.end
        assert lab.playbook("undrain", "-l", NODE).code == 0


def test_a_plan_and_a_check_change_nothing() -> None:
    started = [lab.started(node) for node in lab.ENGINES]
    plan = lab.playbook("plan", "--diff", *lab.release("next"))
    assert plan.code == 0, plan.end
    assert "short-0: image.digest: " in plan.output, plan.end
    check = lab.playbook("redeploy", "--check", "--diff", *lab.release("next"), *lab.QUICK)
    assert check.code == 0, check.end
    assert [lab.started(node) for node in lab.ENGINES] == started
    assert all(inside().values())


def test_one_of_the_pool_refuses_and_says_why() -> None:
    assert lab.playbook("drain", "-l", NODE).code == 0
    try:
        run = lab.playbook("redeploy", *lab.release("next"), *lab.QUICK, "-l", "engine2")
        assert run.code != 0
        assert "pool short: 1 replica, headroom 0" in run.output, run.end
    finally:
        assert lab.playbook("undrain", "-l", NODE).code == 0


def test_interrupted_once_it_stops_before_the_next_node() -> None:
    with lab.script("redeploy", *lab.release("next"), *lab.QUICK) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "drain" in line:
                run.send_signal(signal.SIGINT)
                break
        rest = run.stdout.read()
    assert run.returncode == 1, rest
    assert "stopped before engine2, as asked" in rest
    back = lab.playbook("redeploy", *lab.QUICK)
    assert back.code == 0, back.end
