# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF009 - fact(), many(), table() and part() give dataclass fields, made anew for each class
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

UNLIMITED = 2**63 - 1
"""The value of a resource limit that is ``unlimited`` (so that it compares as the largest number)."""


def fact(says: str, unit: str = "") -> Any:
    """Return a dataclass field that is None until something is known; ``says`` and ``unit`` go to the documentation."""
    return field(default=None, metadata={"says": says, "unit": unit})


def many(says: str) -> Any:
    """Return a dataclass field that is a list, empty at first."""
    return field(default_factory=list, metadata={"says": says})


def table(says: str) -> Any:
    """Return a dataclass field that is a mapping, empty at first."""
    return field(default_factory=dict, metadata={"says": says})


def part(kind: type[Any], says: str) -> Any:
    """Return a dataclass field that holds another group of facts, all of them unknown at first."""
    return field(default_factory=kind, metadata={"says": says})


@dataclass
class ProbeState:
    """How one reading went."""

    name: str = field(default="", metadata={"says": "name of the probe"})
    state: str = field(
        default=NOT_COLLECTED,
        metadata={"says": "ok, absent (looked for, not there), denied, timeout, error or not_collected"},
    )
    error: str = field(default="", metadata={"says": "the reason in words where the state is neither ok nor absent"})
    seconds: float = field(default=0.0, metadata={"says": "how long it took", "unit": "s"})

    @property
    def ok(self) -> bool:
        """Tell whether the source was read."""
        return self.state == OK


@dataclass
class Host:
    """Name and kernel."""

    hostname: Optional[str] = fact("the kernel's node name")
    architecture: Optional[str] = fact("machine architecture as the kernel says it, for example x86_64")
    kernel_release: Optional[str] = fact("running kernel")
    kernel_version: Optional[str] = fact("build of the running kernel")
    uptime_s: Optional[float] = fact("time since the start of the machine", "s")
    virtualization: Optional[str] = fact("what systemd-detect-virt says: none, kvm, docker, …")


@dataclass
class Os:
    """The distribution, from os-release."""

    id: Optional[str] = fact("ID, for example debian, ubuntu, rocky")
    id_like: list[str] = many("ID_LIKE")
    version_id: Optional[str] = fact("VERSION_ID, for example 12 or 24.04")
    codename: Optional[str] = fact("VERSION_CODENAME")
    pretty_name: Optional[str] = fact("PRETTY_NAME")
    family: Optional[str] = fact("debian, redhat, suse or the ID itself")


@dataclass
class Kernel:
    """What the kernel was started with and has loaded."""

    cmdline: Optional[str] = fact("kernel command line")
    arguments: dict[str, str] = table("the command line by name; the last of equal names; a bare word has the value ''")
    modules: Optional[list[str]] = fact("names of the loaded modules")
    nouveau_loaded: Optional[bool] = fact("whether the nouveau module is loaded")
    nouveau_blacklisted_in: Optional[list[str]] = fact(
        "files of modprobe.d (or kernel command line) that blacklist nouveau"
    )
    nouveau_blacklist_in_initramfs: Optional[bool] = fact(
        "whether the initramfs was built after nouveau was blacklisted (an older one may still load it)"
    )
    modprobe_options: Optional[list[str]] = fact("lines of modprobe.d that concern nvidia or nouveau")
    secure_boot: Optional[bool] = fact("whether Secure Boot is on; False too where the firmware is not EFI")
    lockdown: Optional[str] = fact("kernel lockdown mode: none, integrity or confidentiality")
    iommu_groups: Optional[int] = fact("number of IOMMU groups; 0 where no IOMMU is on")
    taint: Optional[int] = fact("/proc/sys/kernel/tainted, a bit field")


@dataclass
class Cpu:
    """Processors."""

    model: Optional[str] = fact("model name of the first processor")
    vendor: Optional[str] = fact("vendor id")
    logical: Optional[int] = fact("processors that are online")
    sockets: Optional[int] = fact("different physical ids")
    cores: Optional[int] = fact("different pairs of physical and core id")
    online: Optional[str] = fact("processors that are online, as a list of ranges")
    governors: Optional[dict[str, int]] = fact("cpufreq governor -> number of processors; {} where there is no cpufreq")
    available_governors: Optional[list[str]] = fact("governors that the first processor could have")
    flags: list[str] = many(
        "instruction set flags of the first processor that matter to an engine (avx2, avx512f, amx_tile, …)"
    )


@dataclass
class Memory:
    """Main memory."""

    total_kib: Optional[int] = fact("MemTotal", "KiB")
    available_kib: Optional[int] = fact("MemAvailable", "KiB")
    swap_total_kib: Optional[int] = fact("SwapTotal", "KiB")
    swap_free_kib: Optional[int] = fact("SwapFree", "KiB")
    hugepages_total: Optional[int] = fact("HugePages_Total")
    hugepage_size_kib: Optional[int] = fact("Hugepagesize", "KiB")
    transparent_hugepages: Optional[str] = fact("always, madvise or never")
    transparent_hugepages_defrag: Optional[str] = fact("when the kernel compacts memory for them")


@dataclass
class NumaNode:
    """One NUMA node."""

    id: int = field(default=0, metadata={"says": "number of the node"})
    cpu_list: Optional[str] = fact("its processors, as a list of ranges; '' where it has none")
    memory_total_kib: Optional[int] = fact("its memory", "KiB")
    distances: Optional[list[int]] = fact("distance to each node, in the order of the nodes")


@dataclass
class Numa:
    """Memory topology."""

    nodes: Optional[list[NumaNode]] = fact("the nodes that are online")
    balancing: Optional[int] = fact("/proc/sys/kernel/numa_balancing, a bit field: anything but 0 is on")


@dataclass
class Cgroup:
    """Control groups."""

    version: Optional[int] = fact("1 or 2 (a mixed hierarchy counts as 1: limits are set through version 1)")
    controllers: Optional[list[str]] = fact("controllers of the root group")
    swap_limit: Optional[bool] = fact("whether the kernel can limit a group's swap")
    memory_limit: Optional[bool] = fact("whether the kernel can limit a group's memory")


@dataclass
class ProcessLimits:
    """Resource limits of one process; an unlimited one is 9223372036854775807."""

    pid: Optional[int] = fact("process id")
    nofile_soft: Optional[int] = fact("open files, soft")
    nofile_hard: Optional[int] = fact("open files, hard")
    memlock_soft: Optional[int] = fact("locked memory, soft", "B")
    memlock_hard: Optional[int] = fact("locked memory, hard", "B")
    nproc_soft: Optional[int] = fact("processes, soft")
    nproc_hard: Optional[int] = fact("processes, hard")


@dataclass
class LimitsEntry:
    """One line of limits.conf or limits.d."""

    file: str = field(default="", metadata={"says": "file it stands in"})
    domain: str = field(default="", metadata={"says": "user, @group or *"})
    type: str = field(default="", metadata={"says": "soft, hard or -"})
    item: str = field(default="", metadata={"says": "nofile, memlock, …"})
    value: Optional[int] = fact("the limit in the file's unit (memlock: KiB); unlimited is 9223372036854775807")


@dataclass
class Limits:
    """Resource limits in force and as configured."""

    processes: dict[str, ProcessLimits] = table(
        "limits in force by process: pid1, dockerd, containerd, nginx, sshd, session (a login over SSH)"
    )
    entries: Optional[list[LimitsEntry]] = fact("limits.conf and limits.d, in the order in which PAM reads them")
    systemd_default_nofile: Optional[int] = fact("DefaultLimitNOFILE of the service manager")
    systemd_default_memlock: Optional[int] = fact("DefaultLimitMEMLOCK of the service manager", "B")


@dataclass
class Driver:
    """The accelerator's driver."""

    version_loaded: Optional[str] = fact("version of the loaded kernel module, from /proc/driver/nvidia/version")
    version_nvml: Optional[str] = fact("driver version that nvidia-smi prints")
    version_installed: Optional[str] = fact(
        "upstream version of the installed driver package (None where none, or where packages disagree)"
    )
    versions_installed: list[str] = many(
        "every upstream version among the installed driver packages: more than one is a half upgrade"
    )
    version_on_disk: Optional[str] = fact("version of the kernel module file that the next start would load")
    cuda_version: Optional[str] = fact("newest CUDA that this driver runs, for example 13.0")
    kernel_module_type: Optional[str] = fact("open or proprietary")
    module_parameters: Optional[dict[str, str]] = fact("/proc/driver/nvidia/params")
    module_signer: Optional[str] = fact("who signed the module file; '' where nobody did")
    nvidia_smi_seconds: Optional[float] = fact("how long nvidia-smi took to answer", "s")
    nvidia_smi_error: Optional[str] = fact("what nvidia-smi said where it failed, for example a library mismatch")
    attached_gpus: Optional[int] = fact("number of GPUs that the driver counts")
    device_majors: dict[str, int] = table("major numbers of the driver's character devices, from /proc/devices")
    device_nodes: Optional[list[str]] = fact("/dev/nvidia* that exist")
    char_links: Optional[list[str]] = fact("links /dev/char/<major>:<minor> that lead to a device of the driver")


@dataclass
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: Optional[int] = fact("process id")
    name: Optional[str] = fact("its name, as the driver knows it, else as the kernel does")
    type: Optional[str] = fact("C (compute), G (graphics) or C+G")
    used_mib: Optional[int] = fact("memory it holds", "MiB")
    container_id: Optional[str] = fact("the container it runs in, '' where in none")


@dataclass
class Gpu:
    """One GPU, as nvidia-smi and sysfs describe it."""

    index: int = field(default=0, metadata={"says": "position in nvidia-smi's order (by PCI address)"})
    uuid: Optional[str] = fact("UUID")
    name: Optional[str] = fact("product name")
    brand: Optional[str] = fact("product brand; GeForce cards and data centre cards follow different CUDA rules")
    architecture: Optional[str] = fact("product architecture, for example Hopper")
    pci_bus_id: Optional[str] = fact("PCI address in sysfs form, 0000:3b:00.0")
    pci_device_id: Optional[str] = fact("device and vendor id, for example 233510DE")
    minor_number: Optional[int] = fact("number of /dev/nvidia<n>")
    vbios_version: Optional[str] = fact("VBIOS version")
    memory_total_mib: Optional[int] = fact("frame buffer", "MiB")
    memory_reserved_mib: Optional[int] = fact("frame buffer that the driver keeps", "MiB")
    memory_used_mib: Optional[int] = fact("frame buffer in use", "MiB")
    memory_free_mib: Optional[int] = fact("frame buffer that is free", "MiB")
    bar1_total_mib: Optional[int] = fact("BAR1 window", "MiB")
    bar1_used_mib: Optional[int] = fact("BAR1 in use", "MiB")
    numa_node: Optional[int] = fact("NUMA node it hangs on; None where the firmware does not say")
    local_cpus: Optional[str] = fact("processors near it, as a list of ranges")
    pcie_gen_current: Optional[int] = fact("PCIe generation now (lower when idle)")
    pcie_gen_max: Optional[int] = fact("PCIe generation that card and slot can do together")
    pcie_gen_device_max: Optional[int] = fact("PCIe generation that the card can do")
    pcie_gen_host_max: Optional[int] = fact("PCIe generation that the slot can do")
    pcie_width_current: Optional[int] = fact("PCIe lanes now")
    pcie_width_max: Optional[int] = fact("PCIe lanes that it can have")
    pcie_replays: Optional[int] = fact("PCIe replay counter")
    performance_state: Optional[str] = fact("P0 (fastest) … P12")
    throttle_reasons: Optional[dict[str, Optional[bool]]] = fact(
        "reason (gpu_idle, sw_power_cap, hw_slowdown, hw_thermal_slowdown, …) -> active, None where unknown"
    )
    persistence_mode: Optional[bool] = fact("persistence mode")
    compute_mode: Optional[str] = fact("Default, Exclusive_Process or Prohibited")
    mig_mode: Optional[bool] = fact("whether MIG is on; None also on cards that have no MIG")
    mig_mode_pending: Optional[bool] = fact("whether MIG will be on after a reset")
    mig_devices: Optional[int] = fact("number of MIG devices")
    addressing_mode: Optional[str] = fact("None, HMM or ATS, as the driver says it")
    virtualization_mode: Optional[str] = fact("None, Pass-Through, VGPU, Host VGPU or Host VSGA")
    ecc_mode: Optional[bool] = fact("whether ECC is on; None also on cards that have no ECC")
    ecc_mode_pending: Optional[bool] = fact("whether ECC will be on after a reset")
    ecc_volatile_correctable: Optional[int] = fact("corrected errors since the driver was loaded")
    ecc_volatile_uncorrectable: Optional[int] = fact("uncorrected errors since the driver was loaded")
    ecc_aggregate_correctable: Optional[int] = fact("corrected errors over the card's life")
    ecc_aggregate_uncorrectable: Optional[int] = fact("uncorrected errors over the card's life")
    ecc_counters: dict[str, Optional[int]] = table("each ECC counter, for example volatile.dram_uncorrectable")
    sram_threshold_exceeded: Optional[bool] = fact(
        "whether SRAM errors passed the vendor's threshold (replace the card)"
    )
    unrepairable_memory: Optional[bool] = fact("whether memory cannot be repaired any more")
    channel_repair_pending: Optional[bool] = fact("whether a channel repair waits for a reset")
    tpc_repair_pending: Optional[bool] = fact("whether a TPC repair waits for a reset")
    retired_pages_single_bit: Optional[int] = fact("pages retired for single bit errors (before Ampere)")
    retired_pages_double_bit: Optional[int] = fact("pages retired for double bit errors (before Ampere)")
    retired_pages_pending: Optional[bool] = fact("whether page retirement waits for a reset")
    remapped_rows_correctable: Optional[int] = fact("rows remapped for correctable errors")
    remapped_rows_uncorrectable: Optional[int] = fact("rows remapped for uncorrectable errors")
    remapped_rows_pending: Optional[bool] = fact("whether a remapping waits for a reset")
    remapped_rows_failure: Optional[bool] = fact("whether a remapping failed (replace the card)")
    row_remapper_banks: dict[str, Optional[int]] = table(
        "banks by remapping availability: max, high, partial, low, none"
    )
    recovery_action: Optional[str] = fact("what the driver asks for: None, Reset, Reboot, Drain P2P, …")
    reset_required: Optional[bool] = fact("whether the driver says that a reset is required")
    temperature_c: Optional[int] = fact("GPU temperature", "°C")
    temperature_memory_c: Optional[int] = fact("memory temperature", "°C")
    temperature_slowdown_c: Optional[int] = fact("temperature at which it slows down", "°C")
    temperature_to_limit_c: Optional[int] = fact("degrees below the thermal limit (newer drivers)", "°C")
    power_draw_w: Optional[float] = fact("power now", "W")
    power_limit_w: Optional[float] = fact("power limit in force", "W")
    power_default_limit_w: Optional[float] = fact("power limit of the card as shipped", "W")
    utilization_gpu_percent: Optional[int] = fact("share of time with a kernel running", "%")
    utilization_memory_percent: Optional[int] = fact("share of time with memory traffic", "%")
    clock_sm_mhz: Optional[int] = fact("SM clock", "MHz")
    clock_sm_max_mhz: Optional[int] = fact("highest SM clock", "MHz")
    clock_memory_mhz: Optional[int] = fact("memory clock", "MHz")
    fabric_state: Optional[str] = fact("state of the NVLink fabric: Completed, In Progress, Not Started")
    fabric_status: Optional[str] = fact("result of fabric registration, for example Success")
    fabric_health: dict[str, Optional[str]] = table("fabric health by name, for example bandwidth")
    nvlink_active: Optional[int] = fact("NVLink links that are up; 0 where the card has none")
    nvlink_inactive: Optional[int] = fact("NVLink links that are down")
    gsp_firmware: Optional[str] = fact("GSP firmware version")
    processes: Optional[list[GpuProcess]] = fact("processes that hold its memory")

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

    address: str = field(default="", metadata={"says": "0000:3b:00.0"})
    vendor: Optional[str] = fact("vendor id, 4 hex digits")
    device: Optional[str] = fact("device id, 4 hex digits")
    pci_class: Optional[str] = fact("class, 6 hex digits: 0300xx and 0302xx GPU, 0680xx NVSwitch, 0604xx bridge")
    numa_node: Optional[int] = fact("NUMA node; None where the firmware does not say")
    local_cpus: Optional[str] = fact("processors near it, as a list of ranges")
    link_width_current: Optional[int] = fact("lanes now")
    link_width_max: Optional[int] = fact("lanes that it can have")
    link_speed_current: Optional[float] = fact("speed now", "GT/s")
    link_speed_max: Optional[float] = fact("speed that it can have", "GT/s")
    bar_sizes: list[int] = many("sizes of its memory windows in bytes, in order; 0 where a window has no place")
    driver: Optional[str] = fact("kernel driver that is bound to it; '' where none is")


@dataclass
class PciBridge:
    """A bridge above a GPU, from lspci -vvv."""

    address: str = field(default="", metadata={"says": "0000:3a:00.0"})
    name: str = field(default="", metadata={"says": "what lspci calls it"})
    acs: Optional[dict[str, bool]] = fact(
        "ACSCtl flags (SrcValid, ReqRedir, CmpltRedir, UpstreamFwd, …); {} where it has no ACS"
    )
    bus: Optional[str] = fact("buses behind it, for example 3b-3c")
    prefetchable_window: Optional[str] = fact("prefetchable memory window as lspci prints it")


@dataclass
class Pci:
    """PCI devices that matter to serving."""

    gpus: Optional[list[PciDevice]] = fact("GPUs on the bus, whether a driver is loaded or not")
    nvswitches: Optional[list[PciDevice]] = fact("NVSwitch devices")
    bridges: Optional[list[PciBridge]] = fact("bridges above GPUs (read only where there is more than one GPU)")
    rdma_devices: Optional[list[str]] = fact("RDMA devices, for example mlx5_0")


@dataclass
class Topology:
    """How the GPUs reach each other."""

    matrix: Optional[dict[str, dict[str, str]]] = fact("device -> device -> NV18, PIX, PXB, PHB, NODE, SYS or X")
    cpu_affinity: dict[str, str] = table("device -> processors near it")
    numa_affinity: dict[str, str] = table("device -> NUMA node, as nvidia-smi prints it")


@dataclass
class Package:
    """An installed package of the driver's or the container runtime's family."""

    name: str = field(default="", metadata={"says": "name without architecture"})
    version: str = field(default="", metadata={"says": "full version"})
    status: str = field(
        default="", metadata={"says": "ii (installed), rc (removed, configuration left), iU, …; rpm: ii"}
    )
    architecture: Optional[str] = fact("architecture")
    held: Optional[bool] = fact(
        "whether it is held back (apt-mark hold, dnf versionlock); None where holds could not be read"
    )


@dataclass
class PackageEvent:
    """One run of apt that touched a package of the driver's or the container runtime's family."""

    date: Optional[str] = fact("when it started, in the host's time")
    command: Optional[str] = fact("command line")
    unattended: bool = field(default=False, metadata={"says": "whether unattended-upgrade did it"})
    action: str = field(default="", metadata={"says": "install, upgrade, downgrade, remove, purge or reinstall"})
    package: str = field(default="", metadata={"says": "package name"})
    old: Optional[str] = fact("version before")
    new: Optional[str] = fact("version after")


@dataclass
class Packages:
    """Packages that matter to serving."""

    manager: Optional[str] = fact("dpkg or rpm")
    items: Optional[list[Package]] = fact(
        "packages of the driver's, CUDA's, the container runtime's and the gateway's family"
    )
    holds: Optional[list[str]] = fact("every name (or pattern) that is held back")
    unattended_enabled: Optional[bool] = fact("whether unattended upgrades run (apt periodic or dnf-automatic)")
    unattended_blacklist: Optional[list[str]] = fact("patterns that unattended upgrades leave alone")
    unattended_origins: Optional[list[str]] = fact("origins from which unattended upgrades take packages")
    events: Optional[list[PackageEvent]] = fact("what apt's history says about those packages, oldest first")

    def find(self, name: str) -> Optional[Package]:
        """Return the installed package of this name; None where it is not installed or nothing could be read."""
        return next((item for item in self.items or [] if item.name == name and item.status.startswith("ii")), None)


@dataclass
class Service:
    """A systemd unit."""

    name: str = field(default="", metadata={"says": "full name, for example docker.service"})
    load_state: Optional[str] = fact("loaded, not-found or masked")
    active_state: Optional[str] = fact("active, inactive, failed, activating, …")
    sub_state: Optional[str] = fact("running, dead, exited, …")
    unit_file_state: Optional[str] = fact("enabled, disabled, static, masked, …")
    result: Optional[str] = fact("success, exit-code, signal, …")
    main_pid: Optional[int] = fact("main process; 0 where none runs")
    restarts: Optional[int] = fact("how often systemd restarted it")
    limit_nofile: Optional[int] = fact("LimitNOFILE in force for the next start")
    limit_memlock: Optional[int] = fact("LimitMEMLOCK in force for the next start", "B")
    timeout_stop_s: Optional[float] = fact("TimeoutStopUSec", "s")
    need_daemon_reload: Optional[bool] = fact("whether unit files changed since systemd read them")
    fragment_path: Optional[str] = fact("unit file")
    drop_ins: list[str] = many("drop-in files")
    after: list[str] = many("units it is ordered after")
    status_text: Optional[str] = fact("last status that the service itself gave")


@dataclass
class Xid:
    """One Xid of the driver in the kernel's log."""

    time: Optional[str] = fact("when, as the log has it")
    pci: Optional[str] = fact("PCI address without function, 0000:3b:00")
    code: int = field(default=0, metadata={"says": "Xid number"})
    message: str = field(default="", metadata={"says": "the rest of the line"})


@dataclass
class BarMessage:
    """A line in which the kernel says that it found no place for a memory window of a PCI device."""

    device: str = field(default="", metadata={"says": "PCI address of the bridge or card"})
    driver: str = field(default="", metadata={"says": "who said it, for example pcieport or pci"})
    message: str = field(default="", metadata={"says": "the rest of the line"})


@dataclass
class KernelLog:
    """What the kernel's log says about GPUs since the last start of the machine."""

    source: Optional[str] = fact("journal or dmesg")
    xids: Optional[list[Xid]] = fact("Xid lines, oldest first (at most 500)")
    nvrm: Optional[list[str]] = fact("other lines of the driver that name a fault (at most 200)")
    fabric_manager: Optional[list[str]] = fact(
        "last lines of the fabric manager's own log; [] where it is not installed"
    )
    bar_messages: Optional[list[BarMessage]] = fact("memory windows that found no place")


@dataclass
class Mount:
    """A mount of a container."""

    source: str = field(default="", metadata={"says": "path on the host or name of the volume"})
    destination: str = field(default="", metadata={"says": "path in the container"})
    writable: Optional[bool] = fact("whether the container may write to it")


@dataclass
class Container:
    """A container, as the Docker daemon describes it."""

    id: str = field(default="", metadata={"says": "64 hex digits"})
    name: Optional[str] = fact("name without the slash")
    image: Optional[str] = fact("image as it was asked for")
    image_id: Optional[str] = fact("id of the image it runs")
    repo_digests: Optional[list[str]] = fact("digests under which registries know that image")
    state: Optional[str] = fact("running, exited, created, …")
    exit_code: Optional[int] = fact("exit code of the last run")
    oom_killed: Optional[bool] = fact("whether the last run ended for want of memory")
    started_at: Optional[str] = fact("start of the last run")
    finished_at: Optional[str] = fact("end of the last run")
    restart_count: Optional[int] = fact("restarts by Docker itself")
    pid: Optional[int] = fact("first process; 0 where it does not run")
    health: Optional[str] = fact("healthy, unhealthy, starting; None where it has no health check")
    labels: dict[str, str] = table("labels")
    entrypoint: list[str] = many("entrypoint, secrets masked")
    command: list[str] = many("command, secrets masked")
    environment: dict[str, str] = table("environment; values that look secret are '***'")
    secrets_in_environment: list[str] = many("names of variables whose value looks secret and is not empty")
    secrets_in_arguments: list[str] = many("options whose value looks secret")
    network_mode: Optional[str] = fact("host, bridge, none or a network's name")
    ports: list[str] = many("published ports as address:port->port/protocol")
    memory_bytes: Optional[int] = fact("memory limit; 0 where none", "B")
    memory_swap_bytes: Optional[int] = fact("memory and swap limit; 0 where none, -1 where unlimited", "B")
    cpuset_cpus: Optional[str] = fact("processors it may use; '' where all")
    cpuset_mems: Optional[str] = fact("NUMA nodes it may use; '' where all")
    shm_bytes: Optional[int] = fact("size of /dev/shm", "B")
    ipc_mode: Optional[str] = fact("private, host, shareable, …")
    pid_mode: Optional[str] = fact("'' or host")
    init: Optional[bool] = fact(
        "whether an init process runs as first; None where not set (the daemon's default holds)"
    )
    privileged: Optional[bool] = fact("whether it is privileged")
    read_only: Optional[bool] = fact("whether its root is read-only")
    stop_signal: Optional[str] = fact("signal that asks it to stop")
    stop_timeout_s: Optional[int] = fact(
        "seconds between that signal and the kill; None where not set (Docker's 10 s hold)", "s"
    )
    restart_policy: Optional[str] = fact("no, always, on-failure or unless-stopped")
    log_driver: Optional[str] = fact("log driver")
    log_options: Optional[dict[str, str]] = fact("log options")
    runtime: Optional[str] = fact("OCI runtime, for example runc or nvidia")
    ulimits: dict[str, list[int]] = table("name -> soft and hard limit")
    device_ids: list[str] = many("GPUs that were asked for by id, or CDI device names")
    device_count: Optional[int] = fact("GPUs that were asked for by number; -1 where all")
    devices: list[str] = many("device nodes on the host that were given to it")
    mounts: list[Mount] = many("mounts")
    capabilities_added: list[str] = many("CapAdd")
    security_options: list[str] = many("SecurityOpt")
    limits: Optional[ProcessLimits] = fact("limits in force in its first process")
    cpus_allowed: Optional[str] = fact("processors that its first process may use, as the kernel says")
    mems_allowed: Optional[str] = fact("NUMA nodes that its first process may use, as the kernel says")
    device_allow: Optional[list[str]] = fact("lines of its 50-DeviceAllow.conf; None where there is no such drop-in")

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

    version: Optional[str] = fact("version of the daemon")
    api_version: Optional[str] = fact("newest API version that the daemon speaks")
    min_api_version: Optional[str] = fact("oldest API version that the daemon speaks (MinAPIVersion)")
    client_version: Optional[str] = fact("version of the docker command")
    client_api_version: Optional[str] = fact("API version that the docker command would use")
    client_pinned_api_version: Optional[str] = fact(
        "DOCKER_API_VERSION in the host's environment files; '' where not set"
    )
    storage_driver: Optional[str] = fact("storage driver")
    cgroup_driver: Optional[str] = fact("systemd or cgroupfs")
    cgroup_version: Optional[str] = fact("control group version that the daemon uses")
    live_restore: Optional[bool] = fact("whether containers survive a restart of the daemon")
    swap_limit: Optional[bool] = fact("whether the daemon can limit swap")
    memory_limit: Optional[bool] = fact("whether the daemon can limit memory")
    default_runtime: Optional[str] = fact("default OCI runtime")
    runtimes: list[str] = many("OCI runtimes")
    logging_driver: Optional[str] = fact("default log driver")
    root_dir: Optional[str] = fact("data root")
    cdi_spec_dirs: Optional[list[str]] = fact("folders of CDI specs; None where the daemon does not know CDI")
    init_binary: Optional[str] = fact("program of --init")
    warnings: list[str] = many("warnings of docker info")
    daemon_json: Optional[dict[str, Any]] = fact(
        "/etc/docker/daemon.json; {} where the file is absent, None where it is malformed"
    )
    daemon_json_error: Optional[str] = fact("what is wrong with daemon.json")
    socket_mode: Optional[str] = fact("mode of docker.sock, for example 0660")
    socket_owner: Optional[str] = fact("owner and group of docker.sock, for example root:docker")
    tcp_listeners: list[str] = many("addresses on which dockerd listens for TCP")
    containers: Optional[list[Container]] = fact("all containers, running or not")


@dataclass
class CdiDeviceNode:
    """A device node in a CDI spec."""

    path: str = field(default="", metadata={"says": "path in the container"})
    major: Optional[int] = fact("major number; None where the spec leaves it to the runtime")
    minor: Optional[int] = fact("minor number")


@dataclass
class CdiSpec:
    """A CDI spec file."""

    path: str = field(default="", metadata={"says": "file"})
    kind: Optional[str] = fact("for example nvidia.com/gpu")
    version: Optional[str] = fact("CDI version")
    devices: list[str] = many("device names")
    device_nodes: list[CdiDeviceNode] = many("device nodes of all devices")
    error: Optional[str] = fact("what is wrong with the file")


@dataclass
class Directive:
    """One directive of an nginx configuration."""

    name: str = field(default="", metadata={"says": "for example proxy_pass"})
    args: list[str] = many("arguments")
    file: str = field(default="", metadata={"says": "file it stands in"})
    line: int = field(default=0, metadata={"says": "line in that file"})
    block: Optional[list[Directive]] = fact("directives inside, where it opens a block")

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

    version: Optional[str] = fact("version")
    modules: list[str] = many("modules compiled in or loaded, as nginx -V and load_module name them")
    config: Optional[list[Directive]] = fact("the whole configuration of nginx -T, includes in place")
    config_error: Optional[str] = fact("what nginx -t says is wrong")
    access_log: Optional[list[str]] = fact(
        "last lines of the access logs whose status is 400 or more, addresses masked (at most 500)"
    )
    error_log: Optional[list[str]] = fact("last lines of the error logs (at most 200)")


@dataclass
class Certificate:
    """A TLS certificate file that nginx names."""

    path: str = field(default="", metadata={"says": "file"})
    not_before: Optional[str] = fact("valid from, UTC, as 2026-01-31T00:00:00Z")
    not_after: Optional[str] = fact("valid until, UTC")
    subject: Optional[str] = fact("subject")
    names: list[str] = many("alternative names")
    error: Optional[str] = fact("why it could not be read")


@dataclass
class Rule:
    """A rule of Prometheus."""

    name: str = field(default="", metadata={"says": "alert or record"})
    kind: str = field(default="", metadata={"says": "alerting or recording"})
    expr: str = field(default="", metadata={"says": "expression"})
    for_s: Optional[float] = fact("how long it must hold", "s")
    labels: dict[str, str] = table("labels")
    file: Optional[str] = fact("file, or where it was loaded from")
    health: Optional[str] = fact("ok, err or unknown, as Prometheus evaluates it")
    error: Optional[str] = fact("last evaluation error")


@dataclass
class Target:
    """A scrape target of Prometheus."""

    job: Optional[str] = fact("job")
    instance: Optional[str] = fact("instance")
    url: Optional[str] = fact("scrape address")
    health: Optional[str] = fact("up, down or unknown")
    error: Optional[str] = fact("last scrape error")


@dataclass
class Scrape:
    """What an exporter or an engine on this machine answered to a scrape."""

    name: str = field(default="", metadata={"says": "engine replica or exporter, for example short-0 or node"})
    port: Optional[int] = fact("port")
    state: str = field(default=NOT_COLLECTED, metadata={"says": "as for a probe"})
    error: str = field(default="", metadata={"says": "the reason in words"})
    metrics: Optional[list[str]] = fact("names of all series (histograms with their _bucket, _sum and _count)")
    samples: dict[str, float] = table(
        "series with labels -> value; buckets and what every exporter says of itself (go_, process_, node_) left out"
    )


@dataclass
class Monitoring:
    """Prometheus and the exporters of this machine."""

    rules: Optional[list[Rule]] = fact("rules that Prometheus has loaded, asked over its API")
    rules_in_files: Optional[list[Rule]] = fact("rules in the rule files")
    rule_files: list[str] = many("rule files")
    targets: Optional[list[Target]] = fact("targets, asked over Prometheus' API")
    version: Optional[str] = fact("version of Prometheus")
    scrapes: list[Scrape] = many("exporters and engines of this machine")
    dashboards: dict[str, list[str]] = table("dashboard file -> expressions in it")


@dataclass
class FileMode:
    """Owner and mode of a file; its content is never read."""

    path: str = field(default="", metadata={"says": "path"})
    kind: str = field(default="", metadata={"says": "file, directory, link, socket or other"})
    mode: Optional[str] = fact("mode, for example 0600")
    owner: Optional[str] = fact("owner")
    group: Optional[str] = fact("group")
    size: Optional[int] = fact("size", "B")
    mtime_ns: Optional[int] = fact("time of the last change", "ns")


@dataclass
class Release:
    """A release folder of an engine replica."""

    hash: str = field(default="", metadata={"says": "name of the folder"})
    release: Optional[dict[str, Any]] = fact("release.json")
    config: Optional[dict[str, Any]] = fact("config.yaml, where it is simple enough to read")
    config_text: Optional[str] = fact("config.yaml as it stands, secrets masked")
    error: Optional[str] = fact("why release.json could not be read")


@dataclass
class Engine:
    """The state of one engine replica on this machine."""

    replica: str = field(default="", metadata={"says": "replica, for example short-0"})
    current: Optional[str] = fact("release that the link `current` names")
    previous: Optional[str] = fact("release that the link `previous` names")
    releases: list[Release] = many("release folders")
    rotation: Optional[dict[str, Any]] = fact("rotation file: desired in or out, by whom, since when")
    health_status: Optional[str] = fact("state of the health endpoint, as for a probe; ok where it answered 200")
    port: Optional[int] = fact("port it listens on, from its release")


@dataclass
class ModelFile:
    """A file of a model folder."""

    path: str = field(default="", metadata={"says": "path below the model's revision folder"})
    size: Optional[int] = fact("size", "B")
    mtime_ns: Optional[int] = fact("time of the last change", "ns")
    ctime_ns: Optional[int] = fact("time of the last change of content or attributes", "ns")
    inode: Optional[int] = fact("inode")


@dataclass
class Model:
    """A model revision on this machine."""

    name: str = field(default="", metadata={"says": "model"})
    revision: str = field(default="", metadata={"says": "revision folder"})
    manifest: Optional[dict[str, Any]] = fact("<revision>.manifest.json")
    manifest_error: Optional[str] = fact("why the manifest could not be read")
    files: Optional[list[ModelFile]] = fact("files that are there; sizes are None for a link that leads nowhere")
    index_files: Optional[list[str]] = fact("weight files that the index lists; None where there is no index")


@dataclass
class Metalserve:
    """What this bundle left on the machine."""

    engines: Optional[list[Engine]] = fact("engine replicas")
    models: Optional[list[Model]] = fact("models")
    secrets: Optional[list[FileMode]] = fact("files below /etc/metalserve/secrets: modes, never contents")


@dataclass
class Listener:
    """A listening TCP socket."""

    address: str = field(default="", metadata={"says": "address; 0.0.0.0 or :: is every address"})
    port: int = field(default=0, metadata={"says": "port"})
    process: Optional[str] = fact("name of the process, where it could be found")


@dataclass
class Network:
    """Sockets and firewall."""

    listeners: Optional[list[Listener]] = fact("listening TCP sockets")
    nft_ruleset: Optional[str] = fact("nft list ruleset")
    nft_tables: Optional[list[str]] = fact("tables of it, for example inet metalserve")


@dataclass
class TimeSync:
    """Clock."""

    synchronized: Optional[bool] = fact("whether the kernel's clock is synchronised")
    ntp_enabled: Optional[bool] = fact("whether a time service is on")
    service: Optional[str] = fact("active time service: chrony, ntpsec, systemd-timesyncd, …")
    offset_s: Optional[float] = fact("offset that chrony reports", "s")
    estimated_error_s: Optional[float] = fact("error that the kernel estimates, where it is synchronised", "s")


@dataclass
class Disk:
    """Space of one path that serving needs."""

    path: str = field(default="", metadata={"says": "path that was asked for"})
    total_bytes: Optional[int] = fact("size of its file system", "B")
    free_bytes: Optional[int] = fact("space free for root", "B")
    error: Optional[str] = fact("why it could not be read, for example a mount that does not answer")


@dataclass
class Security:
    """Mandatory access control."""

    selinux: Optional[str] = fact("enforcing, permissive or disabled")
    apparmor: Optional[bool] = fact("whether AppArmor is on")


@dataclass
class HostFacts:
    """Everything that is known about one machine."""

    schema_version: int = field(default=SCHEMA_VERSION, metadata={"says": "version of this structure"})
    source: str = field(default="", metadata={"says": "live or snapshot"})
    collected_at: Optional[str] = fact("when it was read, UTC, as 2026-01-31T00:00:00Z")
    collected_as_root: Optional[bool] = fact("whether root read it")
    masked: Optional[bool] = fact(
        "whether names and addresses are stand-ins (hashes over texts then differ); None where a snapshot does not say"
    )
    probes: dict[str, ProbeState] = table("state of every probe by name")
    unknown_fields: list[str] = many(
        "elements in nvidia-smi's answer that are not known here: read them as 'not judged'"
    )
    problems: list[str] = many("what could not be understood, one sentence each")
    host: Host = part(Host, "name and kernel")
    os: Os = part(Os, "distribution")
    kernel: Kernel = part(Kernel, "kernel state")
    cpu: Cpu = part(Cpu, "processors")
    memory: Memory = part(Memory, "main memory")
    numa: Numa = part(Numa, "NUMA")
    cgroup: Cgroup = part(Cgroup, "control groups")
    limits: Limits = part(Limits, "resource limits")
    sysctl: dict[str, str] = table("kernel parameters that matter to serving, as text")
    driver: Driver = part(Driver, "accelerator driver")
    gpus: Optional[list[Gpu]] = fact(
        "GPUs that the driver shows; [] where there is neither nvidia-smi nor a GPU on the bus, None: not known"
    )
    pci: Pci = part(Pci, "PCI devices")
    topology: Topology = part(Topology, "GPU topology")
    packages: Packages = part(Packages, "packages")
    services: dict[str, Service] = table("systemd units by name")
    kernel_log: KernelLog = part(KernelLog, "kernel log")
    docker: Docker = part(Docker, "Docker")
    cdi: Optional[list[CdiSpec]] = fact("CDI specs")
    nginx: Nginx = part(Nginx, "nginx")
    certificates: Optional[list[Certificate]] = fact("TLS certificates that nginx names")
    monitoring: Monitoring = part(Monitoring, "monitoring")
    metalserve: Metalserve = part(Metalserve, "what this bundle left")
    network: Network = part(Network, "network")
    time: TimeSync = part(TimeSync, "clock")
    disks: Optional[list[Disk]] = fact("space")
    security: Security = part(Security, "access control")

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
            return _convert(next(arg for arg in args if arg is not type(None)), value)
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
