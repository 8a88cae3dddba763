# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a whole inventory on the controller, for playbooks/plan.yml: no host is asked, recorded facts stand in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import SnapshotError
from ansible_collections.metal.serve.plugins.module_utils.planner import render
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import mapping
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import parse_node
from ansible_collections.metal.serve.plugins.module_utils.planner.presets import (
    DEEPSEEK_V2_LITE,
    SMOLLM2_135M,
    example_node,
)
from ansible_collections.metal.serve.plugins.module_utils.planner.replica import jobs_of, replica_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.weights import parse_index


@dataclass(frozen=True)
class Preview:
    """What is planned for one host: text for a person, plans for programs, what stood in for what is not known."""

    text: str
    plans: list[dict[str, Any]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    problem: str = ""


def _read(path: str) -> Any:
    """Return a JSON file, None where it is not there. Raises PlanError when it is no JSON."""
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({str(error)[:120]}).") from None


def facts_of(folder: str, host: str, accelerator: str, gpus: int) -> tuple[dict[str, Any], str]:
    """Return a host's facts and what was assumed: from its snapshot, else an example node (a CPU node: nothing).

    Raises PlanError when there is a snapshot that cannot be read.
    """
    path = os.path.join(folder, host)
    if os.path.isdir(path):
        try:
            return collect(path).facts.to_dict(), ""
        except SnapshotError as error:
            raise PlanError(f"the snapshot of {host}: {error}.") from None
    if accelerator == "cpu":
        return {}, f"no snapshot of {host} in {folder}: its memory is not known"
    return example_node(gpus), (
        f"no snapshot of {host} in {folder}: an example node of {gpus} x NVIDIA H200 stands in "
        "(ansible-playbook playbooks/snapshot.yml records the real one)"
    )


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


def preview(
    pools: Mapping[str, Any],
    plans: Sequence[Mapping[str, Any]],
    models: Mapping[str, Any],
    host: str,
    accelerator: str,
    expected_gpus: int | None,
    folder: str,
) -> Preview:
    """Return what ``host`` would run. A plan that does not fit is a Preview with ``problem``, not an exception."""
    jobs = jobs_of(pools, plans, host)
    if not jobs:
        return Preview(f"{host} runs no engine\n")
    assumed: list[str] = []
    try:
        gpus = expected_gpus or max(1, sum(job.gpus for job in jobs))
        facts, note = facts_of(folder, host, accelerator, gpus)
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
        fitted = calibrations_of(pools)
        found = replica_plans(pools, plans, host, accelerator, parse_node(facts), configs, revisions, indexes, fitted)
    except PlanError as error:
        return Preview(f"{host}: {error}\n", assumed=assumed, problem=f"{host}: {error}")
    values = [plan.to_dict() for plan in found]
    parts: list[str] = []
    seen: dict[str, str] = {}
    for plan in values:
        # Replicas of one pool differ in place alone: the first is shown whole, the others by where they are.
        if plan["pool"] in seen:
            where = f"GPU {', '.join(plan['gpus'])}" if plan["gpus"] else "processors"
            parts.append(
                f"Replica {plan['replica']} at {plan['address']}:{plan['port']}, {where}, as {seen[plan['pool']]}\n"
            )
            continue
        seen[plan["pool"]] = plan["replica"]
        parts.append(render.replica(plan))
    head = "".join(f"Assumed: {note}\n" for note in assumed)
    return Preview(head + ("\n" if head else "") + "".join(parts), plans=values, assumed=assumed)
