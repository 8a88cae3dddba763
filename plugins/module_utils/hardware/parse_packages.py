# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads package managers: dpkg and rpm lists, holds, unattended upgrades, apt's history."""

from __future__ import annotations

import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Package, PackageEvent

_RELEVANT = re.compile(
    r"""\A(?:
        lib(?:nvidia|xnvctrl|nvsdm|nccl|cuda)[\w.+-]* | nvidia[\w.+-]* | xserver-xorg-video-nvidia[\w.+-]* |
        (?:kmod|akmod|dkms)-nvidia[\w.+-]* | cuda[\w.+-]* | nvlsm[\w.+-]* | imex[\w.+-]* |
        datacenter-gpu-manager[\w.+-]* |
        linux-(?:objects|modules|signatures)-nvidia[\w.+-]* |
        docker[\w.+-]* | moby-engine | containerd[\w.+-]* | runc | podman |
        nginx[\w.+-]* | libnginx[\w.+-]* | lua-resty[\w.+-]* | prometheus[\w.+-]* | mtail |
        (?:python3-)?unattended-upgrades | dnf-automatic | chrony | ntpsec | systemd-timesyncd | nftables |
        numactl | numad | irqbalance | mokutil | pciutils | rdma-core | ibverbs[\w.+-]* | doca[\w.+-]* | mlnx[\w.+-]*
    )\Z""",
    re.VERBOSE,
)

_CORE = re.compile(
    r"""\A(?:
        libnvidia-(?:compute|cfg1|ml1|ptxjitcompiler1)[\w-]* | libcuda1 |
        nvidia-(?:utils|compute-utils|dkms|headless-no-dkms|smi|driver-cuda(?:-libs)?|driver)[\w-]* |
        nvidia-kernel-(?:common|source|dkms|open-dkms)[\w-]* |
        kmod-nvidia[\w.-]*
    )\Z""",
    re.VERBOSE,
)

_NOT_DRIVER = re.compile(
    r"container|settings|prime|modprobe|xconfig|installer-cleanup|support|docker|legacy-check|repo|local-repo"
)


def is_relevant(name: str) -> bool:
    """Tell whether a package belongs to the driver's, the container runtime's, the gateway's or the monitoring's
    family.
    """
    return _RELEVANT.match(name) is not None


def is_driver_core(name: str) -> bool:
    """Tell whether a package's version is the driver's (and not, say, a metapackage's or a tool's)."""
    return _CORE.match(name) is not None and _NOT_DRIVER.search(name) is None


def upstream_version(version: str) -> str:
    """Return the driver version inside a package version (``1:550.107.02-0ubuntu0.24.04.1`` -> ``550.107.02``)."""
    bare = version.split(":", 1)[-1]
    match = re.match(r"\A(\d{3,4}\.\d+(?:\.\d+)?)", bare)
    return match.group(1) if match else bare.split("-", 1)[0]


def parse_dpkg(text: str) -> list[Package]:
    """Read ``dpkg -l`` or ``dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version} ${Architecture}\\n'``:
    relevant packages.

    A line in another order (``name version status``, as people paste it into a report) is understood too.
    """
    found: list[Package] = []
    seen: set[tuple[str, Optional[str]]] = set()
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and re.match(r"\A[uihrp][ncufhwtiUFHW][R]?\Z", words[0]):
            status, name, version = words[0], words[1], words[2]
            architecture = words[3] if len(words) > 3 else None
        elif len(words) >= 3 and re.match(r"\A[uihrp][ncufhwtiUFHW]\Z", words[2]):
            name, version, status = words[0], words[1], words[2]
            architecture = words[3] if len(words) > 3 else None
        else:
            continue
        name, _colon, suffix = name.partition(":")
        architecture = suffix or architecture
        if is_relevant(name) and (name, architecture) not in seen:
            seen.add((name, architecture))
            # A held package is 'hi' in dpkg's own words: installed, to be held.
            held = status.startswith("h")
            installed = f"i{status[1:]}" if held else status
            found.append(Package(name, version, installed, architecture, True if held else None))
    return found


def lies_on_disk(package: Package) -> bool:
    """Tell whether a package's files are there: also unpacked or half configured, as an upgrade that broke off leaves it."""
    return package.status[1:2].lower() in tuple("iufhwt")


def parse_rpm(text: str) -> list[Package]:
    """Read ``rpm -qa`` with a name, version and architecture per line, or its usual name-version-release.arch form."""
    found: list[Package] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2:
            name, version = words[0], words[1]
            architecture = words[2] if len(words) > 2 else None
        else:
            match = re.match(r"\A([\w.+-]+)-([\w.+~^:]+-[\w.+~^]+)\.(\w+)\Z", line.strip())
            if match is None:
                continue
            name, version, architecture = match.groups()
        if is_relevant(name):
            found.append(Package(name, version, "ii", architecture))
    return found


def parse_holds(text: str) -> list[str]:
    """Read ``apt-mark showhold``: names."""
    return sorted(
        {line.strip().split(":")[0] for line in text.splitlines() if re.match(r"\A[a-z0-9][\w.+:-]*\Z", line.strip())}
    )


def parse_versionlock(text: str) -> list[str]:
    """Read dnf's versionlock.list or ``dnf versionlock list``: names (with dnf4's epoch and version cut off)."""
    names = set()
    for line in text.splitlines():
        word = line.strip()
        if not word or word.startswith(("#", "!", "Last metadata")) or " " in word:
            continue
        match = re.match(r"\A([\w.+-]+?)-(?:\d+:)?\d[\w.+~^]*-[\w.+~^*]+(?:\.[\w*]+)?\Z", word)
        names.add(match.group(1) if match else word)
    return sorted(names)


def parse_apt_config(text: str) -> dict[str, list[str]]:
    """Read ``apt-config dump`` lines (``Name::Sub "value";``): name -> values, lists collected, lower-case names."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r'\A([\w:/.-]+?)(?:::)?\s+"((?:[^"\\]|\\.)*)";\s*\Z', line.strip())
        if match and match.group(2) != "":
            found.setdefault(match.group(1).lower(), []).append(match.group(2))
    return found


_ACTIONS = {
    "install": "install",
    "upgrade": "upgrade",
    "downgrade": "downgrade",
    "remove": "remove",
    "purge": "purge",
    "reinstall": "reinstall",
}


def parse_apt_history(text: str) -> list[PackageEvent]:
    """Read apt's history.log: what happened to relevant packages, in the order of the file."""
    events: list[PackageEvent] = []
    date: Optional[str] = None
    command: Optional[str] = None
    for line in text.splitlines():
        key, sign, value = line.partition(":")
        value = value.strip()
        if not line.strip():
            date = command = None
        elif key == "Start-Date":
            date, command = " ".join(value.split()), None
        elif key == "Commandline":
            command = value
        elif sign and key.lower() in _ACTIONS:
            for name, old, new in _changes(value, key.lower()):
                if is_relevant(name):
                    unattended = "unattended-upgrade" in (command or "")
                    events.append(PackageEvent(date, command, unattended, _ACTIONS[key.lower()], name, old, new))
    return events


def _changes(text: str, action: str) -> list[tuple[str, Optional[str], Optional[str]]]:
    """Return name, old and new version of ``libnvidia-common-460:amd64 (460.56-…, 460.73.01-…), …``."""
    found: list[tuple[str, Optional[str], Optional[str]]] = []
    for match in re.finditer(r"([a-z0-9][\w.+-]*)(?::\w+)?\s+\(([^)]*)\)", text):
        versions = [word.strip() for word in match.group(2).split(",") if word.strip() not in ("", "automatic")]
        if action in ("upgrade", "downgrade"):
            old = versions[0] if versions else None
            new = versions[1] if len(versions) > 1 else None
        elif action in ("remove", "purge"):
            old, new = (versions[0] if versions else None), None
        else:
            old, new = None, (versions[0] if versions else None)
        found.append((match.group(1), old, new))
    return found
