# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The agent: one thread per source, a snapshot of each, and the scrape that hands the fresh ones out.

A scrape never waits for a device: a driver that hangs holds up its own thread only. A snapshot that grows too old is
left out, so a hung source shows as missing metrics (which has an alert), not as the last good values for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Callable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .catalogue import CATALOGUE
from .readings import Errors, Reading


class Source:
    """A reader that runs every ``interval_s`` seconds in its own thread and keeps its last readings."""

    def __init__(self, name: str, interval_s: float, read: Callable[[], list[Reading]], errors: Errors) -> None:
        self.name = name
        self.interval_s = interval_s
        self.max_age_s = 3 * interval_s + 10
        self._read = read
        self._errors = errors
        self._lock = threading.Lock()
        self._readings: list[Reading] = []
        self._finished_monotonic: float | None = None
        self._finished_unix = 0.0
        self._took = 0.0
        self._stop = threading.Event()
        errors.declare(name, "source_failed")

    def collect_once(self) -> None:
        """Run one round now. A reader that raises costs this source its readings of the round, and is counted."""
        started = time.monotonic()
        try:
            readings = self._read()
        except Exception:  # a source must not take the others down, whatever it met
            self._errors.add(self.name, "source_failed")
            readings = []
        with self._lock:
            self._readings = readings
            self._finished_monotonic = time.monotonic()
            self._finished_unix = time.time()
            self._took = self._finished_monotonic - started

    def run(self) -> None:
        """Collect until :meth:`stop`; for a daemon thread."""
        while not self._stop.is_set():
            self.collect_once()
            self._stop.wait(max(0.1, self.interval_s - self._took))

    def stop(self) -> None:
        """End :meth:`run` after the round that is on."""
        self._stop.set()

    def snapshot(self) -> list[Reading]:
        """Return the last readings and when they were made; only the latter once they are too old."""
        with self._lock:
            if self._finished_monotonic is None:
                return []
            about = [
                Reading("metalserve_agent_last_collect_timestamp_seconds", (self.name,), self._finished_unix),
                Reading("metalserve_agent_collect_duration_seconds", (self.name,), self._took),
            ]
            if time.monotonic() - self._finished_monotonic > self.max_age_s:
                return about
            return about + self._readings


class Exporter:
    """The prometheus_client collector over all sources."""

    def __init__(self, version: str, accelerator: str, errors: Errors) -> None:
        self._about = Reading("metalserve_agent_info", (version, accelerator), 1)
        self._errors = errors
        self._lock = threading.Lock()
        self._sources: tuple[Source, ...] = ()

    def use(self, sources: Iterable[Source]) -> None:
        """Hand out the readings of ``sources`` from now on."""
        with self._lock:
            self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        """Yield every family that has a sample now."""
        with self._lock:
            sources = self._sources
        readings = [self._about, *self._errors.readings()]
        for source in sources:
            readings.extend(source.snapshot())
        yield from families(readings)


def families(readings: Iterable[Reading]) -> Iterator[Metric]:
    """Yield ``readings`` as metric families in the order of the catalogue. A name outside it is a programming error."""
    by_name: dict[str, list[Reading]] = {name: [] for name in CATALOGUE}
    for reading in readings:
        by_name[reading.name].append(reading)
    for name, values in by_name.items():
        if not values:
            continue
        metric = CATALOGUE[name]
        family: CounterMetricFamily | GaugeMetricFamily
        if metric.kind == "counter":
            family = CounterMetricFamily(name[: -len("_total")], metric.help, labels=metric.labels)
        else:
            family = GaugeMetricFamily(name, metric.help, labels=metric.labels)
        for reading in values:
            family.add_metric(reading.labels, reading.value)
        yield family
