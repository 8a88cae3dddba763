# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes and canonical JSON: the two things every writer of a file needs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from typing import Any


def canonical_json(value: Any) -> str:
    """Return ``value`` as JSON whose bytes depend on the content alone (sorted keys, final newline)."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def sha256_text(text: str) -> str:
    """Return the hex SHA-256 of ``text`` in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def write_atomic(path: str, text: str, mode: int = 0o644) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the whole new one, also after a crash.

    The temporary file is made in the same folder, synced and renamed. Raises OSError; the old file then still stands.
    """
    folder = os.path.dirname(path) or "."
    handle, temporary = tempfile.mkstemp(prefix=".metalserve-", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
