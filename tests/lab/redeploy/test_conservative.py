# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The conservative setting changes how gateways treat connections: the one verb that reloads nginx, which closes idle ones."""

from __future__ import annotations

from tests.lab.redeploy import lab

NODE = "engine1"
# Closed before the first byte of an answer: the request met a connection that was being closed, and may be sent again.
UNANSWERED = ("IncompleteReadError: 0 bytes read", "ConnectionResetError", "BrokenPipeError")
CLIENTS, RELOADS = 4, 2


def test_to_the_conservative_setting_and_back() -> None:
    releases = [lab.current(node) for node in lab.ENGINES]
    with lab.load(clients=CLIENTS, rate=40) as clients:
        clients.until(20)
        run = lab.playbook("rollback", "-e", "release_to=conservative", *lab.QUICK)
        try:
            assert run.code == 0, run.end
            config = lab.on(NODE, "cat /var/lib/metalserve/engines/short-0/current/config.yaml")
            assert "max-num-batched-tokens: 4096" in config, config
        finally:
            assert lab.playbook("redeploy", *lab.QUICK).code == 0
            assert lab.playbook("gateways").code == 0
        clients.until(clients.seen.good + 20)
    failed = clients.seen.failed
    print(
        f"{clients.seen.good} answers at {clients.seen.rate:.0f}/s, {len(failed)} met a connection that was being closed"
    )
    assert [failure for failure in failed if not failure.why.startswith(UNANSWERED)] == []
    assert len(failed) <= CLIENTS * RELOADS
    assert [lab.current(node) for node in lab.ENGINES] == releases
    assert lab.no_locks() == []
