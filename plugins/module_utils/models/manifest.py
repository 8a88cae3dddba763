# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The manifest of a model folder: what every file was when it arrived, and whether it still is.

A file is hashed once, at arrival. Later its size, mtime, ctime and inode are compared with those recorded then,
and only a file that differs is hashed again. The kernel sets ctime on every write and nobody can set it back, so
a byte that was changed is found even where the modification time was restored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic

_CHUNK = 4 * 1024 * 1024
_FIELDS = ("path", "size", "sha256", "mtime_ns", "ctime_ns", "inode")
_HEX64 = 64


class ManifestError(ValueError):
    """A manifest that cannot be read, or a folder that cannot be sealed; the text is for the user."""


@dataclass(frozen=True)
class FileEntry:
    """One file: path relative to the folder (``/`` between parts), bytes, content hash, and its stat at hashing."""

    path: str
    size: int
    sha256: str
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class Manifest:
    """All files of one revision of a model."""

    name: str
    revision: str
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of the file sizes in bytes."""
        return sum(entry.size for entry in self.files)

    @property
    def digest(self) -> str:
        """Hex SHA-256 over paths, sizes and content hashes: equal on every node that holds the same bytes."""
        return content_digest((entry.path, entry.size, entry.sha256) for entry in self.files)


@dataclass(frozen=True)
class Verification:
    """What a comparison found: ``problems`` (sentences; empty = good), ``hashed`` (paths that had to be read).

    ``refreshed`` is the manifest with the new stat of files whose stat differed but whose content did not, else None.
    """

    problems: tuple[str, ...]
    hashed: tuple[str, ...]
    refreshed: Manifest | None


def content_digest(files: Iterable[tuple[str, int, str]]) -> str:
    """Return the hex SHA-256 over (path, size, sha256) triples in the order of their paths."""
    lines = [f"{sha256} {size} {path}\n" for path, size, sha256 in sorted(files)]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def sha256_file(path: str) -> str:
    """Return the hex SHA-256 of the file at ``path``. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while True:
            chunk = stream.read(_CHUNK)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)


def walk_files(folder: str) -> list[str]:
    """Return the relative paths of all files below ``folder``, sorted; symbolic links are followed.

    Raises OSError where a folder cannot be read (a listing with a hole in it would pass for a complete one).
    """
    found: list[str] = []

    def fail(error: OSError) -> None:
        raise error

    for base, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders.sort()
        relative = os.path.relpath(base, folder)
        for name in names:
            found.append(name if relative == "." else f"{relative}/{name}".replace(os.sep, "/"))
    return sorted(found)


def _entry(folder: str, path: str) -> FileEntry:
    full = os.path.join(folder, path)
    before = os.stat(full)
    sha256 = sha256_file(full)
    after = os.stat(full)
    if _stat_key(before) != _stat_key(after):
        raise ManifestError(f"{full} changed while it was read; nothing may write to a model folder")
    return FileEntry(path, after.st_size, sha256, after.st_mtime_ns, after.st_ctime_ns, after.st_ino)


def _stat_key(info: os.stat_result) -> tuple[int, int, int, int]:
    return (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def hash_entries(folder: str, paths: Iterable[str], threads: int = 4) -> list[FileEntry]:
    """Return an entry per path, in the order given; hashing runs in ``threads`` threads (hashlib frees the lock).

    Raises OSError, and ManifestError where a file changed while it was read.
    """
    wanted = list(paths)
    with ThreadPoolExecutor(max_workers=max(1, min(threads, os.cpu_count() or 1, len(wanted) or 1))) as pool:
        return list(pool.map(lambda path: _entry(folder, path), wanted))


def build(folder: str, name: str, revision: str) -> Manifest:
    """Hash every file below ``folder`` and return its manifest. Raises OSError and ManifestError."""
    return Manifest(name, revision, tuple(hash_entries(folder, walk_files(folder))))


def to_json(manifest: Manifest) -> str:
    """Return the manifest as the text that stands beside the folder."""
    return canonical_json(
        {
            "name": manifest.name,
            "revision": manifest.revision,
            "digest": manifest.digest,
            "files": [{field: getattr(entry, field) for field in _FIELDS} for entry in manifest.files],
        }
    )


def from_json(text: str, origin: str) -> Manifest:
    """Read a manifest; ``origin`` (its path) names it in errors. Raises ManifestError for anything malformed."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ManifestError(f"{origin} is not JSON ({error}); remove it to have the model hashed anew") from error
    files = data.get("files") if isinstance(data, dict) else None
    if not isinstance(files, list) or not files:
        raise ManifestError(f"{origin} lists no files; remove it to have the model hashed anew")
    manifest = Manifest(
        str(data.get("name", "")), str(data.get("revision", "")), tuple(_read_entry(item, origin) for item in files)
    )
    if data.get("digest") not in (None, manifest.digest):
        raise ManifestError(f"{origin}: its digest is not that of its own list; somebody edited it")
    return manifest


def _read_entry(item: Any, origin: str) -> FileEntry:
    if not isinstance(item, Mapping):
        raise ManifestError(f"{origin}: {item!r} is not a file entry")
    path, sha256 = item.get("path"), item.get("sha256")
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/"):
        raise ManifestError(f"{origin}: {path!r} is not a path below the model folder")
    if not isinstance(sha256, str) or len(sha256) != _HEX64:
        raise ManifestError(f"{origin}: {path} has no sha256")
    numbers: dict[str, int] = {}
    for field in ("size", "mtime_ns", "ctime_ns", "inode"):
        value = item.get(field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ManifestError(f"{origin}: {path} has no whole number as {field}")
        numbers[field] = value
    return FileEntry(path, numbers["size"], sha256, numbers["mtime_ns"], numbers["ctime_ns"], numbers["inode"])


def load(path: str) -> Manifest | None:
    """Read the manifest at ``path``; None where there is none. Raises ManifestError and OSError."""
    try:
        with open(path, encoding="utf-8") as stream:
            return from_json(stream.read(), path)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} is not UTF-8 text; remove it to have the model hashed anew") from error


def save(path: str, manifest: Manifest) -> None:
    """Write the manifest to ``path`` at once and whole. Raises OSError."""
    write_atomic(path, to_json(manifest))


def verify(folder: str, manifest: Manifest, deep: bool = False) -> Verification:
    """Compare ``folder`` with ``manifest``; ``deep`` reads every file, otherwise only those whose stat differs.

    Never raises for a damaged folder: what is wrong is in ``problems``, each naming the file.
    """
    problems: list[str] = []
    if not os.path.isdir(folder):
        return Verification((f"{folder} does not exist, but its manifest does",), (), None)
    known = {entry.path: entry for entry in manifest.files}
    try:
        present = set(walk_files(folder))
    except OSError as error:
        return Verification((f"{folder} cannot be listed: {error.strerror}",), (), None)
    problems.extend(f"{path} is missing" for path in sorted(known.keys() - present))
    problems.extend(f"{path} is not in the manifest" for path in sorted(present - known.keys()))
    suspects: list[FileEntry] = []
    for path in sorted(known.keys() & present):
        entry = known[path]
        try:
            info = os.stat(os.path.join(folder, path))
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        if info.st_size != entry.size:
            problems.append(f"{path} has {info.st_size} bytes, its manifest says {entry.size}")
        elif deep or _stat_key(info) != (entry.size, entry.mtime_ns, entry.ctime_ns, entry.inode):
            suspects.append(entry)
    return _hash_suspects(folder, manifest, suspects, problems)


def _hash_suspects(folder: str, manifest: Manifest, suspects: list[FileEntry], problems: list[str]) -> Verification:
    renewed: dict[str, FileEntry] = {}
    hashed = tuple(entry.path for entry in suspects)
    for entry in suspects:
        try:
            now = hash_entries(folder, [entry.path])[0]
        except (OSError, ManifestError) as error:
            problems.append(f"{entry.path} cannot be read: {error}")
            continue
        if now.sha256 != entry.sha256:
            problems.append(
                f"{entry.path}: its content changed (sha256 {now.sha256[:12]}…, at arrival {entry.sha256[:12]}…)"
            )
        elif now != entry:
            renewed[entry.path] = now
    refreshed = None
    if renewed and not problems:
        refreshed = replace(manifest, files=tuple(renewed.get(entry.path, entry) for entry in manifest.files))
    return Verification(tuple(problems), hashed, refreshed)
