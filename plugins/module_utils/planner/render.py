# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plans as text for a person: every number with its reason beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 118
SHOWN_MEMORY = (
    ("weights_gib", "weights", "GiB"),
    ("activation_gib", "activation peak", "GiB"),
    ("non_torch_gib", "context, NCCL", "GiB"),
    ("graphs_gib", "CUDA graphs", "GiB"),
    ("kv_cache_gib", "KV cache", "GiB"),
    ("kv_cache_tokens", "KV cache", "tokens"),
    ("max_concurrency", "whole contexts at once", "x"),
    ("expected_error_pct", "expected error", "%"),
)


def _value(value: Any) -> str:
    """Return a value as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(name: str, value: str, reason: str) -> list[str]:
    """Return one row, the reason wrapped beside the value."""
    head = f"  {name:<24} {value:>12}  "
    if not reason:
        return [head.rstrip()]
    parts = textwrap.wrap(reason, WIDTH - len(head)) or [""]
    return [head + parts[0], *(" " * len(head) + part for part in parts[1:])]


def _settings(settings: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str]:
    """Return the rows of the engine's settings."""
    rows: list[str] = []
    for name, value in settings.items():
        rows += _line(name, _value(value), reasons.get(f"settings.{name}", ""))
    if "settings.batch_delay" in reasons:
        rows += _line("batch_delay", "-", reasons["settings.batch_delay"])
    return rows


def _memory(memory: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str]:
    """Return the rows of the memory part that a plan has."""
    rows: list[str] = []
    for key, label, unit in SHOWN_MEMORY:
        if key in memory:
            rows += _line(f"{label}, {unit}" if unit else label, _value(memory[key]), reasons.get(f"memory.{key}", ""))
    return rows


def offline(plan: Mapping[str, Any]) -> str:
    """Return scripts/plan's text."""
    model, gpu, engine, place = plan["model"], plan["gpu"], plan["engine"], plan["placement"]
    reasons = plan["reasons"]
    out = [
        f"{model['architecture']}, {model['parameters_billions']:g} billion parameters, on {gpu['count']} x "
        f"{gpu['name']} ({gpu['memory_mib']:,} MiB each), {engine['kind']} {engine['version']}",
        "",
        "Placement",
    ]
    out += _line("tensor_parallel", str(place["tensor_parallel"]), reasons.get("placement.tensor_parallel", ""))
    if place["pipeline_parallel"] > 1:
        out += _line("pipeline_parallel", str(place["pipeline_parallel"]), "fixed with --set")
    out += _line("replicas", str(place["replicas"]), f"{place['gpus_per_replica']} GPU(s) each")
    out += ["", "Settings", *_settings(plan["settings"], reasons)]
    out += ["", "Memory of each GPU", *_memory(plan["memory"], reasons)]
    out += ["", "Limits"]
    out += _line("queue", str(plan["admission"]["queue"]), reasons.get("admission.queue", ""))
    out += _line("max_in_flight", str(plan["admission"]["max_in_flight"]), "max_num_seqs + queue, per replica")
    rough = plan["rough"]
    out += ["", "Rough estimate of the field report, beside it"]
    out += _line("whole model, GB", _value(rough["total_gb"]), "; ".join(rough["limits"]))
    pools = plan.get("pools")
    if pools:
        out += ["", "Pools"]
        out += textwrap.wrap(pools["reason"], WIDTH, initial_indent="  ", subsequent_indent="  ")
        for pool in pools["pools"]:
            bound = pool.get("prompt_tokens_max")
            text = f"prompts up to {bound} tokens" if bound else f"prompts from {pool['prompt_tokens_min']} tokens"
            out += _line(
                pool["pool"],
                f"{pool['replicas']} x",
                f"{text}, {pool['request_share']:.0%} of requests, load {pool['load']:.0%}",
            )
    if plan["warnings"]:
        out += ["", "To know"]
        for warning in plan["warnings"]:
            out += textwrap.wrap(warning, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(out) + "\n"


def _span(numbers: list[int]) -> str:
    """Return consecutive numbers as first..last."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}..{high}"


def pool(plan: Mapping[str, Any]) -> str:
    """Return a PoolPlan as text."""
    reasons = plan["reasons"]
    out = [f"Pool {plan['pool']}: {plan['served_name']} on {plan['engine']} {plan['engine_version']}".rstrip()]
    ports: dict[str, list[int]] = {}
    for one in plan["replicas"]:
        name = one["host"] if one["host"] == one["address"] else f"{one['host']} ({one['address']})"
        ports.setdefault(name, []).append(one["port"])
    spans = [f"{name}, port {_span(numbers)}" for name, numbers in ports.items()]
    out += _line("replicas", str(len(plan["replicas"])), "; ".join(spans))
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        out += _line(name, _value(plan["batching"][name]), reasons.get(f"settings.{name}", ""))
    out += _line("max_model_len", _value(plan["max_model_len"]), reasons.get("max_model_len", ""))
    for name in ("queue", "max_in_flight"):
        out += _line(name, _value(plan["admission"][name]), reasons.get(f"admission.{name}", ""))
    rate = plan["admission"]["requests_per_s"]
    out += _line("requests_per_s", _value(rate) if rate else "-", reasons.get("admission.requests_per_s", ""))
    out += _line("body_limit_bytes", _value(plan["body_limit_bytes"]), reasons.get("body_limit_bytes", ""))
    for name in ("drain_s", "longest_silent_prefill_s", "gateway_read_s", "wedged_after_s"):
        out += _line(name, _value(plan["times"][name]), reasons.get(f"times.{name}", ""))
    if "pools.split" in reasons:
        out += _line("split", "-", reasons["pools.split"])
    out += _line("alert above p99_s", _value(plan["alerts"]["p99_s"]), reasons.get("alerts.p99_s", ""))
    return "\n".join(out) + "\n"


def replica(plan: Mapping[str, Any]) -> str:
    """Return a ReplicaPlan as text."""
    reasons = plan["reasons"]
    where = f"{len(plan['gpus'])} GPU(s)" if plan["gpus"] else "processors"
    out = [f"Replica {plan['replica']} on {plan['host']} at {plan['address']}:{plan['port']}, on {where}"]
    if plan["gpus"]:
        out += _line("gpus", str(len(plan["gpus"])), f"{', '.join(plan['gpus'])}; {reasons.get('gpus', '')}")
        pinned = plan["cpuset_cpus"] or "none"
        out += _line("processors", pinned, "those of the GPUs' NUMA node" if plan["cpuset_cpus"] else "not pinned")
    out += _settings(plan["settings"], reasons)
    for name, value in plan["environment"].items():
        out += _line(name, value, reasons.get(f"environment.{name}", ""))
    out += _memory(plan["memory"], reasons)
    for name in ("memory_bytes", "memory_swap_bytes", "shm_bytes"):
        gib = f"{plan['container'][name] / 1024**3:.1f} GiB"
        out += _line(f"container {name[:-6]}", gib, reasons.get(f"container.{name}", ""))
    for warning in plan["warnings"]:
        out += textwrap.wrap(warning, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(out) + "\n"
