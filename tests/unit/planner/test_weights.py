# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters and bytes of weights against the published sizes of real models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import estimator, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

from .helpers import config, shape

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_are_counted_exactly(name: str) -> None:
    assert estimator.parameters(shape(name)) == PARAMETERS[name]


def test_loaded_weights_match_what_the_engine_reported() -> None:
    # 'Model loading took 14.32 GiB' and '29.34 GiB' on an H200, vLLM 0.26.0.
    dense = weights.weights(shape("qwen2-7b")).allocated / 2**30
    latent = weights.weights(shape("deepseek-v2-lite")).allocated / 2**30
    assert dense == pytest.approx(14.32, abs=0.006)
    assert latent == pytest.approx(29.34, abs=0.011)


def test_four_bit_weights_with_scales_and_zeros() -> None:
    size = weights.weights(shape("llama-3.1-70b-awq")).exact / 1e9
    assert size == pytest.approx(39.77, abs=0.05)  # the published checkpoint


def test_fp8_blocks() -> None:
    size = weights.weights(shape("deepseek-v3")).exact / 1e9
    plain = weights.weights(shape("deepseek-v3", quantization_config=None)).exact / 1e9
    assert 0.5 < size / plain < 0.51  # one byte, scales, and unquantized embeddings


def test_skip_list_keeps_tensors_as_they_are() -> None:
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn.o_proj"]}
    kept = weights.weights(shape("llama-3-8b", quantization_config=quantization)).exact
    quantization = {**quantization, "modules_to_not_convert": []}
    all_of_them = weights.weights(shape("llama-3-8b", quantization_config=quantization)).exact
    assert kept - all_of_them == 32 * (4096 * 4096 - 4096 * 4)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-2-9b"])
def test_tensor_parallelism_divides(name: str) -> None:
    model = shape(name)
    one, two = weights.weights(model, 1).exact, weights.weights(model, 2).exact
    assert one / 2 < two < one / 2 * 1.05  # replicated parts make it a little more than half


def test_experts_are_shared_by_all_ranks() -> None:
    model = shape("qwen3-30b-a3b")

    def experts(data: int, whole: bool) -> int:
        parts = weights.tensors(model, 2, 1, data, whole)
        return sum(t.count * t.elements for t in parts if t.name.startswith("experts"))

    total = 48 * 128 * 3 * 768 * 2048
    assert experts(1, False) == experts(1, True) == total // 2
    assert experts(2, False) == experts(2, True) == total // 4


def test_key_heads_are_replicated_beyond_their_number() -> None:
    model = shape("llama-3-8b")  # 8 key heads
    eight = sum(t.count * t.elements for t in weights.tensors(model, 8) if t.name == "qkv_proj")
    sixteen = sum(t.count * t.elements for t in weights.tensors(model, 16) if t.name == "qkv_proj")
    assert eight == 32 * (4 + 2) * 128 * 4096
    assert sixteen == 32 * (2 + 2) * 128 * 4096


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(PlanError, match=r"tensor_parallel is 8.*num_attention_heads \(28\)"):
        weights.weights(shape("qwen2-7b"), 8)


def test_a_safetensors_index_is_believed() -> None:
    model = shape("llama-3-8b")
    assert weights.weights(model, index_bytes=16_060_522_496).warnings == ()
    other = weights.weights(model, index_bytes=20_000_000_000)
    assert other.exact == 20_000_000_000
    assert "index" in other.source
    assert "the index is believed" in other.warnings[0]
    assert weights.weights(model, 2, index_bytes=20_000_000_000).exact == pytest.approx(10e9, rel=0.01)


def test_compressed_models_need_the_index() -> None:
    model = shape("deepseek-v4-flash")
    with pytest.raises(PlanError, match="--index"):
        weights.weights(model)
    assert weights.weights(model, index_bytes=160_000_000_000).exact == 160_000_000_000


@pytest.mark.parametrize(
    "index", [{}, [], {"metadata": {}}, {"metadata": {"total_size": "x"}}, {"metadata": {"total_size": 0}}]
)
def test_a_broken_index_is_named(index: object) -> None:
    with pytest.raises(PlanError, match="total_size"):
        weights.parse_index(index)


@given(st.integers(1, 2**34))
def test_the_allocator_never_gives_less_or_much_more(size: int) -> None:
    got = weights.allocated(size)
    assert size <= got < size + 2 * 2**20
    assert got % 512 == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size = '4096'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"vocab_size": None}, "vocab_size"),
        ({"torch_dtype": "int3"}, "torch_dtype 'int3'"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method = 'magic'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "bits = 5"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 32 layers"),
        ({"layer_types": ["holographic"] * 32}, "layer_types holographic"),
        ({"architectures": None, "model_type": None}, "architectures nor model_type"),
    ],
)
def test_a_wrong_config_names_its_key(change: dict[str, object], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        shape("llama-3-8b", **change)


def test_no_json_object() -> None:
    from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config  # noqa: PLC0415

    values: tuple[object, ...] = ([], "x", None, 3)
    for value in values:
        with pytest.raises(PlanError, match="JSON object"):
            parse_config(value)


def test_a_multimodal_config_uses_its_text_part() -> None:
    outer = {"architectures": ["X"], "model_type": "x", "text_config": config("llama-3-8b"), "vision_config": {}}
    from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config  # noqa: PLC0415

    assert parse_config(outer).layers == 32
