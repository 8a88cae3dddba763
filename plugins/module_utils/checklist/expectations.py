# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the inventory says a host is: the policy's ``expected``, from groups, host variables and pool plans alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import parse_size

ROLE_OF_GROUP = {"engines": "engine", "gateways": "gateway", "monitors": "monitor"}


def expected_of(
    host: str,
    groups: Mapping[str, Sequence[str]],
    variables: Mapping[str, Mapping[str, Any]],
    pools: Mapping[str, Any],
    plans: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return ``expected`` for ``host``; ``variables`` are those of all hosts, ``plans`` the pool plans as dicts.

    A key that the inventory says nothing about is left out, so the policy's own default holds. Nothing is raised for a
    value of a wrong kind: the inventory's own check names it.
    """
    own = variables[host]
    mine = [plan for plan in plans if any(replica["host"] == host for replica in plan["replicas"])]
    found: dict[str, Any] = {
        "roles": [role for group, role in ROLE_OF_GROUP.items() if host in groups.get(group, [])],
        "gateways": _addresses(groups.get("gateways", []), variables),
        "monitors": _addresses(groups.get("monitors", []), variables),
    }
    times = [plan["times"] for plan in plans if isinstance(plan.get("times"), Mapping)]
    for name, worst in (("engine_keepalive_s", min), ("longest_silent_prefill_s", max)):
        values = [one[name] for one in times if isinstance(one.get(name), (int, float))]
        if values and "gateway" in found["roles"]:
            found[name] = worst(values)
    bodies = [plan["body_limit_bytes"] for plan in plans if isinstance(plan.get("body_limit_bytes"), int)]
    if bodies and "gateway" in found["roles"]:
        found["body_limit_bytes"] = max(bodies)
    if "engine" not in found["roles"]:
        engines = [str(variables[one].get("metalserve_accelerator") or "nvidia") for one in groups.get("engines", [])]
        # Without a GPU anywhere no monitor needs alerts on GPUs.
        return {**found, "accelerator": "cpu"} if engines and set(engines) == {"cpu"} else found
    more = own.get("engine_firewall_addresses")  # let in on purpose, beside gateways and monitors
    found["monitors"] += [str(one) for one in more] if isinstance(more, (list, tuple)) else []
    found["accelerator"] = str(own.get("metalserve_accelerator") or "nvidia")
    if isinstance(own.get("metalserve_expected_gpus"), int):
        found["gpus"] = own["metalserve_expected_gpus"]
    replicas = [(replica, plan) for plan in mine for replica in plan["replicas"] if replica["host"] == host]
    found["engine_ports"] = sorted({replica["port"] for replica, _plan in replicas})
    found["tensor_parallel"] = max((plan["parallel"]["tensor"] for plan in mine), default=1)
    found["releases"] = {
        replica["replica"]: {"image": plan["image"], "container": _container(pools.get(plan["pool"]))}
        for replica, plan in replicas
    }
    shares = [_share(pools.get(plan["pool"])) for plan in mine]
    if shares and None not in shares:
        found["gpu_memory_utilization"] = max(shares)
    return found


def _addresses(hosts: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return each host's private address, found as the roles find it."""
    names = ("metalserve_address", "ansible_host")
    return [
        next((str(variables[host][name]) for name in names if variables[host].get(name)), host)
        for host in sorted(hosts)
    ]


def _container(pool: Any) -> dict[str, int]:
    """Return the container limits that a pool sets, in bytes; what the plan computes on the node is not known here."""
    given = pool.get("container") if isinstance(pool, Mapping) else None
    found = {}
    for key in ("memory", "memory_swap"):
        try:
            found[f"{key}_bytes"] = parse_size(given[key]) if isinstance(given, Mapping) and given.get(key) else 0
        except ValueError:
            found[f"{key}_bytes"] = 0
    return {key: size for key, size in found.items() if size}


def _share(pool: Any) -> Any:
    """Return the share of GPU memory that a pool fixes, or None."""
    settings = pool.get("settings") if isinstance(pool, Mapping) else None
    value = settings.get("gpu_memory_utilization") if isinstance(settings, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
