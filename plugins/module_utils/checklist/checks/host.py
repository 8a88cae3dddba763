# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Host: supported system, clock, disk, kernel command line."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import CONTAINERS, Policy, not_read
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, format_size
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts

MANAGED = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}


@check(
    "host.supported_os",
    title="Operating system is one that is managed",
    severity="major",
    why="Debian 12/13 and Ubuntu 22.04/24.04 are managed; the RHEL family is audited only",
    remedy="install a managed system, or keep the host out of site.yml and audit it only",
    source="README: supported systems",
)
def supported_os(facts: HostFacts, policy: Policy) -> Finding:
    desired = "Debian 12/13 or Ubuntu 22.04/24.04"
    if facts.os.id is None:
        return not_read(facts, "os_release")
    name = f"{facts.os.id} {facts.os.version_id or '?'}"
    if facts.os.version_id in MANAGED.get(facts.os.id, ()):
        return passed(name, desired)
    if facts.os.family == "redhat":
        return warned(f"{name}: audited only", desired)
    if facts.os.id in MANAGED and facts.os.version_id is None:
        return unknown(f"{name}: its version is not said", desired)
    return failed(name, desired)


@check(
    "host.time_synchronised",
    title="Clock is synchronised",
    severity="major",
    why="certificates, locks and the comparison of logs and metrics rest on one time",
    remedy="enable chrony or systemd-timesyncd with servers that the node reaches",
    source="https://prometheus.io/docs/introduction/faq/ (clock skew)",
)
def time_synchronised(facts: HostFacts, policy: Policy) -> Finding:
    limit = policy["clock_offset_seconds_maximum"]
    if facts.time.offset_s is not None and abs(facts.time.offset_s) > limit:
        return failed(f"{facts.time.offset_s:+.3f} s off", f"within {limit:g} s")
    if facts.host.virtualization in CONTAINERS:
        return not_applicable(f"a container ({facts.host.virtualization}): the machine under it keeps the clock")
    if facts.time.synchronized is None:
        return not_read(facts, "clock", "chrony")
    if not facts.time.synchronized:
        return failed(f"not synchronised (service: {facts.time.service or 'none'})", f"within {limit:g} s")
    return passed(f"synchronised by {facts.time.service or 'an unknown service'}", f"within {limit:g} s")


@check(
    "host.disk_free",
    title="Disk holds the next image and model",
    severity="major",
    why="a release needs the new image, the new model and the previous ones at once; a full disk stops Docker and logging",
    remedy="remove old releases and images that no release names, or grow the disk",
    source="model store: preflight of image + 2 x model + previous",
)
def disk_free(facts: HostFacts, policy: Policy) -> Finding:
    wanted = policy["disk_free_gib_minimum"] * GIB
    if facts.disks is None:
        return not_read(facts, "disks")
    dark = [f"{disk.path}: {disk.error or 'not known'}" for disk in facts.disks if disk.free_bytes is None]
    short = [
        f"{disk.path}: {format_size(disk.free_bytes)} free"
        for disk in facts.disks
        if disk.free_bytes is not None and disk.free_bytes < wanted
    ]
    desired = f">= {policy['disk_free_gib_minimum']} GiB free"
    if short:
        return failed("; ".join(short), desired)
    if dark or not facts.disks:
        return unknown("; ".join(dark) or "no path was looked at", desired)
    return passed([f"{disk.path}: {format_size(disk.free_bytes or 0)} free" for disk in facts.disks], desired)


NOTED = (
    "pci",  # noacs turns ACS off, realloc gives BAR1 windows room
    "pcie_acs_override",
    "iommu",
    "iommu.passthrough",
    "intel_iommu",
    "amd_iommu",
    "nokaslr",  # a workaround for CUDA error 802
    "cgroup_enable",
    "systemd.unified_cgroup_hierarchy",
    "swapaccount",
    "numa_balancing",
    "transparent_hugepage",
    "mitigations",
)


@check(
    "host.kernel_cmdline",
    title="Kernel command line of note (reported, not judged)",
    severity="minor",
    applies_to=("engine",),
    why="IOMMU, ACS and KASLR settings explain peer-to-peer and start-up faults; they are shown beside them",
    remedy="nothing to mend",
    source="reports: iommu=pt, pci=noacs, nokaslr",
)
def kernel_cmdline(facts: HostFacts, policy: Policy) -> Finding:
    if facts.kernel.cmdline is None:
        return not_read(facts, "cmdline")
    noted = [word for word in facts.kernel.cmdline.split() if word.split("=", 1)[0] in NOTED or "noacs" in word]
    return not_applicable(", ".join(noted) if noted else "nothing of note")
