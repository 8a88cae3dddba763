# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A model's own config.json as the numbers a memory plan needs. A missing or wrong key is named, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
KNOWN_DENSE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "smollm3", "olmo2")
)
LIMITS = {"num_hidden_layers": 10_000, "num_attention_heads": 100_000}
INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models that see or hear keep the part that writes."""

INHERITED = ("torch_dtype", "dtype", "quantization_config", "compression_config", "tie_word_embeddings")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""As vLLM looks for them: the smallest counts (model_arch_config_convertor.py, derive_max_model_len_and_key)."""

CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "llama4": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
}
"""What transformers' own configuration class assumes and published files of the kind leave out."""

TIED = ("gemma", "cohere", "falcon", "opt", "bloom")
"""Kinds whose output layer is the embedding table where config.json says nothing."""

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
PER_TOKEN = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""A mixture's numbers under the names that published models have for them."""

LATENT_KINDS = ("deepseek", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "pangu_ultra_moe", "axk1")
"""Kinds whose latent attention vLLM keeps compressed (model_arch_config_convertor.py, is_deepseek_mla); others with the
same keys, such as MiniCPM3, get a cache of whole heads."""

MIXTURE = ("|".join(PER_TOKEN),)
REQUIRED = {
    "deepseek_v2": ("kv_lora_rank", "n_routed_experts", "moe_intermediate_size", *MIXTURE),
    "deepseek_v3": ("kv_lora_rank", "n_routed_experts", "moe_intermediate_size", *MIXTURE),
    "deepseek_v32": ("kv_lora_rank", "index_head_dim", "n_routed_experts", "moe_intermediate_size", *MIXTURE),
    "mixtral": ("num_local_experts", *MIXTURE),
    "qwen2_moe": ("num_experts", "moe_intermediate_size", *MIXTURE),
    "qwen3_moe": ("num_experts", "moe_intermediate_size", *MIXTURE),
    "qwen3_next": ("linear_num_value_heads", "num_experts", "moe_intermediate_size", *MIXTURE),
}
"""Without these a model of that kind would be counted as another one, many times too large or too small."""

UNCOUNTED = {
    **dict.fromkeys(
        ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "attn_layer_period", "attn_layer_indices"),
        "state-space layers",
    ),
    **dict.fromkeys(
        ("hybrid_override_pattern", "hybrid_layer_pattern", "layers_block_type", "attention_other_setting"),
        "layers of several kinds",
    ),
    **dict.fromkeys(
        (
            "block_configs",
            "num_key_value_heads_per_layer",
            "global_head_dim",
            "num_global_key_value_heads",
            "swa_head_dim",
        ),
        "layers that differ in size",
    ),
    **dict.fromkeys(("conv_L_cache", "lru_width", "rwkv_version", "linear_attn_config"), "recurrent layers"),
    **dict.fromkeys(("num_kv_shared_layers", "cla_share_factor"), "layers that share a KV cache"),
    "zero_expert_num": "layers of two attentions each",
}
"""Keys of models that the planner cannot count; a wrong number would be worse than none."""


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts part: sizes in elements, counts per layer. ``dense_layers`` have a plain MLP instead."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    dense_layers: int
    shared_gate: bool = False
    router_bias: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2 and later): sizes in elements; q_rank 0: plain queries."""

    kv_rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of DeepSeek V3.2: one key of ``head_dim`` per token and layer."""

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class LinearState:
    """A gated-delta-net layer: bytes of state that one sequence holds in it, and its sizes in elements."""

    bytes_per_sequence: int
    key_dim: int
    value_dim: int
    value_heads: int
    kernel: int


@dataclass(frozen=True)
class Quantization:
    """How linear weights are stored. ``group`` 0: one scale per output row; ``block``: two-dimensional scale blocks."""

    method: str
    bits: int
    group: int = 0
    zero_points: bool = False
    block: tuple[int, int] | None = None
    skip: tuple[str, ...] = ()
    mixed: bool = False
    """Whether groups of layers differ in bits; counted as the first group."""


@dataclass(frozen=True)
class ModelShape:
    """Everything the planner reads from config.json. Element counts; ``dtype_bytes`` for unquantized weights."""

    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    dtype: str
    dtype_bytes: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    norms_per_layer: int = 2
    rotary_dim: int = 0
    rope_scaling: bool = False
    context_limit: int = 0
    """Longest context that the model was made for, rope scaling counted; 0 where config.json does not say."""
    sliding_window: int = 0
    chunk: int = 0
    """Tokens of Llama 4's chunks: a chunked layer looks at its own chunk alone."""
    layer_kinds: tuple[str, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    linear_state: LinearState | None = None
    quantization: Quantization | None = None
    kv_dtype: str = ""
    """Type of the KV cache that the files ask for, taken where nothing else is fixed; empty: the model's own."""
    notes: tuple[str, ...] = ()

    @property
    def compressed(self) -> bool:
        """Whether layers keep compressed KV (DeepSeek V4)."""
        return any(kind.startswith("compressed:") for kind in self.layer_kinds)

    @property
    def hybrid(self) -> bool:
        """Whether some layers are linear attention (state per sequence, not per token)."""
        return "linear" in self.layer_kinds


def _whole(config: Mapping[str, Any], name: str, default: int | None = None, low: int = 0) -> int:
    """Return a whole number from config.json, or ``default`` where the key is missing or null."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise PlanError(
                f"config.json has no {name}; the planner needs it. Is this the folder of a causal language model?"
            )
        return default
    high = LIMITS.get(name, 10**12)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, value, f"a whole number, {low} or more" + (f", {high} at most" if name in LIMITS else ""))
    return value


def _wrong(name: str, value: Any, right: str) -> PlanError:
    """Return the error for a key of the wrong type or size; a long value is cut."""
    text = repr(value)
    return PlanError(f"config.json has {name} = {text if len(text) < 80 else text[:77] + '...'}; it must be {right}.")


_T = TypeVar("_T")


def _typed(config: Mapping[str, Any], name: str, default: _T, kind: type, right: str) -> _T:
    """Return a value of ``kind`` from config.json, ``default`` where the key is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _wrong(name, value, right)
    return cast(_T, value)


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a switch from config.json; the word "false" is none."""
    return _typed(config, name, default, bool, "true or false")


def _word(config: Mapping[str, Any], name: str, default: str = "") -> str:
    """Return a word from config.json."""
    return _typed(config, name, default, str, "a word")


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a JSON object from config.json, an empty one where the key is missing or null."""
    empty: Mapping[str, Any] = {}
    return _typed(config, name, empty, Mapping, "a JSON object")


def _list(config: Mapping[str, Any], name: str, kind: type, what: str) -> list[Any] | None:
    """Return a list of ``kind`` from config.json, None where the key is missing or null."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, kind) for item in value):
        raise _wrong(name, value, f"a list of {what}")
    return value


def _real(config: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Return a number within bounds from config.json, or ``default`` where the key is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _wrong(name, value, f"a number, {low:g} to {high:g}")
    return float(value)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how positions are scaled; where it differs by kind of layer, what holds for full attention."""
    rope = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    return _object(rope, "full_attention") or rope


def _positions(config: Mapping[str, Any]) -> int:
    """Return the positions that the model was made with, 0 where config.json does not say; model_max_length wins."""
    found = [_whole(config, name, low=1) for name in POSITIONS if config.get(name) is not None]
    return _whole(config, "model_max_length", 0) or min(found, default=0)


def _context_limit(config: Mapping[str, Any], positions: int, kind: str) -> int:
    """Return the longest context with rope scaling counted, as vLLM derives it (config/model.py).

    Gemma 3's positions have their scaling in them already.
    """
    if kind.startswith("gemma3"):
        return positions
    rope = _rope(config)
    scaling = _word(rope, "rope_type") or _word(rope, "type") or "default"
    factor = _real(rope, "factor", 1.0, 1.0, 1e4)
    if scaling in ("default", "su", "longrope", "llama3", "mrope"):
        return positions
    original = _whole(rope, "original_max_position_embeddings", positions, low=1)
    return int((original if scaling == "yarn" else positions) * factor)


def _block(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of fp8's scale blocks, None for one scale per tensor."""
    value = _list(raw, "weight_block_size", int, "whole numbers")
    if value is None:
        return None
    if len(value) != 2 or min(value) < 1:
        raise _wrong("quantization_config.weight_block_size", value, "two whole numbers, 1 or more")
    return int(value[0]), int(value[1])


def _group(raw: Mapping[str, Any], default: int) -> int:
    """Return how many weights share a scale; 0 (-1 in the file): a whole row."""
    return max(0, _whole(raw, "group_size", default, low=-1))


def _grouped(method: str, raw: Mapping[str, Any], skip: tuple[str, ...]) -> Quantization:
    """Return an AWQ or GPTQ scheme: packed integers with a scale (and maybe a zero point) per group."""
    bits = _whole(raw, "bits" if raw.get("bits") is not None else "w_bit", 4)
    if bits not in (2, 3, 4, 8):
        raise PlanError(f"config.json has quantization_config.bits = {bits!r}; {method} knows 2, 3, 4 and 8.")
    zero = _flag(raw, "zero_point", method.startswith("awq") or not _flag(raw, "sym", True))
    return Quantization(method, bits, _group(raw, _whole(raw, "q_group_size", 128, low=-1)), zero, skip=skip)


def _compressed_tensors(method: str, raw: Mapping[str, Any], skip: tuple[str, ...]) -> Quantization | None:
    """Return a compressed-tensors scheme from the weights of its first group; None where it leaves the weights plain."""
    groups = _object(raw, "config_groups")
    schemes = [_object(_object(groups, name), "weights") for name in sorted(groups)]
    found = [scheme for scheme in schemes if scheme]
    if not found:
        return None
    each = [_whole(scheme, "num_bits", 8) for scheme in found]
    for bits in each:
        if bits not in (4, 8):
            raise PlanError(f"config.json has compressed-tensors weights of {bits!r} bits; the planner counts 4 and 8.")
    return Quantization(method, each[0], _group(found[0], 0), skip=skip, mixed=len(set(each)) > 1)


def _kv_dtype(config: Mapping[str, Any], latent: bool) -> str:
    """Return the KV type that quantized files ask for, empty where they do not.

    vLLM takes it where the type is 'auto': ModelOpt's (torch_utils.py, get_kv_cache_quant_algo_string), and compressed
    tensors' for attention that is not latent (attention.py).
    """
    raw = _object(config, "quantization_config") or _object(config, "compression_config")
    method = _method(raw)
    inner = _object(raw, "quantization") or raw
    scheme = inner.get("kv_cache_scheme") or raw.get("kv_cache_scheme")
    if method == "compressed-tensors":
        return "fp8" if scheme and not latent else ""
    if not method.startswith("modelopt"):
        return ""
    if isinstance(scheme, Mapping):
        if scheme.get("type") != "float":
            return ""
        if scheme.get("num_bits") == 4:
            return "nvfp4"
        return "fp8" if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False else ""
    named = scheme or inner.get("kv_cache_quant_algo") or raw.get("kv_cache_quant_algo")
    return named.lower() if isinstance(named, str) and named.lower() in ("fp8", "nvfp4") else ""


def _method(raw: Mapping[str, Any]) -> str:
    """Return the method's name as vLLM makes it one (model_arch_config_convertor.py, _normalize_quantization_config)."""
    method = _word(raw, "quant_method").lower().replace("compressed_tensors", "compressed-tensors")
    if _word(_object(raw, "producer"), "name") == "modelopt":
        algorithm = _word(_object(raw, "quantization") or raw, "quant_algo").upper()
        method = "modelopt_fp4" if algorithm == "NVFP4" else method or "modelopt"
    return method.removesuffix("_marlin")


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights are quantized, None for plain weights. Raises PlanError for a method it cannot count."""
    raw = _object(config, "quantization_config") or _object(config, "compression_config")
    if not raw:
        return None
    method = _method(raw)
    listed = next((key for key in ("modules_to_not_convert", "ignore", "ignored_layers") if raw.get(key)), "ignore")
    skip = tuple(_list(raw, listed, str, "words") or ())
    four = "FP4" in _word(raw, "quant_algo").upper()
    plain = {
        "fp8": Quantization("fp8", 8, block=_block(raw), skip=skip),
        "modelopt": Quantization(method, 4 if four else 8, 16 if four else 0, skip=skip),
        "modelopt_fp4": Quantization(method, 4, 16, skip=skip),
        "mxfp4": Quantization(method, 4, 32, skip=(*skip, "qkv_proj", "o_proj")),
        "bitsandbytes": Quantization(method, 4 if _flag(raw, "load_in_4bit", False) else 8, 64, skip=skip),
    }
    if method in plain:
        return plain[method]
    if method in ("awq", "gptq"):
        return _grouped(method, raw, skip)
    if method == "compressed-tensors":
        return _compressed_tensors(method, raw, skip)
    raise PlanError(
        f"config.json has quantization_config.quant_method = {method!r}; the planner counts awq, gptq, "
        f"compressed-tensors, {', '.join(sorted(plain))}."
    )


LAYER_NAMES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "compressed_sparse_attention": "compressed:4",
    "heavily_compressed_attention": "compressed:128",
}


def _listed_kinds(listed: list[Any], layers: int) -> tuple[str, ...]:
    """Return the kinds that config.json lists layer by layer; empty when all are full."""
    if len(listed) < layers:
        raise PlanError(f"config.json has {len(listed)} layer_types for {layers} layers; it must name each layer.")
    unknown = sorted({name for name in listed if name not in LAYER_NAMES})
    if unknown:
        raise PlanError(
            f"config.json has layer_types {', '.join(unknown)}; the planner knows {', '.join(sorted(LAYER_NAMES))}."
        )
    found = tuple(LAYER_NAMES[name] for name in listed[:layers])
    return found if set(found) != {"full"} else ()


def _patterned(layers: int, every: int, other: str, first: str = "") -> tuple[str, ...]:
    """Return ``other`` layers with a full one at every ``every``-th place (or full ones first)."""
    if first:
        return tuple(other if index % every == 0 else "full" for index in range(layers))
    return tuple("full" if (index + 1) % every == 0 else other for index in range(layers))


def _compressed_kinds(rates: list[Any], layers: int) -> tuple[str, ...]:
    """Return DeepSeek V4's kinds from the compression rate of each layer (0: window only)."""
    if len(rates) < layers:
        raise PlanError(f"config.json has {len(rates)} compression rates for {layers} layers; it must name each layer.")
    for rate in rates:
        if isinstance(rate, bool) or not isinstance(rate, int) or not 0 <= rate <= 10**6:
            raise PlanError(f"config.json has a compression rate {rate!r}; it must be a whole number, 0 or more.")
    return tuple(f"compressed:{rate}" if rate else "sliding" for rate in rates[:layers])


def _every(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kinds that sliding_window_pattern tells: a number N (each Nth layer is full) or letters such as LLLG."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return tuple("full" if pattern[index % len(pattern)] == "G" else "sliding" for index in range(layers))
    if isinstance(pattern, str):
        raise _wrong("sliding_window_pattern", pattern, "a whole number, or letters L and G")
    every = _whole(config, "sliding_window_pattern", 0)
    return _patterned(layers, every, "sliding") if every > 1 else ()


def _chunked_kinds(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return Llama 4's kinds: layers with rotary positions look at their chunk alone (no_rope_layers, 1 for those)."""
    rotary = _list(config, "no_rope_layers", int, "whole numbers")
    if not rotary:
        return _patterned(layers, max(1, _whole(config, "no_rope_layer_interval", 4)), "chunked")
    if len(rotary) < layers:
        raise PlanError(f"config.json has {len(rotary)} no_rope_layers for {layers} layers; it must name each layer.")
    return tuple("chunked" if here else "full" for here in rotary[:layers])


def _layer_kinds(config: Mapping[str, Any], layers: int, window: int, kind: str) -> tuple[str, ...]:
    """Return the attention of each layer: full, sliding, chunked, linear, compressed:N; empty when all are full."""
    rates = _list(config, "compress_rates", int, "whole numbers") or _list(
        config, "compress_ratios", int, "whole numbers"
    )
    listed = _list(config, "layer_types", str, "words")
    pattern = _every(config, layers) if window else ()
    interval = _whole(config, "full_attention_interval", 0)
    kinds: tuple[str, ...] = ()
    if kind.startswith("deepseek_v4") and rates is not None:
        kinds = _compressed_kinds(rates, layers)
    elif listed:
        kinds = _listed_kinds(listed, layers)
    elif kind.startswith("llama4") and config.get("attention_chunk_size"):
        kinds = _chunked_kinds(config, layers)
    elif kind.startswith("deepseek_v4"):
        # transformers' default pattern: after three heavily compressed layers every second one is sparse.
        sparse = (layers - 3) // 2
        kinds = ("compressed:128",) * (layers - sparse) + ("compressed:4",) * sparse
    elif pattern:
        kinds = pattern
    elif window and kind == "gemma2":
        kinds = _patterned(layers, 2, "sliding", first="sliding")
    elif window and kind.startswith("gemma3"):
        kinds = _patterned(layers, 6, "sliding")
    elif window:
        kinds = ("sliding",) * layers
    elif interval > 1 and config.get("linear_num_value_heads"):
        kinds = _patterned(layers, interval, "linear")
    if "linear" in kinds and not config.get("linear_num_value_heads"):
        raise PlanError(
            "config.json has linear_attention layers and no linear_num_value_heads; the planner counts the state of gated "
            "delta nets alone."
        )
    if "chunked" in kinds and not config.get("attention_chunk_size"):
        kinds = tuple("full" if name == "chunked" else name for name in kinds)
    if "sliding" in kinds and not window and not kind.startswith("deepseek_v4"):
        raise PlanError("config.json has sliding_attention layers and no sliding_window; the planner needs its size.")
    return kinds


def _linear_state(config: Mapping[str, Any], width: int, kind: str) -> LinearState | None:
    """Return the state of a gated-delta-net layer (Qwen3-Next keys), None where there is none.

    vLLM keeps it in the model's own type; Qwen3.5 says another one (config.py, Qwen3_5ForConditionalGenerationConfig).
    """
    heads = _whole(config, "linear_num_value_heads", 0)
    if not heads:
        return None
    key_size = _whole(config, "linear_key_head_dim", low=1)
    value_size = _whole(config, "linear_value_head_dim", low=1)
    keys = _whole(config, "linear_num_key_heads", low=1) * key_size
    values = heads * value_size
    kernel = _whole(config, "linear_conv_kernel_dim", 4, low=1)
    said = _word(config, "mamba_ssm_dtype").replace("torch.", "") if kind.startswith("qwen3_5") else ""
    if said and said not in DTYPE_BYTES:
        raise _wrong("mamba_ssm_dtype", said, f"one of {', '.join(sorted(DTYPE_BYTES))}")
    state = heads * key_size * value_size * (DTYPE_BYTES[said] if said else width)
    convolution = (2 * keys + values) * (kernel - 1) * width
    return LinearState(
        bytes_per_sequence=state + convolution, key_dim=keys, value_dim=values, value_heads=heads, kernel=kernel
    )


def _dense_layers(config: Mapping[str, Any], layers: int, kind: str) -> int:
    """Return how many layers of a mixture of experts have a plain MLP instead."""
    step = _whole(config, "decoder_sparse_step", 1, low=1)
    dense = set(range(min(_whole(config, "first_k_dense_replace", 0), layers)))
    dense |= {index for index in range(layers) if (index + 1) % step}
    dense |= set(_list(config, "mlp_only_layers", int, "whole numbers") or ())
    if isinstance(config.get("moe_layer_freq"), list):
        each = _list(config, "moe_layer_freq", int, "whole numbers") or []
        dense |= {index for index, mixed in enumerate(each) if not mixed}
    else:
        every = _whole(config, "moe_layer_freq", 1, low=1)
        dense |= {index for index in range(layers) if index % every}
    first = _whole(config, "moe_layer_start_index", 0)
    last = _whole(config, "moe_layer_end_index", layers - 1)
    between = _whole(config, "moe_layer_interval", 1, low=1)
    dense |= {index for index in range(layers) if not first <= index <= last or (index + 1) % between}
    if kind.startswith("llama4"):
        step = _whole(config, "interleave_moe_layer_step", 1)
        mixed_layers = _list(config, "moe_layers", int, "whole numbers")
        if mixed_layers is None:
            mixed_layers = [index for index in range(layers) if step and (index + 1) % step == 0]
        dense |= set(range(layers)) - set(mixed_layers)
    return len(dense & set(range(layers)))


def _experts(config: Mapping[str, Any], layers: int, kind: str) -> Experts | None:
    """Return the mixture-of-experts part, None for a dense model. Raises PlanError for a mixture with other keys."""
    names = [name for name in EXPERTS if config.get(name) is not None]
    count = _whole(config, names[0]) if names else 0
    if not count:
        other = sorted(
            name
            for name, value in config.items()
            if name not in EXPERTS
            and (name.startswith("moe_") or name.endswith("_experts"))
            and isinstance(value, (int, list))
            and not isinstance(value, bool)
            and value
        )
        if other and not names:
            raise PlanError(
                f"config.json has {', '.join(other[:3])} and none of {', '.join(EXPERTS)}: a mixture of experts, which the "
                "planner would count as a dense model."
            )
        return None
    per_token = next((name for name in PER_TOKEN if config.get(name) is not None), PER_TOKEN[0])
    chosen = _whole(config, per_token, low=1)
    if chosen > count:
        raise PlanError(f"config.json has {per_token} = {chosen} of {names[0]} = {count}; it must be {count} at most.")
    own = config.get("moe_intermediate_size") is not None
    size = _whole(config, "moe_intermediate_size" if own else "intermediate_size", low=1)
    shared = _whole(config, "shared_expert_intermediate_size", 0)
    alike = next((name for name in SHARED if config.get(name) is not None), SHARED[0])
    shared = shared or _whole(config, alike, 1 if kind.startswith("llama4") else 0) * size
    return Experts(
        count=count,
        per_token=chosen,
        intermediate=size,
        shared_intermediate=shared,
        dense_layers=_dense_layers(config, layers, kind),
        shared_gate=bool(config.get("shared_expert_intermediate_size")),
        router_bias=_word(config, "topk_method") == "noaux_tc",
    )


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the part of config.json that describes the language model (two levels down at most), and notes about the rest."""
    senses = False
    for _level in range(2):
        inner = next((name for name in INNER if config.get(name) is not None), "")
        if not inner:
            break
        outer, part = config, _object(config, inner)
        senses = senses or bool(outer.get("vision_config") or outer.get("audio_config"))
        config = {
            **part,
            "architectures": outer.get("architectures") or part.get("architectures"),
            "model_type": part.get("model_type") or outer.get("model_type"),
        }
        for name in INHERITED:
            if config.get(name) is None and outer.get(name) is not None:
                config[name] = outer[name]
    return config, ["the vision part is not counted: give the safetensors index"] if senses else []


def _refuse_uncounted(config: Mapping[str, Any], kind: str) -> None:
    """Raise PlanError for a model that would be counted as something else than it is."""
    if _flag(config, "is_encoder_decoder", False):
        raise PlanError("config.json has is_encoder_decoder = true; the planner counts decoders alone.")
    if any(one != 1 for one in _list(config, "attn_type_list", int, "whole numbers") or ()):
        raise PlanError(
            "config.json has attn_type_list: a model with layers of several kinds, which the planner does not count."
        )
    for name, what in UNCOUNTED.items():
        if config.get(name):
            raise PlanError(f"config.json has {name}: a model with {what}, which the planner does not count.")
    if config.get("kv_lora_rank") and not kind.startswith(LATENT_KINDS):
        raise PlanError(
            f"config.json of model_type {kind} has kv_lora_rank; vLLM keeps a latent cache for {', '.join(LATENT_KINDS)} alone, "
            "and the planner does not count other attention of that form."
        )
    for wanted in REQUIRED.get(kind, ()):
        names = wanted.split("|")
        if all(not config.get(name) for name in names):
            raise PlanError(f"config.json of model_type {kind} has no {names[0]}; the planner needs it.")


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Return the number of key heads, under the name that this kind of model has for it; all heads where none is said."""
    name = next((name for name in KV_HEADS if config.get(name) is not None), "")
    if _flag(config, "multi_query", False) and not _flag(config, "new_decoder_architecture", False):
        return 1 if name in ("", "num_kv_heads") else _whole(config, name, low=1)
    return _whole(config, name, low=1) if name else heads


def _identity(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return (architecture, model_type in small letters), each from the other where one is missing."""
    named = _list(config, "architectures", str, "words") or []
    kind = _word(config, "model_type").lower()
    architecture = named[0] if named else kind
    if not architecture:
        raise PlanError("config.json names neither architectures nor model_type; the planner needs one of them.")
    return architecture, kind or architecture.lower().replace("forcausallm", "").replace("deepseekv", "deepseek_v")


def parse_config(config: Any) -> ModelShape:
    """Return the shape that config.json describes. Raises PlanError naming the key that is missing or wrong."""
    if not isinstance(config, Mapping):
        raise PlanError(f"config.json holds {type(config).__name__}; it must be a JSON object.")
    config, notes = _text_part(config)
    architecture, kind = _identity(config)
    config = {**CLASS_DEFAULTS.get(kind.removesuffix("_text"), {}), **config}
    _refuse_uncounted(config, kind)
    hidden = _whole(config, "hidden_size", low=1)
    heads = _whole(config, "num_attention_heads", low=1)
    layers = _whole(config, "num_hidden_layers", low=1)
    dtype = (_word(config, "dtype") or _word(config, "torch_dtype") or "bfloat16").replace("torch.", "")
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"config.json has torch_dtype {dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}.")
    # vLLM runs float32 checkpoints of the 'auto' dtype in bfloat16 on GPUs that have it.
    width = 2 if dtype in ("float32", "float") else DTYPE_BYTES[dtype]
    if config.get("head_dim") is None and hidden % heads and not config.get("kv_lora_rank"):
        raise PlanError(
            f"config.json has hidden_size {hidden} and num_attention_heads {heads}; without a head_dim the second must "
            "divide the first."
        )
    head_dim = _whole(config, "head_dim", max(1, hidden // heads), low=1)
    kv_heads = _kv_heads(config, heads)
    if heads % kv_heads:
        raise PlanError(
            f"config.json has num_attention_heads {heads} and num_key_value_heads {kv_heads}; "
            "the second must divide the first."
        )
    window = _whole(config, "sliding_window", 0)
    if kind.startswith(("qwen2", "qwen3")) and not _flag(config, "use_sliding_window", False):
        window = 0
    latent = None
    rotary = int(head_dim * _real(config, "partial_rotary_factor", 1.0, 0.0, 1.0))
    if _whole(config, "kv_lora_rank", 0):
        latent = Latent(
            kv_rank=_whole(config, "kv_lora_rank", low=1),
            q_rank=_whole(config, "q_lora_rank", 0),
            nope_dim=_whole(config, "qk_nope_head_dim", low=1),
            rope_dim=_whole(config, "qk_rope_head_dim", low=1),
            v_dim=_whole(config, "v_head_dim", low=1),
        )
        rotary = latent.rope_dim
    indexer = None
    if _whole(config, "index_head_dim", 0) and latent is not None:
        indexer = Indexer(
            heads=_whole(config, "index_n_heads", 64),
            head_dim=_whole(config, "index_head_dim", low=1),
            topk=_whole(config, "index_topk", 2048),
        )
    experts = _experts(config, layers, kind)
    qwen2 = kind.startswith("qwen2")
    bias = _flag(config, "attention_bias", False)
    quantization = parse_quantization(config)
    if quantization is not None and quantization.mixed:
        notes.append("its groups of layers are stored in several widths; all are counted as the first: give the index")
    base = kind.replace("_moe", "").replace("_text", "")
    known = base in KNOWN_DENSE or kind in ("mixtral", "qwen3_next") or kind.startswith("deepseek")
    if not known:
        notes.append(
            f"model_type {kind!r} is not one whose weights were counted tensor by tensor: it is taken as a decoder of "
            "the common form; the safetensors index makes it exact"
        )
    longest = _positions(config)
    dense = layers if experts is None else experts.dense_layers
    plain = "intermediate_size_mlp" if kind.startswith("llama4") and experts is not None else "intermediate_size"
    intermediate = _whole(config, plain, None if dense else 0, low=1)
    return ModelShape(
        architecture=architecture,
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=_whole(config, "vocab_size", low=1),
        max_position=longest,
        dtype=dtype,
        dtype_bytes=width,
        tied=_flag(config, "tie_word_embeddings", base.startswith(TIED)),
        qkv_bias=qwen2 or bias,
        o_bias=bias and not qwen2,
        mlp_bias=_flag(config, "mlp_bias", False),
        qk_norm=kind.startswith(("qwen3", "gemma3", "olmo2")),
        output_gate=_flag(config, "attn_output_gate", kind == "qwen3_next"),
        norms_per_layer=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        rotary_dim=rotary,
        rope_scaling=bool(_object(config, "rope_scaling")),
        context_limit=_context_limit(config, longest, kind),
        sliding_window=window,
        chunk=_whole(config, "attention_chunk_size", 0),
        layer_kinds=_layer_kinds(config, layers, window, kind),
        experts=experts,
        latent=latent,
        indexer=indexer,
        linear_state=_linear_state(config, width, kind),
        quantization=quantization,
        kv_dtype=_kv_dtype(config, latent is not None),
        notes=tuple(notes),
    )
