# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Debian packages: what is installed, what has to be held together, and whether automatic upgrades leave it alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DPKG_FORMAT = "${Package}\\t${Architecture}\\t${Version}\\t${db:Status-Want}\\t${db:Status-Status}\\n"
"""The ``-f`` argument of ``dpkg-query -W`` that :func:`parse_dpkg` reads."""

BLACKLIST_KEY = "Unattended-Upgrade::Package-Blacklist"


@dataclass(frozen=True)
class Package:
    """One package of dpkg's database. ``wanted`` is ``install``, ``hold``, ``deinstall`` or ``purge``."""

    name: str
    architecture: str
    version: str
    wanted: str
    status: str

    @property
    def installed(self) -> bool:
        """Return whether its files are there (also half-configured ones)."""
        return self.status not in ("not-installed", "config-files")


def parse_dpkg(text: str) -> list[Package]:
    """Return the packages in the output of ``dpkg-query -W -f DPKG_FORMAT``; lines of another form are left out."""
    found = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 5:
            found.append(Package(*fields))
    return found


def matching(packages: Iterable[Package], patterns: Sequence[str]) -> list[Package]:
    """Return the installed packages whose whole name matches one of the regular expressions ``patterns``, sorted by
    name.

    Raises ValueError for a pattern that is no regular expression.
    """
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    found = [p for p in packages if p.installed and any(c.fullmatch(p.name) for c in compiled)]
    return sorted(found, key=lambda package: (package.name, package.architecture))


def parse_apt_list(text: str, key: str) -> list[str]:
    """Return the values of the list ``key`` in the output of ``apt-config dump``, in order.

    That output is what apt itself believes after reading every file, with ``#clear`` and order applied, so it tells
    whether a setting is effective, not only whether a file has it.
    """
    found = []
    for line in text.splitlines():
        match = re.match(r'\A(\S+?)(::)? "(.*)";\Z', line)
        if match is not None and match.group(1) == key and match.group(2):
            found.append(match.group(3))
    return found


def unprotected(names: Iterable[str], blacklist: Sequence[str]) -> list[str]:
    """Return the ``names`` that no entry of unattended-upgrades' ``blacklist`` covers.

    An entry is a Python regular expression, matched from the start of the name and not to its end (``re.match``), as
    unattended-upgrades does; one that does not compile covers nothing.
    """
    compiled = []
    for entry in blacklist:
        try:
            compiled.append(re.compile(entry))
        except re.error:
            continue
    return sorted(name for name in set(names) if not any(pattern.match(name) for pattern in compiled))


def split_request(request: str) -> tuple[str, str]:
    """Return (name, version) of ``name`` or ``name=version``; the version may end in ``*``. Raises ValueError."""
    match = re.match(r"\A([a-z0-9][a-z0-9+.-]+)(?:=(\S+))?\Z", request)
    if match is None:
        raise ValueError(f"{request!r} is not a package; write a name such as docker.io, or name=version")
    return match.group(1), match.group(2) or ""


def missing(requests: Iterable[str], packages: Iterable[Package]) -> list[str]:
    """Return the ``requests`` (``name`` or ``name=version``) that the installed ``packages`` do not fulfil. Raises
    ValueError."""
    versions = _versions(packages)
    found = []
    for request in requests:
        name, version = split_request(request)
        installed = versions.get(name)
        if installed is None or (version and not _fits(installed, version)):
            found.append(request)
    return found


def _versions(packages: Iterable[Package]) -> Mapping[str, str]:
    return {package.name: package.version for package in packages if package.status == "installed"}


def _fits(installed: str, wanted: str) -> bool:
    return installed.startswith(wanted[:-1]) if wanted.endswith("*") else installed == wanted
