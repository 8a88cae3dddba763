# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The lock of a redeploy: one file on every gateway for the whole run, and on each node while it is worked on.

Its heartbeat is written with each phase, and at least every 30 s in waits. A lock without a heartbeat for 120 s, or of a
process that is gone from the very machine that asks, is taken over. The age is measured on the host that has the
file, so clocks need not agree.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic

STALE_S = 120.0
"""Seconds without a heartbeat after which a lock counts as left."""

NAME = "redeploy.lock"
TAKE, RENEW, TAKE_OVER, REFUSE = "take", "renew", "take over", "refuse"


class LockError(ValueError):
    """A lock that cannot be had or read; one sentence."""


@dataclass(frozen=True)
class Holder:
    """Who holds it: run id, user@host, the controller's machine id, process id and its start in clock ticks since
    that machine's boot, the boot's id, start of the run and last heartbeat (seconds since 1970, the holder host's
    clock), and the phase.
    """

    run: str
    by: str
    machine: str = ""
    boot: str = ""
    pid: int = 0
    pid_started: int = 0
    started: float = 0.0
    heartbeat: float = 0.0
    phase: str = ""

    @property
    def since(self) -> str:
        """The start as ISO 8601, UTC."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))


def parse(text: str, path: str) -> Holder:
    """Read a lock file. Raises LockError for one that is not whole."""
    try:
        value = json.loads(text)
        return Holder(
            run=str(value["run"]),
            by=str(value["by"]),
            machine=str(value.get("machine", "")),
            boot=str(value.get("boot", "")),
            pid=int(value.get("pid", 0)),
            pid_started=int(value.get("pid_started", 0)),
            started=float(value.get("started", 0)),
            heartbeat=float(value.get("heartbeat", 0)),
            phase=str(value.get("phase", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LockError(f"{path} is not a lock ({error}); see that no redeploy runs, then remove it") from None


def read(path: str) -> Holder | None:
    """Return who holds the lock, None where nobody does. Raises LockError, OSError."""
    try:
        with open(path, encoding="utf-8") as stream:
            return parse(stream.read(), path)
    except FileNotFoundError:
        return None


def gone(holder: Holder, me: Holder, started_of: Mapping[int, int]) -> bool:
    """Return whether the holder's process is known to be gone, seen from the controller ``me``.

    ``started_of`` maps the processes of this controller to their start. Another machine's process is never known to
    be gone.
    """
    if not holder.machine or holder.machine != me.machine:
        return False
    return holder.boot != me.boot or started_of.get(holder.pid) != holder.pid_started


def judge(holder: Holder | None, me: Holder, age_s: float, holder_gone: bool) -> str:
    """Return ``take``, ``renew``, ``take over`` or ``refuse``; ``age_s`` is the heartbeat's age."""
    if holder is None:
        return TAKE
    if holder.run == me.run:
        return RENEW
    return TAKE_OVER if holder_gone or age_s > STALE_S else REFUSE


def age(holder: Holder, now: float) -> float:
    """Return the heartbeat's age in seconds. A heartbeat from the future (the clock was set back) is fresh."""
    return max(0.0, now - holder.heartbeat)


def refusal(holder: Holder, where: str) -> str:
    """Return the sentence for a lock that is held."""
    phase = f", now in phase {holder.phase}" if holder.phase else ""
    return f"{where} is held by {holder.by} (run {holder.run}, process {holder.pid}{phase}) since {holder.since}"


def write(path: str, holder: Holder) -> None:
    """Write the lock. Raises OSError."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    write_atomic(path, canonical_json(asdict(holder)), 0o644)


def hold(path: str, me: Holder, now: float, holder_gone: bool) -> tuple[str, Holder | None]:
    """Take, renew or take over the lock at ``path``; return what was done and who held it before.

    ``refuse`` leaves it alone. The caller keeps others out between the look and the write (an flock beside it).
    Raises LockError, OSError.
    """
    before = read(path)
    verdict = judge(before, me, age(before, now) if before else 0.0, holder_gone)
    if verdict != REFUSE:
        started = before.started if before and verdict == RENEW else me.started or now
        write(path, replace(me, started=started, heartbeat=now))
    return verdict, before


def renew(path: str, run: str, phase: str, now: float) -> bool:
    """Renew the heartbeat of a lock of ``run``; False where it holds none (any more). Raises LockError, OSError."""
    holder = read(path)
    if holder is None or holder.run != run:
        return False
    write(path, replace(holder, heartbeat=now, phase=phase or holder.phase))
    return True


def give_back(path: str, run: str) -> bool:
    """Remove the lock of ``run``; False where it is not its own. Raises LockError, OSError."""
    holder = read(path)
    if holder is None or holder.run != run:
        return False
    os.unlink(path)
    return True
