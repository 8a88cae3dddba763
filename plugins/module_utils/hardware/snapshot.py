# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: a folder with everything that the probes read, masked, from which the same facts can be built anywhere.

The layout mirrors where things come from (docs/snapshots.md), so a folder can be made by hand; ``index.json`` says
how each reading went. Without an index a file that is there was read, and what is not there was not collected.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json
from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import decode, state_of
from ansible_collections.metal.serve.plugins.module_utils.hardware.masking import Masker
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ABSENT,
    ERROR,
    NOT_COLLECTED,
    OK,
    STATES,
    Item,
    Probe,
    ProbeResult,
    not_collected,
    summarise,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
INDEX = "index.json"
LINKS = ("current", "previous")
"""Names of links that are read, as the name of what they lead to; any other link is an error."""
MAX_FILES = 50_000
MAX_FILE = 16 * 1024 * 1024
MAX_TOTAL = 512 * 1024 * 1024
"""Bounds of a folder that is read: files, bytes of one, bytes of all."""


class SnapshotError(ValueError):
    """A folder that cannot be read or written as a snapshot; the message says which and why."""


@dataclass(frozen=True)
class Snapshot:
    """The results of a snapshot's probes, and what its index says about it."""

    results: dict[str, ProbeResult] = field(default_factory=dict)
    collected_at: Optional[str] = None
    as_root: Optional[bool] = None
    masked: Optional[bool] = None


def snapshot_files(
    results: Mapping[str, ProbeResult],
    users: tuple[str, ...] = (),
    masked: bool = True,
    as_root: Optional[bool] = None,
) -> dict[str, str]:
    """Return path -> text of a snapshot of ``results``, ``index.json`` included.

    ``users`` are names of people's accounts, which are masked wherever they stand. Nothing is written.
    """
    uname = results["uname"].text() if "uname" in results else None
    words = (uname or "").split()
    masker = Masker(words[1:2], users) if masked else None
    if masker is not None:
        for name in sorted(results):
            for item in results[name].items:
                masker.learn(item.text)
    files: dict[str, str] = {}
    probes: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name in sorted(results):
        result = results[name]
        probes[name] = {"state": result.state, "seconds": result.seconds}
        if result.error:
            probes[name]["error"] = masker.identities(result.error) if masker else result.error
        for item in result.items:
            path = _safe(masker.identities(item.path) if masker else item.path)
            if item.state == OK or item.text:
                files[path] = masker.mask(name, item.path, item.text) if masker else item.text
            if item.state != OK:
                error = masker.identities(item.error) if masker else item.error
                states[path] = {"state": item.state, **({"error": error} if error else {})}
    index = {
        "schema_version": SCHEMA_VERSION,
        "collected_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "as_root": os.geteuid() == 0 if as_root is None else as_root,
        "masked": masked,
        "probes": probes,
        "files": states,
    }
    files[INDEX] = canonical_json(index)
    return files


def _safe(path: str) -> str:
    """Return ``path`` so that it stays inside the folder, whatever a daemon called its things."""
    parts = [part[:200] for part in path.split("/") if part not in ("", ".", "..")]
    return "/".join(part.replace("\x00", "_") for part in parts) or "unnamed"


def write_snapshot(folder: str, files: Mapping[str, str]) -> None:
    """Write ``files`` as the snapshot ``folder``: whole or not at all, in place of an older snapshot there.

    Raises SnapshotError where the folder exists and is no snapshot, or cannot be written.
    """
    target = os.path.abspath(folder)
    if os.path.lexists(target) and not _replaceable(target):
        raise SnapshotError(f"{folder} exists and is no snapshot (it has no {INDEX}); name another folder")
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        made = tempfile.mkdtemp(prefix=".snapshot-", dir=os.path.dirname(target))
    except OSError as error:
        raise SnapshotError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        for path in sorted(files):
            full = os.path.join(made, _safe(path))
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w", encoding="utf-8", errors="replace", newline="\n") as stream:
                stream.write(files[path])
        os.chmod(made, 0o755)
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(made, target)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise SnapshotError(f"{folder} cannot be written: {error.strerror} ({error.filename})") from None


def _replaceable(folder: str) -> bool:
    if os.path.islink(folder) or not os.path.isdir(folder):
        return False
    names = os.listdir(folder)
    return not names or INDEX in names


def read_snapshot(folder: str) -> Snapshot:
    """Return what a snapshot folder holds. Its files are data: whatever stands in them raises nothing.

    Raises SnapshotError where the folder is not there, is no folder, or is larger than any snapshot.
    """
    files = _read_files(folder)
    raw_index = files.pop(INDEX, None)
    index: dict[str, Any] = {}
    broken = ""
    if raw_index is not None:
        found, error = values.json_object(raw_index.text)
        error = raw_index.error or error
        index, broken = found or {}, f"{INDEX}: {error}" if error else ""
    states = _states(index)
    results = {}
    for probe in PROBES:
        items = _items(probe, files, states)
        results[probe.name] = _result(probe, items, states, index, broken)
    at = values.as_str(index.get("collected_at"))
    return Snapshot(results, at, values.as_bool(index.get("as_root")), values.as_bool(index.get("masked")))


def _read_files(folder: str) -> dict[str, Item]:
    """Return path -> what lies there. Raises SnapshotError where the folder is none or too large."""
    if not os.path.isdir(folder):
        raise SnapshotError(f"{folder} is no folder; a snapshot is one (docs/snapshots.md)")
    found: dict[str, Item] = {}
    total = 0
    for base, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in sorted(names + links):
            full = os.path.join(base, name)
            path = os.path.relpath(full, folder).replace(os.sep, "/")
            found[path] = _read_one(full, path)
            total += len(found[path].text)
            if len(found) > MAX_FILES or total > MAX_TOTAL:
                raise SnapshotError(f"{folder} holds more than a snapshot can ({MAX_FILES} files, {MAX_TOTAL} bytes)")
    return found


def _read_one(full: str, path: str) -> Item:
    """Return a file; of the links of a replica where they lead. Links are never followed, pipes never opened."""
    try:
        if os.path.islink(full):
            if os.path.basename(path) not in LINKS:
                return Item(path, ERROR, "", f"{path} is a link, which is never followed: put the file itself there")
            return Item(path, OK, os.path.basename(os.readlink(full)) + "\n")
        if not os.path.isfile(full):
            return Item(path, ERROR, "", f"{path} is no file")
        with open(full, "rb") as stream:
            data = stream.read(MAX_FILE + 1)
        if full.endswith(".gz"):
            data = zlib.decompressobj(31).decompress(data, MAX_FILE + 1)
    except OSError as error:
        return Item(path, state_of(error), "", f"{path}: {error.strerror}")
    except zlib.error as error:
        return Item(path, ERROR, "", f"{path}: {error}")
    if len(data) > MAX_FILE:
        return Item(path, ERROR, decode(data[:MAX_FILE]), f"{path} is longer than {MAX_FILE} bytes")
    return Item(path, OK, decode(data))


def _states(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return probe name or path -> state and error, from ``probes`` and ``files``; a bare word is a state."""
    found: dict[str, tuple[str, str]] = {}
    for section in ("probes", "files"):
        entries = index.get(section)
        for name, entry in entries.items() if isinstance(entries, dict) else []:
            state = entry if isinstance(entry, str) else values.get(entry, "state")
            error = values.as_str(values.get(entry, "error")) or ""
            if state in STATES:
                found[name] = (state, error)
            else:
                found[name] = (ERROR, f"{INDEX}: {state!r} is no state; right are {', '.join(STATES)}"[:300])
    return found


def _items(probe: Probe, files: Mapping[str, Item], states: Mapping[str, tuple[str, str]]) -> list[Item]:
    items = []
    for path in sorted(path for path in files if probe.owns(path)):
        found = files[path]
        state, error = states.get(path, (found.state, found.error))
        if state == ABSENT:
            state, error = ERROR, f"{INDEX} says that {path} is absent, but it is there"
        if state in (OK, NOT_COLLECTED):
            state, error = found.state, found.error
        items.append(Item(path[: -len(".gz")] if path.endswith(".gz") else path, state, found.text, error))
    for path, (state, error) in states.items():
        if path not in files and probe.owns(path):
            missing = state == OK
            why = f"{INDEX} says that {path} was read, but it is not there"
            items.append(Item(path, ERROR if missing else state, "", why if missing else error))
    return items


def _result(
    probe: Probe, items: list[Item], states: Mapping[str, tuple[str, str]], index: Mapping[str, Any], broken: str
) -> ProbeResult:
    seconds = values.get(index, "probes", probe.name, "seconds")
    timed = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < 1e9
    took = float(seconds) if timed else 0.0
    if broken:
        return ProbeResult(probe.name, ERROR, broken, 0.0, ())
    read = (
        summarise(probe.name, items, took) if items else not_collected(probe.name, "the snapshot holds nothing of it")
    )
    if probe.name not in states:
        return read
    state, error = states[probe.name]
    have = [item for item in items if item.state == OK]
    if state == OK and not have:
        return ProbeResult(probe.name, ERROR, f"{INDEX} says ok, but its files are not there", took, tuple(items))
    if state == ABSENT and have:
        state, error = ERROR, f"{INDEX} says absent, but {have[0].path} is there"
    if state == OK:
        return read
    if have and len(have) == len(items):
        # No single file explains the state, so it holds for each of them: half a reading is no whole one.
        items = [Item(item.path, state, item.text, error) for item in items]
    return ProbeResult(probe.name, state, error, took, tuple(items))
