# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Pools on nodes: GPUs and ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    WARNING,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import (
    LOWEST_PORT,
    RESERVED_PORTS,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import listed, show
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    View,
    setting_or,
    whole,
)
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import BASE_PORT, PORTS_PER_POOL, port_places


def _pools_of(view: View, host: str) -> list[str]:
    return [pool for pool in view.pools if host in view.inventory.group(pool)]


def _parallel(spec: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (GPUs of a node for one replica, nodes of a replica), or None where a number is missing or wrong."""
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "nodes_per_replica")
    sizes = [whole(spec.get(name), 1) for name in names]
    if not all(sizes):
        return None
    tensor, pipeline, data, nodes = (size or 1 for size in sizes)
    total = tensor * pipeline * data
    return (total // nodes, nodes) if total % nodes == 0 else None


def spread(view: View) -> None:
    """A replica that spans nodes divides evenly, and its pool has enough nodes."""
    setting = view.setting("metalserve_pools")
    for pool, spec in view.pools.items():
        nodes = whole(spec.get("nodes_per_replica"), 1) or 1
        if nodes == 1:
            continue
        if _parallel(spec) is None:
            view.add_at(
                setting,
                (pool, "nodes_per_replica"),
                "does not divide the GPUs of a replica (tensor_parallel x pipeline_parallel x data_parallel)",
                "make the product a multiple of it",
            )
        count = len(view.inventory.group(pool))
        if count and count % nodes:
            view.add_at(
                setting,
                (pool, "nodes_per_replica"),
                f"does not divide the {count} nodes of the group {pool}",
                f"have a multiple of {nodes} nodes in the group",
            )


def gpus(view: View) -> None:
    """All replicas of a node together fit on its GPUs."""
    for host in view.inventory.group("engines"):
        accelerator = view.inventory.get(host, "metalserve_accelerator", "nvidia")
        expected = view.inventory.get(host, "metalserve_expected_gpus")
        pools = _pools_of(view, host)
        if accelerator == "cpu":
            if whole(expected):
                view.add_at(
                    view.setting_of(host, "metalserve_expected_gpus"),
                    (),
                    "contradicts metalserve_accelerator: cpu",
                    "write 0 or remove it, or set metalserve_accelerator: nvidia",
                )
            continue
        if accelerator != "nvidia" or not pools:
            continue
        if expected is None:
            view.add(
                "metalserve_expected_gpus",
                "",
                "is missing: how many GPUs must be there is never guessed",
                "write how many GPUs the node has, such as 8; on a node without GPUs: metalserve_accelerator: cpu",
                hosts=[host],
            )
        elif whole(expected) is not None:
            _fit(view, host, pools, whole(expected) or 0)


def _fit(view: View, host: str, pools: list[str], expected: int) -> None:
    """Note a node whose pools want more GPUs than it has (or leave some unused)."""
    setting = view.setting_of(host, "metalserve_expected_gpus")
    if expected == 0:
        view.add_at(
            setting,
            (),
            "says that the node has no GPU, but it is an engine node",
            "write the number of GPUs, or metalserve_accelerator: cpu",
        )
        return
    parts, used, open_pools = [], 0, []
    for pool in pools:
        spec = view.pools[pool]
        parallel = _parallel(spec)
        replicas = whole(spec.get("replicas_per_node"))
        if parallel is None or ("replicas_per_node" in spec and replicas is None):
            return
        if parallel[0] > expected:
            view.add(
                f"metalserve_pools.{pool}",
                "",
                f"needs {parallel[0]} GPUs of a node for one replica, but the node has {expected}",
                "lower tensor_parallel, use nodes_per_replica, or take the node out of the group",
                hosts=[host],
            )
            return
        if replicas is None:
            open_pools.append(pool)
            continue
        used += parallel[0] * replicas
        parts.append(f"{pool} {replicas} x {parallel[0]}")
    if open_pools and len(pools) > 1:
        for pool in open_pools:
            others = listed([other for other in pools if other != pool], "and")
            view.add(
                f"metalserve_pools.{pool}.replicas_per_node",
                "",
                f"is missing, but its node is also in {others}: who gets how many GPUs?",
                "write the number of replicas for each of these pools",
                hosts=[host],
            )
        return
    if used > expected:
        pool = pools[-1]
        view.add(
            f"metalserve_pools.{pool}.replicas_per_node",
            str(view.pools[pool].get("replicas_per_node")),
            f"asks for more GPUs than metalserve_expected_gpus ({expected}): {' + '.join(parts)} = {used}",
            f"lower replicas_per_node or tensor_parallel, so that the sum is at most {expected}",
            hosts=[host],
        )
    elif not open_pools and used < expected:
        view.add(
            "metalserve_expected_gpus",
            str(expected),
            f"is more than the pools use ({' + '.join(parts)} = {used}): {expected - used} GPU(s) stay idle",
            "raise replicas_per_node, unless this is meant",
            hosts=[host],
            severity=WARNING,
        )


def ports(view: View) -> None:
    """Each replica of a node has a port of its own, and none that something else uses."""
    setting = view.setting("metalserve_pools")
    places = port_places({pool: view.inventory.group(pool) for pool in view.pools})
    for host in view.inventory.group("engines"):
        taken: dict[int, str] = {}
        for pool, spec in view.pools.items():
            first = whole(spec.get("port"), BASE_PORT + PORTS_PER_POOL * places[pool])
            count = _replicas(view, host, spec)
            if host not in view.inventory.group(pool) or first is None or count is None:
                continue
            if not LOWEST_PORT <= first <= 65535:  # told by the schema
                continue
            clash = next((taken[port] for port in range(first, first + count) if port in taken), "")
            used = next((port for port in range(first, first + count) if port in RESERVED_PORTS), None)
            span = f"{first}" if count == 1 else f"{first} to {first + count - 1}"
            shown = show(spec["port"]) if "port" in spec else ""
            if clash:
                free = max(taken) + 1
                view.add(
                    f"metalserve_pools.{pool}.port",
                    shown,
                    f"overlaps with the pool {clash} on the same node: this pool takes {span}",
                    f"write a port from {free} on",
                    where=setting_or(setting).variable.origin((pool, "port")),
                    hosts=[host],
                )
            if used is not None:
                view.add(
                    f"metalserve_pools.{pool}.port",
                    shown,
                    f"takes the ports {span}; {used} belongs to {RESERVED_PORTS[used]}",
                    "write another port, such as 8100",
                    where=setting_or(setting).variable.origin((pool, "port")),
                    hosts=[host],
                )
            if first + count - 1 > 65535:
                view.add(
                    f"metalserve_pools.{pool}.port",
                    shown,
                    f"takes the ports {span}, but 65535 is the last",
                    "write a lower port",
                    where=setting_or(setting).variable.origin((pool, "port")),
                    hosts=[host],
                )
            taken.update(dict.fromkeys(range(first, first + count), pool))


def _replicas(view: View, host: str, spec: Mapping[str, Any]) -> int | None:
    """Return how many replicas of a pool a node runs, or None where that cannot be said."""
    if "replicas_per_node" in spec:
        return whole(spec["replicas_per_node"])
    if view.inventory.get(host, "metalserve_accelerator", "nvidia") == "cpu":
        return 1
    expected, parallel = whole(view.inventory.get(host, "metalserve_expected_gpus")), _parallel(spec)
    return expected // parallel[0] if expected and parallel and parallel[0] else None
