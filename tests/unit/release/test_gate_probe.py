# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""metal.serve.engine_gate against the stand-in engine: it lets a good one through and finds each fault."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.release import gate, state
from ansible_collections.metal.serve.plugins.modules import engine_gate
from tests.unit.lab.test_standin import Engine

RELEASE = "a" * 64
GOLDEN = [{"prompt": "The capital of France is", "expect": "Paris"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = Engine("--served-model-name", "tiny", "--max-model-len", "1024").wait_ready()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def healed(engine: Engine) -> Iterator[None]:
    yield
    engine.fault("none")


def probe(root: Path, engine: Engine, log: str = "", **more: Any) -> engine_gate.Probe:
    replica = state.Replica(str(root), "short-0")
    os.makedirs(replica.release(RELEASE), exist_ok=True)
    document = {
        "pool": "short",
        "address": "127.0.0.1",
        "port": engine.port,
        "served_name": "tiny",
        "health": {"metrics": "/metrics", "metrics_port": engine.port},
        "content": {"engine": {"kind": "vllm"}},
        "plan": {"settings": {"max_model_len": 1024}, "memory": {"kv_cache_tokens": 131072}},
    }
    Path(replica.release(RELEASE), state.RELEASE_FILE).write_text(json.dumps(document))
    state.activate(replica, RELEASE, keep_previous=False)
    params = {
        "root": str(root),
        "api_key": "",
        "golden": GOLDEN,
        "policy": {"answer_s": 1.0},
        "warm_up": [0.01, 0.5],
        "requests": 8,
        "concurrency": 4,
        "prompt_tokens": 64,
        "max_tokens": 8,
        "previous": {},
        **more,
    }

    def run_command(argv: list[str]) -> tuple[int, str, str]:
        return 0, "" if "--until" in argv else log, ""

    module: Any = SimpleNamespace(params=params, check_mode=False, run_command=run_command)
    return engine_gate.Probe(module, "short-0")


def wrong(found: engine_gate.Probe) -> list[str]:
    return gate.failures(found.judged()[1])


def test_a_good_engine_passes(tmp_path: Path, engine: Engine) -> None:
    measured, findings = probe(tmp_path, engine).judged()
    assert gate.failures(findings) == []
    assert {item.name for item in findings} >= {"errors under load", "KV cache", "log"}
    assert (measured.requests, measured.failed, measured.kv_tokens) == (8, 0, 131072)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage", "golden prompt"),
        ("error", "warm-up: a prompt of about"),
        ("wedge", "warm-up: a prompt of about"),
        ("truncate", "ends a stream without its end mark"),
        ("reject_stream", "breaks a stream off"),
    ],
)
def test_each_fault_is_found(tmp_path: Path, engine: Engine, fault: str, words: str) -> None:
    engine.fault(fault)
    found = wrong(probe(tmp_path, engine))
    assert len(found) == 1
    assert words in found[0]


def test_a_slow_release_is_found_against_the_previous_one(tmp_path: Path, engine: Engine) -> None:
    before = probe(tmp_path, engine).load().to_dict()
    engine.fault("slow", factor=30)
    found = wrong(probe(tmp_path, engine, previous={"short-0": before}, policy={"answer_s": 20.0}))
    assert any(text.startswith("P99") for text in found)


def test_errors_in_the_log_are_found(tmp_path: Path, engine: Engine) -> None:
    found = wrong(probe(tmp_path, engine, log="INFO fine\nERROR 12:00 the cache is on fire\n"))
    assert found == [
        "log: 1 new error lines, first: ERROR 12:00 the cache is on fire, should be no error that the previous release "
        "did not have too"
    ]


def test_a_golden_prompt_of_another_pool_is_not_asked(tmp_path: Path, engine: Engine) -> None:
    others = [{"prompt": "x", "expect": "never", "pool": "long"}]
    assert wrong(probe(tmp_path, engine, golden=others)) == []
