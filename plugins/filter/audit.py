# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of playbooks/audit.yml. Thin: the work is in module_utils/checklist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean

from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import REGISTRY, areas_of, policy_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.expectations import expected_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import PolicyError
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import HOST_VARIABLES, host_address

NAMES = (*HOST_VARIABLES, "engine_firewall_addresses")


def audit_policy(
    policy: Any,
    host: str,
    groups: Mapping[str, Sequence[str]],
    hostvars: Mapping[str, Any],
    pools: Mapping[str, Any],
    plans: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the policy for ``host``: ``policy`` (metalserve_audit_policy) over what the inventory expects of it."""
    given = dict(policy or {})
    engine = host in groups.get("engines", [])
    needed = {
        host,
        *groups.get("gateways", []),
        *groups.get("monitors", []),
        *([] if engine else groups.get("engines", [])),
    }
    variables = {}
    for name in needed:
        values = hostvars[name]
        variables[name] = {key: values[key] for key in NAMES if key in values}
    given["expected"] = {**expected_of(host, groups, variables, pools, plans), **(given.get("expected") or {})}
    try:
        policy_of(given)
    except PolicyError as error:
        raise AnsibleFilterError(f"metalserve_audit_policy of {host}: {error}") from None
    return given


def audit_areas(tags: Iterable[str], skipped: Iterable[str] = ()) -> list[str]:
    """Return the areas of checks that ``--tags`` and ``--skip-tags`` leave; [] for all of them."""
    try:
        wanted, left_out = areas_of(tags), areas_of(skipped)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from None
    if not left_out:
        return list(wanted)
    kept = [area for area in wanted or REGISTRY.areas() if area not in left_out]
    if not kept:
        raise AnsibleFilterError("--tags and --skip-tags leave no check.")
    return kept


def audit_targets(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how the monitor reaches each host: its private address and the port of its sshd."""
    targets = []
    for host in sorted(hosts):
        values = hostvars[host]
        port = values.get("audit_timer_ssh_port") or values.get("ansible_port") or 22
        strict = boolean(values.get("metalserve_audit_strict") or False, strict=False)
        targets.append({"host": host, "address": host_address(host, values), "port": int(port), "strict": strict})
    return targets


class FilterModule:
    """Offer the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"audit_policy": audit_policy, "audit_areas": audit_areas, "audit_targets": audit_targets}
