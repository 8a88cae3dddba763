# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""No client notices a redeploy or a rollback: every answer is judged word by word."""

from __future__ import annotations

from tests.lab.redeploy import lab

RATE = 230.0


def test_nothing_is_lost_over_a_redeploy_and_a_rollback() -> None:
    before = {gateway: lab.workers(gateway) for gateway in lab.GATEWAYS}
    releases = [lab.current(node) for node in lab.ENGINES]
    with lab.load(clients=48, rate=RATE) as load:
        load.until(500)
        forward = lab.playbook("redeploy", *lab.release("next"))
        deployed = [lab.current(node) for node in lab.ENGINES]
        back = lab.playbook("rollback")
    seen = load.seen
    print(f"{seen.good} answers at {seen.rate:.0f}/s, slowest {seen.slowest_s:.2f} s, failed {len(seen.failed)}")
    assert forward.code == 0, forward.end
    assert back.code == 0, back.end
    assert seen.failed == []
    assert seen.good >= 2000
    assert seen.rate >= 200
    assert all(one != other for one, other in zip(releases, deployed, strict=True))
    assert [lab.current(node) for node in lab.ENGINES] == releases
    assert {gateway: lab.workers(gateway) for gateway in lab.GATEWAYS} == before
    lab.wait_until_all_serve()
    assert lab.no_locks() == []


def test_the_same_release_again_does_nothing() -> None:
    started = [lab.started(node) for node in lab.ENGINES]
    run = lab.playbook("redeploy")
    assert run.code == 0, run.end
    assert "Nothing to do" in run.output
    assert {host: count for host, count in run.changed.items() if host in lab.ENGINES} == dict.fromkeys(lab.ENGINES, 0)
    assert started == [lab.started(node) for node in lab.ENGINES]
