# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts: addresses that the others can reach, operating systems that can be set up."""

from __future__ import annotations

import ipaddress
import re

from ansible_collections.metal.serve.plugins.module_utils.inventory.model import WARNING, Unresolved
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import OS_VARIABLES, PLACEHOLDER
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import show
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    AUDIT,
    View,
    text,
)

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def placeholders(view: View) -> None:
    """How hosts are reached is no longer what the example says."""
    for name, right in (
        ("ansible_host", "write the host's address, such as 10.0.0.11"),
        ("ansible_user", "write the login of the hosts, a user who may use sudo"),
    ):
        for setting in view.settings.get(name, []):
            if isinstance(setting.variable.value, str) and PLACEHOLDER in setting.variable.value:
                view.add_at(setting, (), "is still the placeholder of the example", right)


def names(view: View) -> None:
    """An inventory name can be a file's name, a label and a word in nginx's configuration, for it becomes all three."""
    for host in view.served:
        if not _HOST_NAME.fullmatch(host):
            view.add(
                f"host {host}",
                "",
                "has a name that will not do",
                "choose letters, digits, dots, dashes and underscores; its address goes into ansible_host",
                where=view.inventory.source,
            )


def addresses(view: View) -> None:
    """Each host has an address that the others can reach: a number, since neither balancer nor firewall asks a name."""
    several = len(view.served) > 1
    by_address: dict[str, list[str]] = {}
    right = "write the host's private address, such as 10.0.0.11, as metalserve_address"
    for host in view.served:
        name = "metalserve_address" if view.inventory.get(host, "metalserve_address") is not None else "ansible_host"
        setting = view.setting_of(host, name)
        given = view.inventory.get(host, name, host)
        if isinstance(given, Unresolved) and name == "ansible_host":
            view.add_at(setting, (), given.problem, given.right, given.shown)
        value = text(given).strip()
        if not value:
            continue
        if host in view.inventory.group("engines"):
            by_address.setdefault(value, []).append(host)
        problem = _unfit(value, several)
        public = "public" in problem
        if not problem or (public and host not in view.inventory.group("engines")):
            continue
        severity = WARNING if public else view.lenient()
        if setting is None:
            why = f"is missing, and the host's name {problem}"
            view.add("metalserve_address", "", why, right, hosts=[host], severity=severity)
        else:
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
    if re.search(r"[\s/@]|\A\[|\A[^:]+:\d+\Z", value):
        return "is not an address: no scheme, user, port, brackets or path belong here"
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        if re.fullmatch(r"[\d.]+", value):
            return "is not an address: four numbers from 0 to 255 are needed"
        return "is no number: the gateway's balancer and the engines' firewall look no name up"
    if address.version == 6:
        return "is an IPv6 address: exporters and Prometheus are set up with IPv4 alone"
    if address.is_unspecified or address.is_multicast:
        return "is not the address of one host"
    if address.is_loopback:
        return "is this machine itself; the other hosts cannot reach it there" if several else ""
    return "" if address.is_private else "is a public address; engines belong on a private one"


def firewall(view: View) -> None:
    """What may reach engines beside gateways and monitors is given as addresses or networks."""
    for setting in view.settings.get("engine_firewall_addresses", []):
        given = setting.variable.value
        for index, value in enumerate(given if isinstance(given, (list, tuple)) else ()):
            try:
                ipaddress.ip_network(text(value), strict=False)
            except ValueError:
                if text(value):
                    view.add_at(setting, (index,), "is no address and no network", "write one such as 10.0.0.0/24")


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
