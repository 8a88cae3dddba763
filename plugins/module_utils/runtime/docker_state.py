# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What must happen to a running dockerd so that it uses its new configuration, and what may happen now.

A restart of dockerd is a planned step on a node that serves: it is done only where none of our containers runs, and
reported elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTAINER_PREFIX = "metalserve-"
"""Every container that this bundle creates has a name that begins so."""


@dataclass(frozen=True)
class Decision:
    """``action`` is ``none``, ``restart`` or ``pending``; ``message`` says why in one sentence, or is
    empty."""

    action: str
    message: str = ""


def serving_containers(listing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of our running containers in Docker's ``GET /containers/json``, sorted."""
    names = []
    for container in listing:
        for name in container.get("Names") or []:
            if name.lstrip("/").startswith(CONTAINER_PREFIX):
                names.append(name.lstrip("/"))
    return sorted(names)


def decide(restart_for: Sequence[str], running: bool, serving: Sequence[str]) -> Decision:
    """Return what to do with dockerd.

    ``restart_for`` names what dockerd takes over at a restart only; ``serving`` are our running containers.
    """
    if not running:
        return Decision("none")
    if restart_for and not serving:
        return Decision("restart")
    if restart_for:
        waiting = ", ".join(restart_for)
        return Decision(
            "pending",
            f"docker restart pending: {waiting} take effect only then, and {len(serving)} engine container(s) run here"
            f" ({', '.join(serving)}). Drain this node and restart Docker with playbooks/maintain.yml.",
        )
    return Decision("none")


def parse_start_ticks(stat: str) -> int:
    """Return field 22 of a ``/proc/PID/stat`` (start after boot, in clock ticks). Raises ValueError for another
    text."""
    # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError("not the content of /proc/PID/stat")
    return int(fields[19])


def parse_boot_time(stat: str) -> int:
    """Return ``btime`` of ``/proc/stat``: seconds since the epoch at which the machine started. Raises ValueError."""
    match = re.search(r"^btime (\d+)$", stat, re.MULTILINE)
    if match is None:
        raise ValueError("no btime in /proc/stat")
    return int(match.group(1))
