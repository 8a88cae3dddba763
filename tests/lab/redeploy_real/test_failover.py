# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A real engine that dies or hangs costs the requests that it had, and comes back without a person."""

from __future__ import annotations

import time

import pytest

from tests.lab.redeploy import lab
from tests.lab.redeploy_real import real

OUT_S, BACK_S = 5.0, 30.0
NODE = "engine1"
REPLICA = f"{NODE}/short-0"


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_an_engine_that_ends_or_hangs_costs_what_it_had_in_flight(signal: str) -> None:
    lab.wait_until_all_serve()
    # An engine that failed minutes ago waits longer before its next start; this is about the first failure.
    lab.on(NODE, "rm -f /run/metalserve/short-0.starts")
    pids = lab.on(NODE, f"docker top {lab.container(NODE)} -eo pid").split()[1:]
    with real.load() as load:
        load.until(40, 120)
        began = time.time()
        lab.on(NODE, f"kill -{signal} {' '.join(pids)}")
        out_s = lab.out_since(REPLICA, began)
        lab.wait_until_all_serve(300)
        back_s = time.time() - began
        load.until(load.seen.good + 40, 120)
    seen = load.seen
    again_s, start_s = real.start_of(NODE)
    last = max((failure.sent - began for failure in seen.failed), default=0.0)
    print(
        f"SIG{signal}: out after {out_s:.1f} s, started again after {again_s - began:.1f} s, back after {back_s:.1f} s, of which "
        f"{start_s:.1f} s are the engine's own start; {seen.sent} requests at {seen.rate:.1f}/s, {len(seen.failed)} failed, "
        f"the last of them sent {last:.1f} s after the signal"
    )
    assert out_s <= OUT_S
    assert back_s <= BACK_S + start_s
    # One request a client at most was in flight, and what is sent once it is out goes elsewhere.
    assert len(seen.failed) <= real.CLIENTS
    assert all(failure.sent <= began + out_s for failure in seen.failed), seen.failed
