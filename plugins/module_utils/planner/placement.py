# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Which GPUs of a node each replica gets, and the processors and memory next to them (docs/planning.md#placement)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import Gpu, Node

MOST_SETS = 5000
"""Sets of GPUs that are compared for one replica; 8 of 16 are 12,870, so large nodes look at a part only."""


@dataclass(frozen=True)
class Placement:
    """Where one replica runs. ``cpus`` and ``mems`` are cpusets, empty where nothing is pinned."""

    gpus: tuple[Gpu, ...]
    cpus: str
    mems: str
    reason: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Score:
    """How bad a set of GPUs is, the smaller the better, in this order."""

    numa_nodes: int
    pairs_without_nvlink: int
    leftover: int
    order: tuple[int, ...]

    def key(self) -> tuple[int, int, int, tuple[int, ...]]:
        return (self.numa_nodes, self.pairs_without_nvlink, self.leftover, self.order)


def _pairs_without_nvlink(node: Node, chosen: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of GPU positions that no NVLink joins; empty where the topology was not read."""
    if node.links is None:
        return []
    links = node.links
    return [(a, b) for a, b in combinations(chosen, 2) if not links[a][b].startswith("NV")]


def _score(node: Node, free: Sequence[int], chosen: tuple[int, ...]) -> _Score:
    """Return how bad ``chosen`` is: NUMA nodes spanned, links missing, GPUs left alone on the same NUMA node."""
    nodes = {node.gpus[index].numa_node for index in chosen}
    left = [index for index in free if index not in chosen and node.gpus[index].numa_node in nodes]
    return _Score(len(nodes), len(_pairs_without_nvlink(node, chosen)), len(left), chosen)


def _describe(node: Node, chosen: tuple[int, ...]) -> tuple[str, list[str]]:
    """Return the reason and the warnings of a set of GPUs."""
    warnings = []
    nodes = sorted({number for index in chosen if (number := node.gpus[index].numa_node) is not None})
    if len(nodes) > 1:
        warnings.append(
            f"GPUs {', '.join(map(str, chosen))} lie on NUMA nodes {' and '.join(map(str, nodes))}: "
            "no free set lies on one"
        )
    missing = _pairs_without_nvlink(node, chosen)
    if missing:
        links = node.links
        if links is None:
            raise AssertionError("links is known here")
        a, b = missing[0]
        warnings.append(
            f"GPU {a} and GPU {b} are joined by {links[a][b] or 'nothing known'}, not by NVLink"
            + (f" (and {len(missing) - 1} more pairs)" if len(missing) > 1 else "")
            + ": tensor parallelism goes through the host"
        )
    where = f"NUMA node {nodes[0]}" if len(nodes) == 1 else "unknown NUMA node" if not nodes else "several NUMA nodes"
    joined = "" if len(chosen) == 1 else ", topology not read" if node.links is None else ", NVLink between all"
    if missing:
        joined = ", NVLink missing"
    return f"GPU {', '.join(map(str, chosen))}: {where}{joined}; see docs/planning.md#placement", warnings


def place(node: Node, demands: Sequence[tuple[str, int]]) -> dict[str, Placement]:
    """Return a placement for each (replica, GPUs of this node), in that order, every GPU at most once.

    A set on one NUMA node with NVLink between all of its GPUs is preferred; where none is left, the set that breaks the
    least is taken and said so. Raises DoesNotFitError when there are not enough GPUs.
    """
    wanted = sum(count for _name, count in demands)
    if wanted > len(node.gpus):
        names = ", ".join(f"{name} ({count})" for name, count in demands)
        raise DoesNotFitError(
            f"the node has {len(node.gpus)} GPU(s); its replicas need {wanted}: {names}.",
            [
                f"lower replicas_per_node so that they fit into {len(node.gpus)}",
                f"wait until {wanted} GPUs are seen (metalserve_expected_gpus)",
            ],
        )
    free = list(range(len(node.gpus)))
    numa = dict(node.numa_cpus)
    placed: dict[str, Placement] = {}
    for name, count in demands:
        best: _Score | None = None
        for number, chosen in enumerate(combinations(free, count)):
            score = _score(node, free, chosen)
            if best is None or score.key() < best.key():
                best = score
            if number >= MOST_SETS:
                break
        if best is None:
            raise AssertionError("best is known here")
        chosen = best.order
        free = [index for index in free if index not in chosen]
        gpus = tuple(node.gpus[index] for index in chosen)
        nodes = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
        known = len(nodes) > 0 and all(gpu.numa_node is not None for gpu in gpus) and len(numa) > 1
        cpus = [numa.get(number, "") for number in nodes] if known else []
        reason, warnings = _describe(node, chosen)
        placed[name] = Placement(
            gpus=gpus,
            cpus=",".join(cpus) if cpus and all(cpus) else "",
            mems=",".join(map(str, nodes)) if known else "",
            reason=reason,
            warnings=tuple(warnings),
        )
    return placed
