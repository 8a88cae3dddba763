# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the rest of a pool can carry its load while some of its replicas are away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BUSY = 0.8
"""Share of the sequences of a replica that may be in use by the load that is there; the rest is for its swings."""

KV_FULL = 0.9
"""Share of the KV cache above which requests of the remaining replicas would begin to wait for memory."""


@dataclass(frozen=True)
class Load:
    """A pool now. ``serving``: replicas that get requests. ``in_flight``: requests inside, over all gateways.
    ``sequences``: requests that one replica works on at a time. ``kv_usage``: share 0..1 of the fullest KV cache,
    None where no engine says so.
    """

    pool: str
    serving: tuple[str, ...]
    in_flight: int
    sequences: int
    kv_usage: float | None = None


@dataclass(frozen=True)
class Headroom:
    """``spare``: replicas that may be away at once; ``needed`` carry the load; ``why`` in words."""

    pool: str
    serving: int
    needed: int
    spare: int
    why: str


def needed(load: Load) -> tuple[int, str]:
    """Return how many replicas the load needs, one at least, and what decides it."""
    by_requests = math.ceil(load.in_flight / max(1.0, BUSY * load.sequences))
    by_memory = math.ceil(len(load.serving) * (load.kv_usage or 0.0) / KV_FULL)
    if by_memory > max(by_requests, 1):
        return by_memory, f"KV cache {load.kv_usage:.0%} full"
    return max(1, by_requests), f"{load.in_flight} requests in flight, {load.sequences} sequences a replica"


def headroom(load: Load) -> Headroom:
    """Return how many of the pool's replicas may be away."""
    count, why = needed(load)
    serving = len(load.serving)
    return Headroom(load.pool, serving, count, max(0, serving - count), why)


def refusals(loads: Sequence[Load], leaving: Sequence[str]) -> list[str]:
    """Return a sentence per pool that could not spare those of its serving replicas that are ``leaving``.

    A replica that serves nobody now is no loss.
    """
    found = []
    for load in loads:
        away = [name for name in load.serving if name in set(leaving)]
        room = headroom(load)
        if len(away) > room.spare:
            replicas = f"{room.serving} replica{'' if room.serving == 1 else 's'}"
            more = f" ({len(away)} would leave, {room.why})" if room.serving > 1 else ""
            found.append(f"pool {load.pool}: {replicas}, headroom {room.spare}{more}")
    return found


def loads(views: Sequence[Mapping[str, Any]], sequences: Mapping[str, int]) -> list[Load]:
    """Return the load of each pool from what metal.serve.gateway_rotation read on every gateway.

    A replica serves where every gateway wants it in and finds it healthy: a client may come through any of them.
    ``sequences`` maps a pool to the requests that one of its replicas works on at a time.
    """
    serving: dict[str, dict[str, bool]] = {}
    flying: dict[str, int] = {}
    usage: dict[str, float] = {}
    for view in views:
        for replica in view["replicas"]:
            pool, name = str(replica["pool"]), str(replica["replica"])
            known = serving.setdefault(pool, {})
            known[name] = known.get(name, True) and bool(replica["in"]) and bool(replica["healthy"])
            flying[pool] = flying.get(pool, 0) + int(replica["in_flight"])
            if replica.get("kv_usage") is not None:
                usage[pool] = max(usage.get(pool, 0.0), float(replica["kv_usage"]))
    return [
        Load(
            pool=pool,
            serving=tuple(sorted(name for name, good in known.items() if good)),
            in_flight=flying[pool],
            sequences=int(sequences.get(pool, 1)),
            kv_usage=usage.get(pool),
        )
        for pool, known in sorted(serving.items())
    ]
