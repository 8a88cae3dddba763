# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The values that sources hand to the exporter, and the count of the reads that failed."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One value of one catalogued metric, in the unit of its name. ``labels`` are in the order of the catalogue."""

    name: str
    labels: tuple[str, ...]
    value: float


class Errors:
    """Failed reads by source and reason; shared by all sources."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, source: str, reason: str) -> None:
        """Count one failed read of ``source`` for a short, fixed ``reason``."""
        with self._lock:
            self._counts[(source, reason)] += 1

    def declare(self, source: str, reason: str) -> None:
        """Make the counter exist at zero, so that its first rise is seen as a rise."""
        with self._lock:
            self._counts[(source, reason)] += 0

    def readings(self) -> list[Reading]:
        """Return the counts as readings."""
        with self._lock:
            return [Reading("metalserve_agent_errors_total", key, count) for key, count in sorted(self._counts.items())]
