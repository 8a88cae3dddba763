# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Where models lie on a node, how one arrives, and when it counts as arrived.

A model arrives in ``<revision>.partial`` and is nobody's to serve. Sealing checks it, hashes it, makes it
read-only, gives the folder its name and writes the manifest last: a revision without a manifest is never served,
whatever interrupted it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import format_size
from ansible_collections.metal.serve.plugins.module_utils.models import faults, manifest

_NAME = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_HIDDEN = (".git", ".cache", ".rsync-partial")


class StoreError(ValueError):
    """A model that cannot be put on the node; the text is one sentence for the user."""


@dataclass(frozen=True)
class Expected:
    """What a source says about a file: bytes, and its content hash where the source knows it (``""`` otherwise).

    ``git_oid`` is the git blob id (SHA-1) that a hub gives for small files.
    """

    path: str
    size: int
    sha256: str = ""
    git_oid: str = ""


@dataclass(frozen=True)
class Place:
    """The paths of one revision below ``root`` (``/var/lib/metalserve``)."""

    root: str
    name: str
    revision: str

    def __post_init__(self) -> None:
        for label, value in (("name", self.name), ("revision", self.revision)):
            if not _NAME.match(value) or value.endswith((".partial", ".manifest.json")):
                raise StoreError(
                    f"the model's {label} {value!r} cannot be a folder name; use letters, digits, '.', '_' and '-'"
                )

    @property
    def folder(self) -> str:
        """The folder that holds every revision of this model."""
        return os.path.join(self.root, "models", self.name)

    @property
    def final(self) -> str:
        """The sealed folder."""
        return os.path.join(self.folder, self.revision)

    @property
    def partial(self) -> str:
        """The folder of a model that is still arriving."""
        return f"{self.final}.partial"

    @property
    def archive(self) -> str:
        """The archive of a model that comes as one file, while it is unpacked."""
        return f"{self.final}.archive.partial"

    @property
    def manifest(self) -> str:
        """The manifest; a revision without it is not sealed."""
        return f"{self.final}.manifest.json"


def list_source(folder: str) -> list[Expected]:
    """Return the files of a source folder with their sizes; hidden tool folders are left out, links followed.

    Raises StoreError where it is not a folder or holds a broken link, OSError where it cannot be read.
    """
    if not os.path.isdir(folder):
        raise StoreError(f"{folder} is not a folder on this machine")
    found = []
    for path in manifest.walk_files(folder):
        if any(part in _HIDDEN for part in path.split("/")):
            continue
        full = os.path.join(folder, path)
        if not os.path.isfile(full):
            raise StoreError(f"{full} is a link to nothing, or not a file; complete the folder first")
        found.append(Expected(path, os.path.getsize(full)))
    if not found:
        raise StoreError(f"{folder} is empty")
    return found


def hashed_source(folder: str, cache: str = "") -> list[Expected]:
    """Return ``list_source`` with content hashes; ``cache`` is a folder where the hashes are kept for the next run.

    With a cache a file is hashed once and again only when its stat differs; several processes that ask at once
    wait for the first. Raises StoreError and OSError.
    """
    listed = [item.path for item in list_source(folder)]
    if not cache:
        return [Expected(e.path, e.size, e.sha256) for e in manifest.hash_entries(folder, listed)]
    os.makedirs(cache, exist_ok=True)
    key = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:24]
    kept_path = os.path.join(cache, f"{key}.json")
    with open(os.path.join(cache, f"{key}.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {entry.path: entry for entry in _cached(kept_path)}
        stale = [path for path in listed if not _same_stat(folder, kept.get(path))]
        kept.update({entry.path: entry for entry in manifest.hash_entries(folder, stale)})
        entries = tuple(kept[path] for path in listed)
        if stale:
            manifest.save(kept_path, manifest.Manifest(os.path.basename(folder), "source", entries))
    return [Expected(entry.path, entry.size, entry.sha256) for entry in entries]


def _cached(path: str) -> tuple[manifest.FileEntry, ...]:
    try:
        kept = manifest.load(path)
    except (manifest.ManifestError, OSError):
        return ()
    return kept.files if kept else ()


def _same_stat(folder: str, entry: manifest.FileEntry | None) -> bool:
    if entry is None:
        return False
    info = os.stat(os.path.join(folder, entry.path))
    now = (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
    return now == (entry.size, entry.mtime_ns, entry.ctime_ns, entry.inode)


def expected_digest(files: Iterable[Expected]) -> str:
    """Return the manifest digest that the files will have, or ``""`` where a hash is not known beforehand."""
    listed = list(files)
    if not listed or any(not item.sha256 for item in listed):
        return ""
    return manifest.content_digest((item.path, item.size, item.sha256) for item in listed)


def open_partial(place: Place) -> bool:
    """Make the folder in which the model arrives, or take up the one that an interrupted run left; True if made.

    A folder that has its final name but no manifest (the run ended between the two) becomes a partial one again.
    """
    if os.path.lexists(place.manifest):
        raise StoreError(f"{place.final} is sealed and is never edited; give the new files a new revision")
    os.makedirs(place.folder, mode=0o755, exist_ok=True)
    if os.path.islink(place.final):
        os.unlink(place.final)
    elif os.path.isdir(place.final):
        if os.path.isdir(place.partial):
            remove_tree(place.final)
        else:
            os.rename(place.final, place.partial)
    if os.path.isdir(place.partial):
        set_modes(place.partial, folder_mode=0o755, file_mode=0o644)
        return False
    os.mkdir(place.partial, 0o755)
    return True


def seal(
    place: Place, expected: Iterable[Expected] = (), require_weights: bool = True, owner: int = 0
) -> manifest.Manifest:
    """Check, hash, protect and name the arrived folder, then write its manifest; returns the manifest.

    ``expected`` is what the source says; an empty one means that nothing is known. ``owner`` is the user and
    group id that the files get (skipped where this process is not root). Raises StoreError with every fault
    found, and OSError.
    """
    problems = faults.folder_faults(place.partial, require_weights)
    wanted = {item.path: item for item in expected}
    if wanted:
        problems += _listing_problems(place.partial, wanted)
    if problems:
        raise StoreError(f"{place.name} {place.revision} is not complete: {'; '.join(problems)}")
    set_modes(place.partial, folder_mode=0o555, file_mode=0o444, owner=owner)
    sealed = manifest.build(place.partial, place.name, place.revision)
    wrong = content_mismatches(place.partial, sealed, wanted)
    if wrong:
        set_modes(place.partial, folder_mode=0o755, file_mode=0o644)
        for path in wrong:
            os.unlink(os.path.join(place.partial, path))
        raise StoreError(
            f"{place.name} {place.revision} arrived damaged: {', '.join(wrong)} "
            f"do not have the content hash that the source gives; they were removed, run again to fetch them anew"
        )
    os.rename(place.partial, place.final)
    manifest.save(place.manifest, sealed)
    return sealed


def adopt(place: Place, folder: str, require_weights: bool = True) -> manifest.Manifest:
    """Use ``folder`` (a shared mount) in place: check and hash it, link the revision to it, write the manifest.

    The folder itself is not changed. Raises StoreError and OSError.
    """
    if not os.path.isdir(folder):
        raise StoreError(f"{folder} is not a folder on this node: is the share mounted?")
    if os.path.lexists(place.manifest):
        raise StoreError(f"{place.final} is sealed and is never edited; give the new files a new revision")
    problems = faults.folder_faults(folder, require_weights)
    if problems:
        raise StoreError(f"{folder} is not complete: {'; '.join(problems)}")
    os.makedirs(place.folder, mode=0o755, exist_ok=True)
    sealed = manifest.build(folder, place.name, place.revision)
    if os.path.islink(place.final):
        os.unlink(place.final)
    elif os.path.isdir(place.final):
        remove_tree(place.final)
    os.symlink(os.path.abspath(folder), place.final)
    manifest.save(place.manifest, sealed)
    return sealed


def _listing_problems(folder: str, wanted: Mapping[str, Expected]) -> list[str]:
    present = {path: os.path.getsize(os.path.join(folder, path)) for path in manifest.walk_files(folder)}
    problems = [f"{path} is missing" for path in sorted(wanted.keys() - present.keys())]
    problems += [f"{path} is not in the source" for path in sorted(present.keys() - wanted.keys())]
    problems += [
        f"{path} has {present[path]} bytes, the source says {wanted[path].size}"
        for path in sorted(wanted.keys() & present.keys())
        if present[path] != wanted[path].size
    ]
    return problems


def content_mismatches(folder: str, sealed: manifest.Manifest, wanted: Mapping[str, Expected]) -> list[str]:
    """Return the paths whose content is not what the source gave as sha256, or as git blob id where it gave
    only that.
    """
    wrong = []
    for entry in sealed.files:
        item = wanted.get(entry.path)
        if item is None:
            continue
        if item.sha256:
            if item.sha256 != entry.sha256:
                wrong.append(entry.path)
        elif item.git_oid and git_blob_id(os.path.join(folder, entry.path)) != item.git_oid:
            wrong.append(entry.path)
    return wrong


def git_blob_id(path: str) -> str:
    """Return the id that git gives the file's content (SHA-1 over ``blob <size>\\0`` and the bytes)."""
    digest = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(1024 * 1024), b""):
            digest.update(chunk)
    return digest.hexdigest()


def set_modes(folder: str, folder_mode: int, file_mode: int, owner: int | None = None) -> None:
    """Set the modes of everything below ``folder`` (and itself), and the owner where this process is root."""
    change_owner = owner is not None and os.geteuid() == 0
    for base, _folders, names in os.walk(folder, topdown=False):
        for path, mode in [*((os.path.join(base, name), file_mode) for name in names), (base, folder_mode)]:
            if os.path.islink(path):
                continue
            os.chmod(path, mode)
            if change_owner and owner is not None:
                os.chown(path, owner, owner)


def remove_tree(folder: str) -> None:
    """Remove a folder that may be read-only. Raises OSError."""
    set_modes(folder, folder_mode=0o755, file_mode=0o644)
    shutil.rmtree(folder)


def read_config(folder: str) -> dict[str, Any]:
    """Return the model's config.json as a dict; empty where there is none. Raises StoreError for a malformed one."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as stream:
            data = json.load(stream)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{path} is not a JSON object")
    return data


def bytes_below(path: str) -> int:
    """Return the bytes of all files below ``path``, links not followed; 0 where it does not exist."""
    if os.path.islink(path):
        return 0
    if os.path.isfile(path):
        return os.path.getsize(path)
    total = 0
    for base, _folders, names in os.walk(path):
        for name in names:
            total += os.lstat(os.path.join(base, name)).st_size
    return total


@dataclass(frozen=True)
class Volume:
    """A file system: where it is used, bytes free, and an identity that is equal for paths on the same one."""

    path: str
    free: int
    device: int


def volume_of(path: str) -> Volume:
    """Return the file system that ``path``, or its nearest parent that exists, is on."""
    probe = os.path.abspath(path)
    while not os.path.exists(probe):
        probe = os.path.dirname(probe)
    info = os.statvfs(probe)
    return Volume(path, info.f_bavail * info.f_frsize, os.stat(probe).st_dev)


def disk_problems(store: Volume, docker: Volume, image_bytes: int, model_bytes: int, present_bytes: int) -> list[str]:
    """Return a sentence per file system that is too small, with the sum; empty when all fits.

    Needed is the image (``image_bytes``, 0 where it is already there) plus twice the model: the one that arrives
    and the revision that will follow it while this one stays as previous. ``present_bytes`` (of the same model: a
    partial copy and older revisions) are already on the disk and count towards that sum.
    """
    model_part = max(0, 2 * model_bytes - present_bytes)
    model_text = f"2 x {format_size(model_bytes)} for the model and its next revision"
    if present_bytes:
        model_text += f" (of it {format_size(min(present_bytes, 2 * model_bytes))} already there)"
    image_text = f"{format_size(image_bytes)} for the engine image"
    if store.device == docker.device:
        demands = [(store, model_part + image_bytes, f"{image_text} and {model_text}")]
    else:
        demands = [(store, model_part, model_text), (docker, image_bytes, image_text)]
    return [
        f"{volume.path} has {format_size(volume.free)} free, but needs {format_size(need)}: {why}"
        for volume, need, why in demands
        if need > volume.free
    ]


def image_present(docker_root: str, image: str) -> bool:
    """Return whether Docker's own index below ``docker_root`` lists ``image`` (``name@sha256:…``).

    Read from the file, so that it also answers where Docker is not running; False where the layout is another one.
    """
    for driver in ("overlay2", "vfs", "btrfs", "zfs", "fuse-overlayfs"):
        try:
            with open(os.path.join(docker_root, "image", driver, "repositories.json"), encoding="utf-8") as stream:
                repositories = json.load(stream)["Repositories"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if any(image in references for references in repositories.values()):
            return True
    return False
