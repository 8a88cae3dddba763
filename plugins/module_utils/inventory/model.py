# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The plain values that the checks take and give: an inventory, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ERROR = "error"
WARNING = "warning"

Path = tuple[Any, ...]
"""Place inside a value: mapping keys and list positions, outermost first; ``()`` is the value itself."""


@dataclass(frozen=True)
class Unresolved:
    """Stands in a value for a template or an encrypted text that could not be resolved.

    ``shown`` is what the file says, ``problem`` and ``right`` are for the report.
    """

    shown: str
    problem: str
    right: str


@dataclass(frozen=True)
class Variable:
    """One variable as one or several hosts have it.

    ``origins`` maps places inside the value to ``file:line``; ``command_line`` is true for ``-e``.
    """

    name: str
    value: Any
    origins: Mapping[Path, str] = field(default_factory=dict, compare=False)
    command_line: bool = False

    def origin(self, path: Path) -> str:
        """Return ``file:line`` of the innermost place on the way to ``path`` that is known, or an empty text."""
        for length in range(len(path), -1, -1):
            found = self.origins.get(path[:length])
            if found:
                return found
        return ""


@dataclass(frozen=True)
class Setting:
    """A variable with the hosts that have exactly this value from the same place, in inventory order."""

    variable: Variable
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class VariableFile:
    """A file or folder under ``group_vars`` or ``host_vars``; ``name`` is the group or host that it is for, and empty for a
    ``folder`` that is merely called like one of these two."""

    folder: str
    name: str
    path: str


@dataclass(frozen=True)
class Inventory:
    """What the checks look at. Nothing here was asked from a host.

    ``groups`` maps each group to all its hosts, those of child groups included; ``children`` maps each group to its
    direct child groups; ``variables`` maps each host to its variables. ``source`` says where the inventory stands;
    ``files`` are its variable files.
    """

    groups: Mapping[str, Sequence[str]]
    children: Mapping[str, Sequence[str]]
    variables: Mapping[str, Mapping[str, Variable]]
    source: str = "the inventory"
    files: Sequence[VariableFile] = ()

    @classmethod
    def of(
        cls,
        groups: Mapping[str, Sequence[str]],
        children: Mapping[str, Sequence[str]],
        hostvars: Mapping[str, Mapping[str, Any]],
    ) -> Inventory:
        """Return an inventory from plain values (``hostvars``: host -> name -> value), for callers outside Ansible."""
        return cls(
            groups,
            children,
            {host: {name: Variable(name, value) for name, value in known.items()} for host, known in hostvars.items()},
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, in inventory order."""
        return tuple(self.variables)

    def group(self, name: str) -> tuple[str, ...]:
        """Return the hosts of a group; none where there is no such group."""
        return tuple(self.groups.get(name, ()))

    def get(self, host: str, name: str, default: Any = None) -> Any:
        """Return the value of a variable on a host."""
        found = self.variables.get(host, {}).get(name)
        return default if found is None else found.value

    def settings(self) -> dict[str, list[Setting]]:
        """Return every variable with its different values and the hosts that have each; 1 and true are different."""
        by_identity: dict[tuple[str, int], list[str]] = {}
        by_value: dict[tuple[str, str, str, bool], tuple[Variable, list[str]]] = {}
        for host, known in self.variables.items():
            for name, variable in known.items():
                hosts = by_identity.get((name, id(variable)))
                if hosts is None:
                    same = (name, repr(variable.value), variable.origin(()), variable.command_line)
                    hosts = by_identity[(name, id(variable))] = by_value.setdefault(same, (variable, []))[1]
                hosts.append(host)
        found: dict[str, list[Setting]] = {}
        for variable, hosts in by_value.values():
            found.setdefault(variable.name, []).append(Setting(variable, tuple(hosts)))
        return found


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong (or, as a warning, doubtful).

    ``variable`` is the dotted name, ``value`` the value as the report shows it (empty: there is none to show),
    ``right`` what would be right (lines after the first are commands), ``where`` the file and line or the hosts and
    groups.
    """

    variable: str
    value: str
    problem: str
    right: str
    where: str = ""
    severity: str = ERROR

    def as_dict(self) -> dict[str, str]:
        """Return the problem as plain data, for JSON."""
        return {
            "where": self.where,
            "variable": self.variable,
            "value": self.value,
            "problem": self.problem,
            "right": self.right,
            "severity": self.severity,
        }


def dotted(name: str, path: Iterable[Any]) -> str:
    """Return a place as people write it: ``metalserve_api_keys[0].key``."""
    text = name
    for part in path:
        text += f"[{part}]" if isinstance(part, int) and not isinstance(part, bool) else f".{part}"
    return text
