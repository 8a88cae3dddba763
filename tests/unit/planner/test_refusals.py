# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Odd models, cards, versions and settings: one sentence that names what is wrong and what would be right, never a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS
from ansible_collections.metal.serve.plugins.module_utils.planner import cli, documents, offline, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config

from .helpers import config

WRONG: list[Any] = ["8", -1, 1.5, True, [], {}, 10**30, float("nan"), ["x"], [1], {"a": 1}]
OF_EVERY_MODEL = (
    *("architectures", "model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "torch_dtype", "tie_word_embeddings", "rope_scaling", "sliding_window"),
    *(
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "quantization_config",
        "layer_types",
        "text_config",
    ),
)
OF_A_MIXTURE = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "topk_method"),
)
FINE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("architectures", "layer_types"), (list,)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), (bool,)),
    **dict.fromkeys(("rope_scaling", "quantization_config", "text_config"), (dict,)),
    **dict.fromkeys(("model_type", "torch_dtype", "topk_method"), (str,)),
}


def refusal(model: str = "llama-3-8b", /, **changes: Any) -> str:
    """Return what is said of a changed config.json; fails where it is taken."""
    values = {**config(model), **changes}
    with pytest.raises(PlanError) as caught:
        parse_config({key: value for key, value in values.items() if value != "(gone)"})
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


@pytest.mark.parametrize(
    ("model", "name"),
    [*(("llama-3-8b", name) for name in OF_EVERY_MODEL), *(("deepseek-v2-lite", name) for name in OF_A_MIXTURE)],
)
def test_a_value_of_another_type_is_named_and_not_guessed(model: str, name: str) -> None:
    for value in WRONG:
        if type(value) not in FINE.get(name, ()):
            assert name in refusal(model, **{name: value})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("llama-3-8b", name) for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")),
        *(("deepseek-v2-lite", name) for name in ("kv_lora_rank", "n_routed_experts", "moe_intermediate_size")),
        *(("deepseek-v3", name) for name in ("num_experts_per_tok", "intermediate_size")),
        *(("deepseek-v3.2", name) for name in ("index_head_dim",)),
        *(("mixtral-8x7b", name) for name in ("num_local_experts", "num_experts_per_tok")),
        *(("qwen3-30b-a3b", name) for name in ("num_experts", "moe_intermediate_size")),
        *(("qwen3-next-80b-a3b", name) for name in ("linear_num_value_heads", "num_experts")),
    ],
)
def test_what_makes_a_model_another_one_must_be_there(model: str, name: str) -> None:
    for value in ("(gone)", None, 0):
        assert name in refusal(model, **{name: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 4097}, "without a head_dim"),
        ({"is_encoder_decoder": True}, "decoders alone"),
        ({"mamba_d_state": 128}, "state-space layers"),
        ({"hybrid_override_pattern": "M-M*"}, "layers of several kinds"),
        ({"block_configs": [{}]}, "layers that differ in size"),
        ({"layer_types": ["mamba"] * 32}, "layer_types mamba"),
        ({"layer_types": ["linear_attention"] * 32}, "no linear_num_value_heads"),
        ({"layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 32 layers"),
        ({"sliding_window": 512, "sliding_window_pattern": "LLXG"}, "sliding_window_pattern"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}, "original_max"),
        ({"quantization_config": {"quant_method": "zip"}}, "'zip'"),
        ({"quantization_config": {"quant_method": 4}}, "quant_method"),
        ({"quantization_config": {"quant_method": "awq", "bits": 5}}, "bits = 5"),
        ({"quantization_config": {"quant_method": "awq", "bits": "4"}}, "bits"),
        ({"quantization_config": {"quant_method": "gptq", "group_size": -2}}, "group_size"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": "lm_head"}}, "ignored_layers"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}}, "config_groups"),
        ({"torch_dtype": "float8_e4m3"}, "torch_dtype"),
        ({"text_config": {}}, "neither architectures nor model_type"),
        ({"num_hidden_layers": 10**6}, "10000 at most"),
    ],
)
def test_what_cannot_be_counted_is_refused(changes: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"architectures": None, "model_type": None} if "text_config" in changes else {}
    assert words in refusal(**base, **changes)


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_the_language_part_is_found_where_models_that_see_keep_it(name: str) -> None:
    plain = parse_config(config("qwen2-7b"))
    outer = {"architectures": ["SeesAndTells"], "vision_config": {"depth": 1}, name: config("qwen2-7b")}
    found = parse_config(outer)
    assert (found.layers, found.kv_heads, found.head_dim) == (plain.layers, plain.kv_heads, plain.head_dim)
    assert found.architecture == "SeesAndTells"
    assert any("vision" in note for note in found.notes)
    deeper = parse_config({"architectures": ["Omni"], "thinker_config": outer} if name != "thinker_config" else outer)
    assert deeper.layers == plain.layers


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"num_key_value_heads": None, "num_kv_heads": 8}, 8),
        ({"num_key_value_heads": None, "multi_query_group_num": 2}, 2),
        ({"num_key_value_heads": None, "multi_query": True, "num_kv_heads": 32}, 1),
        ({"num_key_value_heads": None, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"num_key_value_heads": None}, 32),
    ],
)
def test_key_heads_go_by_several_names(changes: dict[str, Any], heads: int) -> None:
    assert parse_config({**config("llama-3-8b"), **changes}).kv_heads == heads


def test_letters_tell_a_window_pattern_too() -> None:
    shape = parse_config({**config("llama-3-8b"), "sliding_window": 512, "sliding_window_pattern": "LLLG"})
    assert shape.layer_kinds[:8] == ("sliding", "sliding", "sliding", "full") * 2


def test_experts_in_every_second_layer_are_counted_so() -> None:
    every, some = (
        parse_config(config("deepseek-v2-lite")),
        parse_config({**config("deepseek-v2-lite"), "moe_layer_freq": 2}),
    )
    assert every.experts is not None
    assert some.experts is not None
    assert (every.experts.dense_layers, some.experts.dense_layers) == (1, 14)
    listed = parse_config({**config("deepseek-v2-lite"), "moe_layer_freq": [0, 0, 0] + [1] * 24})
    assert listed.experts is not None
    assert listed.experts.dense_layers == 3


@pytest.mark.parametrize("size", [None, "1", True, 0, 1, -1, float("inf"), float("nan"), 1e300, [], {}])
def test_a_size_that_is_none_is_not_believed(size: Any) -> None:
    with pytest.raises(PlanError, match="total_size"):
        weights.parse_index({"metadata": {"total_size": size}})


def said(tmp_path: Path, *arguments: str, capsys: pytest.CaptureFixture[str], model: Any = None) -> tuple[int, str]:
    """Return how scripts/plan ends and what it says; --gpu and --engine are given where they are not there."""
    path = tmp_path / "config.json"
    path.write_text(model if isinstance(model, str) else json.dumps(model or config("llama-3-8b")), encoding="utf-8")
    given = ["--config", str(path), *arguments]
    for option, value in (("--gpu", "NVIDIA H200:143771:1"), ("--engine", "vllm==0.26.0")):
        given += [] if option in given else [option, value]
    try:
        code = cli.main(given)
    except SystemExit as end:
        code = int(str(end.code))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpu", "NVIDIA H200:\uff11\uff14\uff13771:1"), 2, "whole MiB"),
        (("--gpu", "NVIDIA H200:143771:\u0663"), 2, "count must be"),
        (("--gpu", "H\n200:143771:1"), 2, "name"),
        (("--gpu", "A" * 5000 + ":143771:1"), 2, "5000 characters"),
        (("--gpu", "NVIDIA H200:" + "9" * 5000 + ":1"), 2, "whole MiB"),
        (("--gpu", "NVIDIA H200:143771:" + "9" * 5000), 2, "count must be"),
        (("--set", "max_num_batched_tokens=1" + "0" * 400), 2, "max_num_batched_tokens is 1000"),
        (("--set", "kv_cache_memory_bytes=1" + "0" * 4000), 2, "kv_cache_memory_bytes is 1000"),
        (("--set", "radix_threshold=32"), 2, "leave it out: every shared prefix"),
        (("--engine", "vllm==0.."), 2, "--engine is"),
        (("--engine", "vllm==0.26.0; id"), 2, "--engine is"),
        (("--engine", "vllm==0.26.x"), 2, "--engine is"),
        (("--engine", "triton_vllm==26.07"), 2, "name the vLLM in it"),
        (("--set", "scheduling_policy=lifo"), 2, "scheduling_policy is 'lifo'; write one of fcfs, priority"),
        (("--set", "dtype=float8"), 2, "dtype is 'float8'"),
        (("--set", "dtype="), 2, "dtype is ''"),
        (("--set", "quantization=awq"), 2, "no quantization_config"),
        (("--set", "quantization=foo"), 2, "quantization is 'foo'"),
        (("--set", "block_size=7"), 2, "multiple of 16"),
        (("--set", "max_num_queued_reqs=5"), 2, "nothing that vLLM 0.26.0 has; use the pool's queue"),
        (("--set", "kv_cache_memory_bytes=999999999999999"), 1, "leave it out"),
        (("--set", "kv_cache_memory_bytes=1"), 1, "set kv_cache_memory_bytes to 1073741824 or more"),
        (("--set", "max_num_batched_tokens=10000000"), 1, "set max_num_batched_tokens to 8192"),
        (("--set", "pipeline_parallel=2"), 1, "plan for 2 GPUs"),
        (("--gpu", "NVIDIA H200:143771:64", "--set", "pipeline_parallel=33"), 2, "num_hidden_layers 32"),
        (("--p99", "nan"), 2, "--p99 is nan"),
        (("--ttft", "-1"), 2, "--ttft is -1"),
        (("--lengths", "", "--qps", "5"), 2, "workload.lengths"),
        (("--preset", ""), 2, "--preset '' is not known"),
        (("--out", "/nowhere/x"), 2, "--out is"),
        (("--jso",), 2, "unrecognized arguments: --jso"),
    ],
)
def test_odd_arguments_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, text = said(tmp_path, *arguments, capsys=capsys)
    assert (found, text.count("\n")) == (code, 1), text
    assert words in text


def test_odd_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "{", "[" * 100_000, '{"a":' * 50_000, "null", "[]", "\ud800"):
        code, words = said(tmp_path, model=text.encode("utf-8", "replace").decode() or " ", capsys=capsys)
        assert (code, words.count("\n")) == (2, 1), words
    nested: Any = config("llama-3-8b")
    for _level in range(200):
        nested = {"text_config": nested}
    code, words = said(tmp_path, model=nested, capsys=capsys)
    assert code == 2
    assert "Traceback" not in words
    monkeypatch.setattr(documents, "MOST_BYTES", 100)
    words = said(tmp_path, capsys=capsys)[1]
    assert words.endswith("bytes; a JSON file here has 100 at most.\n")
    assert "no JSON" not in words


def test_weights_that_the_engine_quantizes_itself_are_counted_so() -> None:
    def weight(**fixed: Any) -> float:
        request = offline.Request(
            config=config("llama-3-8b"), gpu="NVIDIA H200:143771:1", engine="vllm", version="0.26.0", fixed=fixed
        )
        return float(offline.plan(request)["memory"]["weights_gib"])

    assert weight(quantization="fp8") < 0.65 * weight()
    assert weight(dtype="float32") > 1.9 * weight()
    awq = config("llama-3.1-70b-awq")
    request = offline.Request(config=awq, gpu="NVIDIA H200:143771:1", engine="vllm", version="0.26.0")
    for name in ("awq", "awq_marlin"):
        offline.plan(offline.Request(**{**request.__dict__, "fixed": {"quantization": name, "max_model_len": 4096}}))
    with pytest.raises(PlanError, match="files are awq"):
        offline.plan(offline.Request(**{**request.__dict__, "fixed": {"quantization": "gptq"}}))


@pytest.mark.parametrize("kind", ["vllm", "triton_vllm", "sglang"])
def test_each_value_that_a_plan_can_have_is_judged_by_the_version_s_catalogue(kind: str) -> None:
    """A value that the catalogue of a version lacks is refused with the nearest alternative; one that it has is taken."""
    values = {
        **dict.fromkeys(offline.FLAGS, True),
        **dict.fromkeys(("scheduling_policy",), "priority"),
        **dict.fromkeys(("max_num_queued_reqs", "prefill_schedule_interval", "long_prefill_token_threshold"), 4),
        "kv_offloading_size": 2.0,
    }
    for version, words in OPTIONS[kind].items():
        there = {word.partition(":")[0] for word in words.split()}
        for name, value in values.items():
            request = offline.Request(
                config=config("deepseek-v2-lite"),
                gpu="NVIDIA H200:143771:1",
                engine=kind,
                version=version,
                fixed={name: value, "max_model_len": 4096},
            )
            # What SGLang calls otherwise is translated, and what it always has is no option of it.
            if name in there:
                offline.plan(request)
            elif kind != "sglang":
                with pytest.raises(PlanError, match=f"--set {name} .*; "):
                    offline.plan(request)
