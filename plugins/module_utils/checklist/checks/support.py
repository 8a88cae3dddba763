# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the checks share: when unknown is the only honest answer, versions, CPU lists, hosts without GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    CheckFunction,
    Finding,
    not_applicable,
    unknown,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Gpu, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, OK

Policy = Mapping[str, Any]


def not_read(facts: HostFacts, *probes: str) -> Finding:
    """Return the unknown that names the probes and why they brought nothing."""
    states = []
    for name in probes:
        state = facts.probe(name)
        states.append(f"{name}: {state.state}{f' ({state.error})' if state.error else ''}")
    return unknown("; ".join(states))


def unread(facts: HostFacts, *probes: str) -> bool:
    """Tell whether one of ``probes`` was neither read nor seen to be absent: then nothing may pass."""
    return any(facts.probe(name).state not in (OK, ABSENT) for name in probes)


def needs_gpus(function: CheckFunction) -> CheckFunction:
    """Wrap a check of GPUs: not applicable where there can be none, unknown where nvidia-smi did not answer."""

    @wraps(function)
    def checked(facts: HostFacts, policy: Policy) -> Finding:
        absence = no_gpus(facts, policy)
        if absence is not None:
            return absence
        if facts.gpus is None:
            return not_read(facts, "nvidia_smi")
        if not facts.gpus:
            return unknown("nvidia-smi answered, but shows no GPU")
        return function(facts, policy)

    return checked


def needs_driver(function: CheckFunction) -> CheckFunction:
    """Wrap a check of the driver: not applicable on a host that has, and is meant to have, no NVIDIA GPU."""

    @wraps(function)
    def checked(facts: HostFacts, policy: Policy) -> Finding:
        absence = no_gpus(facts, policy)
        return absence if absence is not None else function(facts, policy)

    return checked


def no_gpus(facts: HostFacts, policy: Policy) -> Optional[Finding]:
    """Return not applicable where this host has no NVIDIA GPU by declaration, or by what was seen; else None."""
    if policy["expected"]["accelerator"] == "cpu":
        return not_applicable("this host is declared to have no GPU (metalserve_accelerator: cpu)")
    if policy["expected"]["accelerator"] == "nvidia" or policy["expected"]["gpus"] or facts.gpus:
        return None
    seen_none = facts.pci.gpus is not None and not facts.pci.gpus
    if seen_none and facts.driver.version_loaded is None and facts.probe("nvidia_smi").state == ABSENT:
        return not_applicable("no NVIDIA GPU on the PCI bus, and no driver")
    return None


def version(text: str) -> tuple[int, ...]:
    """Return a dotted version as numbers (``550.107.02`` -> 550, 107, 2); letters end it. Empty where there is none."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def cpu_set(ranges: str) -> Optional[set[int]]:
    """Return ``0-3,8`` as numbers; None for text that is no CPU list."""
    numbers: set[int] = set()
    for part in ranges.strip().split(",") if ranges.strip() else []:
        match = re.match(r"\A(\d+)(?:-(\d+))?\Z", part.strip())
        if match is None or int(match.group(2) or match.group(1)) - int(match.group(1)) > 65536:
            return None
        numbers.update(range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1))
    return numbers


def label(gpu: Gpu) -> str:
    """Return how a GPU is named in a report: its index and PCI address."""
    return f"GPU {gpu.index} ({gpu.pci_bus_id or 'address unknown'})"


def by_gpu(
    facts: HostFacts, judge_one: Callable[[Gpu], Optional[tuple[str, str]]]
) -> tuple[list[str], list[str], list[str]]:
    """Sort what ``judge_one`` says of each GPU into (failures, warnings, unknowns); None from it means fine."""
    sorted_out: dict[str, list[str]] = {"fail": [], "warn": [], "unknown": []}
    for gpu in facts.gpus or []:
        said = judge_one(gpu)
        if said is not None:
            sorted_out[said[0]].append(f"{label(gpu)}: {said[1]}")
    return sorted_out["fail"], sorted_out["warn"], sorted_out["unknown"]


def worst(found: tuple[list[str], list[str], list[str]], desired: Any, fine: Any) -> Finding:
    """Return the finding for what :func:`by_gpu` sorted: a failure beats an unknown, an unknown beats a warning."""
    failures, warnings, unknowns = found
    evidence = (*failures, *unknowns, *warnings)
    if failures:
        return Finding("fail", "; ".join(failures), desired, evidence)
    if unknowns:
        return Finding("unknown", "; ".join(unknowns), desired, evidence)
    if warnings:
        return Finding("warn", "; ".join(warnings), desired, evidence)
    return Finding("pass", fine, desired)
