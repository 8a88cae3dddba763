# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What must happen next with a replica, from what is there now, whoever left it so.

There is no other state than what a look at the node and the gateways shows: the links ``current`` and
``previous``, whether the engine runs, the record of a change that was not proven yet, and the rotation. So a run that
was killed at any moment is finished, or taken back, by the next one with the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

DRAIN, STOP, ACTIVATE, START = "drain", "stop", "activate", "start"
PROVE, RETURN, SETTLE = "prove", "return", "settle"
ORDER = (DRAIN, STOP, ACTIVATE, START, PROVE, RETURN, SETTLE)
DONE = "done"

OURS = ("redeploy-", "rollback-", "maintain-")
"""Run ids of what took a replica out in order to put it back. Any other is a person's, and a redeploy never ends it."""


@dataclass(frozen=True)
class Replica:
    """What is there. ``current``, ``goal`` and ``fallback`` are release hashes (``""``: none).

    ``fallback``: the release that served last. ``running``: the engine of ``current`` runs. ``proven``: it passed its
    gate. ``settled``: no change of it is on record. ``inside``: every gateway wants it in. ``held``: a person wants it
    out. ``failed``: this run's attempt failed, so the way is back.
    """

    name: str
    current: str
    goal: str
    fallback: str
    running: bool
    proven: bool
    inside: bool
    settled: bool = True
    held: bool = False
    failed: bool = False

    @property
    def wanted(self) -> str:
        """The release that should serve in the end."""
        return self.fallback if self.failed else self.goal


def next_step(replica: Replica) -> str:
    """Return the next step, ``done`` where there is none.

    An engine is stopped, and an unproven one is asked, only while no gateway sends it requests.
    """
    if replica.current == replica.wanted and replica.running and replica.proven:
        if not (replica.inside or replica.held):
            return RETURN
        return DONE if replica.settled else SETTLE
    if replica.inside:
        return DRAIN
    if replica.current != replica.wanted:
        return STOP if replica.running else ACTIVATE
    return PROVE if replica.running else START


def after(replica: Replica, step: str) -> Replica:
    """Return the replica as it is once ``step`` succeeded."""
    if step == DRAIN:
        return replace(replica, inside=False)
    if step == STOP:
        return replace(replica, running=False)
    if step == ACTIVATE:
        # What served before is what is gone back to; what is gone back to has to pass its gate again.
        fallback = replica.current if replica.settled else replica.fallback
        return replace(replica, current=replica.wanted, fallback=fallback, proven=False, settled=False)
    if step == START:
        return replace(replica, running=True)
    if step == PROVE:
        return replace(replica, proven=True)
    if step == RETURN:
        return replace(replica, inside=True)
    if step == SETTLE:
        return replace(replica, settled=True, fallback=replica.current)
    raise ValueError(f"{step!r} is no step; it is one of {', '.join(ORDER)}")


def way(replica: Replica) -> list[str]:
    """Return all steps from here to where the replica should be, in order; empty where it is there."""
    steps = []
    while (step := next_step(replica)) != DONE:
        steps.append(step)
        replica = after(replica, step)
    return steps


def node_way(replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """Return ``[{step, replicas}]`` of a node: each step once, for those replicas that need it."""
    ways = {replica.name: way(replica) for replica in replicas}
    found = []
    for step in ORDER:
        names = [name for name, steps in ways.items() if step in steps]
        if names:
            found.append({"step": step, "replicas": names})
    return found


def replica_of(
    seen: Mapping[str, Any], goal: str, rotation: Mapping[str, Sequence[Mapping[str, Any]]], failed: bool
) -> Replica:
    """Return the Replica of one entry of metal.serve.engine_switch, ``rotation`` being each gateway's view of it.

    ``rotation`` maps a gateway to its entries for this replica: ``in`` and, where it is out, the ``run`` that took it
    out. A replica that a gateway does not know yet counts as in: there is nothing to put back.
    """
    record = seen.get("record") or {}
    entries = [entry for found in rotation.values() for entry in found]
    return Replica(
        name=str(seen["replica"]),
        current=str(seen["current"]),
        goal=goal or str(seen["current"]),
        fallback=str(record.get("from") or seen["current"]),
        running=bool(seen["running"]),
        proven=bool(not record or record.get("gated")),
        settled=not record,
        inside=all(entry["in"] for entry in entries),
        held=any(not entry["in"] and not str(entry.get("run", "")).startswith(OURS) for entry in entries),
        failed=failed,
    )


class RollbackError(ValueError):
    """A rollback that has nowhere to go; one sentence."""


def rollback_goal(seen: Mapping[str, Any]) -> str:
    """Return the release that a rollback of a replica goes to. Raises RollbackError."""
    name, current, previous = str(seen["replica"]), str(seen["current"]), str(seen["previous"])
    record = seen.get("record") or {}
    if record.get("from") and record["from"] != current:
        return str(record["from"])
    if not previous:
        raise RollbackError(f"{name} has no previous release: it never served another one than {current[:12]}")
    if previous == current:
        raise RollbackError(f"{name}: previous and current are the same release {current[:12]}; nothing to go back to")
    if previous not in seen.get("releases", [previous]):
        raise RollbackError(f"{name}: the previous release {previous[:12]} is no longer on this node")
    return previous
