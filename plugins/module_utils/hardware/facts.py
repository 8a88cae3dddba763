# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""``HostFacts``: what is known about one machine, as plain values.

None always means *not known*, never *no*: whether a thing is absent or could not be read is said by the state of the
probe it came from (``facts.probe("numa_balancing").state``). Lists are None where their source could not be read and
empty where the source says that there is nothing. docs/facts.md and schemas/facts.json are made from these classes.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar

from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import NOT_COLLECTED, OK

SCHEMA_VERSION = 1
NONE = type(None)

UNLIMITED = 2**63 - 1
"""The value of a resource limit that is ``unlimited`` (so that it compares as the largest number)."""


def says(what: str, unit: str = "") -> dict[str, str]:
    """Return the metadata of a field: what it is and its unit, for the documentation and the schema."""
    return {"says": what, "unit": unit}


@dataclass
class ProbeState:
    """How one reading went."""

    name: str = field(default="", metadata=says("name of the probe"))
    state: str = field(
        default=NOT_COLLECTED,
        metadata=says("ok, absent (looked for, not there), denied, timeout, error or not_collected"),
    )
    error: str = field(default="", metadata=says("the reason in words where the state is neither ok nor absent"))
    seconds: float = field(default=0.0, metadata=says("how long it took", "s"))

    @property
    def ok(self) -> bool:
        """Tell whether the source was read."""
        return self.state == OK


@dataclass
class Host:
    """Name and kernel."""

    hostname: Optional[str] = field(default=None, metadata=says("the kernel's node name"))
    architecture: Optional[str] = field(
        default=None, metadata=says("machine architecture as the kernel says it, for example x86_64")
    )
    kernel_release: Optional[str] = field(default=None, metadata=says("running kernel"))
    kernel_version: Optional[str] = field(default=None, metadata=says("build of the running kernel"))
    uptime_s: Optional[float] = field(default=None, metadata=says("time since the start of the machine", "s"))
    virtualization: Optional[str] = field(
        default=None, metadata=says("what systemd-detect-virt says: none, kvm, docker, …")
    )


@dataclass
class Os:
    """The distribution, from os-release."""

    id: Optional[str] = field(default=None, metadata=says("ID, for example debian, ubuntu, rocky"))
    id_like: list[str] = field(default_factory=list, metadata=says("ID_LIKE"))
    version_id: Optional[str] = field(default=None, metadata=says("VERSION_ID, for example 12 or 24.04"))
    codename: Optional[str] = field(default=None, metadata=says("VERSION_CODENAME"))
    pretty_name: Optional[str] = field(default=None, metadata=says("PRETTY_NAME"))
    family: Optional[str] = field(default=None, metadata=says("debian, redhat, suse or the ID itself"))


@dataclass
class Kernel:
    """What the kernel was started with and has loaded."""

    cmdline: Optional[str] = field(default=None, metadata=says("kernel command line"))
    arguments: dict[str, str] = field(
        default_factory=dict,
        metadata=says("the command line by name; the last of equal names; a bare word has the value ''"),
    )
    modules: Optional[list[str]] = field(default=None, metadata=says("names of the loaded modules"))
    nouveau_loaded: Optional[bool] = field(default=None, metadata=says("whether the nouveau module is loaded"))
    nouveau_blacklisted_in: Optional[list[str]] = field(
        default=None, metadata=says("files of modprobe.d (or kernel command line) that blacklist nouveau")
    )
    nouveau_blacklist_in_initramfs: Optional[bool] = field(
        default=None,
        metadata=says("whether the initramfs was built after nouveau was blacklisted (an older one may still load it)"),
    )
    modprobe_options: Optional[list[str]] = field(
        default=None, metadata=says("lines of modprobe.d that concern nvidia or nouveau")
    )
    secure_boot: Optional[bool] = field(
        default=None, metadata=says("whether Secure Boot is on; False too where the firmware is not EFI")
    )
    lockdown: Optional[str] = field(
        default=None, metadata=says("kernel lockdown mode: none, integrity or confidentiality")
    )
    iommu_groups: Optional[int] = field(default=None, metadata=says("number of IOMMU groups; 0 where no IOMMU is on"))
    taint: Optional[int] = field(default=None, metadata=says("/proc/sys/kernel/tainted, a bit field"))


@dataclass
class Cpu:
    """Processors."""

    model: Optional[str] = field(default=None, metadata=says("model name of the first processor"))
    vendor: Optional[str] = field(default=None, metadata=says("vendor id"))
    logical: Optional[int] = field(default=None, metadata=says("processors that are online"))
    sockets: Optional[int] = field(default=None, metadata=says("different physical ids"))
    cores: Optional[int] = field(default=None, metadata=says("different pairs of physical and core id"))
    online: Optional[str] = field(default=None, metadata=says("processors that are online, as a list of ranges"))
    governors: Optional[dict[str, int]] = field(
        default=None, metadata=says("cpufreq governor -> number of processors; {} where there is no cpufreq")
    )
    available_governors: Optional[list[str]] = field(
        default=None, metadata=says("governors that the first processor could have")
    )
    flags: list[str] = field(
        default_factory=list,
        metadata=says(
            "instruction set flags of the first processor that matter to an engine (avx2, avx512f, amx_tile, …)"
        ),
    )


@dataclass
class Memory:
    """Main memory."""

    total_kib: Optional[int] = field(default=None, metadata=says("MemTotal", "KiB"))
    available_kib: Optional[int] = field(default=None, metadata=says("MemAvailable", "KiB"))
    swap_total_kib: Optional[int] = field(default=None, metadata=says("SwapTotal", "KiB"))
    swap_free_kib: Optional[int] = field(default=None, metadata=says("SwapFree", "KiB"))
    hugepages_total: Optional[int] = field(default=None, metadata=says("HugePages_Total"))
    hugepage_size_kib: Optional[int] = field(default=None, metadata=says("Hugepagesize", "KiB"))
    transparent_hugepages: Optional[str] = field(default=None, metadata=says("always, madvise or never"))
    transparent_hugepages_defrag: Optional[str] = field(
        default=None, metadata=says("when the kernel compacts memory for them")
    )


@dataclass
class NumaNode:
    """One NUMA node."""

    id: int = field(default=0, metadata=says("number of the node"))
    cpu_list: Optional[str] = field(
        default=None, metadata=says("its processors, as a list of ranges; '' where it has none")
    )
    memory_total_kib: Optional[int] = field(default=None, metadata=says("its memory", "KiB"))
    distances: Optional[list[int]] = field(
        default=None, metadata=says("distance to each node, in the order of the nodes")
    )


@dataclass
class Numa:
    """Memory topology."""

    nodes: Optional[list[NumaNode]] = field(default=None, metadata=says("the nodes that are online"))
    balancing: Optional[int] = field(
        default=None, metadata=says("/proc/sys/kernel/numa_balancing, a bit field: anything but 0 is on")
    )


@dataclass
class Cgroup:
    """Control groups."""

    version: Optional[int] = field(
        default=None, metadata=says("1 or 2 (a mixed hierarchy counts as 1: limits are set through version 1)")
    )
    controllers: Optional[list[str]] = field(default=None, metadata=says("controllers of the root group"))
    swap_limit: Optional[bool] = field(default=None, metadata=says("whether the kernel can limit a group's swap"))
    memory_limit: Optional[bool] = field(default=None, metadata=says("whether the kernel can limit a group's memory"))


@dataclass
class ProcessLimits:
    """Resource limits of one process; an unlimited one is 9223372036854775807."""

    pid: Optional[int] = field(default=None, metadata=says("process id"))
    nofile_soft: Optional[int] = field(default=None, metadata=says("open files, soft"))
    nofile_hard: Optional[int] = field(default=None, metadata=says("open files, hard"))
    memlock_soft: Optional[int] = field(default=None, metadata=says("locked memory, soft", "B"))
    memlock_hard: Optional[int] = field(default=None, metadata=says("locked memory, hard", "B"))
    nproc_soft: Optional[int] = field(default=None, metadata=says("processes, soft"))
    nproc_hard: Optional[int] = field(default=None, metadata=says("processes, hard"))


@dataclass
class LimitsEntry:
    """One line of limits.conf or limits.d."""

    file: str = field(default="", metadata=says("file it stands in"))
    domain: str = field(default="", metadata=says("user, @group or *"))
    type: str = field(default="", metadata=says("soft, hard or -"))
    item: str = field(default="", metadata=says("nofile, memlock, …"))
    value: Optional[int] = field(
        default=None, metadata=says("the limit in the file's unit (memlock: KiB); unlimited is 9223372036854775807")
    )


@dataclass
class Limits:
    """Resource limits in force and as configured."""

    processes: dict[str, ProcessLimits] = field(
        default_factory=dict,
        metadata=says("limits in force by process: pid1, dockerd, containerd, nginx, sshd, session (a login over SSH)"),
    )
    entries: Optional[list[LimitsEntry]] = field(
        default=None, metadata=says("limits.conf and limits.d, in the order in which PAM reads them")
    )
    session_outdated: Optional[bool] = field(
        default=None,
        metadata=says(
            "whether what sets the limits of logins was changed after the login that was seen began: it keeps its old ones"
        ),
    )
    sessions_read_limits: Optional[bool] = field(
        default=None,
        metadata=says("whether a login over SSH gets what limits.d says: UsePAM, and pam_limits in sshd's PAM file"),
    )
    systemd_default_nofile: Optional[int] = field(
        default=None, metadata=says("DefaultLimitNOFILE of the service manager: the hard limit")
    )
    systemd_default_nofile_soft: Optional[int] = field(
        default=None, metadata=says("DefaultLimitNOFILESoft, what a service has that does not raise it itself")
    )
    systemd_default_memlock: Optional[int] = field(
        default=None, metadata=says("DefaultLimitMEMLOCK of the service manager", "B")
    )


@dataclass
class Driver:
    """The accelerator's driver."""

    version_loaded: Optional[str] = field(
        default=None, metadata=says("version of the loaded kernel module, from /proc/driver/nvidia/version")
    )
    version_nvml: Optional[str] = field(default=None, metadata=says("driver version that nvidia-smi prints"))
    version_installed: Optional[str] = field(
        default=None,
        metadata=says("upstream version of the installed driver package (None where none, or where packages disagree)"),
    )
    versions_installed: list[str] = field(
        default_factory=list,
        metadata=says("every upstream version among the installed driver packages: more than one is a half upgrade"),
    )
    version_on_disk: Optional[str] = field(
        default=None, metadata=says("version of the kernel module file that the next start would load")
    )
    cuda_version: Optional[str] = field(
        default=None, metadata=says("newest CUDA that this driver runs, for example 13.0")
    )
    kernel_module_type: Optional[str] = field(default=None, metadata=says("open or proprietary"))
    module_parameters: Optional[dict[str, str]] = field(default=None, metadata=says("/proc/driver/nvidia/params"))
    module_signer: Optional[str] = field(default=None, metadata=says("who signed the module file; '' where nobody did"))
    nvidia_smi_seconds: Optional[float] = field(default=None, metadata=says("how long nvidia-smi took to answer", "s"))
    nvidia_smi_error: Optional[str] = field(
        default=None, metadata=says("what nvidia-smi said where it failed, for example a library mismatch")
    )
    attached_gpus: Optional[int] = field(default=None, metadata=says("number of GPUs that the driver counts"))
    device_majors: dict[str, int] = field(
        default_factory=dict, metadata=says("major numbers of the driver's character devices, from /proc/devices")
    )
    device_nodes: Optional[list[str]] = field(default=None, metadata=says("/dev/nvidia* that exist"))
    char_links: Optional[list[str]] = field(
        default=None, metadata=says("links /dev/char/<major>:<minor> that lead to a device of the driver")
    )


@dataclass
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: Optional[int] = field(default=None, metadata=says("process id"))
    name: Optional[str] = field(
        default=None, metadata=says("its name, as the driver knows it, else as the kernel does")
    )
    type: Optional[str] = field(default=None, metadata=says("C (compute), G (graphics) or C+G"))
    used_mib: Optional[int] = field(default=None, metadata=says("memory it holds", "MiB"))
    container_id: Optional[str] = field(default=None, metadata=says("the container it runs in, '' where in none"))


@dataclass
class Gpu:
    """One GPU, as nvidia-smi and sysfs describe it."""

    index: int = field(default=0, metadata=says("position in nvidia-smi's order (by PCI address)"))
    uuid: Optional[str] = field(default=None, metadata=says("UUID"))
    name: Optional[str] = field(default=None, metadata=says("product name"))
    brand: Optional[str] = field(
        default=None, metadata=says("product brand; GeForce cards and data centre cards follow different CUDA rules")
    )
    architecture: Optional[str] = field(default=None, metadata=says("product architecture, for example Hopper"))
    pci_bus_id: Optional[str] = field(default=None, metadata=says("PCI address in sysfs form, 0000:3b:00.0"))
    pci_device_id: Optional[str] = field(default=None, metadata=says("device and vendor id, for example 233510DE"))
    minor_number: Optional[int] = field(default=None, metadata=says("number of /dev/nvidia<n>"))
    vbios_version: Optional[str] = field(default=None, metadata=says("VBIOS version"))
    memory_total_mib: Optional[int] = field(default=None, metadata=says("frame buffer", "MiB"))
    memory_reserved_mib: Optional[int] = field(default=None, metadata=says("frame buffer that the driver keeps", "MiB"))
    memory_used_mib: Optional[int] = field(default=None, metadata=says("frame buffer in use", "MiB"))
    memory_free_mib: Optional[int] = field(default=None, metadata=says("frame buffer that is free", "MiB"))
    bar1_total_mib: Optional[int] = field(default=None, metadata=says("BAR1 window", "MiB"))
    bar1_used_mib: Optional[int] = field(default=None, metadata=says("BAR1 in use", "MiB"))
    numa_node: Optional[int] = field(
        default=None, metadata=says("NUMA node it hangs on; None where the firmware does not say")
    )
    local_cpus: Optional[str] = field(default=None, metadata=says("processors near it, as a list of ranges"))
    pcie_gen_current: Optional[int] = field(default=None, metadata=says("PCIe generation now (lower when idle)"))
    pcie_gen_max: Optional[int] = field(
        default=None, metadata=says("PCIe generation that card and slot can do together")
    )
    pcie_gen_device_max: Optional[int] = field(default=None, metadata=says("PCIe generation that the card can do"))
    pcie_gen_host_max: Optional[int] = field(default=None, metadata=says("PCIe generation that the slot can do"))
    pcie_width_current: Optional[int] = field(default=None, metadata=says("PCIe lanes now"))
    pcie_width_max: Optional[int] = field(default=None, metadata=says("PCIe lanes that it can have"))
    pcie_replays: Optional[int] = field(default=None, metadata=says("PCIe replay counter"))
    performance_state: Optional[str] = field(default=None, metadata=says("P0 (fastest) … P12"))
    throttle_reasons: Optional[dict[str, Optional[bool]]] = field(
        default=None,
        metadata=says(
            "reason (gpu_idle, sw_power_cap, hw_slowdown, hw_thermal_slowdown, …) -> active, None where unknown"
        ),
    )
    persistence_mode: Optional[bool] = field(default=None, metadata=says("persistence mode"))
    compute_mode: Optional[str] = field(default=None, metadata=says("Default, Exclusive_Process or Prohibited"))
    mig_mode: Optional[bool] = field(
        default=None, metadata=says("whether MIG is on; None also on cards that have no MIG")
    )
    mig_mode_pending: Optional[bool] = field(default=None, metadata=says("whether MIG will be on after a reset"))
    mig_devices: Optional[int] = field(default=None, metadata=says("number of MIG devices"))
    addressing_mode: Optional[str] = field(default=None, metadata=says("None, HMM or ATS, as the driver says it"))
    virtualization_mode: Optional[str] = field(
        default=None, metadata=says("None, Pass-Through, VGPU, Host VGPU or Host VSGA")
    )
    ecc_mode: Optional[bool] = field(
        default=None, metadata=says("whether ECC is on; None also on cards that have no ECC")
    )
    ecc_mode_pending: Optional[bool] = field(default=None, metadata=says("whether ECC will be on after a reset"))
    ecc_volatile_correctable: Optional[int] = field(
        default=None, metadata=says("corrected errors since the driver was loaded")
    )
    ecc_volatile_uncorrectable: Optional[int] = field(
        default=None, metadata=says("uncorrected errors since the driver was loaded")
    )
    ecc_aggregate_correctable: Optional[int] = field(
        default=None, metadata=says("corrected errors over the card's life")
    )
    ecc_aggregate_uncorrectable: Optional[int] = field(
        default=None, metadata=says("uncorrected errors over the card's life")
    )
    ecc_counters: dict[str, Optional[int]] = field(
        default_factory=dict, metadata=says("each ECC counter, for example volatile.dram_uncorrectable")
    )
    sram_threshold_exceeded: Optional[bool] = field(
        default=None, metadata=says("whether SRAM errors passed the vendor's threshold (replace the card)")
    )
    unrepairable_memory: Optional[bool] = field(
        default=None, metadata=says("whether memory cannot be repaired any more")
    )
    channel_repair_pending: Optional[bool] = field(
        default=None, metadata=says("whether a channel repair waits for a reset")
    )
    tpc_repair_pending: Optional[bool] = field(default=None, metadata=says("whether a TPC repair waits for a reset"))
    retired_pages_single_bit: Optional[int] = field(
        default=None, metadata=says("pages retired for single bit errors (before Ampere)")
    )
    retired_pages_double_bit: Optional[int] = field(
        default=None, metadata=says("pages retired for double bit errors (before Ampere)")
    )
    retired_pages_pending: Optional[bool] = field(
        default=None, metadata=says("whether page retirement waits for a reset")
    )
    remapped_rows_correctable: Optional[int] = field(
        default=None, metadata=says("rows remapped for correctable errors")
    )
    remapped_rows_uncorrectable: Optional[int] = field(
        default=None, metadata=says("rows remapped for uncorrectable errors")
    )
    remapped_rows_pending: Optional[bool] = field(default=None, metadata=says("whether a remapping waits for a reset"))
    remapped_rows_failure: Optional[bool] = field(
        default=None, metadata=says("whether a remapping failed (replace the card)")
    )
    row_remapper_banks: dict[str, Optional[int]] = field(
        default_factory=dict, metadata=says("banks by remapping availability: max, high, partial, low, none")
    )
    recovery_action: Optional[str] = field(
        default=None, metadata=says("what the driver asks for: None, Reset, Reboot, Drain P2P, …")
    )
    reset_required: Optional[bool] = field(
        default=None, metadata=says("whether the driver says that a reset is required")
    )
    temperature_c: Optional[int] = field(default=None, metadata=says("GPU temperature", "°C"))
    temperature_memory_c: Optional[int] = field(default=None, metadata=says("memory temperature", "°C"))
    temperature_slowdown_c: Optional[int] = field(
        default=None, metadata=says("temperature at which it slows down", "°C")
    )
    temperature_to_limit_c: Optional[int] = field(
        default=None, metadata=says("degrees below the thermal limit (newer drivers)", "°C")
    )
    power_draw_w: Optional[float] = field(default=None, metadata=says("power now", "W"))
    power_limit_w: Optional[float] = field(default=None, metadata=says("power limit in force", "W"))
    power_default_limit_w: Optional[float] = field(
        default=None, metadata=says("power limit of the card as shipped", "W")
    )
    utilization_gpu_percent: Optional[int] = field(
        default=None, metadata=says("share of time with a kernel running", "%")
    )
    utilization_memory_percent: Optional[int] = field(
        default=None, metadata=says("share of time with memory traffic", "%")
    )
    clock_sm_mhz: Optional[int] = field(default=None, metadata=says("SM clock", "MHz"))
    clock_sm_max_mhz: Optional[int] = field(default=None, metadata=says("highest SM clock", "MHz"))
    clock_memory_mhz: Optional[int] = field(default=None, metadata=says("memory clock", "MHz"))
    fabric_state: Optional[str] = field(
        default=None, metadata=says("state of the NVLink fabric: Completed, In Progress, Not Started")
    )
    fabric_status: Optional[str] = field(
        default=None, metadata=says("result of fabric registration, for example Success")
    )
    fabric_health: dict[str, Optional[str]] = field(
        default_factory=dict, metadata=says("fabric health by name, for example bandwidth")
    )
    nvlink_active: Optional[int] = field(
        default=None, metadata=says("NVLink links that are up; 0 where the card has none")
    )
    nvlink_inactive: Optional[int] = field(default=None, metadata=says("NVLink links that are down"))
    gsp_firmware: Optional[str] = field(default=None, metadata=says("GSP firmware version"))
    processes: Optional[list[GpuProcess]] = field(default=None, metadata=says("processes that hold its memory"))

    def active_throttle_reasons(self) -> Optional[list[str]]:
        """Return the active reasons, idle left out; None where the driver does not say or one of them is unknown."""
        if self.throttle_reasons is None:
            return None
        if any(active is None for name, active in self.throttle_reasons.items() if name != "gpu_idle"):
            return None
        return sorted(name for name, active in self.throttle_reasons.items() if active and name != "gpu_idle")

    @property
    def idle(self) -> Optional[bool]:
        """Tell whether the driver says that the GPU is idle; None where it does not say."""
        return None if self.throttle_reasons is None else self.throttle_reasons.get("gpu_idle")


@dataclass
class PciDevice:
    """A PCI function, from sysfs."""

    address: str = field(default="", metadata=says("0000:3b:00.0"))
    vendor: Optional[str] = field(default=None, metadata=says("vendor id, 4 hex digits"))
    device: Optional[str] = field(default=None, metadata=says("device id, 4 hex digits"))
    pci_class: Optional[str] = field(
        default=None, metadata=says("class, 6 hex digits: 0300xx and 0302xx GPU, 0680xx NVSwitch, 0604xx bridge")
    )
    numa_node: Optional[int] = field(default=None, metadata=says("NUMA node; None where the firmware does not say"))
    local_cpus: Optional[str] = field(default=None, metadata=says("processors near it, as a list of ranges"))
    link_width_current: Optional[int] = field(default=None, metadata=says("lanes now"))
    link_width_max: Optional[int] = field(default=None, metadata=says("lanes that it can have"))
    link_speed_current: Optional[float] = field(default=None, metadata=says("speed now", "GT/s"))
    link_speed_max: Optional[float] = field(default=None, metadata=says("speed that it can have", "GT/s"))
    bar_sizes: list[int] = field(
        default_factory=list,
        metadata=says("sizes of its memory windows in bytes, in order; 0 where a window has no place"),
    )
    driver: Optional[str] = field(default=None, metadata=says("kernel driver that is bound to it; '' where none is"))


@dataclass
class PciBridge:
    """A bridge above a GPU, from lspci -vvv."""

    address: str = field(default="", metadata=says("0000:3a:00.0"))
    name: str = field(default="", metadata=says("what lspci calls it"))
    acs: Optional[dict[str, bool]] = field(
        default=None,
        metadata=says("ACSCtl flags (SrcValid, ReqRedir, CmpltRedir, UpstreamFwd, …); {} where it has no ACS"),
    )
    bus: Optional[str] = field(default=None, metadata=says("buses behind it, for example 3b-3c"))
    prefetchable_window: Optional[str] = field(
        default=None, metadata=says("prefetchable memory window as lspci prints it")
    )


@dataclass
class Pci:
    """PCI devices that matter to serving."""

    gpus: Optional[list[PciDevice]] = field(
        default=None, metadata=says("GPUs on the bus, whether a driver is loaded or not")
    )
    nvswitches: Optional[list[PciDevice]] = field(default=None, metadata=says("NVSwitch devices"))
    bridges: Optional[list[PciBridge]] = field(
        default=None, metadata=says("bridges above GPUs (read only where there is more than one GPU)")
    )
    rdma_devices: Optional[list[str]] = field(default=None, metadata=says("RDMA devices, for example mlx5_0"))


@dataclass
class Topology:
    """How the GPUs reach each other."""

    matrix: Optional[dict[str, dict[str, str]]] = field(
        default=None, metadata=says("device -> device -> NV18, PIX, PXB, PHB, NODE, SYS or X")
    )
    cpu_affinity: dict[str, str] = field(default_factory=dict, metadata=says("device -> processors near it"))
    numa_affinity: dict[str, str] = field(
        default_factory=dict, metadata=says("device -> NUMA node, as nvidia-smi prints it")
    )


@dataclass
class Package:
    """An installed package of the driver's or the container runtime's family."""

    name: str = field(default="", metadata=says("name without architecture"))
    version: str = field(default="", metadata=says("full version"))
    status: str = field(default="", metadata=says("ii (installed), rc (removed, configuration left), iU, …; rpm: ii"))
    architecture: Optional[str] = field(default=None, metadata=says("architecture"))
    held: Optional[bool] = field(
        default=None,
        metadata=says("whether it is held back (apt-mark hold, dnf versionlock); None where holds could not be read"),
    )


@dataclass
class PackageEvent:
    """One run of apt that touched a package of the driver's or the container runtime's family."""

    date: Optional[str] = field(default=None, metadata=says("when it started, in the host's time"))
    command: Optional[str] = field(default=None, metadata=says("command line"))
    unattended: bool = field(default=False, metadata=says("whether unattended-upgrade did it"))
    action: str = field(default="", metadata=says("install, upgrade, downgrade, remove, purge or reinstall"))
    package: str = field(default="", metadata=says("package name"))
    old: Optional[str] = field(default=None, metadata=says("version before"))
    new: Optional[str] = field(default=None, metadata=says("version after"))


@dataclass
class Packages:
    """Packages that matter to serving."""

    manager: Optional[str] = field(default=None, metadata=says("dpkg or rpm"))
    items: Optional[list[Package]] = field(
        default=None,
        metadata=says("packages of the driver's, CUDA's, the container runtime's and the gateway's family"),
    )
    holds: Optional[list[str]] = field(default=None, metadata=says("every name (or pattern) that is held back"))
    unattended_enabled: Optional[bool] = field(
        default=None, metadata=says("whether unattended upgrades run (apt periodic or dnf-automatic)")
    )
    unattended_blacklist: Optional[list[str]] = field(
        default=None, metadata=says("patterns that unattended upgrades leave alone")
    )
    unattended_origins: Optional[list[str]] = field(
        default=None, metadata=says("origins from which unattended upgrades take packages")
    )
    events: Optional[list[PackageEvent]] = field(
        default=None, metadata=says("what apt's history says about those packages, oldest first")
    )

    def find(self, name: str) -> Optional[Package]:
        """Return the installed package of this name; None where it is not installed or nothing could be read."""
        return next((item for item in self.items or [] if item.name == name and item.status.startswith("ii")), None)


@dataclass
class Service:
    """A systemd unit."""

    name: str = field(default="", metadata=says("full name, for example docker.service"))
    load_state: Optional[str] = field(default=None, metadata=says("loaded, not-found or masked"))
    active_state: Optional[str] = field(default=None, metadata=says("active, inactive, failed, activating, …"))
    sub_state: Optional[str] = field(default=None, metadata=says("running, dead, exited, …"))
    unit_file_state: Optional[str] = field(default=None, metadata=says("enabled, disabled, static, masked, …"))
    result: Optional[str] = field(default=None, metadata=says("success, exit-code, signal, …"))
    main_pid: Optional[int] = field(default=None, metadata=says("main process; 0 where none runs"))
    restarts: Optional[int] = field(default=None, metadata=says("how often systemd restarted it"))
    limit_nofile: Optional[int] = field(default=None, metadata=says("LimitNOFILE in force for the next start"))
    limit_memlock: Optional[int] = field(default=None, metadata=says("LimitMEMLOCK in force for the next start", "B"))
    timeout_stop_s: Optional[float] = field(default=None, metadata=says("TimeoutStopUSec", "s"))
    need_daemon_reload: Optional[bool] = field(
        default=None, metadata=says("whether unit files changed since systemd read them")
    )
    fragment_path: Optional[str] = field(default=None, metadata=says("unit file"))
    drop_ins: list[str] = field(default_factory=list, metadata=says("drop-in files"))
    after: list[str] = field(default_factory=list, metadata=says("units it is ordered after"))
    status_text: Optional[str] = field(default=None, metadata=says("last status that the service itself gave"))


@dataclass
class Xid:
    """One Xid of the driver in the kernel's log."""

    time: Optional[str] = field(default=None, metadata=says("when, as the log has it"))
    pci: Optional[str] = field(default=None, metadata=says("PCI address without function, 0000:3b:00"))
    code: int = field(default=0, metadata=says("Xid number"))
    message: str = field(default="", metadata=says("the rest of the line"))


@dataclass
class BarMessage:
    """A line in which the kernel says that it found no place for a memory window of a PCI device."""

    device: str = field(default="", metadata=says("PCI address of the bridge or card"))
    driver: str = field(default="", metadata=says("who said it, for example pcieport or pci"))
    message: str = field(default="", metadata=says("the rest of the line"))


@dataclass
class KernelLog:
    """What the kernel's log says about GPUs since the last start of the machine."""

    source: Optional[str] = field(default=None, metadata=says("journal or dmesg"))
    xids: Optional[list[Xid]] = field(default=None, metadata=says("Xid lines, oldest first (at most 500)"))
    nvrm: Optional[list[str]] = field(
        default=None, metadata=says("other lines of the driver that name a fault (at most 200)")
    )
    fabric_manager: Optional[list[str]] = field(
        default=None, metadata=says("last lines of the fabric manager's own log; [] where it is not installed")
    )
    bar_messages: Optional[list[BarMessage]] = field(default=None, metadata=says("memory windows that found no place"))


@dataclass
class Mount:
    """A mount of a container."""

    source: str = field(default="", metadata=says("path on the host or name of the volume"))
    destination: str = field(default="", metadata=says("path in the container"))
    writable: Optional[bool] = field(default=None, metadata=says("whether the container may write to it"))


@dataclass
class Container:
    """A container, as the Docker daemon describes it."""

    id: str = field(default="", metadata=says("64 hex digits"))
    name: Optional[str] = field(default=None, metadata=says("name without the slash"))
    image: Optional[str] = field(default=None, metadata=says("image as it was asked for"))
    image_id: Optional[str] = field(default=None, metadata=says("id of the image it runs"))
    repo_digests: Optional[list[str]] = field(
        default=None, metadata=says("digests under which registries know that image")
    )
    state: Optional[str] = field(default=None, metadata=says("running, exited, created, …"))
    exit_code: Optional[int] = field(default=None, metadata=says("exit code of the last run"))
    oom_killed: Optional[bool] = field(default=None, metadata=says("whether the last run ended for want of memory"))
    started_at: Optional[str] = field(default=None, metadata=says("start of the last run"))
    finished_at: Optional[str] = field(default=None, metadata=says("end of the last run"))
    restart_count: Optional[int] = field(default=None, metadata=says("restarts by Docker itself"))
    pid: Optional[int] = field(default=None, metadata=says("first process; 0 where it does not run"))
    health: Optional[str] = field(
        default=None, metadata=says("healthy, unhealthy, starting; None where it has no health check")
    )
    labels: dict[str, str] = field(default_factory=dict, metadata=says("labels"))
    entrypoint: list[str] = field(default_factory=list, metadata=says("entrypoint, secrets masked"))
    command: list[str] = field(default_factory=list, metadata=says("command, secrets masked"))
    environment: dict[str, str] = field(
        default_factory=dict, metadata=says("environment; values that look secret are '***'")
    )
    secrets_in_environment: list[str] = field(
        default_factory=list, metadata=says("names of variables whose value looks secret and is not empty")
    )
    secrets_in_arguments: list[str] = field(default_factory=list, metadata=says("options whose value looks secret"))
    network_mode: Optional[str] = field(default=None, metadata=says("host, bridge, none or a network's name"))
    ports: list[str] = field(default_factory=list, metadata=says("published ports as address:port->port/protocol"))
    memory_bytes: Optional[int] = field(default=None, metadata=says("memory limit; 0 where none", "B"))
    memory_swap_bytes: Optional[int] = field(
        default=None, metadata=says("memory and swap limit; 0 where none, -1 where unlimited", "B")
    )
    cpuset_cpus: Optional[str] = field(default=None, metadata=says("processors it may use; '' where all"))
    cpuset_mems: Optional[str] = field(default=None, metadata=says("NUMA nodes it may use; '' where all"))
    shm_bytes: Optional[int] = field(default=None, metadata=says("size of /dev/shm", "B"))
    ipc_mode: Optional[str] = field(default=None, metadata=says("private, host, shareable, …"))
    pid_mode: Optional[str] = field(default=None, metadata=says("'' or host"))
    init: Optional[bool] = field(
        default=None,
        metadata=says("whether an init process runs as first; None where not set (the daemon's default holds)"),
    )
    privileged: Optional[bool] = field(default=None, metadata=says("whether it is privileged"))
    read_only: Optional[bool] = field(default=None, metadata=says("whether its root is read-only"))
    stop_signal: Optional[str] = field(default=None, metadata=says("signal that asks it to stop"))
    stop_timeout_s: Optional[int] = field(
        default=None,
        metadata=says("seconds between that signal and the kill; None where not set (Docker's 10 s hold)", "s"),
    )
    restart_policy: Optional[str] = field(default=None, metadata=says("no, always, on-failure or unless-stopped"))
    log_driver: Optional[str] = field(default=None, metadata=says("log driver"))
    log_options: Optional[dict[str, str]] = field(default=None, metadata=says("log options"))
    runtime: Optional[str] = field(default=None, metadata=says("OCI runtime, for example runc or nvidia"))
    ulimits: dict[str, list[int]] = field(default_factory=dict, metadata=says("name -> soft and hard limit"))
    device_ids: list[str] = field(
        default_factory=list, metadata=says("GPUs that were asked for by id, or CDI device names")
    )
    device_count: Optional[int] = field(default=None, metadata=says("GPUs that were asked for by number; -1 where all"))
    devices: list[str] = field(default_factory=list, metadata=says("device nodes on the host that were given to it"))
    mounts: list[Mount] = field(default_factory=list, metadata=says("mounts"))
    capabilities_added: list[str] = field(default_factory=list, metadata=says("CapAdd"))
    security_options: list[str] = field(default_factory=list, metadata=says("SecurityOpt"))
    limits: Optional[ProcessLimits] = field(default=None, metadata=says("limits in force in its first process"))
    cpus_allowed: Optional[str] = field(
        default=None, metadata=says("processors that its first process may use, as the kernel says")
    )
    mems_allowed: Optional[str] = field(
        default=None, metadata=says("NUMA nodes that its first process may use, as the kernel says")
    )
    device_allow: Optional[list[str]] = field(
        default=None, metadata=says("lines of its 50-DeviceAllow.conf; None where there is no such drop-in")
    )

    @property
    def wants_gpu(self) -> bool:
        """Tell whether the container was created with access to a GPU."""
        visible = self.environment.get("NVIDIA_VISIBLE_DEVICES", "")
        return bool(
            self.device_ids
            or self.device_count
            or any("nvidia" in device for device in self.devices)
            or (self.runtime == "nvidia" and visible not in ("", "void", "none"))
        )


@dataclass
class Docker:
    """The Docker daemon and its containers."""

    version: Optional[str] = field(default=None, metadata=says("version of the daemon"))
    api_version: Optional[str] = field(default=None, metadata=says("newest API version that the daemon speaks"))
    min_api_version: Optional[str] = field(
        default=None, metadata=says("oldest API version that the daemon speaks (MinAPIVersion)")
    )
    client_version: Optional[str] = field(default=None, metadata=says("version of the docker command"))
    client_api_version: Optional[str] = field(
        default=None, metadata=says("API version that the docker command would use")
    )
    client_pinned_api_version: Optional[str] = field(
        default=None, metadata=says("DOCKER_API_VERSION in the host's environment files; '' where not set")
    )
    storage_driver: Optional[str] = field(default=None, metadata=says("storage driver"))
    cgroup_driver: Optional[str] = field(default=None, metadata=says("systemd or cgroupfs"))
    cgroup_version: Optional[str] = field(default=None, metadata=says("control group version that the daemon uses"))
    live_restore: Optional[bool] = field(
        default=None, metadata=says("whether containers survive a restart of the daemon")
    )
    swap_limit: Optional[bool] = field(default=None, metadata=says("whether the daemon can limit swap"))
    memory_limit: Optional[bool] = field(default=None, metadata=says("whether the daemon can limit memory"))
    default_runtime: Optional[str] = field(default=None, metadata=says("default OCI runtime"))
    runtimes: list[str] = field(default_factory=list, metadata=says("OCI runtimes"))
    logging_driver: Optional[str] = field(default=None, metadata=says("default log driver"))
    root_dir: Optional[str] = field(default=None, metadata=says("data root"))
    cdi_spec_dirs: Optional[list[str]] = field(
        default=None, metadata=says("folders of CDI specs; None where the daemon does not know CDI")
    )
    init_binary: Optional[str] = field(default=None, metadata=says("program of --init"))
    warnings: list[str] = field(default_factory=list, metadata=says("warnings of docker info"))
    daemon_json: Optional[dict[str, Any]] = field(
        default=None, metadata=says("/etc/docker/daemon.json; {} where the file is absent, None where it is malformed")
    )
    daemon_json_error: Optional[str] = field(default=None, metadata=says("what is wrong with daemon.json"))
    socket_mode: Optional[str] = field(default=None, metadata=says("mode of docker.sock, for example 0660"))
    socket_owner: Optional[str] = field(
        default=None, metadata=says("owner and group of docker.sock, for example root:docker")
    )
    tcp_listeners: list[str] = field(default_factory=list, metadata=says("addresses on which dockerd listens for TCP"))
    containers: Optional[list[Container]] = field(default=None, metadata=says("all containers, running or not"))


@dataclass
class CdiDeviceNode:
    """A device node in a CDI spec."""

    path: str = field(default="", metadata=says("path in the container"))
    major: Optional[int] = field(
        default=None, metadata=says("major number; None where the spec leaves it to the runtime")
    )
    minor: Optional[int] = field(default=None, metadata=says("minor number"))


@dataclass
class CdiSpec:
    """A CDI spec file."""

    path: str = field(default="", metadata=says("file"))
    kind: Optional[str] = field(default=None, metadata=says("for example nvidia.com/gpu"))
    version: Optional[str] = field(default=None, metadata=says("CDI version"))
    devices: list[str] = field(default_factory=list, metadata=says("device names"))
    device_nodes: list[CdiDeviceNode] = field(default_factory=list, metadata=says("device nodes of all devices"))
    error: Optional[str] = field(default=None, metadata=says("what is wrong with the file"))


@dataclass
class Directive:
    """One directive of an nginx configuration."""

    name: str = field(default="", metadata=says("for example proxy_pass"))
    args: list[str] = field(default_factory=list, metadata=says("arguments"))
    file: str = field(default="", metadata=says("file it stands in"))
    line: int = field(default=0, metadata=says("line in that file"))
    block: Optional[list[Directive]] = field(default=None, metadata=says("directives inside, where it opens a block"))

    def find(self, *names: str) -> list[Directive]:
        """Return all directives below this one (at any depth) that have one of ``names``."""
        return find_directives(self.block or [], *names)

    def child(self, name: str) -> Optional[Directive]:
        """Return the last directive of that name directly inside, or None."""
        found = [directive for directive in self.block or [] if directive.name == name]
        return found[-1] if found else None


def find_directives(directives: list[Directive], *names: str) -> list[Directive]:
    """Return all directives at any depth that have one of ``names``, in the order of the file."""
    found: list[Directive] = []
    for directive in directives:
        if directive.name in names:
            found.append(directive)
        found += find_directives(directive.block or [], *names)
    return found


@dataclass
class Nginx:
    """The gateway's nginx."""

    version: Optional[str] = field(default=None, metadata=says("version"))
    modules: list[str] = field(
        default_factory=list, metadata=says("modules compiled in or loaded, as nginx -V and load_module name them")
    )
    config: Optional[list[Directive]] = field(
        default=None, metadata=says("the whole configuration of nginx -T, includes in place")
    )
    config_error: Optional[str] = field(default=None, metadata=says("what nginx -t says is wrong"))
    access_log: Optional[list[str]] = field(
        default=None,
        metadata=says("last lines of the access logs whose status is 400 or more, addresses masked (at most 500)"),
    )
    error_log: Optional[list[str]] = field(default=None, metadata=says("last lines of the error logs (at most 200)"))


@dataclass
class Certificate:
    """A TLS certificate file that nginx names."""

    path: str = field(default="", metadata=says("file"))
    not_before: Optional[str] = field(default=None, metadata=says("valid from, UTC, as 2026-01-31T00:00:00Z"))
    not_after: Optional[str] = field(default=None, metadata=says("valid until, UTC"))
    subject: Optional[str] = field(default=None, metadata=says("subject"))
    names: list[str] = field(default_factory=list, metadata=says("alternative names"))
    error: Optional[str] = field(default=None, metadata=says("why it could not be read"))


@dataclass
class Rule:
    """A rule of Prometheus."""

    name: str = field(default="", metadata=says("alert or record"))
    kind: str = field(default="", metadata=says("alerting or recording"))
    expr: str = field(default="", metadata=says("expression"))
    for_s: Optional[float] = field(default=None, metadata=says("how long it must hold", "s"))
    labels: dict[str, str] = field(default_factory=dict, metadata=says("labels"))
    file: Optional[str] = field(default=None, metadata=says("file, or where it was loaded from"))
    health: Optional[str] = field(default=None, metadata=says("ok, err or unknown, as Prometheus evaluates it"))
    error: Optional[str] = field(default=None, metadata=says("last evaluation error"))


@dataclass
class Target:
    """A scrape target of Prometheus."""

    job: Optional[str] = field(default=None, metadata=says("job"))
    instance: Optional[str] = field(default=None, metadata=says("instance"))
    url: Optional[str] = field(default=None, metadata=says("scrape address"))
    health: Optional[str] = field(default=None, metadata=says("up, down or unknown"))
    error: Optional[str] = field(default=None, metadata=says("last scrape error"))


@dataclass
class Scrape:
    """What an exporter or an engine on this machine answered to a scrape."""

    name: str = field(default="", metadata=says("engine replica or exporter, for example short-0 or node"))
    port: Optional[int] = field(default=None, metadata=says("port"))
    state: str = field(default=NOT_COLLECTED, metadata=says("as for a probe"))
    error: str = field(default="", metadata=says("the reason in words"))
    metrics: Optional[list[str]] = field(
        default=None, metadata=says("names of all series (histograms with their _bucket, _sum and _count)")
    )
    samples: dict[str, float] = field(
        default_factory=dict,
        metadata=says("series with labels -> value; without buckets and go_, process_, node_ series"),
    )


@dataclass
class Monitoring:
    """Prometheus and the exporters of this machine."""

    rules: Optional[list[Rule]] = field(
        default=None, metadata=says("rules that Prometheus has loaded, asked over its API")
    )
    rules_in_files: Optional[list[Rule]] = field(default=None, metadata=says("rules in the rule files"))
    rule_files: list[str] = field(default_factory=list, metadata=says("rule files"))
    targets: Optional[list[Target]] = field(default=None, metadata=says("targets, asked over Prometheus' API"))
    version: Optional[str] = field(default=None, metadata=says("version of Prometheus"))
    scrapes: list[Scrape] = field(default_factory=list, metadata=says("exporters and engines of this machine"))
    dashboards: dict[str, list[str]] = field(default_factory=dict, metadata=says("dashboard file -> expressions in it"))
    metric_names: Optional[list[str]] = field(
        default=None,
        metadata=says(
            "metrics that Prometheus knows: series of the last ten minutes, and families that targets declare"
        ),
    )


@dataclass
class FileMode:
    """Owner and mode of a file; its content is never read."""

    path: str = field(default="", metadata=says("path"))
    kind: str = field(default="", metadata=says("file, directory, link, socket or other"))
    mode: Optional[str] = field(default=None, metadata=says("mode, for example 0600"))
    owner: Optional[str] = field(default=None, metadata=says("owner"))
    group: Optional[str] = field(default=None, metadata=says("group"))
    size: Optional[int] = field(default=None, metadata=says("size", "B"))
    mtime_ns: Optional[int] = field(default=None, metadata=says("time of the last change", "ns"))


@dataclass
class Release:
    """A release folder of an engine replica."""

    hash: str = field(default="", metadata=says("name of the folder"))
    release: Optional[dict[str, Any]] = field(default=None, metadata=says("release.json"))
    config: Optional[dict[str, Any]] = field(
        default=None, metadata=says("config.yaml, where it is simple enough to read")
    )
    config_text: Optional[str] = field(default=None, metadata=says("config.yaml as it stands, secrets masked"))
    content_sha256: Optional[str] = field(
        default=None,
        metadata=says("hash of the content of release.json, computed anew; the folder's name if untouched"),
    )
    file_sha256: dict[str, str] = field(
        default_factory=dict,
        metadata=says("rendered file of the current release -> SHA-256 of it without comments, computed anew"),
    )
    error: Optional[str] = field(default=None, metadata=says("why release.json could not be read"))


@dataclass
class Engine:
    """The state of one engine replica on this machine."""

    replica: str = field(default="", metadata=says("replica, for example short-0"))
    current: Optional[str] = field(default=None, metadata=says("release that the link `current` names"))
    previous: Optional[str] = field(default=None, metadata=says("release that the link `previous` names"))
    releases: list[Release] = field(default_factory=list, metadata=says("release folders"))
    rotation: Optional[dict[str, Any]] = field(
        default=None, metadata=says("rotation file: desired in or out, by whom, since when")
    )
    health_status: Optional[str] = field(
        default=None, metadata=says("state of the health endpoint, as for a probe; ok where it answered 200")
    )
    port: Optional[int] = field(default=None, metadata=says("port it listens on, from its release"))
    progress_interval_s: Optional[float] = field(
        default=None,
        metadata=says("time from its scrape to a second one; None where nothing was in flight and none was made", "s"),
    )
    samples_later: dict[str, float] = field(
        default_factory=dict, metadata=says("series of its progress and queue in that second scrape")
    )


@dataclass
class ModelFile:
    """A file of a model folder."""

    path: str = field(default="", metadata=says("path below the model's revision folder"))
    size: Optional[int] = field(default=None, metadata=says("size", "B"))
    mtime_ns: Optional[int] = field(default=None, metadata=says("time of the last change", "ns"))
    ctime_ns: Optional[int] = field(
        default=None, metadata=says("time of the last change of content or attributes", "ns")
    )
    inode: Optional[int] = field(default=None, metadata=says("inode"))


@dataclass
class Model:
    """A model revision on this machine."""

    name: str = field(default="", metadata=says("model"))
    revision: str = field(default="", metadata=says("revision folder"))
    manifest: Optional[dict[str, Any]] = field(default=None, metadata=says("<revision>.manifest.json"))
    manifest_error: Optional[str] = field(default=None, metadata=says("why the manifest could not be read"))
    files: Optional[list[ModelFile]] = field(
        default=None, metadata=says("files that are there; sizes are None for a link that leads nowhere")
    )
    index_files: Optional[list[str]] = field(
        default=None, metadata=says("weight files that the index lists; None where there is no index")
    )
    file_sha256: Optional[dict[str, str]] = field(
        default=None, metadata=says("path -> SHA-256 of the content; only where the group deep was asked for")
    )


@dataclass
class Metalserve:
    """What this bundle left on the machine."""

    engines: Optional[list[Engine]] = field(default=None, metadata=says("engine replicas"))
    models: Optional[list[Model]] = field(default=None, metadata=says("models"))
    secrets: Optional[list[FileMode]] = field(
        default=None, metadata=says("files below /etc/metalserve/secrets: modes, never contents")
    )


@dataclass
class Listener:
    """A listening TCP socket."""

    address: str = field(default="", metadata=says("address; 0.0.0.0 or :: is every address"))
    port: int = field(default=0, metadata=says("port"))
    process: Optional[str] = field(default=None, metadata=says("name of the process, where it could be found"))


@dataclass
class Network:
    """Sockets and firewall."""

    listeners: Optional[list[Listener]] = field(default=None, metadata=says("listening TCP sockets"))
    nft_ruleset: Optional[str] = field(default=None, metadata=says("nft list ruleset"))
    nft_tables: Optional[list[str]] = field(default=None, metadata=says("tables of it, for example inet metalserve"))


@dataclass
class TimeSync:
    """Clock."""

    synchronized: Optional[bool] = field(default=None, metadata=says("whether the kernel's clock is synchronised"))
    ntp_enabled: Optional[bool] = field(default=None, metadata=says("whether a time service is on"))
    service: Optional[str] = field(
        default=None, metadata=says("active time service: chrony, ntpsec, systemd-timesyncd, …")
    )
    offset_s: Optional[float] = field(default=None, metadata=says("offset that chrony reports", "s"))
    estimated_error_s: Optional[float] = field(
        default=None, metadata=says("error that the kernel estimates, where it is synchronised", "s")
    )


@dataclass
class Disk:
    """Space of one path that serving needs."""

    path: str = field(default="", metadata=says("path that was asked for"))
    total_bytes: Optional[int] = field(default=None, metadata=says("size of its file system", "B"))
    free_bytes: Optional[int] = field(default=None, metadata=says("space free for root", "B"))
    error: Optional[str] = field(
        default=None, metadata=says("why it could not be read, for example a mount that does not answer")
    )


@dataclass
class Security:
    """Mandatory access control."""

    selinux: Optional[str] = field(default=None, metadata=says("enforcing, permissive or disabled"))
    apparmor: Optional[bool] = field(default=None, metadata=says("whether AppArmor is on"))


@dataclass
class HostFacts:
    """Everything that is known about one machine."""

    schema_version: int = field(default=SCHEMA_VERSION, metadata=says("version of this structure"))
    source: str = field(default="", metadata=says("live or snapshot"))
    collected_at: Optional[str] = field(default=None, metadata=says("when it was read, UTC, as 2026-01-31T00:00:00Z"))
    collected_as_root: Optional[bool] = field(default=None, metadata=says("whether root read it"))
    masked: Optional[bool] = field(
        default=None,
        metadata=says(
            "whether names and addresses are stand-ins (hashes of texts then differ); None where it is not said"
        ),
    )
    probes: dict[str, ProbeState] = field(default_factory=dict, metadata=says("state of every probe by name"))
    unknown_fields: list[str] = field(
        default_factory=list,
        metadata=says("elements in nvidia-smi's answer that are not known here: read them as 'not judged'"),
    )
    problems: list[str] = field(default_factory=list, metadata=says("what could not be understood, one sentence each"))
    host: Host = field(default_factory=Host, metadata=says("name and kernel"))
    os: Os = field(default_factory=Os, metadata=says("distribution"))
    kernel: Kernel = field(default_factory=Kernel, metadata=says("kernel state"))
    cpu: Cpu = field(default_factory=Cpu, metadata=says("processors"))
    memory: Memory = field(default_factory=Memory, metadata=says("main memory"))
    numa: Numa = field(default_factory=Numa, metadata=says("NUMA"))
    cgroup: Cgroup = field(default_factory=Cgroup, metadata=says("control groups"))
    limits: Limits = field(default_factory=Limits, metadata=says("resource limits"))
    sysctl: dict[str, str] = field(
        default_factory=dict, metadata=says("kernel parameters that matter to serving, as text")
    )
    driver: Driver = field(default_factory=Driver, metadata=says("accelerator driver"))
    gpus: Optional[list[Gpu]] = field(
        default=None,
        metadata=says(
            "GPUs that the driver shows; [] where there is neither nvidia-smi nor a GPU on the bus, None: not known"
        ),
    )
    pci: Pci = field(default_factory=Pci, metadata=says("PCI devices"))
    topology: Topology = field(default_factory=Topology, metadata=says("GPU topology"))
    packages: Packages = field(default_factory=Packages, metadata=says("packages"))
    services: dict[str, Service] = field(default_factory=dict, metadata=says("systemd units by name"))
    kernel_log: KernelLog = field(default_factory=KernelLog, metadata=says("kernel log"))
    docker: Docker = field(default_factory=Docker, metadata=says("Docker"))
    cdi: Optional[list[CdiSpec]] = field(default=None, metadata=says("CDI specs"))
    nginx: Nginx = field(default_factory=Nginx, metadata=says("nginx"))
    certificates: Optional[list[Certificate]] = field(default=None, metadata=says("TLS certificates that nginx names"))
    monitoring: Monitoring = field(default_factory=Monitoring, metadata=says("monitoring"))
    metalserve: Metalserve = field(default_factory=Metalserve, metadata=says("what this bundle left"))
    network: Network = field(default_factory=Network, metadata=says("network"))
    time: TimeSync = field(default_factory=TimeSync, metadata=says("clock"))
    disks: Optional[list[Disk]] = field(default=None, metadata=says("space"))
    security: Security = field(default_factory=Security, metadata=says("access control"))

    def probe(self, name: str) -> ProbeState:
        """Return the state of the probe ``name``; ``not_collected`` where these facts do not list it.

        Raises KeyError for a name that no probe has: a misspelt name must not look like a reading that was left out.
        """
        if name not in self.probes and name not in probe_names():
            near = ", ".join(difflib.get_close_matches(name, probe_names(), 3)) or "see docs/snapshots.md"
            raise KeyError(f"there is no probe {name!r} ({near})")
        return self.probes.get(name) or ProbeState(name)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> HostFacts:
        """Return the facts that ``to_dict`` gave. Unknown keys are ignored; a value of a wrong type becomes unknown."""
        return from_plain(cls, value)


def probe_names() -> tuple[str, ...]:
    """Return the names of all probes."""
    # The registry needs the parsers, which need this module: it can only be asked for when all are loaded.
    from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES  # noqa: PLC0415

    return tuple(one.name for one in PROBES)


_T = TypeVar("_T")
_HINTS: dict[type[Any], dict[str, Any]] = {}


def hints(kind: type[Any]) -> dict[str, Any]:
    """Return the resolved types of a dataclass' fields."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    return _HINTS[kind]


def from_plain(kind: type[_T], value: Any) -> _T:
    """Build the dataclass ``kind`` from plain JSON values; what does not fit is left at its default."""
    built = kind()
    if not isinstance(value, dict):
        return built
    for name, hint in hints(kind).items():
        if name in value:
            good, converted = _convert(hint, value[name])
            if good:
                setattr(built, name, converted)
    return built


def _convert(hint: Any, value: Any) -> tuple[bool, Any]:
    """Return whether ``value`` fits the type ``hint``, and it as that type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    good, converted = True, value
    if origin is typing.Union:
        if value is not None:
            return _convert(next(arg for arg in args if arg is not NONE), value)
    elif dataclasses.is_dataclass(hint):
        good, converted = isinstance(value, dict), from_plain(typing.cast("type[Any]", hint), value)
    elif origin is list:
        good = isinstance(value, list)
        pairs = [_convert(args[0], one) for one in value] if good else []
        converted = [one for fits, one in pairs if fits]
    elif origin is dict:
        good = isinstance(value, dict)
        made = {str(key): _convert(args[1], one) for key, one in value.items()} if good else {}
        converted = {key: one for key, (fits, one) in made.items() if fits}
    elif hint in (int, float):
        good = isinstance(value, (int, hint)) and not isinstance(value, bool)
        converted = hint(value) if good else None
    elif hint is not Any:
        good = isinstance(value, hint)
    return good, converted
