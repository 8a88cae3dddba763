# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A drain needs a rest that carries the load; batches have a canary first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.release import batches, headroom
from ansible_collections.metal.serve.plugins.module_utils.release.headroom import Load


def test_a_pool_of_one_has_none() -> None:
    assert headroom.refusals([Load("long", ("a/long-0",), 0, 8)], ["a/long-0"]) == ["pool long: 1 replica, headroom 0"]


def test_a_replica_that_serves_nobody_may_leave() -> None:
    assert headroom.refusals([Load("long", (), 0, 8)], ["a/long-0"]) == []


@pytest.mark.parametrize(
    ("in_flight", "kv", "spare"),
    [(0, None, 3), (6, None, 3), (7, None, 2), (13, None, 1), (20, None, 0), (500, None, 0), (0, 0.9, 0), (0, 0.4, 2)],
)
def test_load_decides_how_many_may_be_away(in_flight: int, kv: float | None, spare: int) -> None:
    assert headroom.headroom(Load("short", ("a", "b", "c", "d"), in_flight, 8, kv)).spare == spare


def test_the_refusal_says_why() -> None:
    assert headroom.refusals([Load("short", ("a", "b"), 9, 8)], ["a"]) == [
        "pool short: 2 replicas, headroom 0 (1 would leave, 9 requests in flight, 8 sequences a replica)"
    ]
    assert headroom.refusals([Load("short", ("a", "b"), 0, 8)], ["a"]) == []


def view(**changes: Any) -> dict[str, Any]:
    base = {"pool": "short", "replica": "a/short-0", "in": True, "healthy": True, "in_flight": 2, "kv_usage": None}
    return {"replicas": [{**base, **changes}]}


def test_a_replica_serves_where_all_gateways_agree() -> None:
    both = headroom.loads([view(), view()], {"short": 8})
    assert both == [Load("short", ("a/short-0",), 4, 8)]
    assert headroom.loads([view(), view(healthy=False)], {"short": 8})[0].serving == ()
    assert headroom.loads([view(), view(**{"in": False})], {"short": 8})[0].serving == ()
    assert headroom.loads([view(kv_usage=0.2), view(kv_usage=0.5)], {})[0].kv_usage == 0.5


@given(
    count=st.integers(0, 40),
    in_flight=st.integers(0, 500),
    sequences=st.integers(1, 64),
    kv=st.one_of(st.none(), st.floats(0, 1)),
)
def test_somebody_always_stays(count: int, in_flight: int, sequences: int, kv: float | None) -> None:
    names = tuple(f"n{number}" for number in range(count))
    found = headroom.headroom(Load("p", names, in_flight, sequences, kv))
    assert 0 <= found.spare <= max(0, count - 1)
    allowed = names[: found.spare]
    assert headroom.refusals([Load("p", names, in_flight, sequences, kv)], allowed) == []
    if count:
        assert headroom.refusals([Load("p", names, in_flight, sequences, kv)], names)


def test_canary_then_quarters() -> None:
    hosts = [f"n{number}" for number in range(9)]
    assert [len(batch) for batch in batches.split(hosts)] == [1, 2, 2, 2, 2]
    assert batches.split(["a", "b"]) == [["a"], ["b"]]
    assert batches.split(["a", "b", "c"], ["100%"]) == [["a", "b", "c"]]


def test_each_pool_has_its_own_canary() -> None:
    pools = {"short": ["a", "b", "c"], "long": ["d", "e", "a"]}
    assert batches.batches(pools, ["a", "c", "d", "e", "x"]) == [["a"], ["c"], ["d"], ["e"], ["x"]]
    # What an earlier run left out of rotation comes first.
    assert batches.batches(pools, ["a", "c", "d", "e"], idle=["e"]) == [["e"], ["a"], ["c"], ["d"]]


@pytest.mark.parametrize("wrong", [0, -1, "0%", "120%", "many", "", 1.5])
def test_a_serial_that_means_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="release_serial"):
        batches.split(["a", "b"], [wrong])


def test_an_empty_serial_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        batches.split(["a"], [])


@given(
    hosts=st.lists(st.sampled_from("abcdefghijklmno"), unique=True),
    serial=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 100).map(lambda n: f"{n}%")), min_size=1, max_size=4),
)
def test_every_node_is_in_one_batch(hosts: list[str], serial: list[int | str]) -> None:
    found = batches.split(hosts, serial)
    assert [host for batch in found for host in batch] == hosts
    assert all(found)
