# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Resource limits: how high this machine can go, and who gets them.

A limit above what the machine's first process may hand on is worse than a low one: pam_limits refuses the login, and
Docker the container. So what is wished for is bounded by what is possible first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

UNLIMITED = -1
"""Stands for "no limit", as Docker writes it."""

NOFILE_FLOOR = 100_000
"""The deployment checklist's minimum for ``ulimit -n``."""

NOFILE_CEILING = 1_048_576
"""Above this, programs that walk or allocate for every possible descriptor become slow: nvidia-smi took 24 s at
1,073,741,816."""

_CAP_SYS_RESOURCE = 24
_ROWS = {"nofile": "Max open files", "memlock": "Max locked memory"}


@dataclass(frozen=True)
class Room:
    """How far limits can be raised: PID 1's hard limits, whether it may exceed them, and the kernel's bound on
    nofile."""

    hard_nofile: int
    hard_memlock: int
    may_raise: bool
    nr_open: int


def parse_limit(value: str) -> int:
    """Return a limit as a number; ``unlimited`` and ``infinity`` are UNLIMITED. Raises ValueError."""
    text = value.strip().lower()
    if text in ("unlimited", "infinity", "-1"):
        return UNLIMITED
    if not text.isdigit():
        raise ValueError(f"{value!r} is not a limit; write a number or unlimited")
    return int(text)


def parse_proc_limits(text: str, name: str) -> tuple[int, int]:
    """Return (soft, hard) of ``nofile`` or ``memlock`` from a ``/proc/PID/limits``. Raises ValueError where it is
    missing."""
    row = _ROWS[name]
    match = re.search(rf"^{row}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no line {row!r} in the limits of the process")
    return parse_limit(match.group(1)), parse_limit(match.group(2))


def has_sys_resource(status: str) -> bool:
    """Return whether the process with this ``/proc/PID/status`` may raise hard limits (CAP_SYS_RESOURCE is
    effective)."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    return match is not None and bool(int(match.group(1), 16) >> _CAP_SYS_RESOURCE & 1)


def bounded(wanted: int, hard: int, may_raise: bool, kernel_bound: Optional[int] = None) -> int:
    """Return the highest limit that is at most ``wanted`` and can be set here. Numbers, or UNLIMITED.

    ``kernel_bound`` holds for everybody (``fs.nr_open`` for nofile); ``hard`` only for those who may not raise it.
    """
    bounds = [] if may_raise or hard == UNLIMITED else [hard]
    if kernel_bound is not None:
        bounds.append(kernel_bound)
    if wanted != UNLIMITED:
        bounds.append(wanted)
    return min(bounds) if bounds else UNLIMITED


def possible(nofile: int, memlock: int, room: Room) -> dict[str, int]:
    """Return ``nofile`` (a count) and ``memlock`` (bytes, or UNLIMITED) as they can be set on a machine with
    ``room``."""
    return {
        "nofile": bounded(nofile, room.hard_nofile, room.may_raise, room.nr_open),
        "memlock": bounded(memlock, room.hard_memlock, room.may_raise),
    }


def shortfalls(nofile: int, limits: Mapping[str, int], room: Room) -> list[str]:
    """Return a plain sentence for each limit that ends up below what the checklist or the variable asks for."""
    found = []
    if limits["nofile"] < min(nofile, NOFILE_FLOOR):
        because = (
            f"fs.nr_open is {room.nr_open}"
            if room.nr_open < min(nofile, NOFILE_FLOOR)
            else f"process 1 has a hard limit of {room.hard_nofile} and lacks CAP_SYS_RESOURCE (a container?)"
        )
        found.append(f"open files are limited to {limits['nofile']}, below {NOFILE_FLOOR}: {because}")
    return found


def applies_limits(services: Mapping[str, str], name: str) -> bool:
    """Tell whether a session of the PAM service ``name`` runs pam_limits; ``services`` are the texts of PAM's files by name.

    A file that it includes (``@include``, ``session include`` or ``substack``) counts if it is among ``services`` as well.
    """

    def covered(name: str, seen: frozenset[str]) -> bool:
        for line in services.get(name, "").splitlines():
            words = line.split("#", 1)[0].split()
            included = words[1:] if len(words) == 2 and words[0] == "@include" else []
            if len(words) >= 3 and words[0].lstrip("-") == "session":
                if any(word.endswith("pam_limits.so") for word in words[1:]):
                    return True
                included = words[2:3] if words[1] in ("include", "substack") else []
            if any(one not in seen and covered(one, seen | {one}) for one in included):
                return True
        return False

    return covered(name, frozenset({name}))


def services_without_pam_limits(services: Mapping[str, str]) -> list[str]:
    """Return the PAM services (name -> text of its file) whose sessions do not run pam_limits, so ignore limits.d.

    An included file counts if it is among ``services`` as well.
    """
    return sorted(name for name in services if not name.startswith("common-") and not applies_limits(services, name))
