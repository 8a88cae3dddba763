# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Which systemd units still run with the settings of before.

A run that is interrupted between a new file and the restart that it wants leaves nothing that the next run would see: the file
is as it should be. What tells is time: the file is newer than the unit's last start or reload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROPERTIES = ("ActiveState", "NeedDaemonReload", "StateChangeTimestampMonotonic")


def parse_show(text: str, units: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read ``systemctl show --property=… UNIT…``: a block of ``Name=value`` lines for each unit, in the order asked for.

    Raises ValueError where there are not as many blocks as units.
    """
    blocks = [block for block in text.strip().split("\n\n") if block.strip()]
    if len(blocks) != len(units):
        raise ValueError(f"systemctl described {len(blocks)} units instead of {len(units)}")
    return {
        unit: dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        for unit, block in zip(units, blocks)
    }


def behind(
    shown: Mapping[str, Mapping[str, str]], written: Mapping[str, float], now: float, monotonic: float
) -> list[str]:
    """Return the running units whose files were written after their last start or reload.

    ``written`` maps a unit to the time of its newest file; ``now`` and ``monotonic`` are the same moment on the two clocks
    of that machine. All in seconds.
    """
    found = []
    for unit, properties in shown.items():
        moment = properties.get("StateChangeTimestampMonotonic", "")
        if properties.get("ActiveState") != "active" or not moment.isdigit() or int(moment) == 0:
            continue
        # Reckoned back from now: a clock that was set meanwhile, as at a boot, does not matter then.
        changed_at = now - (monotonic - int(moment) / 1e6)
        if written.get(unit, 0.0) > changed_at:
            found.append(unit)
    return found


def outdated(shown: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the units whose unit files systemd has to read again."""
    return [unit for unit, properties in shown.items() if properties.get("NeedDaemonReload") == "yes"]
