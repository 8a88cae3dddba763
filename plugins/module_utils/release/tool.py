# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Modules of this collection as one executable file, so that a node runs the same code as the controller and
the tests.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The zip format's earliest date: the bytes depend on the content alone."""

HEAD = b"#!/usr/bin/python3 -I\n"


def source_of(module: ModuleType) -> bytes:
    """Return a module's source, also where it was itself loaded from an archive. Raises ValueError without one."""
    loader: Any = module.__loader__
    source = loader.get_source(module.__name__) if hasattr(loader, "get_source") else None
    if source is None:
        raise ValueError(f"{module.__name__} has no source")
    return str(source).encode("utf-8")


def archive(modules: Sequence[ModuleType], main: ModuleType) -> bytes:
    """Return a zipapp of ``modules`` and ``main``, whose function ``main`` it runs. Raises ValueError."""
    members = {f"{module.__name__.replace('.', '/')}.py": source_of(module) for module in [*modules, main]}
    for path in list(members):
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            members.setdefault("/".join([*parts[:depth], "__init__.py"]), b"")
    members["__main__.py"] = f"import sys\n\nfrom {main.__name__} import main\n\nsys.exit(main())\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for path in sorted(members):
            entry = zipfile.ZipInfo(path, FIRST_DATE)
            entry.compress_type = zipfile.ZIP_STORED  # stored: other versions of zlib give other bytes
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, members[path])
    return HEAD + stream.getvalue()
