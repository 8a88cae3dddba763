# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Kills an engine that hangs, so that its unit starts it again without a person. Runs on a node as one file:
/opt/metalserve/engine-watchdog.pyz.

It judges progress, not health: an engine that answers, has work and makes no step for twice the planned longest silence
is stuck; one that stopped answering is dead where its processes stand still, or after a long time where they do not. It
never touches an engine that is wanted out of rotation, whose release is being changed, that never answered since it was
started, or that is being stopped.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.release.guard import ROOT, Command, run_command, say

EVERY_S = 3.0
ANSWER_S = 2.0
SILENT_S = 9.0
"""Seconds without an answer after which an engine whose processes stand still is killed."""

BUSY_SILENT_S = 120.0
"""The same for one whose processes do work: a machine that is short of CPU answers late."""

IDLE_SHARE = 0.02
"""Share of one CPU that the processes of an engine that stands still may use."""

STUCK_FACTOR = 2.0
"""An engine with work and without a step is stuck after so many times its plan's wedged_after_s."""


@dataclass(frozen=True)
class Look:
    """One look at an engine: whether it answered, how many requests are inside, its counter of steps (None: it has
    none).
    """

    answered: bool
    in_flight: float = 0.0
    steps: float | None = None


@dataclass(frozen=True)
class Memory:
    """What earlier looks left, times in seconds of one clock. ``answered``: last answer, None where there was none
    yet. ``moved``: when it last made a step, or had nothing to do.
    """

    answered: float | None = None
    moved: float = 0.0
    steps: float | None = None

    def take(self, look: Look, now: float) -> Memory:
        """Return the memory after one more look."""
        if not look.answered:
            return self
        still = look.in_flight > 0 and look.steps is not None and look.steps == self.steps
        return replace(self, answered=now, steps=look.steps, moved=self.moved if still else now)


def silent_for(memory: Memory, now: float) -> float:
    """Return the seconds since its last answer; 0 for an engine that never answered: it is starting."""
    return 0.0 if memory.answered is None else now - memory.answered


def stuck_for(memory: Memory, now: float) -> float:
    """Return the seconds in which an engine that answers and has work made no step."""
    return 0.0 if memory.answered is None or memory.answered < now else now - memory.moved


def reason(memory: Memory, now: float, wedged_after_s: float, idle: bool) -> str:
    """Return why the engine is to be killed, ``""`` for one that is not. ``idle``: its processes stand still."""
    silent = silent_for(memory, now)
    if silent >= BUSY_SILENT_S or (silent >= SILENT_S and idle):
        return f"it has not answered for {silent:.0f} s" + (" and its processes stand still" if idle else "")
    stuck = stuck_for(memory, now)
    if stuck >= STUCK_FACTOR * wedged_after_s:
        return f"it has requests and has made no step for {stuck:.0f} s"
    return ""


def counted(text: str, name: str) -> float | None:
    """Return the sum over the series of one metric of a scrape, None where there is none."""
    found = None
    for line in text.splitlines():
        if name and line.startswith((f"{name}{{", f"{name} ")):
            try:
                found = (found or 0.0) + float(line.rsplit(" ", 1)[1])
            except ValueError:
                continue
    return found


def look_at(release: Mapping[str, Any]) -> Look:
    """Ask the engine of a release for its metrics once, for at most ``ANSWER_S`` seconds."""
    health, names = release["health"], release.get("metrics") or {}
    connection = http.client.HTTPConnection(str(release["address"]), int(health["metrics_port"]), timeout=ANSWER_S)
    try:
        connection.request("GET", str(health["metrics"]))
        text = connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return Look(False)
    finally:
        connection.close()
    inside = sum(counted(text, str(names.get(one) or "")) or 0.0 for one in ("running", "waiting"))
    return Look(True, inside, counted(text, str(names.get("progress") or "")))


def processes(root_pid: int, proc: str = "/proc") -> tuple[float, bool]:
    """Return the CPU seconds that a process and all below it have used, and whether one of them is stopped."""
    stats: dict[int, tuple[int, str, float]] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            with open(os.path.join(proc, name, "stat"), encoding="utf-8", errors="replace") as stream:
                fields = stream.read().rpartition(")")[2].split()
        except OSError:
            continue
        stats[int(name)] = (int(fields[1]), fields[0], (int(fields[11]) + int(fields[12])) / tick)
    family, grown = {root_pid}, True
    while grown:
        more = {pid for pid, (parent, _state, _cpu) in stats.items() if parent in family} - family
        family, grown = family | more, bool(more)
    mine = [stats[pid] for pid in family if pid in stats]
    return sum(cpu for _parent, _state, cpu in mine), any(state == "T" for _parent, state, _cpu in mine)


def releases(root: str) -> dict[str, dict[str, Any]]:
    """Return release.json by replica, of those that are wanted in rotation and are not being changed."""
    folder = os.path.join(root, "engines")
    found = {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if any(os.path.exists(os.path.join(folder, name, file)) for file in ("rotation.json", "redeploy.json")):
            continue
        try:
            with open(os.path.join(folder, name, "current", "release.json"), encoding="utf-8") as stream:
                found[name] = json.load(stream)
        except (OSError, ValueError):
            continue
    return found


class Watchdog:
    """The watch over all engines of a node."""

    def __init__(self, root: str, command: Command = run_command, pause: float = EVERY_S) -> None:
        """``pause``: seconds over which it sees whether processes stand still."""
        self.root, self.command, self.pause = root, command, pause
        self.memories: dict[str, Memory] = {}

    def started(self, replica: str, container: str) -> tuple[int, float]:
        """Return process id of an engine that its unit runs and for how many seconds; (0, 0) where it does not run."""
        code, unit = self.command(["systemctl", "is-active", f"metalserve-engine@{replica}.service"])
        if code != 0 or unit.strip() != "active":
            return 0, 0.0
        layout = "{{.State.Pid}} {{.State.StartedAt}}"
        code, text = self.command(["docker", "container", "inspect", "--format", layout, container])
        pid, _space, since = text.strip().partition(" ")
        if code != 0 or not pid.isdigit():
            return 0, 0.0
        begun = datetime.fromisoformat(since[:19]).replace(tzinfo=timezone.utc)
        return int(pid), (datetime.now(timezone.utc) - begun).total_seconds()

    def stands_still(self, pid: int) -> bool:
        """Say whether the processes of an engine do nothing."""
        before, _stopped = processes(pid)
        time.sleep(self.pause)
        after, stopped = processes(pid)
        return stopped or after - before <= IDLE_SHARE * self.pause

    def watch(self, now: float) -> dict[str, str]:
        """Look at each engine once; return why it was killed, by replica."""
        killed: dict[str, str] = {}
        known = releases(self.root)
        self.memories = {name: memory for name, memory in self.memories.items() if name in known}
        for name, release in known.items():
            container, plan = str(release["container_name"]), release.get("plan") or {}
            wedged_after_s = float((plan.get("times") or {}).get("wedged_after_s", 60.0))
            memory = self.memories.get(name, Memory()).take(look_at(release), now)
            self.memories[name] = memory
            if silent_for(memory, now) < SILENT_S and not reason(memory, now, wedged_after_s, False):
                continue
            pid, age_s = self.started(name, container)
            if pid == 0 or age_s < silent_for(memory, now):
                # Stopped, or started since its last answer: a new beginning, which may take its time.
                self.memories.pop(name)
                continue
            idle = silent_for(memory, now) >= SILENT_S and self.stands_still(pid)
            why = reason(memory, now, wedged_after_s, idle)
            # Meanwhile a playbook may have taken it out, or somebody else may have started it again.
            if why and name in releases(self.root) and self.started(name, container)[0] == pid:
                self.command(["docker", "kill", container])
                self.memories.pop(name)
                killed[name] = why
        return killed


def main(argv: Sequence[str] | None = None) -> int:
    """``engine-watchdog [ROOT]``: watch until it is stopped; 2: wrong call."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) > 1:
        say("usage: engine-watchdog [ROOT]", sys.stderr)
        return 2
    watchdog = Watchdog(arguments[0] if arguments else ROOT)
    while True:
        try:
            for name, why in watchdog.watch(time.monotonic()).items():
                say(f"{name}: killed, {why}; its unit starts it again", sys.stdout)
        except (OSError, KeyError, TypeError, ValueError) as error:
            say(f"could not look: {error}", sys.stderr)
        time.sleep(EVERY_S)
