# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A program as one file: a zipapp whose bytes depend on its content alone, so an unchanged one is never replaced.

Nodes may have no way to a package index and any Python from 3.9 on: the archive carries the agent, prometheus_client
and pynvml (all pure Python, from the controller's own environment) and is run as ``python3 -I metalserve-agent.pyz``.
The scheduled audit travels the same way and needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Iterable, Mapping

FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The zip format's earliest date: an archive holds no time of its build."""

MAIN = b"""import sys

from metalserve_agent.__main__ import main

sys.exit(main())
"""
VERSION_FILE = "metalserve_agent/_version.py"


def bundle(members: Mapping[str, bytes], main: bytes = MAIN, version_file: str = VERSION_FILE) -> tuple[bytes, str]:
    """Return the archive of ``members`` (path -> content) and its version: 12 digits of a hash over all of them.

    ``main`` is what the archive runs. The version is written into ``version_file``: the agent shows it as a label of
    metalserve_agent_info.
    """
    digest = hashlib.sha256()
    for path in sorted(members):
        digest.update(path.encode() + b"\0" + hashlib.sha256(members[path]).digest())
    version = digest.hexdigest()[:12]
    content = {**members, "__main__.py": main, version_file: f'VERSION = "{version}"\n'.encode()}
    for folder in {parent for path in content for parent in _parents(path)}:
        content.setdefault(f"{folder}/__init__.py", b"")  # zipimport wants packages to be regular ones
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path in sorted(content):
            entry = zipfile.ZipInfo(path, FIRST_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            archive.writestr(entry, content[path], compresslevel=9)
    return stream.getvalue(), version


def read_tree(folder: str, prefix: str, skip: Iterable[str] = ()) -> dict[str, bytes]:
    """Return the .py files and licences below ``folder`` as archive members below ``prefix``. Raises OSError.

    ``skip`` names subfolders that are left out.
    """
    left_out = {"__pycache__", *skip}
    members: dict[str, bytes] = {}
    for current, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out]
        for name in files:
            if name.endswith((".py", ".typed")) or name.startswith(("LICENSE", "NOTICE")):
                path = os.path.join(current, name)
                with open(path, "rb") as stream:
                    members[os.path.join(prefix, os.path.relpath(path, folder))] = stream.read()
    return members


def _parents(path: str) -> Iterable[str]:
    parts = path.split("/")[:-1]
    return ("/".join(parts[: depth + 1]) for depth in range(len(parts)))
