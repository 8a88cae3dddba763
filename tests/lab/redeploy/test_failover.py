# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An engine that dies or hangs costs the requests that it had, and comes back without a person."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.lab.redeploy import lab

OUT_S, BACK_S, START_S = 5.0, 30.0, 5.0
NODE = "engine1"
REPLICA = f"{NODE}/short-0"
CONTROL = "http://127.0.0.1:18100/"


@pytest.fixture(autouse=True)
def all_of_them_serve() -> None:
    lab.wait_until_all_serve()


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_an_engine_that_ends_or_hangs_costs_what_it_had_in_flight(signal: str) -> None:
    # An engine that failed minutes ago waits longer before its next start; this is about the first failure.
    lab.on(NODE, "rm -f /run/metalserve/short-0.starts")
    pids = lab.on(NODE, f"docker top {lab.container(NODE)} -eo pid").split()[1:]
    with lab.load(clients=24, rate=120) as load:
        load.until(300)
        began = time.time()
        lab.on(NODE, f"kill -{signal} {' '.join(pids)}")
        out_s = lab.out_since(REPLICA, began)
        lab.wait_until_all_serve(90)
        back_s = time.time() - began
        load.until(load.seen.good + 200)
    seen = load.seen
    last = max((failure.sent - began for failure in seen.failed), default=0.0)
    print(
        f"SIG{signal}: out after {out_s:.1f} s, back after {back_s:.1f} s; {seen.sent} requests at {seen.rate:.0f}/s, "
        f"{len(seen.failed)} failed, the last of them sent {last:.1f} s after the signal"
    )
    assert out_s <= OUT_S
    assert back_s <= BACK_S + START_S
    # One request a client at most was in flight, and what is sent once it is out goes elsewhere.
    assert len(seen.failed) <= 24
    assert all(failure.sent <= began + out_s for failure in seen.failed), seen.failed


def fault(node: str, name: str, factor: int = 1) -> None:
    """Change what the stand-in on a node does from now on."""
    lines = [
        "import json, urllib.request as u",
        f"body = json.dumps({{'fault': '{name}', 'factor': {factor}}}).encode()",
    ]
    lines.append(f"u.urlopen('{CONTROL}', body)")
    text = "\n".join(lines)
    lab.on(node, f"python3 - <<'END'\n{text}\nEND")


def test_one_long_prefill_alone_is_never_ejected() -> None:
    """Some eight seconds without a token, while nothing else is in flight: within the plan's bound of ten."""
    started = {node: lab.started(node) for node in lab.ENGINES}
    try:
        for node in lab.ENGINES:
            fault(node, "slow", 85)
        healthy = []
        with lab.load(clients=1, words=1450, tokens=1) as load:
            for _ in range(40):
                healthy += [item["observed"]["healthy"] for item in lab.rotation().values()]
                time.sleep(0.2)
    finally:
        for node in lab.ENGINES:
            fault(node, "none")
    print(f"{load.seen.good} prefills, the slowest {load.seen.slowest_s:.1f} s")
    assert all(healthy)
    assert load.seen.failed == []
    assert load.seen.slowest_s > 5
    assert started == {node: lab.started(node) for node in lab.ENGINES}


def test_a_reboot_serves_again_and_leaves_the_previous_release_stopped() -> None:
    assert lab.playbook("redeploy", *lab.release("next"), "-e", '{"release_soak_s": 0}').code == 0
    try:
        node = f"{lab.NAME}-{lab.ENGINES[1]}"
        before = lab.current(lab.ENGINES[1])
        with lab.load(clients=4, rate=20) as load:
            subprocess.run(["docker", "restart", node], check=True, capture_output=True, timeout=180)
            lab.wait_until_all_serve(180)
            load.until(load.seen.good + 50)
        print(f"reboot: {load.seen.good} answers, {len(load.seen.failed)} failed")
        states = lab.on(lab.ENGINES[1], "docker ps -a --format '{{.Names}} {{.State}}'").splitlines()
        running = [line for line in states if line.endswith(" running")]
        assert lab.current(lab.ENGINES[1]) == before
        assert len(states) == 2, states
        assert running == [f"metalserve-short-0-{before[:12]} running"], states
    finally:
        assert lab.playbook("rollback", "-e", '{"release_soak_s": 0}').code == 0
