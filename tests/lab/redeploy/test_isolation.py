# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Short requests beside long ones: the same two engines as one pool, and as a short and a long one."""

from __future__ import annotations

import json
import math
import time

from tests.lab.redeploy import lab

PLAN = "(metalserve_pools | metal.serve.pool_plans(groups, hostvars))[0]"
TWO_POOLS = (
    f"{{{{ [{PLAN} | combine({{'replicas': {PLAN}.replicas[:1], 'max_model_len': 256}}), "
    f"{PLAN} | combine({{'pool': 'long', 'replicas': {PLAN}.replicas[1:]}})] }}}}"
)
SECONDS = 8.0


def short_p99(with_long: bool) -> float:
    """Return the 99th percentile of short requests in seconds, with long ones beside them or not."""
    with lab.load(clients=8, rate=60) as short:
        if not with_long:
            time.sleep(SECONDS)
        else:
            with lab.load(clients=6, words=1450, tokens=4) as long:
                time.sleep(SECONDS)
            assert long.seen.failed == []
            assert long.seen.good > 20
    assert short.seen.failed == []
    ordered = sorted(short.times)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def test_long_prompts_do_not_slow_short_requests_of_another_pool() -> None:
    lab.wait_until_all_serve()
    try:
        alone, one = short_p99(with_long=False), short_p99(with_long=True)
        run = lab.playbook("gateways", "-e", json.dumps({"gateway_pools": TWO_POOLS}))
        assert run.code == 0, run.end
        lab.wait_until_all_serve()
        two = short_p99(with_long=True)
    finally:
        assert lab.playbook("gateways").code == 0
        lab.wait_until_all_serve()
    print(
        f"P99 of short requests: alone {alone:.3f} s, with long ones in one pool {one:.3f} s, in two pools {two:.3f} s"
    )
    assert two < one / 2
