# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Kernel settings: which apply to this machine, and whether another file overrides ours at boot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Set only where the running value is not higher already: to lower them would take something away.
FLOORS = frozenset(
    {"fs.file-max", "fs.nr_open", "net.core.netdev_max_backlog", "net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog"}
)


def normal(value: str) -> str:
    """Return ``value`` with single spaces, as two readings of one setting compare (``32768\\t60999``)."""
    return " ".join(str(value).split())


def applicable(wanted: Mapping[str, str], running: Mapping[str, str], numa_nodes: int) -> dict[str, str]:
    """Return the settings of ``wanted`` that belong into this machine's file.

    ``running`` is what the kernel has now (a key that it does not know is missing). A floor is left out where the
    kernel is above it; NUMA balancing where there is one node, so nothing to balance; a key that this kernel does not
    know always.
    """
    chosen = {}
    for key, value in wanted.items():
        if key not in running:
            continue
        if key == "kernel.numa_balancing" and numa_nodes < 2:
            continue
        if key in FLOORS and int(normal(running[key])) > int(value):
            continue
        chosen[key] = normal(value)
    return chosen


def parse_conf(text: str) -> dict[str, str]:
    """Return key -> value of a sysctl.d file; the last one wins, ``/`` in keys is read as ``.``, a leading ``-`` is
    dropped."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\A\s*-?([A-Za-z0-9_][^=#;\s]*)\s*=\s*(.*?)\s*\Z", line)
        if match is not None:
            found[match.group(1).replace("/", ".")] = normal(match.group(2))
    return found


def overridden(settings: Mapping[str, str], own_name: str, others: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return key -> path of the file that wins over ours at boot with another value.

    ``others`` are (path, text) of all other files; systemd-sysctl reads all files in the order of their names,
    whatever their folder, so a name that sorts after ``own_name`` wins.
    """
    found: dict[str, str] = {}
    values: dict[str, str] = {}
    for path, text in sorted(others, key=lambda other: other[0].rsplit("/", 1)[-1]):
        if path.rsplit("/", 1)[-1] <= own_name:
            continue
        for key, value in parse_conf(text).items():
            if key in settings:
                values[key] = value
                found[key] = path
    return {key: path for key, path in found.items() if values[key] != normal(settings[key])}
