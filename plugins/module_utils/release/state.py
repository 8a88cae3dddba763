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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic
from ansible_collections.metal.serve.plugins.module_utils.release.content import container_name

SERVED = "served"
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


def read_release(replica: Replica, release: str) -> Found | None:
    """Read one release; None where it is not there (or was never written whole). Raises StateError."""
    folder = replica.release(release)
    path = os.path.join(folder, RELEASE_FILE)
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read ({error}); restore it or remove {folder}") from error
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
