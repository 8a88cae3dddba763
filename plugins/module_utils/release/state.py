# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Releases on a node: ``<root>/engines/<replica>/releases/<hash>/`` and the links ``current`` and ``previous``.

A release's folder is written once and never edited. ``current`` moves at once (a new link is renamed over the old
one), so that a unit which starts at any moment finds one whole release.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic
from ansible_collections.metal.serve.plugins.module_utils.release.content import container_name

GUARD_TIME_S = 600
"""Room for the checks before a start: a wait after failures, the GPUs, files whose stat changed."""

SERVED = "served"
GATE = "gate.json"
RELEASE_FILE = "release.json"


class StateError(ValueError):
    """A state on the node that cannot be read; the text is for the user."""


@dataclass(frozen=True)
class Replica:
    """Paths of one replica."""

    root: str
    name: str

    @property
    def folder(self) -> str:
        """Everything of this replica."""
        return os.path.join(self.root, "engines", self.name)

    @property
    def current(self) -> str:
        """Link to the release that runs."""
        return os.path.join(self.folder, "current")

    @property
    def previous(self) -> str:
        """Link to the release that served before."""
        return os.path.join(self.folder, "previous")

    @property
    def record(self) -> str:
        """File of a change of ``current`` that is not proven yet; see open_change."""
        return os.path.join(self.folder, "redeploy.json")

    @property
    def rotation(self) -> str:
        """File that is there while the replica is to get no requests; see note_out."""
        return os.path.join(self.folder, "rotation.json")

    def release(self, release: str) -> str:
        """The folder of one release."""
        return os.path.join(self.folder, "releases", release)

    @property
    def drop_in(self) -> str:
        """The unit's settings that come from the release."""
        return f"/etc/systemd/system/metalserve-engine@{self.name}.service.d/release.conf"

    @property
    def unit(self) -> str:
        """The unit."""
        return f"metalserve-engine@{self.name}.service"


@dataclass(frozen=True)
class Found:
    """A release on the node: its hash, its release.json, and whether it ever served."""

    release: str
    document: Mapping[str, Any]
    served: bool


def read_link(link: str) -> str:
    """Return the hash that ``current`` or ``previous`` points to, ``""`` where there is no such link."""
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def _load(path: str, way_out: str) -> Any:
    """Return what a JSON file holds. Raises FileNotFoundError, and StateError with ``way_out`` where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read ({error}); {way_out}") from error


def read_release(replica: Replica, release: str) -> Found | None:
    """Read one release; None where it is not there (or was never written whole). Raises StateError."""
    folder = replica.release(release)
    path = os.path.join(folder, RELEASE_FILE)
    try:
        document = _load(path, f"restore it or remove {folder}")
    except FileNotFoundError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("content"), dict):
        raise StateError(f"{path} is not a release; restore it or remove {folder}")
    return Found(release, document, os.path.exists(os.path.join(folder, SERVED)))


def read_current(replica: Replica) -> Found | None:
    """Read the release that ``current`` points to; None where none was ever activated. Raises StateError."""
    release = read_link(replica.current)
    return read_release(replica, release) if release else None


def release_env(replica: str, release: str) -> str:
    """Return release.env, which the unit reads."""
    return f"CONTAINER={container_name(replica, release)}\nRELEASE={release}\n"


def drop_in_text(stop_s: int, start_s: int) -> str:
    """Return the unit's drop-in: its stop must outlast the container's, its start the checks before it."""
    return (
        "# From the release that `current` points to; written when it was activated.\n"
        "[Service]\n"
        f"TimeoutStopSec={stop_s}\n"
        f"TimeoutStartSec={start_s}\n"
    )


def release_files(
    replica: Replica,
    release: str,
    document: Mapping[str, Any],
    files: Mapping[str, str],
    modes: Mapping[str, int],
) -> dict[str, tuple[str, int]]:
    """Return path -> (text, mode) of a release's files, release.json last: with it the release is whole."""
    folder = replica.release(release)
    found = {os.path.join(folder, name): (text, modes.get(name, 0o444)) for name, text in sorted(files.items())}
    found[os.path.join(folder, "release.env")] = (release_env(replica.name, release), 0o444)
    found[os.path.join(folder, RELEASE_FILE)] = (canonical_json(document), 0o444)
    return found


def activate(replica: Replica, release: str, keep_previous: bool) -> None:
    """Point ``current`` to the release. With ``keep_previous`` the one before becomes ``previous``. Raises OSError."""
    before = read_link(replica.current)
    if before and before != release and keep_previous:
        _link(replica.previous, before)
    _link(replica.current, release)


def read_json(path: str) -> dict[str, Any] | None:
    """Return a small JSON object, None where there is none. Raises StateError for something else."""
    try:
        value = _load(path, "restore or remove it")
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise StateError(f"{path} is not what was written there; restore or remove it")
    return value


def open_change(replica: Replica, release: str, run: str, now: float) -> dict[str, Any]:
    """Point ``current`` to a release that is not proven yet, and keep on record what served before.

    The record is written first and says ``from`` (what served), ``before`` (its ``previous``), ``to``, ``run`` and
    ``since``. A further change, also the one back, keeps the first record's ``from`` and ``before``. Raises OSError,
    StateError.
    """
    record = read_json(replica.record) or {
        "from": read_link(replica.current),
        "before": read_link(replica.previous),
        "since": now,
    }
    record = {**record, "to": release, "run": run, "gated": False}
    write_atomic(replica.record, canonical_json(record), 0o644)
    previous = record["before"] if release == record["from"] else record["from"]
    if previous:
        _link(replica.previous, str(previous))
    elif os.path.lexists(replica.previous):
        os.unlink(replica.previous)
    _link(replica.current, release)
    return record


def prove_change(replica: Replica, measured: Mapping[str, Any]) -> bool:
    """Note that ``current`` passed its gate, with what was ``measured``; True where that is new. Raises OSError,
    StateError.
    """
    release = read_link(replica.current)
    changed = mark_served(replica, release)
    if measured:
        write_atomic(os.path.join(replica.release(release), GATE), canonical_json(measured), 0o444)
    record = read_json(replica.record)
    if record is None or record.get("gated"):
        return changed
    write_atomic(replica.record, canonical_json({**record, "gated": True}), 0o644)
    return True


def settle_change(replica: Replica) -> bool:
    """Close the record: what ``current`` names is what serves; True where one was open. Raises OSError."""
    if not os.path.exists(replica.record):
        return False
    os.unlink(replica.record)
    return True


def note_out(replica: Replica, by: str, run: str, now: float) -> None:
    """Keep on the node that the replica is wanted out of rotation: by whom, by which run, since when. Raises OSError.

    The gateways own the rotation. With this copy an audit of the node can tell a drained replica from a dead one.
    """
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    write_atomic(replica.rotation, canonical_json({"in": False, "by": by, "run": run, "since": since}), 0o644)


def note_in(replica: Replica) -> bool:
    """Forget it; True where it was noted. Raises OSError."""
    try:
        os.unlink(replica.rotation)
    except FileNotFoundError:
        return False
    return True


def _link(link: str, release: str) -> None:
    temporary = f"{link}.new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(os.path.join("releases", release), temporary)
    os.replace(temporary, link)


def mark_served(replica: Replica, release: str) -> bool:
    """Note that a release served; True if that is new. Raises OSError."""
    path = os.path.join(replica.release(release), SERVED)
    if os.path.exists(path):
        return False
    write_atomic(path, "", 0o444)
    return True


def known_replicas(root: str) -> list[str]:
    """Return the names of the replicas that this node ever had, sorted."""
    folder = os.path.join(root, "engines")
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if os.path.islink(os.path.join(folder, name, "current")))


def stale_releases(replica: Replica) -> list[str]:
    """Return the releases that neither ``current`` nor ``previous`` points to, sorted."""
    kept = {read_link(replica.current), read_link(replica.previous)}
    folder = os.path.join(replica.folder, "releases")
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if name not in kept)


def remove_release(replica: Replica, release: str) -> None:
    """Remove a release's folder. Raises OSError."""
    shutil.rmtree(replica.release(release))
