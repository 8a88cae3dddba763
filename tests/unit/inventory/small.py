# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A small right inventory as plain data, to be broken in one place at a time."""

from __future__ import annotations

import copy
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.inventory.checks import check
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import Inventory, Problem

DIGEST = "sha256:" + "3f" * 32
POOL: dict[str, Any] = {
    "model": "chat",
    "engine": "vllm",
    "engine_version": "0.26.0",
    "image": f"192.0.2.5:5000/vllm-openai@{DIGEST}",
    "replicas_per_node": 8,
}
WIDE: dict[str, Any] = {
    "metalserve_api_keys": [{"name": "finance", "key": "5f2c9e1b7a3d4f60a1"}],
    "metalserve_engine_api_key": "0c7d1e9f4b2a836517",
    "metalserve_alert_receivers": [{"name": "oncall", "webhook_configs": [{"url": "http://192.0.2.30/hook"}]}],
    "metalserve_models": {"chat": {"revision": "604d5664", "source": {"type": "shared", "path": "/srv/models/chat"}}},
    "metalserve_pools": {"short": POOL},
}


class Small:
    """Two nodes in the pool ``short``, a gateway that is also the monitor. Change it, then ask for its problems."""

    def __init__(self) -> None:
        self.wide: dict[str, Any] = copy.deepcopy(WIDE)
        self.groups: dict[str, list[str]] = {
            "all": ["node-a", "node-b", "gate-a"],
            "engines": ["node-a", "node-b"],
            "short": ["node-a", "node-b"],
            "gateways": ["gate-a"],
            "monitors": ["gate-a"],
        }
        self.children: dict[str, list[str]] = {"engines": ["short"]}
        self.hosts: dict[str, dict[str, Any]] = {
            "node-a": {"ansible_host": "192.0.2.11", "metalserve_expected_gpus": 8},
            "node-b": {"ansible_host": "192.0.2.12", "metalserve_expected_gpus": 8},
            "gate-a": {"ansible_host": "192.0.2.10"},
        }

    @property
    def pool(self) -> Any:
        """The pool ``short``."""
        return self.wide["metalserve_pools"]["short"]

    def add_pool(self, name: str, hosts: list[str], **changes: Any) -> None:
        """Add a pool like ``short`` with other values, on hosts."""
        self.wide["metalserve_pools"][name] = {**copy.deepcopy(POOL), **changes}
        self.groups[name] = hosts
        self.children["engines"].append(name)

    def inventory(self) -> Inventory:
        """Return it as an inventory."""
        return Inventory.of(
            self.groups, self.children, {host: {**self.wide, **own} for host, own in self.hosts.items()}
        )

    def problems(self, purpose: str = "site", **more: Any) -> list[Problem]:
        """Return all its problems."""
        return check(self.inventory(), purpose, **more)
