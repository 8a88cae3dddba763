# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner needs of a node, read tolerantly from the dict form of HostFacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, MIB
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
    cpu_count: int = 0
    numa_cpus: tuple[tuple[int, str], ...] = ()
    nvlink: tuple[tuple[int, int], ...] | None = None


def _int(value: Any) -> int | None:
    """Return ``value`` as a whole number, None for anything that is not one (N/A, null, a boolean)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return int(value)
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    return None


def parse_node(facts: Any, where: str = "facts") -> Node:
    """Return the node that a facts dict describes. A GPU without uuid or size is an error."""
    if not isinstance(facts, Mapping):
        raise PlanError(f"{where} is {type(facts).__name__}; it must be the dict that host_facts returns.")
    gpus = []
    for position, gpu in enumerate(facts.get("gpus") or []):
        if not isinstance(gpu, Mapping):
            raise PlanError(f"{where}.gpus[{position}] is {gpu!r}; it must be a mapping.")
        total = _int(gpu.get("memory_total_mib"))
        if not gpu.get("uuid") or not total:
            raise PlanError(
                f"{where}.gpus[{position}] has uuid {gpu.get('uuid')!r} and memory_total_mib "
                f"{gpu.get('memory_total_mib')!r}; both must be known to plan on it."
            )
        numa = _int(gpu.get("numa_node"))
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
    memory = facts.get("memory")
    memory_bytes = _int(facts.get("memory_total_bytes")) or 0
    if not memory_bytes and isinstance(memory, Mapping):
        memory_bytes = _int(memory.get("total_bytes")) or (_int(memory.get("total_kib")) or 0) * 1024
    if not memory_bytes:
        memory_bytes = (_int(facts.get("memory_total_mib")) or 0) * MIB
    return Node(gpus=tuple(gpus), memory_bytes=memory_bytes)


def default_memory(node: Node) -> int:
    """Return the host memory in bytes, 8 GiB where it is unknown."""
    return node.memory_bytes or 8 * GIB
