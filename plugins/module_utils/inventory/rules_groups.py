# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The shape of an inventory: groups, pools and hosts that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.inventory import values
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    ERROR,
    WARNING,
    Inventory,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import (
    MAIN_GROUPS,
    VARIABLE_FOLDERS,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import did_you_mean, listed
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import View, text


def lab_is_missing(view: View) -> bool:
    """Tell, and note, that the inventory describes a lab that is not built yet: all else would follow from that."""
    folder = text(view.wide("lab_dir"))
    if not folder or view.exists is None or view.exists(f"{folder}/images.yml"):
        return False
    right = "build it with scripts/demo, or with:\nansible-playbook playbooks/lab.yml -i " + view.inventory.source
    view.add_at(view.setting("lab_dir"), (), "is where the lab would be, but it is not built yet", right)
    return True


def main_groups(view: View) -> None:
    """The groups engines, gateways and monitors exist and have hosts."""
    if not view.inventory.hosts:
        view.add(
            "inventory",
            "",
            "has no hosts",
            "give the path of one that has some: -i inventory/<name>",
            view.inventory.source,
        )
        return
    for group in MAIN_GROUPS:
        if view.inventory.group(group):
            continue
        state = "is empty" if group in view.inventory.groups else "is missing"
        others = [name for name in view.inventory.groups if name not in (*MAIN_GROUPS, "all", "ungrouped")]
        near = "" if group in view.inventory.groups else values.nearest(group, others, 0.75)
        what = {
            "engines": "a node with accelerators",
            "gateways": "a server for nginx",
            "monitors": "a server for Prometheus",
        }
        also = " (a gateway will do)" if group == "monitors" else ""
        right = f"rename the group {near} to {group}" if near else f"put at least one host into it: {what[group]}{also}"
        severity = ERROR if group == "engines" else view.lenient()
        view.add(f"group {group}", "", state, right, where=view.inventory.source, severity=severity)


def pool_groups(view: View) -> None:
    """Every pool has a group under engines with a host in it, and every group under engines is a pool."""
    inventory = view.inventory
    pools = view.wide("metalserve_pools")
    if not inventory.hosts or not isinstance(pools, Mapping):
        return
    setting = view.setting("metalserve_pools")
    children = list(inventory.children.get("engines", ()))
    below = _below(inventory, "engines")
    for pool in (name for name in pools if isinstance(name, str)):
        if pool in below:
            if not inventory.group(pool):
                view.add_at(
                    setting,
                    (pool,),
                    f"has no node: the group {pool} is empty",
                    f"put a node into the group {pool}, or remove the pool",
                    "",
                )
        elif pool in inventory.groups:
            view.add_at(
                setting,
                (pool,),
                f"has a group {pool}, but not under engines",
                f"make {pool} a child of engines (engines: children: {pool}:)",
                "",
            )
        else:
            near = values.nearest(pool, [group for group in children if group not in pools])
            right = (
                f"did you mean the group {near}?"
                if near
                else f"make a group {pool} under engines: children:, with its nodes in it"
            )
            view.add_at(setting, (pool,), f"has no node: there is no group {pool} under engines", right, "")
        if pool in (*MAIN_GROUPS, "all", "ungrouped"):
            view.add_at(
                setting,
                (pool,),
                "has the name of a group with another meaning",
                "choose another name for the pool and its group",
                "",
            )
        elif pool in inventory.variables:
            view.add_at(
                setting, (pool,), "has the name of a host", "choose another name for the pool and its group", ""
            )
    for group in children:
        if group not in pools and not _leads_to_pools(inventory, group, pools):
            near = values.nearest(group, [pool for pool in pools if isinstance(pool, str) and pool not in children])
            right = (
                f"did you mean the pool {near}?"
                if near
                else f"describe it under metalserve_pools, or take it out of engines; pools are {listed(pools, 'and')}"
            )
            view.add(
                f"group {group}",
                "",
                "is a child of engines, but no pool of this name is described",
                right,
                where=view.inventory.source,
            )
    in_pools = {host for pool in pools if isinstance(pool, str) for host in inventory.group(pool)}
    idle = [host for host in inventory.group("engines") if host not in in_pools]
    if idle and all(group in pools for group in children):
        view.add(
            "group engines",
            "",
            "has nodes that are in no pool: nothing will run there",
            "put them into the group of a pool, or take them out of engines",
            hosts=idle,
            severity=WARNING,
        )


def _below(inventory: Inventory, group: str) -> set[str]:
    """Return all groups below a group, at any depth."""
    found: set[str] = set()
    waiting = [group]
    while waiting:
        for child in inventory.children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _leads_to_pools(inventory: Inventory, group: str, pools: Mapping[Any, Any]) -> bool:
    """Tell whether a group only bundles pools (its own children are pools)."""
    below = inventory.children.get(group, ())
    return bool(below) and all(child in pools or _leads_to_pools(inventory, child, pools) for child in below)


def variable_files(view: View) -> None:
    """Every variable file is for a group or host that exists; Ansible passes over the others in silence."""
    for file in view.inventory.files:
        if file.folder not in VARIABLE_FOLDERS:
            right = did_you_mean(file.folder, VARIABLE_FOLDERS, "rename it")
            view.add(file.path, "", "is a folder that nobody reads", right, view.inventory.source, severity=WARNING)
            continue
        known = view.inventory.groups if file.folder == "group_vars" else view.inventory.variables
        what = "group" if file.folder == "group_vars" else "host"
        if file.name in known or (what == "group" and file.name in ("all", "ungrouped")):
            continue
        right = did_you_mean(file.name, known, f"rename it to a {what} of the inventory, or remove it")
        problem = f"is for a {what} {file.name}, which does not exist, so nobody reads it"
        view.add(file.path, "", problem, right, view.inventory.source, severity=WARNING)


def other_empty_groups(view: View) -> None:
    """Groups without a host that are no pool: probably a name that was mistyped somewhere."""
    described = view.wide("metalserve_pools")
    known = set(described) if isinstance(described, Mapping) else set()
    for group, hosts in view.inventory.groups.items():
        if hosts or group in known or group in (*MAIN_GROUPS, "all", "ungrouped") or not view.inventory.hosts:
            continue
        if group not in view.inventory.children.get("engines", ()):
            view.add(
                f"group {group}",
                "",
                "is empty",
                "put a host into it, or remove it",
                where=view.inventory.source,
                severity=WARNING,
            )
