# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A change of release keeps on record what served, through failures and the way back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.filter import release as filters
from ansible_collections.metal.serve.plugins.module_utils.release import rotation, state
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import parse_scrape
from ansible_collections.metal.serve.plugins.modules import gateway_rotation

A, B, C, Z = (letter * 64 for letter in "abcz")


@pytest.fixture
def replica(tmp_path: Path) -> state.Replica:
    found = state.Replica(str(tmp_path), "short-0")
    for release in (A, B, C, Z):
        os.makedirs(found.release(release))
    state.activate(found, Z, keep_previous=False)
    state.activate(found, A, keep_previous=True)
    return found


def links(replica: state.Replica) -> tuple[str, str]:
    return state.read_link(replica.current), state.read_link(replica.previous)


def test_forward(replica: state.Replica) -> None:
    record = state.open_change(replica, B, "redeploy-1", 1.0)
    assert (record["from"], record["to"], record["before"], record["gated"]) == (A, B, Z, False)
    assert links(replica) == (B, A)
    assert state.stale_releases(replica) == [C, Z]
    assert state.prove_change(replica, {"p99_s": 0.1})
    assert not state.prove_change(replica, {})
    assert state.read_json(os.path.join(replica.release(B), state.GATE)) == {"p99_s": 0.1}
    assert state.settle_change(replica)
    assert not state.settle_change(replica)
    assert links(replica) == (B, A)


def test_back_restores_both_links(replica: state.Replica) -> None:
    state.open_change(replica, B, "redeploy-1", 1.0)
    record = state.open_change(replica, A, "redeploy-1", 2.0)
    assert (record["from"], record["to"], record["since"]) == (A, A, 1.0)
    assert links(replica) == (A, Z)


def test_a_second_attempt_keeps_what_served(replica: state.Replica) -> None:
    state.open_change(replica, B, "redeploy-1", 1.0)
    state.open_change(replica, C, "redeploy-2", 2.0)
    assert links(replica) == (C, A)
    assert state.open_change(replica, A, "redeploy-2", 3.0)["from"] == A
    assert links(replica) == (A, Z)


def test_back_to_a_first_release_has_no_previous(tmp_path: Path) -> None:
    replica = state.Replica(str(tmp_path), "short-0")
    for release in (A, B):
        os.makedirs(replica.release(release))
    state.activate(replica, A, keep_previous=False)
    state.open_change(replica, B, "r", 1.0)
    state.open_change(replica, A, "r", 2.0)
    assert links(replica) == (A, "")


def test_a_broken_record_is_said(replica: state.Replica) -> None:
    Path(replica.record).write_text("[]")
    with pytest.raises(state.StateError, match="is not what was written there"):
        state.open_change(replica, B, "r", 1.0)


STATE: dict[str, Any] = {
    "pools": [
        {
            "pool": "short",
            "replicas": [
                {
                    "replica": "a/short-0",
                    "address": "10.0.0.1:8100",
                    "in_flight": 2,
                    "desired": {"in": False, "by": "ada@desk", "run": "redeploy-1", "since": 5},
                    "observed": {"healthy": False, "reason": "refused", "since": 6},
                },
                {
                    "replica": "b/short-0",
                    "address": "10.0.0.2:8100",
                    "in_flight": 0,
                    "desired": {"in": True},
                    "observed": {"healthy": True},
                },
            ],
        },
        {"pool": "empty", "replicas": {}},
    ]
}


def test_the_gateways_answer_becomes_flat_entries() -> None:
    one, other = gateway_rotation.entries(STATE)
    assert (one["replica"], one["in"], one["run"], one["healthy"], one["in_flight"]) == (
        "a/short-0",
        False,
        "redeploy-1",
        False,
        2,
    )
    assert (other["in"], other["healthy"]) == (True, True)


def test_what_is_out_is_published() -> None:
    scrape = parse_scrape(rotation.textfile(gateway_rotation.entries(STATE)))
    found = scrape.select("metalserve_rotation_out")
    assert [(sample.labels["replica"], sample.labels["run"], sample.value) for sample in found] == [
        ("a/short-0", "redeploy-1", 1)
    ]


def test_a_node_is_out_with_names() -> None:
    views = filters.release_views([{"item": "gateway-1", "replicas": gateway_rotation.entries(STATE)}])
    assert filters.release_out([{"replica": "short-0"}], views, "a") == [
        "a/short-0 is out of rotation on gateway-1, by ada@desk (run redeploy-1)"
    ]
    assert filters.release_out([{"replica": "short-0"}], views, "b") == []


def test_batches_begin_with_what_serves_nobody() -> None:
    views = filters.release_views([{"item": "gateway-1", "replicas": gateway_rotation.entries(STATE)}])
    work = {"b": [{"step": "drain"}], "a": [{"step": "stop"}], "c": []}
    order = filters.release_batches(work, {"short": {}}, {"short": ["b", "a", "c"]}, [1], views)
    assert order == [["a"], ["b"]]
    groups = {item["group"]: [item["host"]] for item in filters.release_members(order)}
    assert filters.release_order(groups) == ["a", "b"]
    assert filters.release_sizes(groups) == [1, 1]
    assert (filters.release_order({"all": ["x"]}), filters.release_sizes({"all": ["x"]})) == (["!all"], [1])


def test_a_wrong_serial_is_one_sentence() -> None:
    with pytest.raises(AnsibleFilterError, match="release_serial has 'many'"):
        filters.release_batches({"a": [{"step": "x"}]}, {"s": {}}, {"s": ["a", "b"]}, ["many"], {})


def test_the_reason_of_a_loop_is_its_first_failed_item() -> None:
    result = {
        "msg": "One or more items failed",
        "results": [{"item": "g1"}, {"item": "g2", "failed": True, "msg": "no"}],
    }
    assert filters.release_reason(result) == "g2: no"
    assert filters.release_reason({"msg": "plain"}) == "plain"
    assert filters.release_reason({}) == "failed"


def test_the_conservative_setting() -> None:
    found = filters.release_conservative({"s": {"queue": 20, "settings": {"max_num_seqs": 8}}, "l": {}})
    assert found["s"] == {"queue": 20, "settings": {"max_num_seqs": 8, "max_num_batched_tokens": 4096}}
    assert found["l"] == {"queue": 100, "settings": {"max_num_batched_tokens": 4096}}


def test_headroom_counts_what_a_drain_takes_away() -> None:
    both = {
        "pools": [
            {
                "pool": "short",
                "replicas": [
                    {**item, "desired": {"in": True}, "observed": {"healthy": True}}
                    for item in STATE["pools"][0]["replicas"]
                ],
            }
        ]
    }
    views = filters.release_views([{"item": "gateway-1", "replicas": gateway_rotation.entries(both)}])
    plans = [{"pool": "short", "batching": {"max_num_seqs": 8}}]
    work = {"a": [{"step": "drain", "replicas": ["short-0"]}], "b": [{"step": "drain", "replicas": ["short-0"]}]}
    assert filters.release_refusals(["a"], views, plans, work) == []
    assert filters.release_refusals(["a", "b"], views, plans, work)[0].startswith("pool short: 2 replicas, headroom 1")


def test_what_fails_after_maintenance_and_did_not_before() -> None:
    def verdict(name: str, word: str, **more: Any) -> dict[str, Any]:
        return {"id": name, "verdict": word, "current": "1", "desired": "0", **more}

    before = [verdict("numa.balancing", "fail"), verdict("gpu.ecc", "unknown"), verdict("driver.version", "pass")]
    after = [
        verdict("numa.balancing", "fail"),
        verdict("gpu.ecc", "fail"),
        verdict("driver.version", "fail", waiver={"reason": "known"}),
    ]
    assert filters.release_worse(after, before) == ["gpu.ecc: 1, should be 0"]
    assert filters.release_failing(after) == ["numa.balancing: 1, should be 0", "gpu.ecc: 1, should be 0"]
    assert filters.release_worse(before, before) == []
