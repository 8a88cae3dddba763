# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a whole inventory on the controller, for playbooks/plan.yml: no host is asked, recorded facts stand in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json
from ansible_collections.metal.serve.plugins.module_utils.engines import registry
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import SnapshotError
from ansible_collections.metal.serve.plugins.module_utils.planner import render
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import mapping, number
from ansible_collections.metal.serve.plugins.module_utils.planner.documents import read_json
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import Node, parse_node
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import MOST
from ansible_collections.metal.serve.plugins.module_utils.planner.presets import DEEPSEEK_V2_LITE, SMOLLM2_135M
from ansible_collections.metal.serve.plugins.module_utils.planner.replica import Job, jobs_of, replica_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.weights import parse_index


@dataclass(frozen=True)
class Preview:
    """What is planned for one host: its hardware in words, plans, what stood in for what is not known, what does not fit."""

    host: str
    hardware: str = ""
    plans: list[dict[str, Any]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    problem: str = ""


def _read(path: str) -> Any:
    """Return a JSON file, None where it is not there. Raises PlanError when it is no JSON."""
    try:
        return read_json(path, path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _snapshot(path: str) -> dict[str, Any]:
    """Return the facts of a snapshot. Raises PlanError where it cannot be read."""
    try:
        return collect(path).facts.to_dict()
    except SnapshotError as error:
        raise PlanError(f"the snapshot {path}: {error}.") from None


def facts_of(folder: str, host: str, accelerator: str, gpus: int, stand_in: str) -> tuple[dict[str, Any], str]:
    """Return a host's facts and what was assumed: from its snapshot, else the first GPUs of the one that stands in.

    Raises PlanError when there is a snapshot that cannot be read, or none that could stand in.
    """
    path = os.path.join(folder, host)
    if os.path.isdir(path):
        return _snapshot(path), ""
    if accelerator == "cpu":
        return {}, f"there is no snapshot of it in {folder}: its memory is not known"
    record = "ansible-playbook playbooks/snapshot.yml records the real one"
    facts = _snapshot(stand_in) if os.path.isdir(stand_in) else {}
    found = facts.get("gpus") or []
    if not 1 <= gpus <= len(found):
        raise PlanError(
            f"there is no snapshot of it in {folder}, and what would stand in ({stand_in}) has {len(found)} GPUs, "
            f"not {gpus}; {record}."
        )
    note = f"there is no snapshot of it in {folder} yet: {gpus} x {found[0]['name']} stand in ({stand_in}); {record}"
    return {**facts, "gpus": found[:gpus]}, note


def config_of(name: str, model: Mapping[str, Any], accelerator: str) -> tuple[Any, int | None, str]:
    """Return a model's config.json, its index size and what was assumed: from a local source, else an example."""
    source = mapping(model.get("source"), f"metalserve_models.{name}.source")
    path = source.get("path")
    if source.get("type") == "local" and isinstance(path, str):
        config = _read(os.path.join(path, "config.json"))
        if config is not None:
            index = _read(os.path.join(path, "model.safetensors.index.json"))
            return config, parse_index(index) if index is not None else None, ""
    example, label = (SMOLLM2_135M, "SmolLM2-135M") if accelerator == "cpu" else (DEEPSEEK_V2_LITE, "DeepSeek-V2-Lite")
    return example, None, f"config.json of {name} is not on this machine: the shape of {label} stands in"


def calibrations_of(pools: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of each pool's calibration file. Raises PlanError naming pool and file."""
    found: dict[str, Any] = {}
    for pool, spec in pools.items():
        path = spec.get("calibration") if isinstance(spec, Mapping) else None
        if path:
            found[pool] = _read(str(path))
            if found[pool] is None:
                raise PlanError(
                    f"metalserve_pools.{pool}.calibration is {path!r}, and there is no such file here; make it with "
                    "scripts/plan --calibrate LOG --out FILE."
                )
    return found


def hardware_of(node: Node, accelerator: str) -> str:
    """Return what a node has, in a few words."""
    kinds: dict[str, int] = {}
    for gpu in node.gpus:
        name = f"{gpu.name} of {gpu.total_mib:,} MiB"
        kinds[name] = kinds.get(name, 0) + 1
    cards = " and ".join(f"{count} x {name}" for name, count in kinds.items()) or "no GPU"
    memory = f", {node.memory_bytes / 1024**3:,.0f} GiB of memory" if node.memory_bytes else ""
    return ("processors" if accelerator == "cpu" else cards) + memory


def judge_settings(job: Job) -> None:
    """Raise PlanError for a setting that the pool's engine, in its version, does not have, with what to do instead."""
    engine, version = str(job.plan["engine"]), str(job.plan["engine_version"])
    for name, value in mapping(job.spec.get("settings"), f"metalserve_pools.{job.pool}.settings").items():
        found = registry.lacks(engine, version, str(name), value)
        if found:
            raise PlanError(f"metalserve_pools.{job.pool}.settings.{name} {found[0]}; {found[1].rstrip('.?')}.")


def preview(
    pools: Mapping[str, Any],
    plans: Sequence[Mapping[str, Any]],
    models: Mapping[str, Any],
    host: str,
    accelerator: str,
    expected_gpus: Any,
    folder: str,
    stand_in: str = "",
) -> Preview:
    """Return what ``host`` would run. A plan that does not fit is a Preview with ``problem``, not an exception."""
    jobs = jobs_of(pools, plans, host)
    if not jobs:
        return Preview(host, "no engine runs there")
    assumed: list[str] = []
    try:
        gpus = max(1, sum(job.gpus for job in jobs))
        if expected_gpus is not None and accelerator != "cpu":
            where = f"metalserve_expected_gpus of {host}"
            gpus = number(expected_gpus, where, 1, f"a whole number, 1 to {MOST}", True, MOST)
        models = mapping(models, "metalserve_models")
        for job in jobs:
            judge_settings(job)
        facts, note = facts_of(folder, host, accelerator, gpus, stand_in)
        assumed += [note] if note else []
        configs: dict[str, Any] = {}
        indexes: dict[str, int] = {}
        revisions: dict[str, str] = {}
        for job in jobs:
            name = str(job.plan["model"])
            if name in configs:
                continue
            model = mapping(models.get(name), f"metalserve_models.{name}")
            configs[name], index, note = config_of(name, model, accelerator)
            revisions[name] = str(model.get("revision", ""))
            assumed += [note] if note else []
            if index is not None:
                indexes[name] = index
        node = parse_node(facts)
        found = replica_plans(
            pools, plans, host, accelerator, node, configs, revisions, indexes, calibrations_of(pools)
        )
    except PlanError as error:
        return Preview(host, assumed=assumed, problem=str(error))
    return Preview(host, hardware_of(node, accelerator), [plan.to_dict() for plan in found], assumed)


def _alike(shown: Preview) -> str:
    """Return a text that is the same for nodes that differ in name, address and the identity of their GPUs alone."""
    plans = [
        {**plan, "host": "", "address": "", "gpus": len(plan["gpus"])} if not plan["multi_node"] else plan
        for plan in shown.plans
    ]
    noted = [note.replace(shown.host, "") for note in (*shown.assumed, shown.problem)]
    return canonical_json([shown.hardware, plans, noted])


def fleet(previews: Sequence[Preview]) -> tuple[str, list[str]]:
    """Return all nodes as text, those that are alike once, and what does not fit, a sentence for each group of nodes."""
    groups: dict[str, list[Preview]] = {}
    for shown in previews:
        groups.setdefault(_alike(shown), []).append(shown)
    parts, problems = [], []
    for group in groups.values():
        hosts = [shown.host for shown in group]
        first = group[0]
        if first.problem:
            problems.append(f"{', '.join(hosts)}: {first.problem}")
        parts.append(
            render.node(hosts, first.hardware or "its plan does not fit, see the end", first.assumed, first.plans)
        )
    return "\n".join(parts), problems
