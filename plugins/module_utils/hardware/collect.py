# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Runs probes on the live machine or takes their results from a snapshot, and turns them into facts.

A probe that fails, hangs or finds nonsense costs its own facts and nothing else.
"""

from __future__ import annotations

import os
import pwd
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional, Union

from ansible_collections.metal.serve.plugins.module_utils.hardware.build import build_facts
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ERROR,
    TIMEOUT,
    Probe,
    ProbeResult,
    not_collected,
    summarise,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES, USUAL
from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import Snapshot, read_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts

WORKERS = 12
DEFAULT_TIMEOUT = 40.0
"""Seconds for the whole collection; each probe has its own limit below that."""


class _Pool:
    """Runs probes in daemon threads. One that is stuck in the kernel is left behind, and another thread takes its
    place.
    """

    def __init__(self, host: LiveHost, probes: Sequence[Probe]) -> None:
        self.host = host
        self.left: queue.SimpleQueue[Probe] = queue.SimpleQueue()
        self.results: dict[str, ProbeResult] = {}
        self.running: dict[str, float] = {}
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.probes = {probe.name: probe for probe in probes}
        for probe in probes:
            self.left.put(probe)

    def work(self) -> None:
        while True:
            try:
                probe = self.left.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            with self.lock:
                self.running[probe.name] = began
                self.changed.notify()
            result = run_probe(probe, self.host)
            with self.lock:
                if self.running.pop(probe.name, None) is None:
                    return  # this thread was given up, another one works in its place
                self.results[probe.name] = result
                self.changed.notify()

    def start(self) -> None:
        threading.Thread(target=self.work, daemon=True).start()

    def run(self) -> dict[str, ProbeResult]:
        for _worker in range(min(WORKERS, len(self.probes))):
            self.start()
        with self.lock:
            while len(self.results) < len(self.probes):
                now = time.monotonic()
                late = [name for name, began in self.running.items() if now > self._ends(name, began)]
                for name in late:
                    seconds = now - self.running.pop(name)
                    why = f"no answer in {self.probes[name].timeout:g} s"
                    self.results[name] = ProbeResult(name, TIMEOUT, why, round(seconds, 3))
                    self.start()
                if now >= self.host.deadline:
                    break
                if late:
                    continue
                ends = [self._ends(name, began) for name, began in self.running.items()]
                self.changed.wait(max(0.01, min([*ends, self.host.deadline]) - now))
            for name in self.probes:
                if name not in self.results:
                    self.results[name] = ProbeResult(name, TIMEOUT, "the time for the whole collection was used up")
                    self.running.pop(name, None)
            return dict(self.results)

    def _ends(self, name: str, began: float) -> float:
        return min(began + self.probes[name].timeout + 0.5, self.host.deadline)


def run_probe(probe: Probe, host: LiveHost) -> ProbeResult:
    """Run one probe; whatever goes wrong inside becomes its state."""
    began = time.monotonic()
    try:
        items = probe.read(host)
    except Exception as error:
        return ProbeResult(
            probe.name, ERROR, f"{type(error).__name__}: {error}"[:300], round(time.monotonic() - began, 3)
        )
    return summarise(probe.name, items, round(time.monotonic() - began, 3))


def collect_live(
    probes: Optional[Sequence[Probe]] = None, timeout: float = DEFAULT_TIMEOUT, host: Optional[LiveHost] = None
) -> dict[str, ProbeResult]:
    """Run ``probes`` (the usual ones by default) on this machine, at most ``timeout`` seconds in all; never raises for what it
    finds.

    The result has every probe there is: those that were not asked for are ``not_collected``.
    """
    chosen = tuple(USUAL if probes is None else probes)
    machine = host or LiveHost()
    machine.deadline = time.monotonic() + timeout
    first = [probe for probe in chosen if not probe.second_round]
    second = [probe for probe in chosen if probe.second_round]
    results = _Pool(machine, first).run()
    machine.found = results
    results.update(_Pool(machine, second).run() if second else {})
    for probe in PROBES:
        results.setdefault(probe.name, not_collected(probe.name, "not asked for"))
    return results


class LiveSource:
    """The machine this runs on, as a source of facts."""

    kind = "live"

    def __init__(self, host: Optional[LiveHost] = None) -> None:
        """Read ``host`` (default: this machine)."""
        self.host = host or LiveHost()

    def results(self, probes: Sequence[Probe], timeout: float) -> Snapshot:
        """Run ``probes`` within ``timeout`` seconds."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Snapshot(collect_live(probes, timeout, self.host), at, os.geteuid() == 0, False)


class SnapshotSource:
    """A snapshot folder, as a source of facts."""

    kind = "snapshot"

    def __init__(self, folder: str) -> None:
        """Read ``folder``."""
        self.folder = folder

    def results(self, probes: Sequence[Probe], timeout: float) -> Snapshot:
        """Return what the folder holds of ``probes``. Raises SnapshotError where it is no folder."""
        snapshot = read_snapshot(self.folder)
        wanted = {probe.name for probe in probes}
        kept = {name: result for name, result in snapshot.results.items() if name in wanted}
        return Snapshot(kept, snapshot.collected_at, snapshot.as_root, snapshot.masked)


@dataclass(frozen=True)
class Collected:
    """Facts, and the raw results that they were built from."""

    facts: HostFacts
    results: dict[str, ProbeResult]


def collect(
    source: Union[LiveSource, SnapshotSource, str, None] = None,
    probes: Optional[Sequence[Probe]] = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Collected:
    """Return facts and raw results of ``source``: a LiveSource (None: this machine), a SnapshotSource or a folder's
    path.

    Raises SnapshotError where a folder is none; nothing else, whatever is found.
    """
    origin = SnapshotSource(source) if isinstance(source, str) else source or LiveSource()
    usual = USUAL if origin.kind == "live" else PROBES
    found = origin.results(tuple(usual if probes is None else probes), timeout)
    facts = build_facts(found.results, origin.kind, found.collected_at, found.as_root)
    facts.masked = found.masked
    return Collected(facts, found.results)


def people() -> tuple[str, ...]:
    """Return the names of the accounts of people on this machine (user ids from 1000), for masking."""
    return tuple(sorted({one.pw_name for one in pwd.getpwall() if 1000 <= one.pw_uid < 60000}))
