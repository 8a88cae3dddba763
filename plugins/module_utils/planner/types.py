# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The plan's data types. ``to_dict`` gives the keys of docs/architecture.md, 'Plans'."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReplicaAddress:
    """Where one replica of a pool answers: enough for an upstream line and a scrape target."""

    replica: str
    host: str
    address: str
    port: int


@dataclass(frozen=True)
class PoolPlan:
    """What gateways and alerts need of a pool, from the inventory alone. Times in seconds, limits in requests."""

    pool: str
    model: str
    served_name: str
    engine: str
    engine_version: str
    image: str
    replicas: list[ReplicaAddress]
    max_model_len: int
    body_limit_bytes: int
    times: dict[str, float]
    admission: dict[str, int]
    alerts: dict[str, float]
    batching: dict[str, Any]
    parallel: dict[str, int]
    node_groups: dict[str, list[dict[str, str]]]
    reasons: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class ReplicaPlan:
    """What one engine on one node runs with, and why. Memory keys say their unit; container sizes are bytes."""

    replica: str
    pool: str
    host: str
    engine: str
    engine_version: str
    image: str
    model: str
    revision: str
    address: str
    port: int
    gpus: list[str]
    cpuset_cpus: str
    cpuset_mems: str
    settings: dict[str, Any]
    environment: dict[str, str]
    memory: dict[str, Any]
    container: dict[str, Any]
    times: dict[str, float]
    multi_node: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self)
