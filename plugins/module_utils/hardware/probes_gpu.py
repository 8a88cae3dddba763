# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Probes of accelerators: driver, GPUs, PCI, topology, kernel log."""

from __future__ import annotations

import os
import re

from ansible_collections.metal.serve.plugins.module_utils.hardware import parse_nvidia, parse_pci
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ABSENT,
    ERROR,
    NOT_COLLECTED,
    OK,
    Item,
    Probe,
    command_path,
    snapshot_path,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_host import command_probe, file_probe

NVIDIA_SMI_TIMEOUT = 15.0
"""Seconds that nvidia-smi may take: a healthy one needs 0.1 to 3, one without persistence mode up to 30."""

_PCI_ATTRIBUTES = (
    "vendor",
    "device",
    "class",
    "numa_node",
    "local_cpulist",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "resource",
)


def _driver_file(host: LiveHost, path: str) -> Item:
    """Read a file of the NVIDIA driver through a child process: such a read can hang for good when a GPU is gone."""
    place = snapshot_path(path)
    if not os.path.exists(host.real(path)):
        return Item(place, ABSENT)
    return host.command(["head", "-c", "65536", host.real(path)], 5.0, at=place)


def _modinfo(host: LiveHost) -> list[Item]:
    found = host.command(["modinfo", "nvidia"], 8.0)
    gone = found.state == ERROR and "not found" in found.error
    return [Item(found.path, ABSENT)] if gone else [found]


def _gpu_information(host: LiveHost) -> list[Item]:
    paths = host.glob("/proc/driver/nvidia/gpus/*/information")
    items = [_driver_file(host, path) for path in paths[:64]]
    return items or [Item(snapshot_path("/proc/driver/nvidia/gpus"), ABSENT)]


def _device_nodes(host: LiveHost) -> list[Item]:
    """List /dev/nvidia* and the links /dev/char/<major>:<minor> that lead to them."""
    nodes = [
        path
        for path in host.glob("/dev/nvidia*") + host.glob("/dev/nvidia-caps/*")
        if not os.path.isdir(host.real(path))
    ]
    lines = [f"{path}\n" for path in nodes]
    for path in host.glob("/dev/char/*:*"):
        target = host.link(path) or ""
        if "nvidia" in target:
            lines.append(f"{path} -> {target}\n")
    place = "listings/dev_nvidia.txt"
    return [Item(place, OK, "".join(lines))] if lines else [Item(place, ABSENT)]


def _pci_devices(host: LiveHost) -> list[Item]:
    """Read the attributes of NVIDIA GPUs and NVSwitches; absent where the bus was listed and has none."""
    base = "/sys/bus/pci/devices"
    state, names, error = host.listdir(base)
    if state != OK:
        return [Item(snapshot_path(base), ERROR if state == ABSENT else state, "", error)]
    items: list[Item] = []
    for name in names:
        vendor = host.file(f"{base}/{name}/vendor", 64)
        kind = host.file(f"{base}/{name}/class", 64)
        if vendor.text.strip() != "0x10de" or not kind.text.startswith(("0x0300", "0x0302", "0x0680")):
            continue
        for attribute in _PCI_ATTRIBUTES:
            found = host.file(f"{base}/{name}/{attribute}", 8192)
            if found.state != ABSENT:
                items.append(found)
        driver = host.link(f"{base}/{name}/driver") or ""
        items.append(Item(snapshot_path(f"{base}/{name}/driver"), OK, os.path.basename(driver) + "\n"))
    return items or [Item(snapshot_path(base), ABSENT)]


def _bridges(host: LiveHost) -> list[Item]:
    """Ask lspci for the capabilities of the bridges above GPUs, where there is more than one GPU."""
    place = command_path(["lspci", "-D", "-vvv"])
    devices = parse_pci.parse_sysfs(host.found["pci_devices"].texts()) if "pci_devices" in host.found else []
    gpus = [device.address for device in devices if parse_pci.is_gpu(device)]
    if len(gpus) < 2:
        return [Item(place, NOT_COLLECTED, "", "bridges matter only where there is more than one GPU")]
    above: list[str] = []
    for address in gpus:
        real = os.path.realpath(host.real(f"/sys/bus/pci/devices/{address}"))
        for part in real.split("/")[:-1]:
            if re.match(r"\A[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z", part) and part not in above:
                above.append(part)
    if not above:
        return [Item(place, OK, "")]
    texts: list[str] = []
    for address in above[:64]:
        found = host.command(["lspci", "-D", "-vvv", "-s", address], 3.0, at=place)
        if found.state != OK:
            return [Item(place, found.state, "\n".join(texts), found.error)]
        texts.append(found.text.rstrip("\n") + "\n")
    return [Item(place, OK, "\n".join(texts))]


def _rdma(host: LiveHost) -> list[Item]:
    place = "listings/sys_class_infiniband.txt"
    state, names, error = host.listdir("/sys/class/infiniband")
    if state == OK and not names:
        state = ABSENT
    return [Item(place, state, "".join(f"{name}\n" for name in names), error)]


def _gpu_processes(host: LiveHost) -> list[Item]:
    """Read name and control group of the processes that hold GPU memory, so that they can be named and told apart."""
    text = host.found["nvidia_smi"].text() if "nvidia_smi" in host.found else None
    if text is None:
        return [Item("processes", NOT_COLLECTED, "", "nvidia-smi did not answer")]
    try:
        gpus = parse_nvidia.parse_smi(text).gpus
    except parse_nvidia.BadXml as error:
        return [Item("processes", NOT_COLLECTED, "", str(error))]
    pids = sorted({process.pid for gpu in gpus for process in gpu.processes or [] if process.pid is not None})
    items: list[Item] = []
    for pid in pids[:256]:
        for name in ("comm", "cgroup"):
            found = host.file(f"/proc/{pid}/{name}", 8192, at=f"processes/{pid}/{name}")
            if found.state != ABSENT:
                items.append(found)
    return items or [Item("processes", ABSENT)]


_LOG_WORDS = (
    "NVRM",
    "Xid",
    "no space for",
    "can't assign",
    "failed to assign",
    "nvidia",
    "nouveau",
    "pcieport",
    "AER:",
)
LOG_LIMIT = 512 * 1024


def _kernel_log(host: LiveHost) -> list[Item]:
    """Read the kernel's lines of the journal since the start of the machine, else dmesg; keep those that concern
    devices.
    """
    place = command_path(["journalctl", "-k", "-b"])
    found = host.command(["journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-iso"], 10.0, at=place)
    if found.state != OK or not found.text.strip():
        place = command_path(["dmesg"])
        found = host.command(["dmesg"], 5.0, at=place)
    kept = "".join(line + "\n" for line in found.text.splitlines() if any(word in line for word in _LOG_WORDS))
    return [Item(place, found.state, kept[-LOG_LIMIT:], found.error)]


def _fabric_manager_log(host: LiveHost) -> list[Item]:
    """Read the fabric manager's last words since the start of the machine, where it is installed."""
    place = command_path(["journalctl", "-u", "nvidia-fabricmanager"])
    if not host.glob("/lib/systemd/system/nvidia-fabricmanager.service") and host.which("nv-fabricmanager") is None:
        return [Item(place, ABSENT)]
    argv = ["journalctl", "-u", "nvidia-fabricmanager", "-b", "-n", "50", "--no-pager", "-q", "-o", "short-iso"]
    return [host.command(argv, 8.0, at=place)]


GPU_PROBES: tuple[Probe, ...] = (
    command_probe(
        "nvidia_smi",
        "gpu",
        ("nvidia-smi", "-q", "-x"),
        "GPUs as the driver describes them",
        NVIDIA_SMI_TIMEOUT,
        more_paths=("commands/nvidia-smi_-q_-x.xml",),
        missing=ABSENT,
    ),
    Probe(
        "gpu_processes",
        "gpu",
        ("processes/[0-9]*/comm", "processes/[0-9]*/cgroup"),
        _gpu_processes,
        second_round=True,
        says="names and control groups of processes on GPUs",
    ),
    Probe(
        "nvidia_version",
        "driver",
        (snapshot_path("/proc/driver/nvidia/version"),),
        lambda host: [_driver_file(host, "/proc/driver/nvidia/version")],
        6.0,
        says="loaded driver",
    ),
    Probe(
        "nvidia_params",
        "driver",
        (snapshot_path("/proc/driver/nvidia/params"),),
        lambda host: [_driver_file(host, "/proc/driver/nvidia/params")],
        6.0,
        says="parameters of the loaded driver",
    ),
    Probe(
        "nvidia_gpu_information",
        "driver",
        (snapshot_path("/proc/driver/nvidia/gpus/*/information"),),
        _gpu_information,
        10.0,
        says="GPUs that the kernel module knows",
    ),
    Probe(
        "modinfo_nvidia",
        "driver",
        (command_path(["modinfo", "nvidia"]),),
        _modinfo,
        says="module file that the next start would load",
    ),
    file_probe("proc_devices", "driver", "/proc/devices", "major numbers"),
    Probe("nvidia_device_nodes", "driver", ("listings/dev_nvidia.txt",), _device_nodes, says="device nodes"),
    Probe(
        "pci_devices",
        "pci",
        (snapshot_path("/sys/bus/pci/devices/*/*"),),
        _pci_devices,
        says="GPUs and NVSwitches on the bus",
    ),
    command_probe("lspci", "pci", ("lspci", "-D", "-nn"), "functions on the bus"),
    Probe(
        "pci_bridges",
        "pci",
        (command_path(["lspci", "-D", "-vvv"]),),
        _bridges,
        10.0,
        second_round=True,
        says="bridges above GPUs",
    ),
    Probe("rdma_devices", "pci", ("listings/sys_class_infiniband.txt",), _rdma, says="RDMA devices"),
    command_probe(
        "nvidia_topology",
        "topology",
        ("nvidia-smi", "topo", "-m"),
        "how GPUs reach each other",
        NVIDIA_SMI_TIMEOUT,
        missing=ABSENT,
    ),
    command_probe(
        "nvidia_nvlink",
        "topology",
        ("nvidia-smi", "nvlink", "-s"),
        "NVLink links",
        NVIDIA_SMI_TIMEOUT,
        missing=ABSENT,
    ),
    Probe(
        "kernel_log",
        "kernel_log",
        (command_path(["journalctl", "-k", "-b"]), command_path(["dmesg"])),
        _kernel_log,
        16.0,
        says="Xids, driver faults, memory windows without a place",
    ),
    Probe(
        "fabric_manager_log",
        "kernel_log",
        (command_path(["journalctl", "-u", "nvidia-fabricmanager"]),),
        _fabric_manager_log,
        says="what the fabric manager said last",
    ),
)
