# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts: addresses that the others can reach, operating systems that can be set up."""

from __future__ import annotations

import ipaddress
import re

from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    ERROR,
    WARNING,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import OS_VARIABLES, PLACEHOLDER
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import show
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    AUDIT,
    View,
    text,
)


def placeholders(view: View) -> None:
    """How hosts are reached is no longer what the example says."""
    for name, right in (
        ("ansible_host", "write the host's address, such as 10.0.0.11"),
        ("ansible_user", "write the login of the hosts, a user who may use sudo"),
    ):
        for setting in view.settings.get(name, []):
            if isinstance(setting.variable.value, str) and PLACEHOLDER in setting.variable.value:
                view.add_at(setting, (), "is still the placeholder of the example", right)


def addresses(view: View) -> None:
    """Engines and gateways have an address that the other hosts can reach, each its own."""
    several = len(view.served) > 1
    by_address: dict[str, list[str]] = {}
    for host in view.served:
        name = "metalserve_address" if view.inventory.get(host, "metalserve_address") is not None else "ansible_host"
        value = text(view.inventory.get(host, name, host)).strip()
        if not value:
            continue
        setting = view.setting_of(host, name)
        right = "write the host's private address, such as 10.0.0.11, as metalserve_address"
        if host in view.inventory.group("engines"):
            by_address.setdefault(value, []).append(host)
        if setting is None:
            continue
        if name == "metalserve_address" and re.search(r"[\s/@]|\A\[|\A[^:]+:\d+\Z", value):
            view.add_at(setting, (), "is not an address: no scheme, user, port or path belongs here", right)
            continue
        problem = _unfit(value, several)
        if problem:
            severity = WARNING if "public" in problem else ERROR
            if severity == ERROR or host in view.inventory.group("engines"):
                view.add_at(setting, (), problem, right, severity=severity)
    for value, hosts in by_address.items():
        if len(hosts) > 1:
            view.add(
                "metalserve_address",
                show(value),
                f"is the address of {len(hosts)} engine nodes: their ports would be the same",
                "give each node its own private address as metalserve_address",
                hosts=hosts,
            )


def _unfit(value: str, several: bool) -> str:
    """Return why an address cannot be reached by other hosts (or should not), or an empty text."""
    alone = "is this machine itself; the other hosts cannot reach it there" if several else ""
    if value.lower() == "localhost":
        return alone
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return "is not an address: four numbers from 0 to 255 are needed" if re.fullmatch(r"[\d.]+", value) else ""
    if address.is_unspecified or address.is_multicast:
        return "is not the address of one host"
    if address.is_loopback:
        return alone
    return "" if address.is_private else "is a public address; engines belong on a private one"


def operating_system(view: View) -> None:
    """Where the inventory declares an operating system, it is one that can be set up."""
    for name in OS_VARIABLES:
        for setting in view.settings.get(name, []):
            value = text(setting.variable.value)
            if not value or (name == "metalserve_os_family" and value not in ("Debian", "RedHat")):
                continue
            good = ("Debian", "Ubuntu") if name == "ansible_distribution" else ("Debian",)
            if value in good:
                continue
            red = value in ("RedHat", "Rocky", "AlmaLinux", "CentOS", "Fedora", "OracleLinux", "RHEL")
            if red and view.purpose == AUDIT:
                continue
            view.add_at(
                setting,
                (),
                "is an operating system that can be audited, but not set up"
                if red
                else "is not a supported operating system",
                "use Debian 12 or 13, or Ubuntu 22.04 or 24.04"
                + ("; playbooks/audit.yml works on this host as it is" if red else ""),
            )
