# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An emergency takes all nodes back at once: shorter, at the price of a moment without an engine."""

from __future__ import annotations

from tests.lab.redeploy import lab


def test_all_nodes_go_back_at_once() -> None:
    lab.wait_until_all_serve()
    before = [lab.current(node) for node in lab.ENGINES]
    assert lab.playbook("redeploy", *lab.release("next"), *lab.QUICK).code == 0
    with lab.load(clients=4, rate=40) as load:
        run = lab.playbook("rollback", "-e", "metalserve_emergency=true")
        lab.wait_until_all_serve()
    assert run.code == 0, run.end
    assert [lab.current(node) for node in lab.ENGINES] == before
    codes = {failure.why[:3] for failure in load.seen.failed}
    print(f"{load.seen.good} answers, {len(load.seen.failed)} refused with {codes or 'nothing'}")
    assert codes <= {"503"}, load.seen.failed[:3]
    assert lab.no_locks() == []
