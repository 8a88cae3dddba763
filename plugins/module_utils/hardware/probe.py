# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What a probe is, what it brings back, and the words for how it went.

A probe is one small reading with a name, a time limit and a place in a snapshot folder. It returns items: raw texts,
each with the path that it has in a snapshot. Nothing is parsed here.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Optional

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost

OK = "ok"
ABSENT = "absent"
DENIED = "denied"
TIMEOUT = "timeout"
ERROR = "error"
NOT_COLLECTED = "not_collected"

STATES = (OK, ABSENT, DENIED, TIMEOUT, ERROR, NOT_COLLECTED)
"""Every state of a probe. Only ``absent`` means: the collector looked, and it is not there."""

_WORST_FIRST = (TIMEOUT, ERROR, DENIED, NOT_COLLECTED)


@dataclass(frozen=True)
class Item:
    """One raw text that a probe read, or the reason why it could not.

    ``path`` is its place in a snapshot folder (``files/proc/meminfo``); ``text`` is kept beside an error where there
    is one, for example what a failing command printed.
    """

    path: str
    state: str = OK
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """All items of one probe, its state, the first error in words and the seconds it took."""

    name: str
    state: str
    error: str = ""
    seconds: float = 0.0
    items: tuple[Item, ...] = ()

    def text(self) -> Optional[str]:
        """Return the text of the first item that was read, or None where none was."""
        for item in self.items:
            if item.state == OK:
                return item.text
        return None

    def texts(self) -> dict[str, str]:
        """Return snapshot path -> text of every item that was read."""
        return {item.path: item.text for item in self.items if item.state == OK}


def not_collected(name: str, why: str = "") -> ProbeResult:
    """Return the result of a probe that was not run, or of which a snapshot holds nothing."""
    return ProbeResult(name, NOT_COLLECTED, why)


def summarise(name: str, items: Iterable[Item], seconds: float = 0.0) -> ProbeResult:
    """Return the result for ``items``: ok only if at least one was read and none failed, absent only if all were
    absent.

    One file that was denied makes the whole probe ``denied``: a part is not the whole, and what is missing may be
    what matters.
    """
    kept = tuple(items)
    states = {item.state for item in kept}
    for state in _WORST_FIRST:
        if state in states:
            error = next((item.error or item.path for item in kept if item.state == state), "")
            return ProbeResult(name, state, error, seconds, kept)
    if OK in states:
        return ProbeResult(name, OK, "", seconds, kept)
    return ProbeResult(name, ABSENT, "", seconds, kept)


@dataclass(frozen=True)
class Probe:
    """One reading: ``read`` is called with the live host; ``paths`` are the snapshot paths (or patterns) that belong
    to it.

    ``timeout`` is in seconds. ``second_round`` probes run after all others and may look at what those found;
    ``on_request`` ones run only where they, or their group, are asked for by name.
    """

    name: str
    group: str
    paths: tuple[str, ...]
    read: Callable[[LiveHost], list[Item]] = field(repr=False)
    timeout: float = 10.0
    second_round: bool = False
    says: str = ""
    on_request: bool = False

    def owns(self, path: str) -> bool:
        """Tell whether a file at ``path`` in a snapshot folder belongs to this probe."""
        return any(path == pattern or fnmatch.fnmatchcase(path, pattern) for pattern in self.paths)


def snapshot_path(path: str) -> str:
    """Return where the file ``path`` of a machine lies in a snapshot (``/proc/meminfo`` -> ``files/proc/meminfo``)."""
    return "files/" + path.lstrip("/")


def command_path(argv: Iterable[str]) -> str:
    """Return where the output of a command lies in a snapshot (``nvidia-smi -q -x`` ->
    ``commands/nvidia-smi_-q_-x.txt``).
    """
    words = "_".join(argv)
    kept = "".join(char if char.isalnum() or char in "-_.=,+@" else "_" for char in words)
    return f"commands/{kept[:120]}.txt"
