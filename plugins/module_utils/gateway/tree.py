# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A tree of nginx configuration files that is tested whole, then swapped in at once.

    /etc/nginx/nginx.conf                          one include line
    /etc/nginx/metalserve/current -> releases/<hash>
    /etc/nginx/metalserve/releases/<hash>/...      everything else

nginx resolves relative names against the folder of its main file. So a copy of ``nginx.conf`` beside a folder
``metalserve/current`` anywhere on the disk is a complete private tree that ``nginx -t -c`` can judge before the real
one is touched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass, field

from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic

FOLDER = "metalserve"
MAIN = "nginx.conf"
PLACEHOLDER = "@metalserve_release@"
"""Stands for the tree's identity in the files; the running nginx answers with it, so that a reload can be proven."""

FOLDER_PLACEHOLDER = "@metalserve_tree@"
"""Stands for the absolute folder of the files, for what nginx does not resolve itself (Lua). A private copy names
itself, so that it is the new code that is tested."""

RELATIVE = re.compile(r"\A[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*\Z")
PLAIN_MODE = 0o644
SECRET_MODE = 0o600


class TreeError(Exception):
    """The tree cannot be written or nginx refuses it; the text is for the person who runs it."""


@dataclass(frozen=True)
class Tree:
    """What is wanted: the main file and the files below ``metalserve/current``, by relative name.

    ``secrets`` and ``copied`` name files for root alone; ``copied`` ones were made on the machine itself (a generated
    certificate), so they do not take part in the release's name: a check can tell it before they exist.
    """

    main: bytes
    files: dict[str, bytes]
    secrets: frozenset[str] = field(default_factory=frozenset)
    copied: frozenset[str] = field(default_factory=frozenset)

    @property
    def release(self) -> str:
        """Return the first 12 hex digits of a SHA-256 over names and contents: the name of the release's folder."""
        digest = hashlib.sha256(hashlib.sha256(self.main).digest())
        for name in sorted(set(self.files) - self.copied):
            digest.update(f"{name}\0".encode() + hashlib.sha256(self.files[name]).digest())
        return digest.hexdigest()[:12]

    @property
    def identity(self) -> str:
        """Return the release and, where files were copied, 8 hex digits over those: what a running nginx answers."""
        if not self.copied:
            return self.release
        digest = hashlib.sha256()
        for name in sorted(self.copied):
            digest.update(f"{name}\0".encode() + hashlib.sha256(self.files[name]).digest())
        return f"{self.release}-{digest.hexdigest()[:8]}"

    def is_private(self, name: str) -> bool:
        """Return whether a file is for root alone and never shown."""
        return name in self.secrets or name in self.copied

    def mode(self, name: str) -> int:
        """Return the permission bits of a file: secrets are for root alone."""
        return SECRET_MODE if self.is_private(name) else PLAIN_MODE

    def folder(self, root: str) -> str:
        """Return where the files lie once they are current."""
        return os.path.join(root, FOLDER, "releases", self.release)

    def content(self, name: str, folder: str) -> bytes:
        """Return the bytes of a file for ``folder``, with identity and folder filled in (never in a private one)."""
        data = self.files[name]
        if self.is_private(name):
            return data
        data = data.replace(PLACEHOLDER.encode(), self.identity.encode())
        return data.replace(FOLDER_PLACEHOLDER.encode(), folder.encode())


def check_names(names: list[str]) -> None:
    """Raise TreeError unless every name stays below the tree."""
    for name in names:
        if not RELATIVE.match(name) or ".." in name.split("/"):
            raise TreeError(f"file name {name!r} must be relative, without dots at the start of a part")


def current_release(root: str) -> str | None:
    """Return the hash that ``metalserve/current`` points at, or None."""
    try:
        return os.path.basename(os.readlink(os.path.join(root, FOLDER, "current")))
    except OSError:
        return None


def read_current(root: str) -> dict[str, tuple[bytes, int]]:
    """Return every file below ``metalserve/current``: name -> (content, permission bits)."""
    base = os.path.join(root, FOLDER, "current")
    return _read_folder(base)


def read_main(root: str) -> bytes | None:
    """Return the bytes of the main file, or None where it is missing."""
    try:
        with open(os.path.join(root, MAIN), "rb") as stream:
            return stream.read()
    except OSError:
        return None


def is_current(root: str, tree: Tree) -> bool:
    """Return whether the disk holds exactly ``tree``: same link, names, contents and modes, nothing else."""
    if current_release(root) != tree.release or read_main(root) != tree.main:
        return False
    folder = tree.folder(root)
    wanted = {name: (tree.content(name, folder), tree.mode(name)) for name in tree.files}
    return read_current(root) == wanted


def stage(root: str, tree: Tree) -> str:
    """Write the whole tree into a private folder (0700) in ``root`` and return its path. The caller removes it."""
    folder = tempfile.mkdtemp(prefix=".metalserve-", dir=root)
    try:
        _write(os.path.join(folder, MAIN), tree.main, PLAIN_MODE)
        _write_files(os.path.join(folder, FOLDER, "current"), tree, os.path.join(folder, FOLDER, "current"))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def swap(root: str, tree: Tree) -> None:
    """Make a tested tree the current one. A crash between two steps is repaired by the next run.

    The order matters: the new files first, then the link (one rename), then the main file (one rename).
    """
    releases = os.path.join(root, FOLDER, "releases")
    os.makedirs(releases, mode=0o755, exist_ok=True)
    target = tree.folder(root)
    fresh = tempfile.mkdtemp(prefix=".new-", dir=releases)
    os.chmod(fresh, 0o755)
    _write_files(fresh, tree, target)
    broken = None
    if os.path.lexists(target):
        # The same hash with other content: somebody edited it in place.
        broken = tempfile.mkdtemp(prefix=".edited-", dir=releases)
        os.rename(target, os.path.join(broken, tree.release))
    os.rename(fresh, target)
    point_at(root, tree.release)
    if read_main(root) != tree.main:
        write_main(root, tree.main)
    if broken is not None:
        shutil.rmtree(broken, ignore_errors=True)


def write_main(root: str, content: bytes) -> None:
    """Replace the main file in one rename."""
    write_atomic(os.path.join(root, MAIN), content.decode("utf-8", "replace"), PLAIN_MODE)


def point_at(root: str, release: str) -> None:
    """Turn ``metalserve/current`` to ``release`` in one rename."""
    link = os.path.join(root, FOLDER, "current")
    if os.path.isdir(link) and not os.path.islink(link):
        raise TreeError(f"{link} is a folder; it must be a link that this role makes: move it away")
    temporary = f"{link}.new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(os.path.join("releases", release), temporary)
    os.replace(temporary, link)


def prune(root: str, keep: int) -> None:
    """Remove releases beyond the newest ``keep`` (the current one always stays) and what an interrupted run left."""
    releases = os.path.join(root, FOLDER, "releases")
    current = current_release(root)
    others = []
    for entry in os.scandir(releases):
        if entry.name.startswith("."):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != current:
            others.append((entry.stat().st_mtime, entry.path))
    for _age, path in sorted(others, reverse=True)[max(0, keep - 1) :]:
        shutil.rmtree(path, ignore_errors=True)


def explain(output: str, staged: str, root: str, tree: Tree) -> str:
    """Return nginx's own error line with the final path, and the line it points at unless that file is secret."""
    # What a Lua file is refused for stands on the line after.
    output = re.sub(r":\n\s+", ": ", output)
    lines = [line.strip() for line in output.splitlines() if re.search(r"\[(emerg|crit|alert|error)\]", line)]
    line = lines[0] if lines else (output.strip().splitlines() or ["nginx -t said nothing"])[-1]
    line = re.sub(r"\A.*?(?=\[(?:emerg|crit|alert|error)\])", "", line).replace("nginx: ", "", 1)
    line = re.sub(r"\] \d+#\d+: ", "] ", line).replace(staged, root.rstrip("/"))
    match = re.search(rf"{re.escape(root.rstrip('/'))}/{FOLDER}/current/(\S+):(\d+)\Z", line)
    if match is None:
        return line
    name, number = match.group(1), int(match.group(2))
    if tree.is_private(name):
        # nginx quotes the offending text, and here that may be a key.
        return f"[emerg] a line that nginx does not accept in {name}:{number}, a file with secrets"
    if name not in tree.files:
        return line
    text = tree.content(name, tree.folder(root)).decode("utf-8", "replace").splitlines()
    return f"{line}: {text[number - 1].strip()}" if 0 < number <= len(text) else line


def _write_files(base: str, tree: Tree, folder: str) -> None:
    """Write all files of a tree below ``base`` as they are to be in ``folder``."""
    for name in tree.files:
        _write(os.path.join(base, name), tree.content(name, folder), tree.mode(name))


def _read_folder(base: str) -> dict[str, tuple[bytes, int]]:
    found: dict[str, tuple[bytes, int]] = {}
    for folder, _folders, names in os.walk(base):
        for name in names:
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as stream:
                    mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
                    found[os.path.relpath(path, base)] = (stream.read(), mode)
            except OSError:
                found[os.path.relpath(path, base)] = (b"", -1)
    return found


def _write(path: str, data: bytes, mode: int) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(path, mode)
