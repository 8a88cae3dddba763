# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the checks share: when unknown is the only honest answer, versions, CPU lists, hosts without GPUs."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Optional, TypeVar

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    CheckFunction,
    Finding,
    not_applicable,
    unknown,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    Container,
    Engine,
    Gpu,
    HostFacts,
    Release,
    Service,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, NOT_COLLECTED, OK

Policy = Mapping[str, Any]
CONTAINERS = ("docker", "lxc", "lxc-libvirt", "podman", "systemd-nspawn")
"""What systemd-detect-virt calls a host that is a container itself."""
_Thing = TypeVar("_Thing")


def not_read(facts: HostFacts, *probes: str) -> Finding:
    """Return the unknown that names the probes and why they brought nothing."""
    states = []
    for name in probes:
        state = facts.probe(name)
        # A probe that was read and yet gave nothing was not understood: the facts say what of it.
        said = "read, but it does not say" if state.state == OK else state.state
        states.append(f"{name}: {said}{f' ({state.error})' if state.error else ''}")
    return unknown("; ".join(states), None, *facts.problems[:8])


def unread(facts: HostFacts, *probes: str) -> bool:
    """Tell whether one of ``probes`` was neither read nor seen to be absent: then nothing may pass."""
    return any(facts.probe(name).state not in (OK, ABSENT) for name in probes)


def broke(facts: HostFacts, *probes: str) -> bool:
    """Tell whether one of ``probes`` was tried and failed: a helper that a hand-made snapshot may do without."""
    return any(facts.probe(name).state not in (OK, ABSENT, NOT_COLLECTED) for name in probes)


def why_down(unit: Service) -> str:
    """Return what systemd says of a unit that does not run, an empty text for one that does or of which it says nothing."""
    down = unit.active_state in ("failed", "inactive", "deactivating")
    return f"{unit.name} is {unit.active_state} ({unit.result or '?'})" if down else ""


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


OUR_CONTAINER = re.compile(r"\Ametalserve-(.+)-[0-9a-f]{12}\Z")
ELSEWHERE = re.compile(r"--config\b|--config-file\b|--model[-_]repository\b|--model-store\b|\btritonserver\b")
"""Words of engines that read what they run with from files."""

SERVES = re.compile(r"vllm|sglang|tritonserver|--(tensor-parallel-size|tp-size|served-model-name|shutdown-timeout)\b")


def replica_of(container: Container) -> str:
    """Return the replica that a container of this bundle runs; empty where the bundle did not create it."""
    match = OUR_CONTAINER.match(container.name or "")
    return container.labels.get("metalserve.replica") or (match.group(1) if match else "")


def engine_of(facts: HostFacts, container: Container) -> Optional[Engine]:
    """Return the replica's state on this node that ``container`` belongs to; None where it is not ours."""
    name = replica_of(container)
    return next((one for one in facts.metalserve.engines or [] if name and one.replica == name), None)


def current_release(engine: Engine) -> Optional[Release]:
    """Return the release that the link ``current`` of a replica names; None where it could not be read."""
    return next((one for one in engine.releases if one.hash == engine.current), None)


def content_of(engine: Optional[Engine]) -> dict[str, Any]:
    """Return what the replica's current release decides (``content`` of release.json); empty where it is not known."""
    release = current_release(engine) if engine is not None else None
    content = (release.release or {}).get("content") if release is not None else None
    return content if isinstance(content, dict) else {}


def part(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping inside a release's content; empty where it is none."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def desired_out(engine: Engine) -> str:
    """Return who took the replica out of rotation and why it may be silent; empty where it is wanted in."""
    rotation = engine.rotation or {}
    wanted = rotation.get("in", rotation.get("desired", True))
    if wanted in (True, "in", None):
        return ""
    return f"desired out by {rotation.get('by') or '?'} since {rotation.get('since') or '?'}"


def is_engine(container: Container) -> bool:
    """Tell whether a container serves a model: ours, or by its image and words, or because it was given GPUs."""
    words = " ".join([container.image or "", *container.entrypoint, *container.command])
    if replica_of(container) or SERVES.search(words):
        return True
    return container.wants_gpu and "exporter" not in f"{container.name} {words}"


def engine_containers(facts: HostFacts) -> Optional[list[Container]]:
    """Return the containers that serve a model, started by this bundle or not; None where Docker was not read.

    One whose state is not said counts as running: what it would do wrong, it does.
    """
    if facts.docker.containers is None:
        return None
    alive = ("running", "restarting", "paused", None)
    return [one for one in facts.docker.containers if one.state in alive and is_engine(one)]


def needs_engines(function: CheckFunction) -> CheckFunction:
    """Wrap a check of engine containers: not applicable where none runs, unknown where Docker was not read."""

    @wraps(function)
    def checked(facts: HostFacts, policy: Policy) -> Finding:
        containers = engine_containers(facts)
        if containers is None:
            if facts.probe("docker_version").state == ABSENT and facts.probe("docker_containers").state == ABSENT:
                return not_applicable("no Docker on this host")
            return not_read(facts, "docker_containers")
        if not containers:
            return not_applicable("no engine container runs")
        return function(facts, policy)

    return checked


def needs_replicas(function: CheckFunction) -> CheckFunction:
    """Wrap a check of this bundle's replicas: not applicable where there is none, unknown where they were not read."""

    @wraps(function)
    def checked(facts: HostFacts, policy: Policy) -> Finding:
        if facts.metalserve.engines is None:
            return not_read(facts, "engines")
        if not facts.metalserve.engines:
            return not_applicable("no engine of this bundle on this host")
        return function(facts, policy)

    return checked


def by_one(
    things: Iterable[_Thing], judge_one: Callable[[_Thing], Optional[tuple[str, str]]]
) -> tuple[list[str], list[str], list[str]]:
    """Sort what ``judge_one`` says of each thing into (failures, warnings, unknowns); None from it means fine."""
    sorted_out: dict[str, list[str]] = {"fail": [], "warn": [], "unknown": []}
    for thing in things:
        said = judge_one(thing)
        if said is not None:
            sorted_out[said[0]].append(said[1])
    return sorted_out["fail"], sorted_out["warn"], sorted_out["unknown"]


def tensor_parallel(facts: HostFacts, container: Container, policy: Policy) -> Optional[int]:
    """Return over how many GPUs a container's model is split: by its release, its words, else as declared.

    None where a container of this bundle says it in a release that could not be read, or one of somebody else, given
    several GPUs, in a file.
    """
    settings = part(content_of(engine_of(facts, container)), "settings")
    for name in ("tensor_parallel_size", "tp_size", "tp"):
        if isinstance(settings.get(name), int):
            return int(settings[name])
    words = " ".join([*container.entrypoint, *container.command])
    match = re.search(r"(?:--tensor[-_]parallel[-_]size|--tp-size|--tp|-tp)[ =](\d+)", words)
    if match:
        return int(match.group(1))
    declared = int(policy["expected"]["tensor_parallel"] or 1)
    if replica_of(container) and not settings:
        return declared if declared > 1 else None
    if not settings and ELSEWHERE.search(words) and len(container.device_ids) != 1 and container.device_count != 1:
        return declared if declared > 1 else None
    return 1 if settings else declared


def largest_tensor_parallel(facts: HostFacts, policy: Policy) -> Optional[int]:
    """Return the largest tensor parallel size that is declared for, or runs on, this host; None: not known."""
    sizes = [tensor_parallel(facts, one, policy) for one in engine_containers(facts) or []]
    largest = max([int(policy["expected"]["tensor_parallel"] or 1), *(size for size in sizes if size is not None)])
    return None if largest <= 1 and None in sizes else largest


def moment(text: Optional[str]) -> Optional[datetime.datetime]:
    """Return a time such as 2026-01-31T00:00:00.123456789Z (UTC, to the second); None for what is none."""
    try:
        return datetime.datetime.strptime((text or "")[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None


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
    """Sort what ``judge_one`` says of each GPU, with the GPU's name before it; see :func:`by_one`."""

    def named(gpu: Gpu) -> Optional[tuple[str, str]]:
        said = judge_one(gpu)
        return None if said is None else (said[0], f"{label(gpu)}: {said[1]}")

    return by_one(facts.gpus or [], named)


def worst(found: tuple[list[str], list[str], list[str]], desired: Any, fine: Any) -> Finding:
    """Return the finding for what :func:`by_one` sorted: a failure beats an unknown, an unknown beats a warning."""
    failures, warnings, unknowns = found
    evidence = (*failures, *unknowns, *warnings)
    if failures:
        return Finding("fail", "; ".join(failures), desired, evidence)
    if unknowns:
        return Finding("unknown", "; ".join(unknowns), desired, evidence)
    if warnings:
        return Finding("warn", "; ".join(warnings), desired, evidence)
    return Finding("pass", fine, desired)
