# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them (``88G``, ``512m``) and as programs need them (bytes)."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_FACTORS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_SIZE = re.compile(r"\A(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\Z", re.IGNORECASE)


def parse_size(value: int | str) -> int:
    """Return ``value`` in bytes; suffixes are powers of 1024, as Docker reads them (``88G`` = 88 GiB).

    Raises ValueError with the value and an example for anything else, negative numbers and booleans included.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is not a size; write bytes or a number with a suffix, such as 88G")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value!r} is negative; a size is 0 or more bytes")
        return value
    match = _SIZE.match(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with a suffix, such as 88G")
    return int(float(match.group(1)) * _FACTORS[match.group(2).lower()])


def format_size(size: int) -> str:
    """Return ``size`` bytes in the largest binary unit that leaves at least 1, to one decimal (``88.0 GiB``)."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
