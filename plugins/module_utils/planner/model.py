# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A model's own config.json as the numbers a memory plan needs. A missing or wrong key is named, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
KNOWN_DENSE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "smollm3", "olmo2")
)
LIMITS = {"num_hidden_layers": 10_000, "num_attention_heads": 100_000}


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
    layer_kinds: tuple[str, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    linear_state: LinearState | None = None
    quantization: Quantization | None = None
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
        raise PlanError(f"config.json has {name} = {value!r}; it must be a whole number, {low} or more.")
    return value


def _real(config: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Return a number within bounds from config.json, or ``default`` where the key is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise PlanError(f"config.json has {name} = {value!r}; it must be a number, {low:g} to {high:g}.")
    return float(value)


def _context_limit(config: Mapping[str, Any], positions: int) -> int:
    """Return the longest context with rope scaling counted, as vLLM derives it (config/model.py)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return positions
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor = _real(rope, "factor", 1.0, 1.0, 1e4)
    if kind in ("default", "su", "longrope", "llama3", "mrope"):
        return positions
    original = _whole(rope, "original_max_position_embeddings", positions)
    return max(positions, int((original if kind == "yarn" else positions) * factor))


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first value that is there among ``names``, else None."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return None


def _ints(value: Any) -> tuple[int, int] | None:
    """Return a pair of whole numbers, None for anything else."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, int) for item in value):
        return int(value[0]), int(value[1])
    return None


def _grouped(method: str, raw: Mapping[str, Any], skip: tuple[str, ...]) -> Quantization:
    """Return an AWQ or GPTQ scheme: packed integers with a scale (and maybe a zero point) per group."""
    bits = raw.get("bits", raw.get("w_bit", 4))
    if bits not in (2, 3, 4, 8):
        raise PlanError(f"config.json has quantization_config.bits = {bits!r}; {method} knows 2, 3, 4 and 8.")
    group = raw.get("group_size", 128)
    zero = bool(raw.get("zero_point", method.startswith("awq") or not raw.get("sym", True)))
    return Quantization(method, int(bits), group if isinstance(group, int) and group > 0 else 0, zero, skip=skip)


def _compressed_tensors(method: str, raw: Mapping[str, Any], skip: tuple[str, ...]) -> Quantization:
    """Return a compressed-tensors scheme from the weights of its first group."""
    groups = raw.get("config_groups")
    first: Any = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    weights = weights if isinstance(weights, Mapping) else {}
    bits, group = weights.get("num_bits", 8), weights.get("group_size")
    if bits not in (4, 8):
        raise PlanError(f"config.json has compressed-tensors weights of {bits!r} bits; the planner counts 4 and 8.")
    return Quantization(method, int(bits), group if isinstance(group, int) and group > 0 else 0, skip=skip)


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights are quantized, None for plain weights. Raises PlanError for a method it cannot count."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise PlanError(f"config.json has quantization_config = {raw!r}; it must be a JSON object.")
    method = str(raw.get("quant_method", "")).lower()
    listed = raw.get("modules_to_not_convert") or raw.get("ignore") or raw.get("ignored_layers") or []
    skip = tuple(str(name) for name in listed) if isinstance(listed, list) else ()
    four = "FP4" in str(raw.get("quant_algo", "")).upper()
    plain = {
        "fp8": Quantization("fp8", 8, block=_ints(raw.get("weight_block_size")), skip=skip),
        "modelopt": Quantization(method, 4 if four else 8, 16 if four else 0, skip=skip),
        "modelopt_fp4": Quantization(method, 4, 16, skip=skip),
        "mxfp4": Quantization(method, 4, 32, skip=(*skip, "qkv_proj", "o_proj")),
        "bitsandbytes": Quantization(method, 4 if raw.get("load_in_4bit") else 8, 64, skip=skip),
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
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "compressed_sparse_attention": "compressed:4",
    "heavily_compressed_attention": "compressed:128",
}


def _listed_kinds(listed: list[Any], layers: int) -> tuple[str, ...]:
    """Return the kinds that config.json lists layer by layer; empty when all are full."""
    if len(listed) < layers:
        raise PlanError(f"config.json has {len(listed)} layer_types for {layers} layers; it must name each layer.")
    unknown = sorted({str(name) for name in listed if str(name) not in LAYER_NAMES})
    if unknown:
        raise PlanError(
            f"config.json has layer_types {', '.join(unknown)}; the planner knows {', '.join(sorted(LAYER_NAMES))}."
        )
    found = tuple(LAYER_NAMES[str(name)] for name in listed[:layers])
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


def _layer_kinds(config: Mapping[str, Any], layers: int, window: int, kind: str) -> tuple[str, ...]:
    """Return the attention of each layer: full, sliding, linear, compressed:N; empty when all are full."""
    rates = _first(config, "compress_rates", "compress_ratios")
    listed = config.get("layer_types")
    pattern = config.get("sliding_window_pattern")
    interval = config.get("full_attention_interval")
    kinds: tuple[str, ...] = ()
    if kind.startswith("deepseek_v4") and isinstance(rates, list):
        kinds = _compressed_kinds(rates, layers)
    elif isinstance(listed, list):
        kinds = _listed_kinds(listed, layers)
    elif kind.startswith("deepseek_v4"):
        # transformers' default pattern: after three heavily compressed layers every second one is sparse.
        sparse = (layers - 3) // 2
        kinds = ("compressed:128",) * (layers - sparse) + ("compressed:4",) * sparse
    elif window and isinstance(pattern, int) and pattern > 1:
        kinds = _patterned(layers, pattern, "sliding")
    elif window and kind == "gemma2":
        kinds = _patterned(layers, 2, "sliding", first="sliding")
    elif window and kind.startswith("gemma3"):
        kinds = _patterned(layers, 6, "sliding")
    elif window:
        kinds = ("sliding",) * layers
    elif isinstance(interval, int) and interval > 1 and config.get("linear_num_value_heads"):
        kinds = _patterned(layers, interval, "linear")
    return kinds


def _linear_state(config: Mapping[str, Any], width: int) -> LinearState | None:
    """Return the state of a gated-delta-net layer (Qwen3-Next keys), None where there is none."""
    if not config.get("linear_num_value_heads"):
        return None
    keys = _whole(config, "linear_num_key_heads") * _whole(config, "linear_key_head_dim")
    values = _whole(config, "linear_num_value_heads") * _whole(config, "linear_value_head_dim")
    recurrent = _whole(config, "linear_num_value_heads") * _whole(config, "linear_key_head_dim")
    state = recurrent * _whole(config, "linear_value_head_dim") * 4
    convolution = (2 * keys + values) * (_whole(config, "linear_conv_kernel_dim", 4) - 1) * width
    return LinearState(
        bytes_per_sequence=state + convolution,
        key_dim=keys,
        value_dim=values,
        value_heads=_whole(config, "linear_num_value_heads"),
        kernel=_whole(config, "linear_conv_kernel_dim", 4),
    )


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    """Return the mixture-of-experts part, None for a dense model."""
    count = _first(config, "n_routed_experts", "num_local_experts", "num_experts")
    if not count:
        return None
    names = {"count": ("n_routed_experts", "num_local_experts", "num_experts")}
    for name in names["count"]:
        if config.get(name) is not None:
            count = _whole(config, name, low=1)
            break
    per_token = _whole(config, "num_experts_per_tok", _first(config, "experts_per_token") or 2)
    size = _whole(config, "moe_intermediate_size", _whole(config, "intermediate_size", 0))
    shared = _whole(config, "shared_expert_intermediate_size", 0)
    shared = shared or (_whole(config, "n_shared_experts", 0)) * size
    step = _whole(config, "decoder_sparse_step", 1) or 1
    only = config.get("mlp_only_layers")
    dense = set(range(min(_whole(config, "first_k_dense_replace", 0), layers)))
    dense |= {index for index in range(layers) if (index + 1) % step}
    dense |= {index for index in only if isinstance(index, int)} if isinstance(only, list) else set()
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=size,
        shared_intermediate=shared,
        dense_layers=len(dense & set(range(layers))),
        shared_gate=bool(config.get("shared_expert_intermediate_size")),
        router_bias=config.get("topk_method") == "noaux_tc",
    )


def parse_config(config: Any) -> ModelShape:
    """Return the shape that config.json describes. Raises PlanError naming the key that is missing or wrong."""
    if not isinstance(config, Mapping):
        raise PlanError(f"config.json holds {type(config).__name__}; it must be a JSON object.")
    text = config.get("text_config")
    notes: list[str] = []
    if isinstance(text, Mapping):
        outer = config
        config = {**text, "architectures": outer.get("architectures") or text.get("architectures")}
        for name in ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings"):
            if config.get(name) is None and outer.get(name) is not None:
                config[name] = outer[name]
        if outer.get("vision_config"):
            notes.append("the vision part is not counted: give the safetensors index")
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) and architectures else []
    kind = str(config.get("model_type") or "").lower()
    architecture = str(named[0]) if named else kind
    if not architecture:
        raise PlanError("config.json names neither architectures nor model_type; the planner needs one of them.")
    kind = kind or architecture.lower().replace("forcausallm", "")
    hidden = _whole(config, "hidden_size", low=1)
    heads = _whole(config, "num_attention_heads", low=1)
    layers = _whole(config, "num_hidden_layers", low=1)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").replace("torch.", "")
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"config.json has torch_dtype {dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}.")
    # vLLM runs float32 checkpoints of the 'auto' dtype in bfloat16 on GPUs that have it.
    width = 2 if dtype in ("float32", "float") else DTYPE_BYTES[dtype]
    head_dim = _whole(config, "head_dim", max(1, hidden // heads), low=1)
    kv_heads = _whole(config, "num_key_value_heads", heads, low=1)
    if heads % kv_heads:
        raise PlanError(
            f"config.json has num_attention_heads {heads} and num_key_value_heads {kv_heads}; "
            "the second must divide the first."
        )
    window = config.get("sliding_window")
    window = window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else 0
    if kind.startswith(("qwen2", "qwen3")) and not config.get("use_sliding_window", False):
        window = 0
    latent = None
    rotary = int(head_dim * _real(config, "partial_rotary_factor", 1.0, 0.0, 1.0))
    if config.get("kv_lora_rank"):
        latent = Latent(
            kv_rank=_whole(config, "kv_lora_rank", low=1),
            q_rank=_whole(config, "q_lora_rank", 0),
            nope_dim=_whole(config, "qk_nope_head_dim"),
            rope_dim=_whole(config, "qk_rope_head_dim"),
            v_dim=_whole(config, "v_head_dim"),
        )
        rotary = latent.rope_dim
    indexer = None
    if config.get("index_head_dim") and latent is not None:
        indexer = Indexer(
            heads=_whole(config, "index_n_heads", 64),
            head_dim=_whole(config, "index_head_dim", low=1),
            topk=_whole(config, "index_topk", 2048),
        )
    experts = _experts(config, layers)
    qwen2 = kind.startswith("qwen2")
    bias = bool(config.get("attention_bias", False))
    base = kind.replace("_moe", "").replace("_text", "")
    known = base in KNOWN_DENSE or kind in ("mixtral", "qwen3_next") or kind.startswith("deepseek")
    if not known:
        notes.append(
            f"model_type {kind!r} is not one whose weights were counted tensor by tensor: it is taken as a decoder of "
            "the common form; the safetensors index makes it exact"
        )
    rope = config.get("rope_scaling")
    return ModelShape(
        architecture=architecture,
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_whole(config, "intermediate_size", 0),
        vocab=_whole(config, "vocab_size", low=1),
        max_position=_whole(config, "max_position_embeddings", 0),
        dtype=dtype,
        dtype_bytes=width,
        tied=bool(config.get("tie_word_embeddings", base.startswith("gemma"))),
        qkv_bias=qwen2 or bias,
        o_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind.startswith(("qwen3", "gemma3", "olmo2")),
        output_gate=bool(config.get("attn_output_gate", kind == "qwen3_next")),
        norms_per_layer=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        rotary_dim=rotary,
        rope_scaling=isinstance(rope, Mapping) and bool(rope),
        context_limit=_context_limit(config, _whole(config, "max_position_embeddings", 0)),
        sliding_window=window,
        layer_kinds=_layer_kinds(config, layers, window, kind),
        experts=experts,
        latent=latent,
        indexer=indexer,
        linear_state=_linear_state(config, width),
        quantization=parse_quantization(config),
        notes=tuple(notes),
    )
