# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Models that come as one tar file: what is in it, and unpacking it without trusting its names."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator

from ansible_collections.metal.serve.plugins.module_utils.models.store import Expected, StoreError

_CHUNK = 4 * 1024 * 1024


def _members(archive: tarfile.TarFile, origin: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for member in archive:
        path = os.path.normpath(member.name)
        if member.isdir():
            continue
        if path.startswith(("/", "..")):
            raise StoreError(f"{origin}: {member.name} points outside the model's folder")
        if not member.isfile():
            raise StoreError(f"{origin}: {member.name} is a link or a device; pack regular files alone")
        yield path, member


def _common_top(paths: list[str]) -> str:
    tops = {path.split("/", 1)[0] for path in paths if "/" in path}
    if len(tops) == 1 and all("/" in path for path in paths):
        return tops.pop() + "/"
    return ""


def _open(path: str) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:*")
    except tarfile.TarError as error:
        raise StoreError(f"{path} is not a tar archive that this Python reads (.tar, .tar.gz, .tar.xz)") from error


def list_archive(path: str, hashed: bool = False) -> list[Expected]:
    """Return the files in the tar at ``path`` as they will lie in the model's folder; ``hashed`` reads them as well.

    A single common top folder is dropped. Raises StoreError for names that leave the folder, links and damaged
    archives.
    """
    found: list[Expected] = []
    try:
        with _open(path) as archive:
            for name, member in _members(archive, path):
                sha256 = _hash_member(archive, member) if hashed else ""
                found.append(Expected(name, member.size, sha256))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StoreError(f"{path} cannot be read to its end: {error}") from error
    top = len(_common_top([item.path for item in found]))
    if not found:
        raise StoreError(f"{path} holds no files")
    return [Expected(item.path[top:], item.size, item.sha256) for item in found]


def _hash_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    digest = hashlib.sha256()
    stream = archive.extractfile(member)
    if stream is None:
        raise StoreError(f"{member.name} cannot be read")
    for chunk in iter(lambda: stream.read(_CHUNK), b""):
        digest.update(chunk)
    return digest.hexdigest()


def unpack(path: str, folder: str) -> list[Expected]:
    """Unpack the tar at ``path`` into ``folder`` and return what was written, with the hash of the bytes read.

    A file that is already there with its right size is written again: an earlier run may have been cut off inside it.
    Raises StoreError and OSError.
    """
    top = len(_common_top([item.path for item in _names(path)]))
    written: list[Expected] = []
    try:
        with _open(path) as archive:
            for name, member in _members(archive, path):
                target = os.path.join(folder, name[top:])
                os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
                written.append(Expected(name[top:], member.size, _write_member(archive, member, target)))
    except (tarfile.TarError, EOFError) as error:
        raise StoreError(f"{path} cannot be read to its end: {error}") from error
    return written


def _names(path: str) -> list[Expected]:
    return [Expected(name, 0) for name in _raw_names(path)]


def _raw_names(path: str) -> list[str]:
    try:
        with _open(path) as archive:
            return [name for name, _member in _members(archive, path)]
    except (tarfile.TarError, EOFError) as error:
        raise StoreError(f"{path} cannot be read to its end: {error}") from error


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> str:
    digest = hashlib.sha256()
    stream = archive.extractfile(member)
    if stream is None:
        raise StoreError(f"{member.name} cannot be read")
    with open(target, "wb") as output:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()
