# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner needs of a node, read tolerantly from the dict form of HostFacts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in MiB as the driver reports it; ``reserved_mib`` is the driver's own part where known."""

    uuid: str
    name: str
    total_mib: int
    reserved_mib: int | None = None
    numa_node: int | None = None
    cpus: str = ""


@dataclass(frozen=True)
class Node:
    """One node: its GPUs in index order, host memory in bytes (0: unknown), CPUs of each NUMA node as a cpulist."""

    gpus: tuple[Gpu, ...] = ()
    memory_bytes: int = 0
    numa_cpus: tuple[tuple[int, str], ...] = ()
    links: tuple[tuple[str, ...], ...] | None = None
    """Row by row how GPU i reaches GPU j (NV18, PIX, PHB, NODE, SYS, X); None where it was not read."""


def _int(value: Any) -> int | None:
    """Return ``value`` as a whole number, None for anything that is not one (N/A, null, a boolean)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) and math.isfinite(value):
        return int(value)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return None


def parse_node(facts: Any, where: str = "facts") -> Node:
    """Return the node that a facts dict describes. A GPU without uuid or size is an error."""
    if not isinstance(facts, Mapping):
        raise PlanError(f"{where} is {type(facts).__name__}; it must be the dict that host_facts returns.")
    gpus = []
    topology = facts.get("topology")
    affinity = topology.get("numa_affinity") if isinstance(topology, Mapping) else None
    near = affinity if isinstance(affinity, Mapping) else {}
    listed = facts.get("gpus")
    if listed is not None and not isinstance(listed, list):
        raise PlanError(f"{where}.gpus is {listed!r}; it must be a list, as host_facts returns it.")
    for position, gpu in enumerate(listed or []):
        if not isinstance(gpu, Mapping):
            raise PlanError(f"{where}.gpus[{position}] is {gpu!r}; it must be a mapping.")
        total = _int(gpu.get("memory_total_mib"))
        if not gpu.get("uuid") or not total:
            raise PlanError(
                f"{where}.gpus[{position}] has uuid {gpu.get('uuid')!r} and memory_total_mib "
                f"{gpu.get('memory_total_mib')!r}; both must be known to plan on it."
            )
        numa = _int(gpu.get("numa_node"))
        if numa is None or numa < 0:
            # A virtual machine's PCI devices often name no node; the driver's own table does.
            numa = _int(near.get(f"GPU{position}"))
        gpus.append(
            Gpu(
                uuid=str(gpu["uuid"]),
                name=str(gpu.get("name") or "unknown GPU"),
                total_mib=total,
                reserved_mib=_int(gpu.get("memory_reserved_mib")),
                numa_node=numa if numa is not None and numa >= 0 else None,
                cpus=str(gpu.get("local_cpus") or ""),
            )
        )
    return Node(gpus=tuple(gpus), memory_bytes=_memory(facts), numa_cpus=_numa(facts), links=_links(facts, len(gpus)))


def _memory(facts: Mapping[str, Any]) -> int:
    """Return the host's memory in bytes, 0 where the facts do not say."""
    memory = facts.get("memory")
    if isinstance(memory, Mapping):
        return (_int(memory.get("total_kib")) or 0) * 1024
    return _int(facts.get("memory_total_bytes")) or 0


def _numa(facts: Mapping[str, Any]) -> tuple[tuple[int, str], ...]:
    """Return (node, processors) of each NUMA node that has processors."""
    numa = facts.get("numa")
    nodes = numa.get("nodes") if isinstance(numa, Mapping) else None
    found = []
    for node in nodes if isinstance(nodes, list) else []:
        number = _int(node.get("id")) if isinstance(node, Mapping) else None
        if number is not None and node.get("cpu_list"):
            found.append((number, str(node["cpu_list"])))
    return tuple(found)


def _links(facts: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], ...] | None:
    """Return how each GPU reaches each other one (NV18, PIX, SYS, X), None where it was not read."""
    topology = facts.get("topology")
    matrix = topology.get("matrix") if isinstance(topology, Mapping) else None
    if not isinstance(matrix, Mapping) or not matrix:
        return None
    rows = []
    for row in range(count):
        cells = matrix.get(f"GPU{row}")
        if not isinstance(cells, Mapping):
            return None
        rows.append(tuple(str(cells.get(f"GPU{column}", "")) for column in range(count)))
    return tuple(rows)
