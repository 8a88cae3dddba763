# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the role release. Thin: the work is in module_utils/release."""

from __future__ import annotations

import getpass
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.release import batches, content, headroom, steps
from ansible_collections.metal.serve.plugins.module_utils.release import lock as _lock

CONSERVATIVE_TOKENS, CONSERVATIVE_QUEUE = 4096, 100


def release_run_id(kind: str) -> str:
    """Return a new run id: kind, UTC time, four digits by chance."""
    return f"{kind}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


def release_caller(_value: Any) -> str:
    """Return who runs this, user@host."""
    return f"{getpass.getuser()}@{platform.node()}"


def release_goals(replicas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the planned release of each replica that metal.serve.engine_release compared."""
    return {str(item["replica"]): str(item["release"]) for item in replicas}


def release_previous(seen: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the release that a rollback of each replica goes to."""
    try:
        return {str(item["replica"]): steps.rollback_goal(item) for item in seen}
    except steps.RollbackError as error:
        raise AnsibleFilterError(str(error)) from None


def release_views(results: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return replicas by gateway from the results of a loop over gateways."""
    return {str(item["item"]): list(item["replicas"]) for item in results if "replicas" in item}


def release_way(
    seen: Sequence[Mapping[str, Any]],
    goals: Mapping[str, str],
    views: Mapping[str, Sequence[Mapping[str, Any]]],
    host: str,
    failed: bool = False,
) -> list[dict[str, Any]]:
    """Return the steps of a node, each with its replicas and the release that each of them is to have."""
    replicas = []
    for item in seen:
        name = f"{host}/{item['replica']}"
        rotation = {gateway: [one for one in found if one["replica"] == name] for gateway, found in views.items()}
        replicas.append(steps.replica_of(item, goals.get(str(item["replica"]), ""), rotation, failed))
    wanted = {replica.name: replica.wanted for replica in replicas}
    return [
        {**step, "releases": {name: wanted[name] for name in step["replicas"]}} for step in steps.node_way(replicas)
    ]


def release_ids(names: Sequence[str], host: str) -> list[str]:
    """Return replicas as gateways know them: host/replica."""
    return [f"{host}/{name}" for name in names]


def release_out(seen: Sequence[Mapping[str, Any]], views: Mapping[str, Any], host: str) -> list[str]:
    """Return a sentence per replica of a node that some gateway does not send requests to, whoever wants it so."""
    found: list[str] = []
    for item in seen:
        name = f"{host}/{item['replica']}"
        for gateway, replicas in sorted(views.items()):
            found.extend(
                f"{name} is out of rotation on {gateway}, by {one['by']} (run {one['run']})"
                for one in replicas
                if one["replica"] == name and not one["in"]
            )
    return found


def release_batches(
    work: Mapping[str, Sequence[Mapping[str, Any]]],
    pools: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]],
    serial: Sequence[int | str],
    views: Mapping[str, Any],
) -> list[list[str]]:
    """Return the batches of those nodes that have work (``work``: steps by node)."""
    busy = [host for host, way in work.items() if way]
    serving = {name for load in _loads(views, {}) for name in load.serving}
    idle = [host for host in busy if views and not any(name.startswith(f"{host}/") for name in serving)]
    try:
        return batches.batches({pool: groups.get(pool, []) for pool in pools}, busy, serial, idle)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from None


def _loads(views: Mapping[str, Any], sequences: Mapping[str, int]) -> list[headroom.Load]:
    return headroom.loads([{"replicas": found} for found in views.values()], sequences)


def release_refusals(
    hosts: Sequence[str], views: Mapping[str, Any], plans: Sequence[Mapping[str, Any]], work: Mapping[str, Any]
) -> list[str]:
    """Return why ``hosts`` cannot leave together now; only what a step takes out of rotation counts."""
    sequences = {str(plan["pool"]): int(plan["batching"]["max_num_seqs"]) for plan in plans}
    leaving = [
        f"{host}/{name}"
        for host in hosts
        for step in work.get(host, [])
        if step["step"] == steps.DRAIN
        for name in step["replicas"]
    ]
    return headroom.refusals(_loads(views, sequences), leaving)


def release_reason(result: Mapping[str, Any]) -> str:
    """Return why a task failed; of a loop the first item that did, with what it was for."""
    for item in result.get("results") or []:
        if item.get("failed"):
            label = item.get("item")
            return f"{label}: {item.get('msg', 'failed')}" if isinstance(label, str) else str(item.get("msg", "failed"))
    return str(result.get("msg") or "failed")


def release_not_locked(result: Mapping[str, Any]) -> list[str]:
    """Return why metal.serve.release_lock did not get a lock, a sentence for each item of its loop that it did not."""
    got = (_lock.TAKE, _lock.RENEW, _lock.TAKE_OVER)
    items = [item for item in result.get("results") or [] if item.get("verdict") not in got]
    return [str(item.get("msg") or f"{item.get('item')}: failed") for item in items]


def _failing(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        str(item["id"]): f"{item['id']}: {item['current']}, should be {item['desired']}"
        for item in verdicts
        if item["verdict"] == "fail" and not item.get("waiver")
    }


def release_failing(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence per check of metal.serve.host_audit that fails and is not waived."""
    return list(_failing(verdicts).values())


def release_worse(verdicts: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence per check that fails and did not fail ``before``."""
    known = _failing(before)
    return [text for name, text in _failing(verdicts).items() if name not in known]


def release_summary(work: Mapping[str, Any], compared: Mapping[str, Any]) -> list[str]:
    """Return what will change, a line per node and difference."""
    found = []
    for host, way in work.items():
        if not way:
            continue
        found.append(f"{host}: {', '.join(step['step'] for step in way)}")
        for item in compared.get(host, []):
            found.extend(f"    {item['replica']}: {content.difference_line(one)}" for one in item["differences"])
    return found or ["Nothing to do: every node runs what is wanted, and is in rotation."]


def release_conservative(pools: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pools with the conservative setting: small batches, a short queue."""
    return {
        name: {
            **pool,
            "queue": min(CONSERVATIVE_QUEUE, int(pool.get("queue", CONSERVATIVE_QUEUE))),
            "settings": {**(pool.get("settings") or {}), "max_num_batched_tokens": CONSERVATIVE_TOKENS},
        }
        for name, pool in pools.items()
    }


def release_times(plans: Sequence[Mapping[str, Any]], host: str) -> dict[str, float]:
    """Return the longest drain and stop of the pools that a node has replicas of, in seconds."""
    mine = [plan["times"] for plan in plans if any(item["host"] == host for item in plan["replicas"])]
    return {
        "drain_s": max((float(times["drain_s"]) for times in mine), default=0.0),
        "stop_s": max((float(times["unit_stop_s"]) for times in mine), default=0.0) + 60.0,
    }


BATCH = "metalserve_batch_"
"""Prefix of the groups that a run puts its batches into; a play's hosts and serial see groups and nothing else."""


def release_members(order: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return host and group of each member of each batch, in order."""
    return [{"host": host, "group": f"{BATCH}{number:05}"} for number, batch in enumerate(order) for host in batch]


def _batches(groups: Mapping[str, Sequence[str]]) -> list[list[str]]:
    return [list(groups[name]) for name in sorted(groups) if name.startswith(BATCH)]


def release_order(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the hosts of all batches in order; a pattern that matches none where there is nothing to do."""
    return [host for batch in _batches(groups) for host in batch] or ["!all"]


def release_sizes(groups: Mapping[str, Sequence[str]]) -> list[int]:
    """Return the sizes of the batches in order."""
    return [len(batch) for batch in _batches(groups)] or [1]


class FilterModule:
    """Offer the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "release_run_id": release_run_id,
            "release_caller": release_caller,
            "release_goals": release_goals,
            "release_previous": release_previous,
            "release_views": release_views,
            "release_way": release_way,
            "release_ids": release_ids,
            "release_out": release_out,
            "release_batches": release_batches,
            "release_refusals": release_refusals,
            "release_reason": release_reason,
            "release_not_locked": release_not_locked,
            "release_failing": release_failing,
            "release_worse": release_worse,
            "release_summary": release_summary,
            "release_conservative": release_conservative,
            "release_times": release_times,
            "release_members": release_members,
            "release_order": release_order,
            "release_sizes": release_sizes,
        }
