# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters that turn the inventory into plans. Thin: the work is in module_utils/planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.planner import render
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import mapping
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import HOST_VARIABLES
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import pool_plans as _pool_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.preview import calibrations_of, fleet, preview


def pool_plans(pools: Any, groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the PoolPlan of every pool as dicts, in the order of metalserve_pools (docs/architecture.md)."""
    try:
        hosts = {host for name in mapping(pools, "metalserve_pools") for host in groups.get(name, [])}
        known = {}
        for host in hosts:
            values = hostvars[host]
            known[host] = {name: values[name] for name in HOST_VARIABLES if name in values}
        return [plan.to_dict() for plan in _pool_plans(pools, groups, known)]
    except PlanError as error:
        raise AnsibleFilterError(str(error)) from None


def replicas_of(plans: Sequence[Mapping[str, Any]], host: str) -> list[dict[str, Any]]:
    """Return the replicas that ``host`` runs, each with the name of its pool."""
    return [
        {**replica, "pool": plan["pool"]} for plan in plans for replica in plan["replicas"] if replica["host"] == host
    ]


def pool_text(plan: Mapping[str, Any]) -> str:
    """Return a PoolPlan as text, every number with its reason."""
    return render.pool(plan)


def node_previews(
    plans: Sequence[Mapping[str, Any]],
    pools: Mapping[str, Any],
    models: Mapping[str, Any],
    hosts: Sequence[str],
    hostvars: Mapping[str, Any],
    snapshots: str,
    stand_in: str,
) -> dict[str, Any]:
    """Return {text, problems} for hosts from recorded facts; nothing is asked of them."""
    shown = []
    for host in hosts:
        values = hostvars[host]
        accelerator = str(values.get("metalserve_accelerator", "nvidia"))
        expected = values.get("metalserve_expected_gpus")
        shown.append(preview(pools, plans, models, host, accelerator, expected, snapshots, stand_in))
    text, problems = fleet(shown)
    return {"text": text, "problems": problems}


def pool_calibrations(pools: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants that each pool's calibration file on the controller holds, for metal.serve.serving_plan."""
    try:
        return calibrations_of(pools)
    except PlanError as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    """Offer the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "pool_plans": pool_plans,
            "replicas_of": replicas_of,
            "pool_text": pool_text,
            "node_previews": node_previews,
            "pool_calibrations": pool_calibrations,
        }
