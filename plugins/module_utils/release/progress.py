# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""How far a redeploy is, from the events of ansible-runner: a line per node, an event log, a summary, an exit code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FILES = {
    "goal_planned.yml": "prefetch",
    "goal_previous.yml": "prefetch",
    "goal_conservative.yml": "prefetch",
    "prepare.yml": "prefetch",
    "order.yml": "headroom",
    "headroom.yml": "headroom",
    "node.yml": "lock",
    "steps/drain.yml": "drain",
    "until_drained.yml": "wait",
    "steps/stop.yml": "baseline",
    "until_stopped.yml": "stop",
    "steps/activate.yml": "activate",
    "steps/start.yml": "start",
    "until_ready.yml": "ready",
    "steps/prove.yml": "gate",
    "gate.yml": "gate",
    "steps/return.yml": "rotation",
    "until_healthy.yml": "rotation",
    "steps/settle.yml": "soak",
    "until_soaked.yml": "soak",
    "back.yml": "back",
    "maintain_back.yml": "back",
    "blind.yml": "back",
    "named.yml": "back",
    "maintenance.yml": "maintenance",
    "audit.yml": "audit",
    "no_worse.yml": "audit",
    "stop.yml": "stop of the run",
}
"""Phase by task file of the role release."""

TOUCHING = frozenset(
    ["drain", "wait", "baseline", "stop", "activate", "start", "ready", "gate", "rotation", "soak", "maintenance"]
)
GOOD, BAD, REFUSED = 0, 1, 2


def phase_of(path: str) -> str:
    """Return the phase of a task from ``/…/tasks/steps/drain.yml:3``, ``""`` where its file names none."""
    name = path.rpartition(":")[0] or path
    if name.endswith("/roles/engine/tasks/lint.yml"):
        return "lint"
    if "/roles/release/tasks/" not in name:
        return ""
    base = os.path.basename(name)
    folder = os.path.basename(os.path.dirname(name))
    return FILES.get(f"steps/{base}" if folder == "steps" else base, "")


@dataclass
class Node:
    """What is known of a node: phase, since when (seconds), requests in flight, how it ended."""

    phase: str = ""
    since: float = 0.0
    began: float = 0.0
    in_flight: int | None = None
    back: bool = False
    end: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)


class Progress:
    """Takes events one by one. ``began`` is the start of the run, seconds since 1970."""

    def __init__(self, began: float) -> None:
        """Begin with no node known."""
        self.began = began
        self.nodes: dict[str, Node] = {}
        self.failures: list[str] = []
        self.touched = False
        self.recap: dict[str, Any] = {}

    def take(self, event: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        """Take one event of ansible-runner; return what the event log should say of it, None where nothing.

        A view that is behind loses nothing: all it needs is in the events.
        """
        kind, data = str(event.get("event", "")), event.get("event_data") or {}
        host = str(data.get("host") or "")
        phase = phase_of(str(data.get("task_path") or ""))
        if kind == "playbook_on_stats":
            self.recap = {name: dict(data.get(name) or {}) for name in ("ok", "changed", "failures", "dark", "rescued")}
            return {"event": "end", **self.recap}
        if not kind.startswith("runner_") or not host:
            return None
        said = None
        if phase:
            said = self._move(host, phase, now)
        result = data.get("res") or {}
        self._count(host, result)
        if kind in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            words = str(result.get("msg") or "failed").strip()
            # A loop says of its items what is wrong with them, each in an event of its own.
            if "One or more items failed" not in words:
                self.failures.append(f"{host}: {data.get('task', '')}: {words}")
            return {"event": "failed", "host": host, "phase": phase, "task": data.get("task", ""), "msg": words}
        return said

    def _move(self, host: str, phase: str, now: float) -> dict[str, Any] | None:
        node = self.nodes.setdefault(host, Node(began=now))
        self.touched = self.touched or phase in TOUCHING
        node.back = node.back or phase == "back"
        if phase == node.phase:
            return None
        if node.phase:
            node.phases.append((node.phase, now - node.since))
        node.phase, node.since = phase, now
        return {"event": "phase", "host": host, "phase": phase, "back": node.back}

    def _count(self, host: str, result: Mapping[str, Any]) -> None:
        found = [result, *(result.get("results") or [])]
        lists = [
            item["replicas"] for item in found if isinstance(item, Mapping) and isinstance(item.get("replicas"), list)
        ]
        flying = [
            one["in_flight"]
            for replicas in lists
            for one in replicas
            if isinstance(one, Mapping) and "in_flight" in one and str(one.get("replica", "")).startswith(f"{host}/")
        ]
        if flying and host in self.nodes:
            self.nodes[host].in_flight = sum(flying)

    def lines(self, now: float) -> list[str]:
        """Return the view: a head and a line per node."""
        width = max((len(host) for host in self.nodes), default=4)
        head = f"{'node'.ljust(width)}  {'phase':<16} {'for':>7} {'in all':>7} {'in flight':>9}"
        found = [head]
        for host, node in self.nodes.items():
            phase = f"{node.phase} (back)" if node.back and node.phase != "back" else node.phase
            flying = "" if node.in_flight is None else str(node.in_flight)
            row = f"{host.ljust(width)}  {phase:<16} {now - node.since:6.0f}s {now - node.began:6.0f}s {flying:>9}"
            found.append(row.rstrip())
        return found

    def exit_code(self, code: int) -> int:
        """Return 0 where all went well, 2 where nothing was touched, else 1. ``code`` is ansible-playbook's."""
        if code == 0:
            return GOOD
        return BAD if self.touched else REFUSED

    def summary(self, code: int, now: float) -> list[str]:
        """Return what a person wants to know at the end."""
        outcome = {GOOD: "done", BAD: "failed", REFUSED: "refused; no engine and no rotation was touched"}
        found = [f"{outcome[self.exit_code(code)]} after {now - self.began:.0f} s"]
        for host, node in self.nodes.items():
            spent: dict[str, float] = {}
            for phase, seconds in [*node.phases, (node.phase, now - node.since)]:
                spent[phase] = spent.get(phase, 0.0) + seconds
            shown = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in spent.items() if seconds >= 1)
            found.append(f"  {host}{' (went back)' if node.back else ''}: {shown or 'no time at all'}")
        last = self.failures[-1:] if code else []
        return [*found, *(line for text in last for line in text.splitlines())]
