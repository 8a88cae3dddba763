# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Driver: version, loaded against installed, holds, nouveau, Secure Boot, persistence, fabric manager, Xid history."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    broke,
    engine_containers,
    needs_driver,
    needs_gpus,
    not_read,
    unread,
    version,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts, Package
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_packages import lies_on_disk
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, NOT_COLLECTED, OK

ENGINE = ("engine",)
HELD_FAMILY = re.compile(r"^(lib)?nvidia-|^cuda-drivers|^libcuda|^xserver-xorg-video-nvidia|^kmod-nvidia")
# Parts of the family that carry the driver's own version and break it when they move alone.
DRIVER_PACKAGE = re.compile(
    r"^(nvidia-(driver|dkms|kernel|utils|headless|compute|firmware|fabricmanager|open|settings)|libnvidia-|libcuda1|"
    r"nvidia-fabric-manager|cuda-drivers|kmod-nvidia|akmod-nvidia|xserver-xorg-video-nvidia|nvidia-alternative|nvidia-modprobe|nvidia-persistenced)"
)
NOT_DRIVER = re.compile(r"^(lib)?nvidia-container|^nvidia-(container|docker|cuda)|^libnvidia-ml-dev")


def driver_packages(facts: HostFacts) -> list[Package]:
    """Return the installed packages that have to move together with the driver."""
    return [
        item
        for item in facts.packages.items or []
        if lies_on_disk(item) and DRIVER_PACKAGE.match(item.name) and not NOT_DRIVER.match(item.name)
    ]


@check(
    "driver.minimum_version",
    title="Driver is new enough for the policy",
    severity="critical",
    applies_to=ENGINE,
    why="older branches lack fixes that serving under load needs, and current engine images do not start on them",
    remedy="install a newer driver of a supported branch in maintenance: playbooks/maintain.yml -l <node>",
    source="deployment checklist: NVIDIA driver >= 525.85.12",
)
@needs_driver
def minimum_version(facts: HostFacts, policy: Policy) -> Finding:
    loaded, wanted = facts.driver.version_loaded or facts.driver.version_nvml, policy["driver_minimum"]
    if loaded is None:
        if facts.probe("nvidia_version").state == ABSENT:
            return failed("no NVIDIA driver is loaded", f">= {wanted}")
        return not_read(facts, "nvidia_version", "nvidia_smi")
    if not version(loaded):
        return unknown(f"the driver's version {loaded!r} is not a number", f">= {wanted}")
    return (passed if version(loaded) >= version(wanted) else failed)(loaded, f">= {wanted}")


# Minimum driver per CUDA major for minor-version compatibility: CUDA 11 >= 450.80.02, 12 >= 525.60.13, 13 >= 580.
CUDA_BRANCH = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}


@check(
    "driver.supports_image_cuda",
    title="Driver runs the CUDA of the engine image",
    severity="critical",
    applies_to=ENGINE,
    why="an image built for a newer CUDA than the driver knows ends with error 803/804 at start, while nvidia-smi works; "
    "within one CUDA major, data centre cards run newer minors (and newer majors with the compat package), GeForce "
    "cards are not covered by the compat package",
    remedy="choose an image for the driver's CUDA, or install a newer driver in maintenance",
    source="https://docs.nvidia.com/deploy/cuda-compatibility/",
)
@needs_driver
def supports_image_cuda(facts: HostFacts, policy: Policy) -> Finding:
    image = policy["expected"]["image_cuda"] or max(_container_cuda(facts), key=version, default="")
    if not image:
        if facts.docker.containers is None:
            return not_read(facts, "docker_containers")
        return not_applicable("neither expected.image_cuda nor an engine container says a CUDA version")
    if not version(image):
        return unknown(f"the image's CUDA version {image!r} is not a version")
    ceiling, loaded = facts.driver.cuda_version, facts.driver.version_loaded or facts.driver.version_nvml
    if ceiling is None or loaded is None:
        return not_read(facts, "nvidia_smi", "nvidia_version")
    desired = f"a driver for CUDA {image}"
    if version(image) <= version(ceiling):
        return passed(f"CUDA {ceiling}", desired)
    brands = {(gpu.brand or "").lower() for gpu in facts.gpus or []}
    if not brands or "" in brands:
        return unknown(f"the driver stops at CUDA {ceiling}, and the cards' brand is not known", desired)
    consumer = any("geforce" in brand or "titan" in brand for brand in brands)
    same_major = version(image)[0] == version(ceiling)[0]
    branch = CUDA_BRANCH.get(version(image)[0])
    if consumer:
        return failed(f"CUDA {ceiling}, GeForce cards: no forward compatibility", desired)
    if same_major and branch and version(loaded) >= branch:
        return warned(f"CUDA {ceiling}: minor-version compatibility only (no PTX of the newer minor)", desired)
    return failed(f"CUDA {ceiling}: works only with the image's compat package", desired)


def _container_cuda(facts: HostFacts) -> list[str]:
    """Return the CUDA versions that engine containers carry in their environment, as NVIDIA's base images set it."""
    return [
        one.environment["CUDA_VERSION"] for one in engine_containers(facts) or [] if "CUDA_VERSION" in one.environment
    ]


@check(
    "driver.loaded_matches_installed",
    title="Loaded driver is the installed one",
    severity="critical",
    applies_to=ENGINE,
    why="libraries of another version than the loaded module give 'driver/library version mismatch' to every new "
    "process: running engines go on, none starts again",
    remedy="reboot in maintenance (playbooks/maintain.yml -l <node>); do not reinstall. Running engines are untouched",
    source="reports: packages moved under a loaded module by unattended upgrades",
)
@needs_driver
def loaded_matches_installed(facts: HostFacts, policy: Policy) -> Finding:
    loaded, installed = facts.driver.version_loaded, facts.driver.versions_installed
    if "mismatch" in (facts.driver.nvidia_smi_error or "").lower():
        return failed(f"reboot pending: {facts.driver.nvidia_smi_error}", "one version")
    if loaded is None:
        if facts.probe("nvidia_version").state == ABSENT and installed:
            return failed(f"installed {', '.join(installed)}, none loaded", "the installed driver, loaded")
        return not_read(facts, "nvidia_version")
    on_disk = facts.driver.version_on_disk
    evidence = tuple(f"{item.name} {item.version} {item.status}" for item in driver_packages(facts)[:12])
    if not installed and not on_disk:
        if facts.packages.items is None:
            return not_read(facts, "dpkg", "rpm")
        return unknown(f"loaded {loaded}; no driver package is installed, and the module file was not seen")
    others = sorted({one for one in [*installed, *([on_disk] if on_disk else [])] if one != loaded})
    if others:
        return failed(f"reboot pending: loaded {loaded}, installed {', '.join(others)}", loaded, *evidence)
    return passed(loaded, loaded, *evidence)


@check(
    "driver.packages_held",
    title="Driver packages are held against unattended upgrades",
    severity="major",
    applies_to=ENGINE,
    tags=("host",),
    why="one unattended upgrade of a driver library breaks every engine start until the next reboot, on all nodes in one "
    "night",
    remedy="hold the driver, fabric manager and libnvidia packages as one set and exclude them from unattended upgrades",
    source="reports: apt history shows unattended-upgrade moving libnvidia",
)
@needs_driver
def packages_held(facts: HostFacts, policy: Policy) -> Finding:
    unattended = [event for event in facts.packages.events or [] if event.unattended and event.action == "upgrade"]
    moved = [event for event in unattended if HELD_FAMILY.match(event.package) and not NOT_DRIVER.match(event.package)]
    evidence = tuple(
        f"{event.date or '?'} {event.package} {event.old} -> {event.new} (unattended)" for event in moved[-8:]
    )
    installed = driver_packages(facts)
    loose = [item for item in installed if not _held(item, facts)]
    if moved and (loose or not installed):
        return failed("hold missing: unattended upgrades moved driver packages", "held", *evidence)
    if facts.packages.items is None:
        quiet = facts.probe("apt_history").state == OK and facts.probe("dpkg").state == NOT_COLLECTED
        if quiet and facts.probe("rpm").state in (ABSENT, NOT_COLLECTED):
            return passed("apt's history shows no unattended upgrade of a driver package (packages not listed)", "held")
        return not_read(facts, *([name for name in ("dpkg", "rpm") if facts.probe(name).state != ABSENT] or ["dpkg"]))
    if unread(facts, "apt_history") and facts.packages.manager == "dpkg":
        return not_read(facts, "apt_history")
    if not installed:
        return passed("no driver package is installed, and unattended upgrades moved none", "held")
    dark = [item.name for item in loose if item.held is None]
    if dark:
        return unknown(f"holds could not be read for {', '.join(dark[:5])}", "held")
    names = ", ".join(item.name for item in loose[:6]) + (" ..." if len(loose) > 6 else "")
    if not loose:
        return passed(f"{len(installed)} packages held or excluded", "held")
    if facts.packages.unattended_enabled is False:
        return warned(f"not held: {names} (unattended upgrades are off)", "held")
    return failed(f"hold missing: {names}", "held", *evidence)


def _held(item: Package, facts: HostFacts) -> bool:
    """Tell whether nothing moves a package by itself: held, locked (a pattern too), or left out of unattended upgrades."""
    patterns = facts.packages.unattended_blacklist or []
    if item.held or any(fnmatch(item.name, hold) for hold in facts.packages.holds or []):
        return True
    if facts.packages.manager == "rpm":
        return any(fnmatch(item.name, pattern) for pattern in patterns if pattern)
    return any(_matches(pattern, item.name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern of unattended upgrades, a regular expression anchored on the left, leaves ``name`` alone."""
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


@check(
    "driver.nouveau",
    title="nouveau is neither loaded nor able to load",
    severity="major",
    applies_to=ENGINE,
    tags=("host",),
    why="nouveau takes the cards before the NVIDIA module at the next boot, and the node comes back without GPUs",
    remedy="blacklist nouveau and rebuild the initramfs; a reboot makes it effective",
    source="reports: packages blacklist it inconsistently",
)
@needs_driver
def nouveau(facts: HostFacts, policy: Policy) -> Finding:
    kernel = facts.kernel
    if kernel.nouveau_loaded:
        return failed("nouveau is loaded", "blacklisted and not loaded")
    if kernel.nouveau_loaded is None or kernel.nouveau_blacklisted_in is None:
        return not_read(facts, "modules", "modprobe_d")
    if not kernel.nouveau_blacklisted_in:
        return warned("not loaded, not blacklisted", "blacklisted and not loaded")
    if kernel.nouveau_blacklist_in_initramfs is False:
        return warned("blacklisted after the initramfs was built", "blacklisted in the initramfs")
    if kernel.nouveau_blacklist_in_initramfs is None and broke(facts, "initramfs", "modprobe_times"):
        return not_read(facts, "initramfs", "modprobe_times")
    return passed(f"blacklisted in {', '.join(kernel.nouveau_blacklisted_in)}", "blacklisted and not loaded")


@check(
    "driver.secure_boot",
    title="Secure Boot accepts the driver's module",
    severity="critical",
    applies_to=ENGINE,
    why="with Secure Boot on, an unsigned module is refused ('Key was rejected by service') and no GPU appears",
    remedy="enrol the module's key (mokutil --import) or turn Secure Boot off in the firmware, in maintenance",
    source="reports: 'Key was rejected by service'",
)
@needs_driver
def secure_boot(facts: HostFacts, policy: Policy) -> Finding:
    if facts.kernel.secure_boot is None:
        return not_read(facts, "secure_boot")
    if facts.kernel.secure_boot is False:
        return passed("Secure Boot is off", "off, or a signed module")
    if facts.driver.version_loaded is not None:
        return passed("Secure Boot is on and the module is loaded", "off, or a signed module")
    if facts.driver.module_signer is None:
        return unknown("Secure Boot is on; the module's signer could not be read", "a signed module")
    if not facts.driver.module_signer:
        return failed("Secure Boot is on and the module is not signed", "a signed module")
    return warned(f"Secure Boot is on, the module of {facts.driver.module_signer} is not loaded", "a module that loads")


@check(
    "driver.persistence",
    title="Persistence keeps the driver initialised",
    severity="major",
    applies_to=ENGINE,
    tags=("host",),
    why="without it the first process after idling waits many seconds; container starts have timed out on it",
    remedy="enable nvidia-persistenced",
    source="reports: nvidia-smi 30 s against 2 s, 'driver rpc timed out'",
)
@needs_gpus
def persistence(facts: HostFacts, policy: Policy) -> Finding:
    modes = [gpu.persistence_mode for gpu in facts.gpus or []]
    if False in modes:
        return failed(f"off on {modes.count(False)} of {len(modes)} GPUs", "on, by nvidia-persistenced")
    if None in modes:
        return unknown("nvidia-smi does not say the persistence mode of every GPU", "on, by nvidia-persistenced")
    service = facts.services.get("nvidia-persistenced.service")
    if service is not None and service.active_state == "active":
        return passed("on, nvidia-persistenced is active", "on, by nvidia-persistenced")
    if service is None and unread(facts, "systemd_units"):
        return not_read(facts, "systemd_units")
    if service is None:
        return warned("on, and there is no nvidia-persistenced: gone after a reboot", "on, by nvidia-persistenced")
    return warned(
        f"on, but nvidia-persistenced is {service.active_state}: gone after a reboot", "on, by nvidia-persistenced"
    )


@check(
    "driver.fabric_manager",
    title="Fabric manager runs exactly where there is NVSwitch, in the driver's version",
    severity="critical",
    applies_to=ENGINE,
    why="without it, or in another version, CUDA on NVSwitch machines fails with error 802 'system not yet initialized'",
    remedy="install nvidia-fabricmanager in exactly the driver's version; where there is no NVSwitch, disable the unit",
    source="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
)
@needs_driver
def fabric_manager(facts: HostFacts, policy: Policy) -> Finding:
    switches = facts.pci.nvswitches
    unit = facts.services.get("nvidia-fabricmanager.service")
    fabric = {(gpu.fabric_state or "", gpu.fabric_status or "") for gpu in facts.gpus or []}
    completed = fabric == {("Completed", "Success")}
    states = {state for state, _status in fabric if state}
    loaded = facts.driver.version_loaded or facts.driver.version_nvml
    installed = [
        item
        for item in facts.packages.items or []
        if re.search(r"fabric-?manager", item.name) and lies_on_disk(item) and "dev" not in item.name
    ]
    nothing_to_do = any("NV_WARN_NOTHING_TO_DO" in line for line in facts.kernel_log.fabric_manager or []) or (
        unit is not None and "NV_WARN_NOTHING_TO_DO" in (unit.status_text or "")
    )
    needs_fabric = bool(switches) or bool(states & {"Completed", "In Progress", "Not Started"})
    if not needs_fabric:
        if switches is None and not facts.gpus and not nothing_to_do:
            return not_read(facts, "pci_devices", "nvidia_smi")
        if facts.gpus is None and unread(facts, "nvidia_smi") and not nothing_to_do:
            return not_read(facts, "nvidia_smi")  # in a virtual machine it alone shows the fabric
        if (unit is not None and unit.active_state == "failed") or nothing_to_do:
            return not_applicable("no NVSwitch: the failed fabric manager unit has nothing to do; disable it")
        if switches is None and not states and any(gpu.fabric_state is None for gpu in facts.gpus or []):
            return unknown("neither the PCI bus nor nvidia-smi says whether there is NVSwitch")
        return not_applicable("no NVSwitch on this machine")
    desired = f"active, version {loaded or 'of the driver'}, fabric Completed/Success"
    evidence = tuple(sorted(f"fabric {state or '?'}/{status or '?'}" for state, status in fabric))
    versions = {upstream(item.version) for item in installed}
    said = [line for line in facts.kernel_log.fabric_manager or [] if "match with driver version" in line]
    if said and not completed:
        return failed(f"version: {said[-1][-160:]}", desired, *evidence)
    if loaded and versions and versions != {loaded}:
        return failed(f"version {', '.join(sorted(versions))} with driver {loaded}", desired, *evidence)
    # In a virtual machine the fabric is managed outside of it: its state is what counts, with or without a unit.
    dead = unit is not None and unit.load_state != "not-found" and unit.active_state not in ("active", None)
    if dead and (switches or not completed):
        return failed(f"unit is {unit.active_state if unit is not None else '?'}", desired, *evidence)
    if completed:
        return passed("fabric Completed/Success", desired, *evidence)
    if not installed and facts.packages.items is not None and (unit is None or unit.load_state == "not-found"):
        return failed("not installed", desired, *evidence)
    if states and (
        {state for state, _status in fabric if state != "Completed"}
        or any(status not in ("Success", "") for _state, status in fabric)
    ):
        return failed(", ".join(evidence), desired, *evidence)
    return unknown("neither the unit nor the fabric state could be read", desired, *evidence)


def upstream(package_version: str) -> str:
    """Return the upstream part of a package version: no epoch, no distribution revision."""
    return re.sub(r"^\d+:", "", package_version).split("-", 1)[0]


@check(
    "driver.nvidia_smi_time",
    title="nvidia-smi answers quickly",
    severity="minor",
    applies_to=ENGINE,
    why="a slow answer means missing persistence, a descriptor limit that is far too high, or a GPU that is going away",
    remedy="enable nvidia-persistenced, bound LimitNOFILE, look for Xid lines",
    source="reports: 24-30 s against 2 s",
)
@needs_driver
def nvidia_smi_time(facts: HostFacts, policy: Policy) -> Finding:
    seconds, limit = facts.driver.nvidia_smi_seconds, policy["nvidia_smi_seconds_maximum"]
    if facts.probe("nvidia_smi").state == "timeout":
        return failed("no answer within its time limit", f"<= {limit:g} s")
    if seconds is None:
        return not_read(facts, "nvidia_smi") if facts.probe("nvidia_smi").state != OK else unknown("not timed")
    return (passed if seconds <= limit else warned)(f"{seconds:.1f} s", f"<= {limit:g} s")


# Xid codes by what they ask for, from NVIDIA's catalogue and from operators' reports; the rest is worth a look.
XID_REPLACE = {74, 95, 140}
XID_RESET = {48, 61, 62, 69, 79, 92, 94, 109, 110, 119, 120, 136, 143, 145, 149, 154}
XID_REMAP, XID_REMAP_FAILED = 63, 64  # the card's own state says what they ask for; alone they demand nothing
XID_APPLICATION = {13, 31, 43, 45, 68}


@check(
    "driver.xid_history",
    title="No Xid since the start that asks for a reset or a replacement",
    severity="major",
    applies_to=ENGINE,
    why="Xid lines name GPUs that are failing; some ask for a reset, some for a new card, some only for a look at the "
    "application",
    remedy="reset: drain, stop every client, nvidia-smi -r or reboot (maintain.yml). Replacement: open a case with the vendor",
    source="https://docs.nvidia.com/deploy/xid-errors/",
)
@needs_driver
def xid_history(facts: HostFacts, policy: Policy) -> Finding:
    xids = facts.kernel_log.xids
    if xids is None:
        return not_read(facts, "kernel_log")
    if not xids:
        return passed("no Xid since the start", "none")
    groups: dict[str, set[int]] = {"replace the card": set(), "reset the GPU": set(), "nothing to mend": set()}
    other: set[int] = set()
    for xid in xids:
        grade = _grade(xid.code, facts)
        (groups[grade] if grade else other).add(xid.code)
    evidence = tuple(
        f"{xid.time or ''} {xid.pci or '?'} Xid {xid.code} {xid.message}".strip()[:160] for xid in xids[-6:]
    )
    said = "; ".join(f"{what}: Xid {', '.join(map(str, sorted(codes)))}" for what, codes in groups.items() if codes)
    if groups["replace the card"] or groups["reset the GPU"]:
        return failed(said, "none that asks for a reset or a replacement", *evidence)
    if other:
        return warned(f"Xid {', '.join(map(str, sorted(other)))}", "none", *evidence)
    return passed(said, "none that asks for a reset or a replacement", *evidence)


def _grade(code: int, facts: HostFacts) -> Optional[str]:
    if code == XID_REMAP_FAILED:
        failures = [gpu.remapped_rows_failure for gpu in facts.gpus or []]
        return "reset the GPU" if failures and not any(one is not False for one in failures) else "replace the card"
    if code == XID_REMAP:
        pending = [gpu.remapped_rows_pending for gpu in facts.gpus or []]
        done = bool(pending) and not any(one is not False for one in pending)
        return "nothing to mend" if done else "reset the GPU"
    if code in XID_REPLACE:
        return "replace the card"
    if code in XID_RESET:
        return "reset the GPU"
    return "nothing to mend" if code in XID_APPLICATION else None
