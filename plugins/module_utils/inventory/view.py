# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An inventory as the rules see it, with the problems found so far, and small readers that never raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.inventory import values
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    ERROR,
    WARNING,
    Inventory,
    Path,
    Problem,
    Setting,
    Variable,
    dotted,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import (
    MAIN_GROUPS,
    PLACEHOLDER,
    Key,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import Finding, listed, show

SITE, AUDIT = "site", "audit"
PURPOSES = (SITE, "plan", "redeploy", AUDIT)
"""What the run that follows will do. An audit changes nothing, so it forgives what only a set-up needs."""


Exists = Callable[[str], bool]
RoleOptions = Mapping[str, Mapping[str, Key]]


class View:
    """An inventory as the rules see it, and the problems found so far."""

    def __init__(
        self,
        inventory: Inventory,
        purpose: str = SITE,
        exists: Exists | None = None,
        roles: RoleOptions | None = None,
    ) -> None:
        self.inventory = inventory
        self.purpose = purpose
        self.exists = exists
        self.roles: RoleOptions = roles or {}
        self.settings = inventory.settings()
        self.served = self._main_hosts()
        self._by_host: dict[str, dict[str, Setting]] = {}
        self._found: dict[tuple[str, str, str, str, str], dict[str, list[str]]] = {}
        self.pools = self._map("metalserve_pools")
        self.models = self._map("metalserve_models")

    def _main_hosts(self) -> tuple[str, ...]:
        """Return the hosts of the three main groups, in inventory order."""
        main = {host for group in MAIN_GROUPS for host in self.inventory.group(group)}
        return tuple(host for host in self.inventory.hosts if host in main)

    def _map(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Return the well-formed entries of an inventory-wide map."""
        value = self.wide(name)
        if not isinstance(value, Mapping):
            return {}
        return {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, Mapping)}

    def setting(self, name: str) -> Setting | None:
        """Return the setting of an inventory-wide variable that most hosts have."""
        found = self.settings.get(name, [])
        return max(found, key=lambda setting: len(setting.hosts)) if found else None

    def setting_of(self, host: str, name: str) -> Setting | None:
        """Return the setting of a variable that a host has, or None."""
        if name not in self._by_host:
            self._by_host[name] = {host: found for found in self.settings.get(name, []) for host in found.hosts}
        return self._by_host[name].get(host)

    def wide(self, name: str) -> Any:
        """Return the value of an inventory-wide variable, or None."""
        setting = self.setting(name)
        return None if setting is None else setting.variable.value

    def lenient(self) -> str:
        """Return the severity of what only a set-up needs."""
        return WARNING if self.purpose == AUDIT else ERROR

    def who(self, hosts: Sequence[str]) -> str:
        """Return in words which hosts are meant, by group where one fits exactly."""
        if not hosts:
            return "no host"
        if len(hosts) == 1:
            return f"host {hosts[0]}"
        if set(hosts) == set(self.inventory.hosts):
            return "all hosts"
        for group, members in self.inventory.groups.items():
            if set(members) == set(hosts):
                return f"group {group}"
        more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
        return f"hosts {', '.join(hosts[:3])}{more}"

    def add(
        self,
        variable: str,
        value: str,
        problem: str,
        right: str,
        where: str = "",
        hosts: Sequence[str] = (),
        severity: str = ERROR,
    ) -> None:
        """Note a problem. The same one on further hosts is told once, with all of them."""
        places = self._found.setdefault((variable, value, problem, right, severity), {})
        known = places.setdefault(where, [])
        known.extend(host for host in hosts if host not in known)

    def add_finding(self, setting: Setting, finding: Finding, secret: bool = False) -> None:
        """Note what values.py found inside a setting."""
        variable = setting.variable
        shown = finding.about
        if shown is None:
            shown = values.SECRET if secret or finding.secret else show(at(variable.value, finding.path))
        self.add_at(setting, finding.path, finding.problem, finding.right, shown, finding.severity)

    def add_at(
        self,
        setting: Setting | None,
        path: Path,
        problem: str,
        right: str,
        shown: str | None = None,
        severity: str = ERROR,
    ) -> None:
        """Note a problem at a place inside a setting."""
        if setting is None:
            return
        variable = setting.variable
        if shown is None:
            shown = show(at(variable.value, path))
        where = "the command line (-e)" if variable.command_line else variable.origin(path)
        hosts = () if variable.command_line else setting.hosts
        self.add(dotted(variable.name, path), shown, problem, right, where, hosts, severity)

    def has_errors(self) -> bool:
        """Tell whether something was found that stops a run."""
        return any(severity == ERROR for *_problem, severity in self._found)

    def problems(self) -> list[Problem]:
        """Return all problems: errors first, then by place and name."""
        found = []
        for (variable, value, problem, right, severity), places in self._found.items():
            hosts = list(dict.fromkeys(host for some in places.values() for host in some))
            where = _places([place for place in places if place])
            who = "" if not hosts or (where and set(hosts) >= set(self.inventory.hosts)) else self.who(hosts)
            place = f"{where} ({who})" if where and who else where or who
            found.append(Problem(variable, value, problem, right, place, severity))
        return sorted(found, key=_order)


def _places(places: Sequence[str], most: int = 10) -> str:
    """Return places in one text, the lines of a file together: ``hosts.yml:19, 20 and 23``."""
    files: dict[str, list[str]] = {}
    for place in places[:most]:
        file, _unused, line = place.rpartition(":")
        known = files.setdefault(file if file and line.isdigit() else place, [])
        if file and line.isdigit():
            known.append(line)
    shown = [f"{file}:{listed(lines, 'and')}" if lines else file for file, lines in files.items()]
    return "; ".join(shown) + (f" and {len(places) - most} more places" if len(places) > most else "")


def _order(problem: Problem) -> tuple[Any, ...]:
    """Sort key: errors first; then file, line as a number, variable."""
    numbers = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", problem.where)]
    return (problem.severity != ERROR, numbers, problem.variable, problem.problem)


def at(value: Any, path: Path) -> Any:
    """Return what stands at a place inside a value; None where there is nothing."""
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def whole(value: Any, default: int | None = None) -> int | None:
    """Return a whole number of 0 or more, ``default`` where there is none, None where there is something else."""
    if value is None:
        return default
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text(value: Any) -> str:
    """Return a text; an empty one for anything else, and for a placeholder, which values.py has refused."""
    return value if isinstance(value, str) and PLACEHOLDER not in value else ""


def setting_or(setting: Setting | None) -> Setting:
    """Return the setting, or one for no host: rules over pools always have one."""
    return setting or Setting(Variable("metalserve_pools", {}), ())
