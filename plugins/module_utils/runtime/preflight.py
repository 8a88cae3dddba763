# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Is this GPU node fit to get a container runtime, and if not, exactly what has to be installed?

The role ``gpu_host`` never installs a driver and never reboots. It stops the host here instead, before Docker, with a
message that an operator can act on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts

# From this branch on NVIDIA's own repository names these packages without the branch; the version carries it.
_UNVERSIONED_FROM = 580


@dataclass(frozen=True)
class GpuHost:
    """What the decision needs to know of a machine. None means: could not be read.

    ``gpus_on_bus`` counts NVIDIA GPUs on the PCI bus, ``gpus_in_driver`` those that the driver reports.
    ``driver_loaded`` is the version of the kernel module, ``driver_installed`` that of the installed driver package
    (upstream part, ``570.124.06``). ``fabric_manager`` is the installed fabric manager's version,
    ``fabric_manager_active`` the state of its unit. ``driver_versions`` are all upstream versions among the driver's
    packages. ``package_source`` is ``distribution`` or ``nvidia`` (NVIDIA's own repository), or empty where nothing
    tells.
    """

    distribution: str
    gpus_on_bus: Optional[int] = None
    gpus_in_driver: Optional[int] = None
    nvswitch: bool = False
    driver_loaded: str = ""
    driver_installed: str = ""
    driver_versions: tuple[str, ...] = ()
    fabric_manager: str = ""
    fabric_manager_active: Optional[bool] = None
    nouveau_loaded: bool = False
    package_source: str = ""


@dataclass(frozen=True)
class Findings:
    """The verdict: ``problems`` stop the host, ``packages`` is the set to install, ``pending`` is said at the end."""

    problems: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    pending: tuple[str, ...] = field(default=())

    @property
    def message(self) -> str:
        """Return all problems and the remedy as one text; empty where there is no problem."""
        lines = list(self.problems)
        if self.packages:
            lines.append("Install exactly this set, then reboot: apt-get install " + " ".join(self.packages))
        return "\n".join(lines)


def branch_of(version: str) -> int:
    """Return the driver branch of a version or a branch name (``570.124.06`` -> 570). Raises ValueError."""
    match = re.match(r"\A(\d{3})(\.|\Z)", version)
    if match is None:
        raise ValueError(f"{version!r} is not an NVIDIA driver version or branch; one looks like 570.124.06 or 570")
    return int(match.group(1))


def upstream_version(package_version: str) -> str:
    """Return the driver's own version from a package version (``550.107.02-0ubuntu0.24.04.1`` -> ``550.107.02``)."""
    match = re.search(r"(?:\A|:)(\d{3}\.\d+(?:\.\d+)?)(?![\d.])", package_version)
    return match.group(1) if match else ""


def driver_packages(distribution: str, branch: int, nvswitch: bool, source: str = "") -> tuple[str, ...]:
    """Return the set of packages that has to be installed together: driver, and for NVSwitch fabric manager and NSCQ.

    ``source`` says where they come from: ``distribution`` (Ubuntu's restricted/multiverse) or ``nvidia``; Debian has
    no fabric manager, so the default is ``distribution`` on Ubuntu and ``nvidia`` on Debian. A name without the branch
    carries it as its version: a fabric manager of another version than the driver's does not start.
    """
    source = source or ("distribution" if distribution == "ubuntu" else "nvidia")
    if source == "distribution" and distribution == "ubuntu":
        return (f"nvidia-driver-{branch}-server-open", *_fabric_names(branch, True, nvswitch))
    versioned = branch < _UNVERSIONED_FROM
    fabric = _fabric_names(branch, versioned, nvswitch)
    return (f"nvidia-open-{branch}", *(name if versioned else f"{name}={branch}.*" for name in fabric))


def fabric_packages(host: GpuHost) -> tuple[str, ...]:
    """Return the fabric manager packages that match the loaded driver of ``host``, with the version where it can be
    said."""
    branch = branch_of(host.driver_loaded)
    source = host.package_source or ("distribution" if host.distribution == "ubuntu" else "nvidia")
    if source == "distribution" and host.distribution == "ubuntu":
        # Ubuntu appends its own revision to the version, which only apt knows: a trailing * takes any.
        return tuple(f"{name}={host.driver_loaded}*" for name in _fabric_names(branch, True, True))
    return tuple(f"{name}={host.driver_loaded}-1" for name in _fabric_names(branch, branch < _UNVERSIONED_FROM, True))


def findings(host: GpuHost, expected_gpus: Optional[int], driver_branch: str) -> Findings:
    """Return what stops this host and what is pending. ``expected_gpus`` None means: do not count.

    ``driver_branch`` is the branch to name where no driver is there to take it from. Raises ValueError for one that
    is none.
    """
    problems: list[str] = []
    pending: list[str] = []
    wanted_branch = branch_of(driver_branch)

    if host.gpus_on_bus == 0:
        return Findings(
            (
                "No NVIDIA GPU is on this machine's PCI bus. Set metalserve_accelerator to cpu for this host, or have"
                " the hardware looked at.",
            )
        )
    if not host.driver_loaded:
        return _no_driver(host, wanted_branch)

    if host.driver_installed and host.driver_installed != host.driver_loaded:
        pending.append(
            f"reboot: driver {host.driver_loaded} is loaded but {host.driver_installed} is installed; until the reboot"
            " new containers cannot use the GPUs"
        )
    if len(host.driver_versions) > 1:
        pending.append(
            f"driver packages of versions {', '.join(host.driver_versions)} are installed at once (a half upgrade);"
            " bring them to one version in a maintenance window, then reboot"
        )
    packages: tuple[str, ...] = ()
    if host.nvswitch:
        problem, packages = _fabric(host)
        if problem:
            problems.append(problem)
    problems += _count(host, expected_gpus)
    return Findings(tuple(problems), packages, tuple(pending))


def _no_driver(host: GpuHost, wanted_branch: int) -> Findings:
    if host.driver_installed:
        why = "nouveau holds the GPUs" if host.nouveau_loaded else "its kernel module is not loaded"
        return Findings(
            (
                f"Driver {host.driver_installed} is installed, but {why}. Reboot this machine; if that does not help,"
                " look at `dkms status` and `mokutil --sb-state` (Secure Boot refuses an unsigned module).",
            ),
            pending=(f"reboot: driver {host.driver_installed} is installed but not loaded",),
        )
    packages = driver_packages(host.distribution, wanted_branch, host.nvswitch, host.package_source)
    what = "No NVIDIA driver is installed"
    if host.nvswitch:
        what += ", and this machine has NVSwitches, so it needs the fabric manager of the same version"
    if not host.package_source and host.distribution != "ubuntu":
        what += ". Its packages are in NVIDIA's own repository, which apt has to know"
    return Findings((what + ".",), packages)


def _fabric(host: GpuHost) -> tuple[str, tuple[str, ...]]:
    driver = host.driver_loaded
    if not host.fabric_manager:
        return (
            f"The machine has NVSwitches but no fabric manager; without version {driver} of it CUDA fails (802).",
            fabric_packages(host),
        )
    if host.fabric_manager != driver:
        return (
            f"Fabric manager {host.fabric_manager} does not fit driver {driver}; it starts with its own version only.",
            fabric_packages(host),
        )
    if host.fabric_manager_active is False:
        return (
            "The fabric manager is installed but not running. Look at `systemctl status nvidia-fabricmanager`, then"
            " `systemctl enable --now nvidia-fabricmanager` while no engine runs (GPUs in use need a reset after it).",
            (),
        )
    return "", ()


def _count(host: GpuHost, expected_gpus: Optional[int]) -> list[str]:
    if expected_gpus is None:
        return []
    if host.gpus_in_driver is None:
        return [
            f"metalserve_expected_gpus is {expected_gpus}, but the driver gave no list of GPUs (nvidia-smi failed);"
            " look at `nvidia-smi -L` and `dmesg | grep -i nvrm`."
        ]
    if host.gpus_in_driver >= expected_gpus:
        return []
    where = ""
    if host.gpus_on_bus is not None:
        lost = host.gpus_on_bus < expected_gpus
        where = f"; {host.gpus_on_bus} are on the PCI bus, so " + (
            "hardware is missing" if lost else "the driver refused some (see `dmesg | grep -i nvrm`)"
        )
    return [
        f"The driver reports {host.gpus_in_driver} GPUs; metalserve_expected_gpus is {expected_gpus}{where}. Repair the"
        " machine or lower the number for this host."
    ]


def _fabric_names(branch: int, versioned: bool, nvswitch: bool) -> list[str]:
    if not nvswitch:
        return []
    suffix = f"-{branch}" if versioned else ""
    return [f"nvidia-fabricmanager{suffix}", f"libnvidia-nscq{suffix}"]


def as_dict(value: Findings) -> dict[str, Any]:
    """Return ``value`` as plain values for Ansible."""
    return {
        "problems": list(value.problems),
        "packages": list(value.packages),
        "pending": list(value.pending),
        "message": value.message,
    }


def package_versions(packages: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return those of ``packages`` (name -> version) whose name matches one of the regular expressions ``patterns``
    fully."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return {name: version for name, version in packages.items() if any(p.fullmatch(name) for p in compiled)}


def from_facts(facts: HostFacts) -> GpuHost:
    """Return the part of a machine's facts that :func:`findings` needs."""
    installed = {item.name: item.version for item in facts.packages.items or [] if item.status.startswith("ii")}
    fabric = package_versions(installed, [r"nvidia-fabric-?manager(-\d+)?"])
    service = facts.services.get("nvidia-fabricmanager.service")
    known = service is not None and service.load_state != "not-found"
    gpus = facts.gpus or []
    return GpuHost(
        distribution=facts.os.id or "",
        gpus_on_bus=None if facts.pci.gpus is None else len(facts.pci.gpus),
        gpus_in_driver=facts.driver.attached_gpus if facts.gpus is None else len(gpus),
        # Newer NVSwitches are not on the GPUs' host bus; the GPUs themselves then say that they belong to a fabric.
        nvswitch=bool(facts.pci.nvswitches) or any(gpu.fabric_state not in (None, "N/A") for gpu in gpus),
        driver_loaded=facts.driver.version_loaded or "",
        driver_installed=upstream_version(facts.driver.version_installed or ""),
        driver_versions=tuple(facts.driver.versions_installed),
        fabric_manager=upstream_version(next(iter(fabric.values()), "")),
        fabric_manager_active=service.active_state == "active" if service is not None and known else None,
        nouveau_loaded=bool(facts.kernel.nouveau_loaded),
        package_source=_source(installed),
    )


def _source(installed: Mapping[str, str]) -> str:
    """Return where the driver packages come from: Ubuntu's carry ``ubuntu`` in their version, NVIDIA's do not."""
    versions = package_versions(installed, [r"(lib)?nvidia-.*", r"cuda-drivers.*"]).values()
    driver = [version for version in versions if upstream_version(version)]
    if not driver:
        return ""
    return "distribution" if any("ubuntu" in version for version in driver) else "nvidia"
