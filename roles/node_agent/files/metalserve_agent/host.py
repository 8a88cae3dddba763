# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about NUMA. Plain files in procfs and sysfs; nothing here can hang on a mount."""

from __future__ import annotations

import re

from .readings import Errors, Reading

SOURCE = "host"
_RANGE = re.compile(r"\A(\d+)(?:-(\d+))?\Z")


class HostSource:
    """Reads kernel.numa_balancing and the number of NUMA nodes. ``root`` is for tests."""

    def __init__(self, errors: Errors, expected_gpus: int, root: str = "/") -> None:
        self._errors = errors
        self._expected_gpus = expected_gpus
        self._root = root.rstrip("/")

    def read(self) -> list[Reading]:
        """Return the readings of one round; a file that is not there gives none."""
        found = [Reading("metalserve_expected_gpus", (), self._expected_gpus)]
        balancing = self._text("/proc/sys/kernel/numa_balancing")
        if balancing is not None:
            try:
                found.append(Reading("metalserve_numa_balancing", (), int(balancing)))
            except ValueError:
                self._errors.add(SOURCE, "numa_balancing")
        nodes = self._text("/sys/devices/system/node/online")
        if nodes is not None:
            count = count_of_list(nodes)
            if count is None:
                self._errors.add(SOURCE, "numa_nodes")
            else:
                found.append(Reading("metalserve_numa_nodes", (), count))
        return found

    def _text(self, path: str) -> str | None:
        try:
            with open(self._root + path, encoding="ascii") as stream:
                return stream.read().strip()
        except FileNotFoundError:
            return None  # a kernel without NUMA; absent is not an error
        except (OSError, UnicodeDecodeError):
            self._errors.add(SOURCE, "unreadable")
            return None


def count_of_list(text: str) -> int | None:
    """Return how many numbers a kernel list such as ``0-1,4`` holds, None if it is not one."""
    total = 0
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            return None
        total += int(match.group(2) or match.group(1)) - int(match.group(1)) + 1
    return total
