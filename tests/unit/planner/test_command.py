# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/plan: its JSON, its text, its exit codes, its presets against golden plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json
from ansible_collections.metal.serve.plugins.module_utils.planner import cli, offline
from ansible_collections.metal.serve.plugins.module_utils.planner.presets import PRESETS

from .helpers import FIXTURES, MODELS, ROOT

GPU = "NVIDIA H200:143771:1"
SCHEMA = json.loads((ROOT / "schemas" / "plan.json").read_text(encoding="utf-8"))
LOG = FIXTURES / "engine-logs" / "vllm-0.26.0-h200-run1.log"


def arguments(model: str = "qwen2-7b", *more: str) -> list[str]:
    return ["--config", str(MODELS / f"{model}.json"), "--gpu", GPU, "--engine", "vllm==0.26.0", *more]


def run(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str, str]:
    code = cli.main(list(given))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_script_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "plan"), *arguments(), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    plan = json.loads(done.stdout)
    assert done.stderr == ""
    assert plan["memory"]["kv_cache_tokens"] == pytest.approx(2_114_896, rel=0.001)
    assert {"max_concurrency", "overhead_gib"} <= plan["memory"].keys()
    jsonschema.Draft202012Validator({"$ref": "#/$defs/offlinePlan", "$defs": SCHEMA["$defs"]}).validate(plan)


def test_fixed_values_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _err = run(
        capsys,
        *arguments(
            "qwen2-7b",
            "--set=max_num_batched_tokens=2048",
            "--set=gpu-memory-utilization=0.8",
            "--set=max_model_len=32768",
            "--set=kv_cache_dtype=fp8",
            "--set=tensor_parallel_size=1",
            "--json",
        ),
    )
    plan = json.loads(out)
    assert code == 0
    assert plan["settings"]["max_num_batched_tokens"] == 2048
    assert plan["settings"]["gpu_memory_utilization"] == 0.8
    assert plan["memory"]["kv_bytes_per_token"] == 28672
    assert plan["reasons"]["settings.max_num_batched_tokens"] == "fixed with --set"


def test_overhead_is_the_sum_of_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    memory = json.loads(run(capsys, *arguments("mixtral-8x7b", "--json"))[1])["memory"]
    parts = memory["activation_gib"] + memory["non_torch_gib"] + memory["graphs_gib"]
    assert memory["overhead_gib"] == pytest.approx(parts, abs=0.002)


def test_text_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _err = run(capsys, *arguments("qwen2-7b", "--qps", "50", "--output-tokens", "128:512"))
    assert code == 0
    for word in (
        "max_num_seqs",
        "KV cache",
        "expected error",
        "Rough estimate",
        "docs/planning.md#tiers",
        "batch_delay",
    ):
        assert word in out
    assert max(map(len, out.splitlines())) <= 118


def test_the_smallest_parallelism_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments("llama-3.1-70b", "--set=max_model_len=8192", "--json")
    given[3] = "NVIDIA A100-SXM4-80GB:81920:8"
    place = json.loads(run(capsys, *given)[1])["placement"]
    assert (place["tensor_parallel"], place["replicas"]) == (2, 4)


def test_what_does_not_fit_leaves_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments("llama-3.1-70b", "--json"))
    assert code == 1
    assert "tensor_parallel is 1" in err
    assert "Ways out" in err
    assert len(err.strip().splitlines()) == 1
    assert json.loads(out)["ways_out"]


WRONG = [
    (["--config", "/nonexistent"], "--config /nonexistent: No such file"),
    (["--gpu", "H200"], "--gpu is 'H200'"),
    (["--engine", "vllm"], "add the version"),
    (["--engine", "tgi==1.0"], "--engine is 'tgi==1.0'"),
    (["--set", "max_num_seqs"], "write name=value"),
    (["--set", "max_num_seqs=many"], "--set max_num_seqs is 'many'"),
    (["--set", "max_num_seqs=0"], "--set max_num_seqs is 0"),
    (["--set", "max_num_sqs=1"], "did you mean max_num_seqs?"),
    (["--set", "batch_delay=20"], "no engine waits to fill a batch"),
    (["--set", "max_tokens_per_batch=1"], "use max_num_batched_tokens"),
    (["--set", "enforce_eager=yes"], "must be true or false"),
    (["--set", "kv_cache_dtype=fp7"], "kv_cache_dtype is 'fp7'"),
    (["--set", "gpu_memory_utilization=1.5"], "gpu_memory_utilization is 1.5"),
    (["--set", "max_num_batched_tokens=64", "--set", "max_num_seqs=128"], "at least max_num_seqs"),
    (["--prompt-tokens", "long"], "--prompt-tokens is 'long'"),
    (["--qps", "-1"], "workload.qps is -1"),
    (
        ["--longest-context", "9000", "--set", "max_model_len=8192"],
        "workload.longest_context is 9000; max_model_len is 8192",
    ),
    (["--longest-context", "0"], "workload.longest_context is 0"),
    (["--shared-prefix", "1.5"], "a share between 0 and 1"),
    (["--lengths", "1000:1"], "without workload.qps"),
    (["--preset", "none"], "--preset 'none'"),
    (["--calibration", "/nonexistent"], "--calibration /nonexistent"),
    (["--index", str(MODELS / "qwen2-7b.json")], "total_size"),
]


@pytest.mark.parametrize(("given", "named"), WRONG, ids=[" ".join(given) for given, _named in WRONG])
def test_wrong_input_leaves_with_two(capsys: pytest.CaptureFixture[str], given: list[str], named: str) -> None:
    code, out, err = run(capsys, *arguments(), *given)
    assert code == 2
    assert named in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("given", [[], ["--config", "x"], ["--bogus"], ["--qps", "x"]])
def test_missing_or_unknown_options_leave_with_two(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    try:
        code = cli.main(given)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_file_that_is_no_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for content, named in (
        ("{", "is no JSON"),
        ("[]", "JSON object"),
        ("{}", "architectures"),
        ("[" * 100_000, "no JSON"),
    ):
        path = tmp_path / "config.json"
        path.write_text(content, encoding="utf-8")
        code, _out, err = run(capsys, "--config", str(path), "--gpu", GPU, "--engine", "vllm==0.26.0")
        assert (code, named in err) == (2, True), content[:10]


def test_calibration_goes_round(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_file = tmp_path / "h200.json"
    given = ["--calibrate", str(LOG), "--config", str(MODELS / "qwen2-7b.json"), "--gpu", GPU]
    code, out, _err = run(capsys, *given, "--out", str(out_file))
    assert code == 0
    assert "reported" in out
    code, out, _err = run(
        capsys, *arguments("qwen2-7b", "--set=max_model_len=32768", "--calibration", str(out_file), "--json")
    )
    assert code == 0
    assert json.loads(out)["memory"]["kv_cache_tokens"] == pytest.approx(2_114_896, abs=16)
    assert json.loads(run(capsys, *given)[1])["version"] == "0.26.0"
    code, _out, err = run(capsys, *given, "--out", "/nonexistent/x.json")
    assert (code, "--out /nonexistent" in err) == (2, True)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_golden_plans(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _err = run(capsys, "--preset", name, "--json")
    assert code == 0
    golden = FIXTURES / "plans" / f"{name}.json"
    assert canonical_json(json.loads(out)) == golden.read_text(encoding="utf-8"), (
        f"the plan of {name} changed; if that is meant: scripts/plan --preset all --out {golden.parent}"
    )


def test_the_field_reports_figures_are_in_the_presets() -> None:
    def plan(name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((FIXTURES / "plans" / f"{name}.json").read_text(encoding="utf-8"))
        return value

    assert plan("finance-qa")["settings"]["max_num_batched_tokens"] == 6144
    assert plan("finance-qa")["placement"]["replicas"] == 8
    assert plan("contracts-128k")["memory"]["kv_cache_tokens"] >= 140_000
    assert plan("contracts-128k")["settings"]["scheduling_policy"] == "priority"
    assert plan("chat-67b")["memory"]["max_concurrency"] >= 35
    assert plan("conservative")["settings"]["max_num_batched_tokens"] == 4096
    assert plan("conservative")["admission"]["queue"] == 100


def test_pools_are_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments("qwen2-7b", "--qps", "21", "--lengths", "1000:0.95,32000:0.05", "--json")
    given[3] = "NVIDIA H200:143771:2"
    pools = json.loads(run(capsys, *given)[1])["pools"]
    assert pools["split"] is True
    assert pools["pools"][0]["ttft_p99_s"] < pools["mixed_short_p99_s"]


def test_active_parameters() -> None:
    from .helpers import shape  # noqa: PLC0415

    assert offline.active_parameters(shape("qwen3-30b-a3b")) == pytest.approx(3.3e9, rel=0.03)
    assert offline.active_parameters(shape("llama-3-8b")) == 8_030_261_248
