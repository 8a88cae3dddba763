# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plans as text for a person: every number with its reason beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
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

MEANING = {
    "max_num_batched_tokens": "tokens of one step, prompts and answers together",
    "max_num_seqs": "requests in work at once",
    "max_model_len": "longest prompt and answer together, in tokens",
    "gpu_memory_utilization": "share of the GPU's memory that it takes",
    "enforce_eager": "without compiled graphs",
    "VLLM_CPU_KVCACHE_SPACE": "GiB for the KV cache",
    "kv_cache_dtype": "how a token's keys and values are kept",
    "queue": "requests that may wait",
    "max_in_flight": "requests of a replica, in work and waiting; a gateway answers 429 to more",
    "requests_per_s": "requests a second of the whole pool",
    "body_limit_bytes": "largest request",
    "drain_s": "how long a node that leaves finishes its answers",
    "longest_silent_prefill_s": "how long a healthy engine may say nothing",
    "gateway_read_s": "how long a gateway waits for the next token",
    "wedged_after_s": "an engine with work that made no step for so long is stuck",
    "p99_s": "99 of 100 answers are there by then",
    "ttft_s": "99 of 100 first tokens are there by then",
    "tpot_s": "99 of 100 tokens come that soon after the last",
}
"""What a number is, for who reads a plan for the first time; the reason beside it says why it is so large."""


def _why(name: str, reason: str) -> str:
    """Return what a number is, and its reason."""
    return f"{MEANING[name]}: {reason}" if name in MEANING and reason else MEANING.get(name, reason)


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
        rows += _line(name, _value(value), _why(name, reasons.get(f"settings.{name}", "")))
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


def _span(numbers: Sequence[int]) -> str:
    """Return consecutive numbers as first..last."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}..{high}"


def pool(plan: Mapping[str, Any]) -> str:
    """Return a PoolPlan as text."""
    reasons = plan["reasons"]
    out = [
        f"Pool {plan['pool']}: model {plan['served_name']} on {plan['engine']} {plan['engine_version']}".rstrip(),
        "  Where gateways find it",
    ]
    ports: dict[str, list[int]] = {}
    for one in plan["replicas"]:
        name = one["host"] if one["host"] == one["address"] else f"{one['host']} ({one['address']})"
        ports.setdefault(name, []).append(one["port"])
    spans = [f"{name}, port {_span(numbers)}" for name, numbers in ports.items()]
    out += _line("replicas", str(len(plan["replicas"])), "; ".join(spans))
    out.append("  What each replica starts from; its node's memory may lower it, see below")
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        out += _line(name, _value(plan["batching"][name]), _why(name, reasons.get(f"settings.{name}", "")))
    out += _line(
        "max_model_len", _value(plan["max_model_len"]), _why("max_model_len", reasons.get("max_model_len", ""))
    )
    out.append("  What gateways let in")
    for name in ("queue", "max_in_flight", "requests_per_s"):
        value = plan["admission"][name]
        out += _line(name, _value(value) if value else "-", _why(name, reasons.get(f"admission.{name}", "")))
    out += _line(
        "body_limit_bytes",
        _value(plan["body_limit_bytes"]),
        _why("body_limit_bytes", reasons.get("body_limit_bytes", "")),
    )
    out.append("  How long things may take, in seconds")
    for name in ("drain_s", "longest_silent_prefill_s", "gateway_read_s", "wedged_after_s"):
        out += _line(name, _value(plan["times"][name]), _why(name, reasons.get(f"times.{name}", "")))
    for name, label in (
        ("p99_s", "alert above p99_s"),
        ("ttft_s", "alert above ttft_s"),
        ("tpot_s", "alert above tpot_s"),
    ):
        if name in plan["alerts"]:
            out += _line(label, _value(plan["alerts"][name]), _why(name, reasons.get(f"alerts.{name}", f"slo.{name}")))
    if "pools.split" in reasons:
        out += ["  Whether long prompts should have a pool of their own", *_line("split", "-", reasons["pools.split"])]
    return "\n".join(out) + "\n"


def _places(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where each replica of a pool runs on its node."""
    rows: list[str] = []
    for one in replicas:
        if not one["gpus"]:
            continue
        pinned = f", processors {one['cpuset_cpus']}" if one["cpuset_cpus"] else ", not pinned to processors"
        why, _see, place = one["reasons"].get("gpus", "").partition("; see")
        rows += _line(one["replica"], str(one["port"]), f"{why}{pinned}{_see}{place}")
    return ["  Port and place", *rows] if rows else rows


def node(hosts: Sequence[str], hardware: str, assumed: Sequence[str], plans: Sequence[Mapping[str, Any]]) -> str:
    """Return what one node runs, and the other hosts that run the same, as text."""
    alike = f"; the same on {', '.join(hosts[1:])}" if len(hosts) > 1 else ""
    out = [f"Node {hosts[0]}{alike}: {hardware}"]
    for note in assumed:
        out += textwrap.wrap(f"Assumed: {note}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    for name in dict.fromkeys(str(plan["pool"]) for plan in plans):
        out += _replicas([plan for plan in plans if plan["pool"] == name])
    return "\n".join(out) + "\n"


def _replicas(mine: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the replicas of one pool on one node: they differ in place alone, so the numbers of the first hold for all."""
    first, reasons = mine[0], mine[0]["reasons"]
    names = f"{len(mine)} replicas of pool {first['pool']}" if len(mine) > 1 else f"Replica {first['replica']}"
    where = f"{len(first['gpus'])} GPU(s)" if first["gpus"] else "processors"
    each = " each" if len(mine) > 1 else ""
    out = ["", f"  {names}, port {_span([one['port'] for one in mine])}, on {where}{each}", *_places(mine)]
    out += ["  What the engine is told", *_settings(first["settings"], reasons)]
    for name, value in first["environment"].items():
        out += _line(name, value, _why(name, reasons.get(f"environment.{name}", "")))
    out += ["  Where its memory goes" + (", of each GPU" if first["gpus"] else ""), *_memory(first["memory"], reasons)]
    out.append("  What its container may use")
    for name in ("memory_bytes", "memory_swap_bytes", "shm_bytes"):
        gib = f"{first['container'][name] / 1024**3:.1f} GiB"
        out += _line(name[:-6], gib, reasons.get(f"container.{name}", ""))
    warnings = list(dict.fromkeys(text for one in mine for text in one["warnings"]))
    out += ["  To know"] if warnings else []
    for warning in warnings:
        out += textwrap.wrap(warning, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return out
