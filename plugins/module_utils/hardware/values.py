# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Small readers of values as kernels and drivers print them. What is not understood is None, never a default."""

from __future__ import annotations

import json
import re
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import UNLIMITED

_NOT_KNOWN = frozenset(
    {
        "",
        "n/a",
        "na",
        "not available",
        "not supported",
        "unsupported",
        "unknown",
        "unknown error",
        "err!",
        "error",
        "none found",
        "not found",
        "insufficient permissions",
        "requested functionality has been deprecated",
        "function not found",
        "gpu is lost",
        "gpu requires reset",
        "reset required",
        "invalid argument",
        "no data",
    }
)

_NUMBER = re.compile(r"\A([+-]?\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z%/()]*)\Z")
_INTEGER = re.compile(r"\A[+-]?\d{1,19}\Z", re.ASCII)

_MIB = {
    "b": 1.0 / 1048576,
    "kib": 1.0 / 1024,
    "kb": 1.0 / 1024,
    "mib": 1.0,
    "mb": 1.0,
    "gib": 1024.0,
    "gb": 1024.0,
    "tib": 1048576.0,
}

JSON_DEPTH = 64
"""Deepest JSON that is read."""


def known(text: Optional[str]) -> Optional[str]:
    """Return ``text`` without surrounding blanks, or None where it is one of the driver's ways to say that it does
    not know.
    """
    if text is None:
        return None
    words = text.strip()
    bare = words[1:-1].strip() if words.startswith("[") and words.endswith("]") else words
    low = bare.lower()
    if low in _NOT_KNOWN or low.startswith(("unknown error", "gpu is lost", "error:")):
        return None
    return words


def integer(text: Optional[str]) -> Optional[int]:
    """Return a plain decimal number, or None."""
    words = known(text)
    if words is None or not _INTEGER.match(words):
        return None
    return int(words)


def quantity(text: Optional[str], *units: str) -> Optional[float]:
    """Return the number of ``37 C`` where the unit is one of ``units`` (any case); None for another unit or no
    number.
    """
    words = known(text)
    match = _NUMBER.match(words) if words is not None else None
    if match is None:
        return None
    if match.group(2).lower() not in {unit.lower() for unit in units}:
        return None
    return float(match.group(1))


def whole(text: Optional[str], *units: str) -> Optional[int]:
    """Return ``quantity`` as a whole number, or None."""
    number = quantity(text, *units)
    return None if number is None or number != int(number) else int(number)


def mebibytes(text: Optional[str]) -> Optional[int]:
    """Return ``143771 MiB`` (or another binary unit) in MiB; None without a unitor number, or where it is negative."""
    words = known(text)
    match = _NUMBER.match(words) if words is not None else None
    if match is None:
        return None
    factor = _MIB.get(match.group(2).lower())
    number = float(match.group(1))
    return None if factor is None or number < 0 else int(number * factor)


def switch(text: Optional[str]) -> Optional[bool]:
    """Return True for Yes, Enabled, Active, On; False for No, Disabled, Not Active, Off; None for anything else."""
    words = (known(text) or "").lower()
    if words in ("yes", "enabled", "active", "on", "true", "1"):
        return True
    if words in ("no", "disabled", "not active", "inactive", "off", "false", "0"):
        return False
    return None


def selected(text: Optional[str]) -> Optional[str]:
    """Return the word in brackets of ``always [madvise] never``, or None."""
    match = re.search(r"\[([\w+-]+)\]", text or "")
    return match.group(1) if match else None


def limit(text: Optional[str]) -> Optional[int]:
    """Return a resource limit: a number, or ``unlimited`` / ``infinity`` as UNLIMITED; None for anything else."""
    words = (text or "").strip().lower()
    if words in ("unlimited", "infinity", "-1", "18446744073709551615"):
        return UNLIMITED
    if not _INTEGER.match(words):
        return None
    number = int(words)
    return None if number < 0 else min(number, UNLIMITED)


def cpu_list(text: Optional[str]) -> Optional[list[int]]:
    """Return the processors of ``0-3,8,10-14:2`` sorted, [] for an empty list; None where it is not one or is
    absurdly large.
    """
    if text is None:
        return None
    words = text.strip()
    if not words:
        return []
    found: set[int] = set()
    for word in words.split(","):
        match = re.match(r"\A\s*(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?\s*\Z", word, re.ASCII)
        if match is None:
            return None
        first = int(match.group(1))
        last = int(match.group(2) or first)
        step = int(match.group(3) or 1)
        if last < first or step < 1 or last > 65535:
            return None
        found.update(range(first, last + 1, step))
    return sorted(found)


def json_value(text: Optional[str]) -> tuple[Any, Optional[str]]:
    """Return the value of a JSON text and None, or None and what is wrong with it. Never raises."""
    if text is None:
        return None, "not read"
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    if deepest > 10 * JSON_DEPTH:
        return None, "nested too deeply"
    try:
        return json.loads(text), None
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"[:200]


def json_object(text: Optional[str]) -> tuple[Optional[dict[str, Any]], Optional[str]]:
    """Return a JSON object and None, or None and what is wrong with it."""
    value, error = json_value(text)
    if error is not None:
        return None, error
    if not isinstance(value, dict):
        return None, "not a JSON object"
    return value, None


def get(value: Any, *path: str) -> Any:
    """Return what lies at ``path`` in nested mappings, or None."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def as_str(value: Any) -> Optional[str]:
    """Return a string, or None for anything else."""
    return value if isinstance(value, str) else None


def as_int(value: Any) -> Optional[int]:
    """Return a whole number, or None for anything else (booleans too)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_bool(value: Any) -> Optional[bool]:
    """Return a boolean, or None for anything else."""
    return value if isinstance(value, bool) else None


def as_strings(value: Any) -> list[str]:
    """Return the strings of a list; [] for anything else."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def as_table(value: Any) -> dict[str, str]:
    """Return a mapping of strings; {} for anything else. Numbers and booleans become text."""
    if not isinstance(value, dict):
        return {}
    return {str(key): one if isinstance(one, str) else json.dumps(one) for key, one in value.items()}
