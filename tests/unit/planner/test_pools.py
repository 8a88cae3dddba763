# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""PoolPlan from the inventory alone: addresses, ports, limits, and what it refuses."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import batching, times
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import pool_plans, port_places

from .helpers import HOSTVARS, pool

GROUPS = {"short": ["node-a", "node-b"], "long": ["node-b"], "lab": ["node-c"]}


def test_addresses_and_ports() -> None:
    short, long = pool_plans({"short": pool(), "long": pool(replicas_per_node=2, tensor_parallel=4)}, GROUPS, HOSTVARS)
    assert [(r.replica, r.host, r.address, r.port) for r in short.replicas][7:9] == [
        ("short-7", "node-a", "10.0.0.11", 8107),
        ("short-0", "node-b", "10.0.0.12", 8100),
    ]
    assert [(r.replica, r.port) for r in long.replicas] == [("long-0", 8200), ("long-1", 8201)]


@given(
    nodes=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6),
    moved=st.randoms(use_true_random=False),
)
def test_a_pool_with_nodes_of_its_own_keeps_its_ports(nodes: list[set[int]], moved: Random) -> None:
    hosts = {f"pool-{index}": [f"node-{node}" for node in sorted(one)] for index, one in enumerate(nodes)}
    order = list(hosts)
    moved.shuffle(order)
    places = port_places({name: hosts[name] for name in order})
    for name in order:
        sharing = [other for other in order if other != name and set(hosts[other]) & set(hosts[name])]
        assert places[name] not in {places[other] for other in sharing}
        if not sharing:
            assert places[name] == 0


def test_the_longest_context_is_what_a_pool_must_take() -> None:
    spec = pool(workload={"longest_context": 30500})
    del spec["max_model_len"]
    plan = pool_plans({"short": spec}, GROUPS, HOSTVARS)[0]
    assert plan.max_model_len == 30500
    assert "longest_context" in plan.reasons["max_model_len"]
    with pytest.raises(
        PlanError, match=r"workload\.longest_context is 30500; metalserve_pools\.short\.max_model_len is 8192"
    ):
        pool_plans({"short": {**spec, "max_model_len": 8192}}, GROUPS, HOSTVARS)


def test_the_documented_example() -> None:
    spec = pool(
        max_model_len=32768,
        replicas_per_node=8,
        minimums={"prefill_tokens_per_s": 4000},
        settings={"max_num_seqs": 256},
    )
    plan = pool_plans({"short": spec}, GROUPS, HOSTVARS)[0]
    assert plan.admission == {"max_in_flight": 356, "queue": 100, "requests_per_s": 100}
    assert plan.body_limit_bytes == 1048576
    assert plan.alerts["p99_s"] == 1.5
    assert times.lint(plan.times) == []


def test_other_hosts_change_nothing() -> None:
    few = pool_plans({"short": pool()}, GROUPS, HOSTVARS)
    more = {**HOSTVARS, "node-x": {"metalserve_expected_gpus": "broken"}}
    assert pool_plans({"short": pool()}, {**GROUPS, "other": ["node-x"]}, more) == few


def test_processors_have_their_own_defaults() -> None:
    spec = pool(max_model_len=None, workload=None)
    plan = pool_plans({"lab": spec}, GROUPS, HOSTVARS)[0]
    assert plan.max_model_len == 2048
    assert plan.batching["max_num_seqs"] == 8
    assert len(plan.replicas) == 1


def test_tiers() -> None:
    for qps, tokens in ((0, 4096), (29.9, 4096), (30, 6144), (79, 6144), (80, 8192), (5000, 8192)):
        plan = pool_plans({"short": pool(workload={"qps": qps})}, GROUPS, HOSTVARS)[0]
        assert plan.batching["max_num_batched_tokens"] == tokens, qps
    assert "exist in no engine" in plan.reasons["settings.batch_delay"]


def test_a_long_context_needs_a_large_body_and_a_patient_gateway() -> None:
    plan = pool_plans({"short": pool(max_model_len=131072)}, GROUPS, HOSTVARS)[0]
    assert plan.body_limit_bytes == 2 * 2**20
    assert plan.times["gateway_read_s"] > plan.times["longest_silent_prefill_s"] == 33


def test_a_replica_over_two_nodes() -> None:
    spec = pool(tensor_parallel=8, pipeline_parallel=2, nodes_per_replica=2)
    plan = pool_plans({"short": spec}, GROUPS, HOSTVARS)[0]
    assert [(r.replica, r.host) for r in plan.replicas] == [("short-0", "node-a")]
    assert plan.node_groups == {
        "node-a/short-0": [
            {"host": "node-a", "address": "10.0.0.11"},
            {"host": "node-b", "address": "10.0.0.12"},
        ]
    }


def test_a_histogram_says_whether_pools_would_pay() -> None:
    load = {"qps": 21, "lengths": "1000:0.95,32000:0.05"}
    spec = pool(workload=load, minimums={"prefill_tokens_per_s": 50000})
    plan = pool_plans({"short": {**spec, "replicas_per_node": 1}}, GROUPS, HOSTVARS)[0]
    assert "separate pools would pay" in plan.reasons["pools.split"]
    one = pool_plans({"long": {**spec, "replicas_per_node": 1}}, GROUPS, HOSTVARS)[0]
    assert "one pool is right" in one.reasons["pools.split"]
    with pytest.raises(PlanError, match=r"metalserve_pools\.short\.workload\.lengths"):
        pool_plans({"short": pool(workload={"qps": 1, "lengths": "x"})}, GROUPS, HOSTVARS)


def test_every_number_has_a_reason() -> None:
    plan = pool_plans({"short": pool()}, GROUPS, HOSTVARS)[0]
    for name in ("max_model_len", "body_limit_bytes", "admission.queue", "times.drain_s", "settings.max_num_seqs"):
        assert plan.reasons[name]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "metalserve_pools.short.model is ''"),
    ({"engine": "tgi"}, "metalserve_pools.short.engine is 'tgi'"),
    ({"tensor_parallel": 0}, "metalserve_pools.short.tensor_parallel is 0"),
    ({"tensor_parallel": "2"}, "tensor_parallel is '2'"),
    ({"tensor_parallel": True}, "tensor_parallel is True"),
    ({"tensor_parallel": 16}, "metalserve_expected_gpus of node-a is 8"),
    ({"replicas_per_node": 1.5}, "replicas_per_node is 1.5"),
    ({"nodes_per_replica": 3}, "nodes_per_replica is 3"),
    ({"max_model_len": -1}, "max_model_len is -1"),
    ({"port": 65535}, "port is 65535"),
    ({"queue": -1}, "queue is -1"),
    ({"longest_stream_s": "5m"}, "longest_stream_s is '5m'"),
    ({"workload": []}, "workload is \\[\\]"),
    ({"workload": {"qsp": 3}}, "workload.qsp is not known"),
    ({"workload": {"qps": "fifty"}}, "workload.qps is 'fifty'"),
    ({"workload": {"prompt_tokens": {"mean": 0}}}, "prompt_tokens.mean is 0"),
    ({"minimums": {"prefill_tokens_per_s": 0}}, "minimums.prefill_tokens_per_s is 0"),
    ({"settings": {"max_num_seqs": 0}}, "settings.max_num_seqs is 0"),
    ({"settings": {"max_num_seqs": 512, "max_num_batched_tokens": 256}}, "at least settings.max_num_seqs"),
    ({"settings": "fast"}, "settings is 'fast'"),
    ({"slo": {"p99_s": "soon"}}, "slo.p99_s is 'soon'"),
]


@pytest.mark.parametrize(("change", "named"), BROKEN, ids=[str(change) for change, _named in BROKEN])
def test_wrong_input_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        pool_plans({"short": pool(**change)}, GROUPS, HOSTVARS)


@pytest.mark.parametrize(
    ("pools", "groups", "hostvars", "named"),
    [
        ({}, GROUPS, HOSTVARS, "metalserve_pools is empty"),
        ([], GROUPS, HOSTVARS, "metalserve_pools is"),
        ({"short": pool()}, {}, HOSTVARS, "group short has no host"),
        ({"short": pool()}, {"short": ["node-z"]}, {}, "node-z has no metalserve_expected_gpus"),
        (
            {"short": pool()},
            {"short": ["n"]},
            {"n": {"metalserve_accelerator": "tpu"}},
            "metalserve_accelerator is 'tpu'",
        ),
    ],
)
def test_a_wrong_inventory_is_named(pools: Any, groups: Any, hostvars: Any, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        pool_plans(pools, groups, hostvars)


def test_two_pools_may_not_share_a_port() -> None:
    pools = {"short": pool(replicas_per_node=1), "long": pool(replicas_per_node=1, port=8100)}
    with pytest.raises(PlanError, match="share port 8100 of node-b"):
        pool_plans(pools, GROUPS, HOSTVARS)


def test_the_plan_is_pure() -> None:
    pools = {"short": pool()}
    before = copy.deepcopy(pools)
    assert pool_plans(pools, GROUPS, HOSTVARS) == pool_plans(pools, GROUPS, HOSTVARS)
    assert pools == before


@given(
    qps=st.floats(0, 10_000),
    prompt=st.floats(1, 200_000),
    output=st.floats(1, 10_000),
    replicas=st.integers(1, 500),
    length=st.integers(1, 1_000_000),
    rate=st.floats(1, 1e6),
)
def test_batching_is_always_one_an_engine_takes(
    qps: float, prompt: float, output: float, replicas: int, length: int, rate: float
) -> None:
    load = batching.Workload(qps=qps, prompt_mean=prompt, prompt_p95=prompt, output_mean=output, output_p95=output)
    for accelerator in ("nvidia", "cpu"):
        got = batching.decide(load, accelerator, replicas, length, rate, {})
        assert got.max_num_batched_tokens >= got.max_num_seqs >= 1
        assert got.max_in_flight == got.max_num_seqs + got.queue
        assert 1 <= got.queue <= 100
        assert got.max_num_seqs <= 384


def test_many_requests_are_not_run_all_at_once() -> None:
    load = batching.Workload(qps=100, prompt_mean=350, prompt_p95=350, output_mean=128, output_p95=128)
    got = batching.decide(load, "nvidia", 1, 32768, 4000, {})
    assert (got.max_num_batched_tokens, got.max_num_seqs) == (8192, 384)
    assert "712, within 256..384" in got.reasons["settings.max_num_seqs"]
