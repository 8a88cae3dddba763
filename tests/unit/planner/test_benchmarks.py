# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark scripts make of an engine's log and of their own records."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(name="measure")
def _measure() -> Any:
    return runpy.run_path(str(BENCHMARKS / "memory" / "measure.py"))


@pytest.fixture(name="serving")
def _serving(monkeypatch: Any) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(BENCHMARKS / "serving" / "run.py"))


def test_log_gives_every_value(measure: Any) -> None:
    log = "\n".join(
        (
            "INFO [gpu_worker.py:378] Using V2 Model Runner",
            "INFO [cuda.py:482] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
            "INFO [model_runner.py:305] Model loading took 14.32 GiB and 2.88 seconds",
            "INFO [gpu_worker.py:560] Available KV cache memory: 95.14 GiB",
            "INFO [kv_cache_utils.py:2177] GPU KV cache size: 1,781,520 tokens",
            "INFO [kv_cache_utils.py:2178] Maximum concurrency for 131,072 tokens per request: 1,013.59x",
            "INFO Actual usage is 14.32 GiB for weight, 2.15 GiB for peak activation, 0.22 GiB for non-torch memory, "
            "and 0.89 GiB for CUDAGraph memory.",
        )
    )
    assert measure["values_in"](log) == {
        "runner": "V2",
        "attention": "FLASH_ATTN",
        "weights_gib": 14.32,
        "kv_cache_gib": 95.14,
        "kv_cache_tokens": 1781520.0,
        "max_concurrency": 1013.59,
        "activation_gib": 2.15,
        "non_torch_gib": 0.22,
        "graphs_gib": 0.89,
    }


def test_a_case_ends_only_where_the_engine_has_said_everything(measure: Any) -> None:
    assert measure["LAST"] not in measure["values_in"]("GPU KV cache size: 1,781,520 tokens")


@pytest.mark.parametrize("name", ["cases.json", "cases-first.json"])
def test_every_case_has_a_shape_and_a_plan_that_fits(measure: Any, name: str) -> None:
    cases = json.loads((BENCHMARKS / "memory" / name).read_text(encoding="utf-8"))
    assert len({case["name"] for case in cases}) == len(cases)
    for case in cases[:2]:
        assert measure["predicted"](case)["kv_cache_tokens"] > 0
    for case in cases:
        assert (BENCHMARKS / "memory" / "shapes" / f"{case['shape']}.json").is_file()


def test_comparison_names_the_worst_case_with_its_sign(measure: Any) -> None:
    records = [
        json.loads(line)
        for line in (ROOT / "docs" / "evidence" / "memory-h200-vllm-0.26.0.jsonl").read_text().splitlines()[:1]
    ]
    records[0]["kv_cache_tokens"] *= 2
    text = measure["compare"]([*records, {"name": "other", "error": "CUDA out of memory"}])
    assert "worst -50.00 %" in text
    assert "| other | CUDA out of memory |" in text


def load(serving: Any, name: str, engine: str, rate: float, *inputs: int) -> dict[str, Any]:
    """Return a record of a load whose parts all answered ``rate`` requests a second."""
    values = {**dict.fromkeys(serving["KEPT"], 1.0), "request_throughput": rate, "failed": 0}
    parts = [{**values, "rate": None, "input": tokens} for tokens in inputs]
    return {"kind": "load", "load": name, "engine": engine, "joules_per_output_token": 0.5, "parts": parts}


def test_report_shows_energy_start_and_both_parts(serving: Any) -> None:
    start = {"kind": "start", "engine": "default", "gpu": 1, "settings": {"max_model_len": 4096}, "warm": True}
    text = serving["report"]([load(serving, "mixed", "default", 9.0, 350, 30000), {**start, "start_s": 9.5}])
    assert "| mixed (350 in) | default | 1 | 0 |" in text
    assert "| mixed (30000 in) | default | 1 | 0 |" in text
    assert "0.500 |" in text
    assert "| default | 1 | max_model_len 4096 | warm | 9.5 |" in text


def test_report_takes_the_mean_of_the_runs_and_compares_it_with_the_defaults(serving: Any) -> None:
    records = [load(serving, "flat-out", engine, rate, 350) for engine, rate in (("p", 60.0), ("default", 75.0))]
    text = serving["report"]([*records, load(serving, "flat-out", "p", 84.0, 350)])
    assert "| flat-out (350 in) | p | 2 | 0 | 72.0 (60.0 to 84.0) | -4.0 % |" in text


def test_a_load_is_the_same_for_every_engine_and_another_at_each_run(serving: Any) -> None:
    seed_of = serving["seed_of"]
    assert len({seed_of(name, run) for name in ("qps-100", "flat-out") for run in (1, 2)}) == 4
    assert seed_of("flat-out", 1) == 1783724066  # in every process, unlike hash()


def test_engine_gets_the_roles_environment_with_its_own_cache_folder(serving: Any) -> None:
    env = serving["environment"](Path("/srv/c1"), 1)
    assert env["HOME"] == "/srv/c1/home"
    assert env["TRITON_CACHE_DIR"] == "/srv/c1/triton"
    assert env["VLLM_CACHE_ROOT"] == "/srv/c1/vllm"
    assert env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "180"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert not [value for key, value in env.items() if value.startswith("/cache")]
