# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The memory prediction against the recorded runs, and the properties that it must have whatever the input."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import calibration, constants, memory
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config

from .helpers import FIXTURES, H200, H200_MIB, MODELS, ROOT, on_h200, shape

NAMES = sorted(path.stem for path in MODELS.glob("*.json") if "v4" not in path.stem)


def log(run: int) -> calibration.Reported:
    path = FIXTURES / "engine-logs" / f"vllm-0.26.0-h200-run{run}.log"
    return calibration.parse_log(path.read_text(encoding="utf-8"))


def test_the_logs_are_read() -> None:
    first, second = log(1), log(2)
    assert first.version == "0.26.0"
    assert (first.max_num_batched_tokens, second.max_num_batched_tokens) == (8192, 2048)
    assert (first.kv_cache_tokens, second.kv_cache_tokens) == (2_114_896, 2_116_432)
    assert (first.activation_gib, second.activation_gib) == (1.13, 1.04)
    assert first.total_gib == 139.8
    assert first.max_model_len == 32768


@pytest.mark.parametrize("run", [1, 2])
def test_the_recorded_runs_are_predicted_to_a_block(run: int) -> None:
    reported = log(run)
    plan = memory.predict(shape("qwen2-7b"), calibration.input_of(reported, H200, H200_MIB))
    assert plan.capacity.tokens == pytest.approx(reported.kv_cache_tokens, abs=32)
    assert plan.capacity.max_concurrency == pytest.approx(reported.max_concurrency, abs=0.01)
    assert plan.weights / 2**30 == pytest.approx(reported.weights_gib, abs=0.006)
    assert plan.activation / 2**30 == pytest.approx(reported.activation_gib, abs=0.011)
    assert plan.non_torch / 2**30 == pytest.approx(reported.non_torch_gib, abs=0.006)
    assert plan.graphs / 2**30 == pytest.approx(reported.graphs_gib, abs=0.02)


def test_the_measured_latent_model() -> None:
    # Measured on the same card: KV 97.96 GiB = 3,381,536 tokens, activation 1.09, graphs 1.20.
    plan = memory.predict(shape("deepseek-v2-lite"), on_h200(max_model_len=32768))
    assert plan.capacity.tokens == pytest.approx(3_381_536, rel=0.0005)
    assert plan.activation / 2**30 == pytest.approx(1.09, abs=0.006)
    assert plan.graphs / 2**30 == pytest.approx(1.20, abs=0.006)
    assert plan.activation_phase == "latent"


MEASURED = [
    json.loads(line)
    for line in (ROOT / "docs" / "evidence" / "memory-h200-vllm-0.26.0.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("record", MEASURED, ids=[record["name"] for record in MEASURED])
def test_the_measured_table_stays_explained(record: dict[str, Any]) -> None:
    # These cases corrected the constants, so this guards them; what was predicted beforehand is in docs/evidence/.
    path = ROOT / "benchmarks" / "memory" / "shapes" / f"{record['shape']}.json"
    model = parse_config(json.loads(path.read_text(encoding="utf-8")))
    values = dict(record["settings"])
    values["utilization"] = values.pop("gpu_memory_utilization", memory.DEFAULT_UTIL)
    plan = memory.predict(model, on_h200(**values))
    overhead = record["activation_gib"] + record["non_torch_gib"] + record["graphs_gib"]
    assert plan.capacity.tokens == pytest.approx(record["kv_cache_tokens"], rel=0.005)
    assert plan.capacity.max_concurrency == pytest.approx(record["max_concurrency"], rel=0.006)
    assert plan.overhead / 2**30 == pytest.approx(overhead, abs=0.15)
    assert plan.activation / 2**30 == pytest.approx(record["activation_gib"], abs=0.02)


@pytest.mark.parametrize(("name", "expected"), [("llama-3-8b", 1.89), ("qwen3-30b-a3b", 2.68)])
def test_the_first_runner_matches_published_activation(
    name: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Published for vLLM 0.19 on H100, where all models had the first runner.
    monkeypatch.setattr(memory, "runner_of", lambda _shape: "first")
    given_ = memory.MemoryInput("NVIDIA H100 80GB HBM3", 81559, max_num_seqs=1024, max_num_batched_tokens=8192)
    phases = memory.activation_phases(shape(name), given_, constants.ENGINES["0.26"])
    assert max(phases.values()) / 2**30 == pytest.approx(expected, abs=0.03)


def test_runners_follow_the_architecture() -> None:
    assert memory.runner_of(shape("llama-3-8b")) == "second"
    assert memory.runner_of(shape("deepseek-v2-lite")) == "second"
    assert memory.runner_of(shape("mixtral-8x7b")) == "first"
    assert memory.runner_of(shape("qwen3-next-80b-a3b")) == "first"


def test_capture_sizes_are_the_engine_s() -> None:
    # As the recorded log lists them: 51 sizes up to 512.
    sizes = memory.capture_sizes(1024, 8192)
    assert (len(sizes), sizes[:5], sizes[-1]) == (51, [1, 2, 4, 8, 16], 512)
    assert memory.capture_sizes(8, 2048) == [1, 2, 4, 8, 16]
    assert memory.capture_sizes(1024, 100)[-1] == 100
    assert memory.capture_sizes(1, 1) == [1]


def test_eager_has_no_graphs_and_no_compiler_peak() -> None:
    plan = memory.predict(shape("qwen2-7b"), on_h200(enforce_eager=True))
    assert plan.graphs == 0
    assert plan.activation_phase != "compile"


def test_a_fixed_cache_size_is_taken_as_it_is() -> None:
    plan = memory.predict(shape("llama-2-7b"), on_h200(max_model_len=4096, kv_cache_memory_bytes=229 * 16 * 524288))
    assert plan.capacity.tokens == 3664


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    mib=st.integers(16_000, 200_000),
    more=st.integers(0, 100_000),
    batched=st.integers(256, 32_768),
    seqs=st.integers(1, 1024),
    length=st.integers(16, 131_072),
    util=st.floats(0.3, 1.0),
    higher=st.floats(0.0, 0.7),
    tensor=st.sampled_from([1, 2, 4]),
)
def test_more_memory_or_utilization_never_plans_less(
    name: str,
    mib: int,
    more: int,
    batched: int,
    seqs: int,
    length: int,
    util: float,
    higher: float,
    tensor: int,
) -> None:
    model = shape(name)
    if model.heads % tensor:
        return
    base = memory.MemoryInput(
        "some GPU",
        mib,
        utilization=util,
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        tensor=tensor,
    )
    plan = memory.predict(model, base)
    larger = memory.predict(model, dataclasses.replace(base, total_mib=mib + more))
    fuller = memory.predict(model, dataclasses.replace(base, utilization=min(1.0, util + higher)))
    for other in (larger, fuller):
        assert other.kv_bytes >= plan.kv_bytes
        assert other.capacity.tokens >= plan.capacity.tokens
        assert other.capacity.max_concurrency >= plan.capacity.max_concurrency
    used = plan.weights + plan.activation + plan.non_torch
    assert plan.kv_bytes == 0 or plan.kv_bytes <= plan.requested - used
    smaller_batch = memory.predict(model, dataclasses.replace(base, max_num_batched_tokens=max(1, batched // 2)))
    if memory.runner_of(model) == "second":
        assert smaller_batch.kv_bytes >= plan.kv_bytes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"utilization": 0}, "gpu_memory_utilization is 0"),
        ({"utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"max_model_len": 1.5}, "max_model_len is 1.5"),
        ({"tensor": 0}, "tensor_parallel is 0"),
        ({"kv_cache_dtype": "fp3"}, "kv_cache_dtype is 'fp3'"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        memory.predict(shape("llama-3-8b"), on_h200(**change))


@pytest.mark.parametrize(
    "text", ["", "H200", "H200:143771", "H200:143GB:1", "H200:143771:0", ":143771:1", "H200:12:1", "H200:143771:x"]
)
def test_a_wrong_gpu_is_named_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match="NVIDIA H200:143771:1"):
        memory.parse_gpu(text)


def test_gpu_names() -> None:
    def match(name: str) -> str | None:
        profile = constants.gpu_profile(name)
        return profile.match if profile else None

    assert match("NVIDIA H200") == "H200"
    assert match("NVIDIA H100 80GB HBM3") == "H100"
    assert match("NVIDIA A100-SXM4-80GB") == "A100"
    assert match("NVIDIA A10G") == "A10"
    assert match("NVIDIA L40S") == "L40"
    assert match("NVIDIA L4") == "L4"
    assert match("Tesla T4") == "T4"
    assert match("NVIDIA GH200 480GB") == "GH200"
    assert match("GeForce GTX 1070 Ti") is None


def test_an_unknown_card_or_version_widens_the_error() -> None:
    known = memory.predict(shape("qwen2-7b"), on_h200())
    other = memory.predict(shape("qwen2-7b"), dataclasses.replace(on_h200(), version="0.31.0"))
    card = memory.predict(shape("qwen2-7b"), memory.MemoryInput("Frobnicator 9000", H200_MIB))
    assert known.expected_error_pct < other.expected_error_pct < card.expected_error_pct
    assert any("0.31.0" in text for text in other.warnings)
    assert any("Frobnicator" in text for text in card.warnings)


@pytest.mark.parametrize("run", [1, 2])
def test_calibration_makes_the_run_itself_exact(run: int) -> None:
    model, reported = shape("qwen2-7b"), log(run)
    given_ = calibration.input_of(reported, H200, H200_MIB)
    fitted = calibration.calibrate(model, reported, given_)
    again = memory.predict(model, dataclasses.replace(given_, calibration=constants.from_dict(fitted.to_dict())))
    assert again.capacity.tokens == pytest.approx(reported.kv_cache_tokens, abs=16)
    assert again.expected_overhead_gib < 0.15


def test_calibration_moves_a_wrong_model() -> None:
    model, reported = shape("qwen2-7b"), log(1)
    given_ = calibration.input_of(reported, H200, H200_MIB)
    moved = dataclasses.replace(
        reported, non_torch_gib=1.22, activation_gib=2.13, graphs_gib=1.78, kv_cache_tokens=2_077_440
    )
    fitted = calibration.calibrate(model, moved, given_)
    again = memory.predict(model, dataclasses.replace(given_, calibration=fitted))
    assert again.non_torch / 2**30 == pytest.approx(1.22, abs=0.01)
    assert again.graphs / 2**30 == pytest.approx(1.78, abs=0.1)
    assert again.capacity.tokens == pytest.approx(2_077_440, rel=0.001)


def test_calibration_refuses_another_model_or_another_log() -> None:
    reported = log(1)
    given_ = calibration.input_of(reported, H200, H200_MIB)
    with pytest.raises(PlanError, match=r"config\.json of the model"):
        calibration.calibrate(shape("llama-3.1-70b"), reported, given_)
    with pytest.raises(PlanError, match="weights_gib"):
        calibration.calibrate(shape("qwen2-7b"), calibration.parse_log("nothing here\n"), given_)


@given(st.text(max_size=2000))
def test_any_text_is_a_log(text: str) -> None:
    calibration.parse_log(text)


@pytest.mark.parametrize(
    "values", [{"version": "x", "graph_mib": "y"}, {"graph_mib": 1.0}, {"version": "1", "other": 1}]
)
def test_a_broken_calibration_is_named(values: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="calibration"):
        constants.from_dict(values)
