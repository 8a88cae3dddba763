# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers and names of the gateway from the pool plans."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.gateway import plan
from tests.unit.gateway.harness import TIMES, pool


@given(st.integers(0, 10**9), st.integers(0, 2 * 10**9))
def test_a_length_bound_as_a_pattern(limit: int, number: int) -> None:
    assert bool(re.fullmatch(plan.at_most(limit), str(number))) == (number <= limit)


@pytest.mark.parametrize("limit", [0, 1, 9, 10, 11, 19, 20, 99, 100, 101, 109, 110, 999, 1000, 24576])
def test_bounds_are_exact(limit: int) -> None:
    pattern = re.compile(plan.at_most(limit))
    assert [n for n in range(limit + 1200) if pattern.fullmatch(str(n))] == list(range(limit + 1))
    assert not pattern.fullmatch("007")


def test_a_lone_peer_is_never_ejected() -> None:
    planned = plan.gateway_plan([pool("one", [8100]), pool("two", [8200, 8201])])
    assert [[server["max_fails"] for server in one["servers"]] for one in planned["pools"]] == [[0], [3, 3]]


def test_with_one_of_two_drained_the_other_is_alone() -> None:
    planned = plan.gateway_plan([pool("two", [8200, 8201])], drained=["node-1/two-0"])
    assert [(server["max_fails"], server["down"]) for server in planned["pools"][0]["servers"]] == [
        (0, False),
        (0, True),
    ]


def test_admission_is_shared_between_the_gateways() -> None:
    assert plan.gateway_plan([pool("a", [1], in_flight=356)], gateways=3)["pools"][0]["max_in_flight"] == 119
    assert plan.gateway_plan([pool("a", [1], in_flight=1)], gateways=3)["pools"][0]["max_in_flight"] == 1


def test_a_planned_rate_is_shared_between_the_gateways_where_it_is_wanted() -> None:
    paced = pool("a", [1], admission={"max_in_flight": 4, "queue": 1, "requests_per_s": 100})
    assert plan.gateway_plan([paced], gateways=3, limit_rates=True)["pools"][0]["requests_per_s"] == 34
    assert plan.gateway_plan([paced], gateways=3)["pools"][0]["requests_per_s"] == 0


def test_connections_hold_the_streams_of_the_brief_and_the_files_twice_that() -> None:
    planned = plan.gateway_plan([pool("a", [1], in_flight=1800)])
    assert planned["worker_connections"] >= 1800 * 2 + 32
    assert planned["worker_rlimit_nofile"] == 2 * planned["worker_connections"]
    assert plan.gateway_plan([pool("a", [1])], max_client_connections=50_000)["worker_connections"] >= 50_000
    assert plan.gateway_plan([pool("a", [1], in_flight=9000)])["worker_connections"] >= 5 * 9000


def test_idle_connections_to_engines_are_as_many_as_requests_in_flight() -> None:
    planned = plan.gateway_plan(
        [pool("a", [1], in_flight=8), pool("b", [2], in_flight=300), pool("c", [3], in_flight=5000)]
    )
    assert [one["keepalive"] for one in planned["pools"]] == [32, 300, 512]
    assert planned["worker_connections"] >= 5 * (8 + 300 + 5000) + 32 + 300 + 512


def test_workers_wait_for_the_longest_stream_of_all_pools() -> None:
    slow = pool("b", [2], times={**TIMES, "longest_stream_s": 1800, "drain_s": 1800.5})
    assert plan.gateway_plan([pool("a", [1]), slow])["worker_shutdown_s"] == 1801


def test_lengths_choose_only_among_pools_of_the_first_model() -> None:
    pools = [pool("long", [1], 8192), pool("short", [2], 2048), pool("huge", [3], 131072, served_name="other")]
    planned = plan.gateway_plan(pools, bytes_per_token=2.5)
    assert [(route["pool"], route["tokens"], route["bytes"]) for route in planned["routes"]] == [
        ("short", 2048, 5120),
        ("long", 8192, 20480),
    ]
    assert planned["longest_pool"] == "long"
    assert [model["id"] for model in planned["models"]] == ["smollm2", "other"]


def test_of_two_equal_pools_the_first_takes_the_requests() -> None:
    assert [route["pool"] for route in plan.gateway_plan([pool("a", [1]), pool("b", [2])])["routes"]] == ["a"]


def test_addresses_of_all_kinds() -> None:
    assert plan.host_port("10.0.0.1", 1) == "10.0.0.1:1"
    assert plan.host_port("fd00::1", 1) == "[fd00::1]:1"
    replicas = [
        {"replica": "a-0", "host": "n", "address": address, "port": 8100} for address in ("10.0.0.1", "fd00::1")
    ]
    found = [(one["address"], one["server"]) for one in plan.upstream_servers(replicas, [])]
    assert found == [("10.0.0.1", "10.0.0.1:8100"), ("[fd00::1]", "[fd00::1]:8100")]
    with pytest.raises(plan.GatewayError, match=r"metalserve_address is '10.0.0.1; evil'"):
        plan.host_port("10.0.0.1; evil", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "bad name"}, "pool name 'bad name'"),
        ({"pool": "x;y"}, "pool name"),
        ({"served_name": 'a"b'}, "served_name of pool a is"),
        ({"times": {**TIMES, "gateway_read_s": None}}, r"times\.gateway_read_s of a pool plan is None"),
        ({"times": {}}, "must be a number of seconds"),
    ],
)
def test_what_cannot_stand_in_a_configuration_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(plan.GatewayError, match=message):
        plan.gateway_plan([{**pool("a", [1]), **change}])


def test_bad_options_are_named() -> None:
    with pytest.raises(plan.GatewayError, match="metalserve_pools"):
        plan.gateway_plan([])
    with pytest.raises(plan.GatewayError, match="gateway_bytes_per_token is 0"):
        plan.gateway_plan([pool("a", [1])], bytes_per_token=0)
    with pytest.raises(plan.GatewayError, match="two pools would share"):
        plan.gateway_plan([pool("a-b", [1]), pool("a_b", [2])])


KEY = "sk-0123456789"
DIGEST = "5a2d0b5e8e7d7b6b6a9d4c6c2f5a1f0f6d1c9b8a7e6f5d4c3b2a190817161514"


def test_keys_become_patterns_or_digests() -> None:
    assert plan.client_keys([{"name": "a", "key": "sk.0123+456"}], hashed=False) == [
        {"name": "a", "pattern": r"^(?i:bearer) +sk\.0123\+456$"}
    ]
    hashed = plan.client_keys([{"name": "a", "key": KEY}, {"name": "b", "sha256": DIGEST.upper()}], hashed=True)
    assert [len(entry["sha256"]) for entry in hashed] == [64, 64]
    assert hashed[1]["sha256"] == DIGEST


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "metalserve_api_keys is empty"),
        (None, "metalserve_api_keys is empty"),
        ("sk-0123456789", "metalserve_api_keys is empty"),
        ([{"key": KEY}], r"metalserve_api_keys\[0\]: give a name"),
        (["sk-0123456789"], r"metalserve_api_keys\[0\]: give a name"),
        ([{"name": "a"}], "give either key or sha256"),
        ([{"name": "a", "key": KEY, "sha256": DIGEST}], "give either key or sha256"),
        ([{"name": "a", "key": KEY}, {"name": "a", "key": KEY}], "the name a is taken"),
        ([{"name": "a", "key": "short"}], "8 to 512"),
        ([{"name": "a", "key": 'with "quotes" in it'}], "8 to 512"),
        ([{"name": "a", "key": "with\nnewline-0123"}], "8 to 512"),
        ([{"name": "a", "sha256": "12"}], "64 hexadecimal digits"),
        ([{"name": "a", "sha256": DIGEST}], "gateway_mode plain"),
    ],
)
def test_bad_keys_are_named_and_never_shown(entries: Any, message: str) -> None:
    with pytest.raises(plan.GatewayError, match=message) as caught:
        plan.client_keys(entries, hashed=False)
    assert KEY not in str(caught.value)
    assert "quotes" not in str(caught.value)


def test_the_engines_key() -> None:
    assert plan.engine_token(None) == ""
    assert plan.engine_token("abc-12345") == "abc-12345"
    with pytest.raises(plan.GatewayError, match="metalserve_engine_api_key"):
        plan.engine_token("with space")


def test_names_of_a_certificate() -> None:
    names = ["llm.example.com", "10.0.0.1", "fd00::1", "llm.example.com", "*.example.com", "gateway-a"]
    assert plan.subject_alt_names(names) == [
        "DNS:llm.example.com",
        "IP:10.0.0.1",
        "IP:fd00::1",
        "DNS:*.example.com",
        "DNS:gateway-a",
    ]
    for bad, message in ((["no name"], "'no name'"), ([], "is empty"), (["-x.com"], "'-x.com'")):
        with pytest.raises(plan.GatewayError, match=message):
            plan.subject_alt_names(bad)
