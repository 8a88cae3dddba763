# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what NVIDIA's tools and driver print: ``nvidia-smi -q -x``, ``topo -m``, ``nvlink -s``, /proc/driver/nvidia.

The XML is tolerant over the generations: v10 to v13 of its DTD, drivers 418 to 580 and later. A field that a
generation renamed is looked for under each name; a field that no generation had is reported by name, so that nobody
takes its absence for good news.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Optional
from xml.parsers import expat

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Gpu, GpuProcess

MAX_DEPTH = 40
MAX_ELEMENTS = 400_000
MAX_UNKNOWN = 200
"""Bounds of an XML answer, and the number of unknown elements that are named."""


class BadXml(ValueError):
    """The answer is not the XML that nvidia-smi prints; the message says why."""


@dataclass
class Element:
    """One XML element: name, attributes, text and children."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def child(self, *names: str) -> Optional[Element]:
        """Return the first child that has one of ``names``, the first name preferred."""
        for name in names:
            for one in self.children:
                if one.tag == name:
                    return one
        return None

    def at(self, *paths: str) -> Optional[str]:
        """Return the text at the first of the slash-separated ``paths`` that exists *and* is known, else None."""
        for path in paths:
            found: Optional[Element] = self
            for name in path.split("/"):
                found = found.child(name) if found is not None else None
            text = values.known(found.text) if found is not None and not found.children else None
            if text is not None:
                return text
        return None


def parse_xml(text: str) -> Element:
    """Return the root element. Raises BadXml for anything malformed, too large, or that declares entities (they can
    explode).
    """
    root = Element("")
    stack = [root]
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MAX_ELEMENTS or len(stack) > MAX_DEPTH:
            raise BadXml("the XML is too large or nested too deeply")
        element = Element(tag, dict(attributes))
        stack[-1].children.append(element)
        stack.append(element)

    def end(_tag: str) -> None:
        stack.pop()

    def data(chars: str) -> None:
        if len(stack[-1].text) < 65536:
            stack[-1].text += chars

    def refuse(*_args: Any) -> None:
        raise BadXml("the XML declares entities, which nvidia-smi never does")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = data
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(text.encode("utf-8", errors="replace"), True)
    except expat.ExpatError as error:
        raise BadXml(f"the XML is not well formed: {error}") from None
    except (LookupError, ValueError) as error:
        raise BadXml(str(error)[:200]) from None
    if len(root.children) != 1 or root.children[0].tag != "nvidia_smi_log":
        raise BadXml("the XML is not an nvidia_smi_log")
    return root.children[0]


@dataclass
class SmiLog:
    """What ``nvidia-smi -q -x`` says: driver, CUDA, GPUs, elements that are not known here, and complaints."""

    driver_version: Optional[str] = None
    cuda_version: Optional[str] = None
    attached_gpus: Optional[int] = None
    gpus: list[Gpu] = field(default_factory=list)
    unknown_fields: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse_smi(text: str) -> SmiLog:
    """Read the answer of ``nvidia-smi -q -x``. Raises BadXml where it is none."""
    root = parse_xml(text)
    log = SmiLog(
        driver_version=root.at("driver_version"),
        cuda_version=root.at("cuda_version"),
        attached_gpus=values.integer(root.at("attached_gpus")),
    )
    elements = [child for child in root.children if child.tag == "gpu"]
    log.gpus = [_gpu(index, element) for index, element in enumerate(elements)]
    if log.attached_gpus is not None and log.attached_gpus != len(elements):
        log.problems.append(f"nvidia-smi counts {log.attached_gpus} GPUs but describes {len(elements)}")
    unknown: dict[str, None] = {}
    for child in root.children:
        if child.tag == "gpu":
            _collect_unknown(child, "gpu", unknown)
        elif child.tag not in _KNOWN_ROOT:
            unknown[child.tag] = None
    log.unknown_fields = list(unknown)[:MAX_UNKNOWN]
    return log


def pci_address(text: Optional[str]) -> Optional[str]:
    """Return ``00000000:3B:00.0`` in sysfs form (``0000:3b:00.0``); None where it is no PCI address."""
    match = re.match(
        r"\A(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?\Z", (text or "").strip()
    )
    if match is None:
        return None
    domain = (match.group(1) or "0000").lower()
    domain = domain[-4:] if len(domain) == 8 and domain.startswith("0000") else domain
    return f"{domain}:{match.group(2)}:{match.group(3)}.{match.group(4) or '0'}".lower()


def _gpu(index: int, element: Element) -> Gpu:
    """Return one GPU; every field that is N/A, renamed or of an unknown form stays None."""
    at = element.at
    gpu = Gpu(index=index)
    gpu.uuid = at("uuid")
    gpu.name = at("product_name")
    gpu.brand = at("product_brand")
    gpu.architecture = at("product_architecture")
    gpu.pci_bus_id = pci_address(at("pci/pci_bus_id")) or pci_address(element.attributes.get("id"))
    gpu.pci_device_id = at("pci/pci_device_id")
    gpu.minor_number = values.integer(at("minor_number"))
    gpu.vbios_version = at("vbios_version")
    gpu.gsp_firmware = at("gsp_firmware_version")
    gpu.memory_total_mib = values.mebibytes(at("fb_memory_usage/total"))
    gpu.memory_reserved_mib = values.mebibytes(at("fb_memory_usage/reserved"))
    gpu.memory_used_mib = values.mebibytes(at("fb_memory_usage/used"))
    gpu.memory_free_mib = values.mebibytes(at("fb_memory_usage/free"))
    gpu.bar1_total_mib = values.mebibytes(at("bar1_memory_usage/total"))
    gpu.bar1_used_mib = values.mebibytes(at("bar1_memory_usage/used"))
    gpu.performance_state = at("performance_state")
    gpu.persistence_mode = values.switch(at("persistence_mode"))
    gpu.compute_mode = at("compute_mode")
    gpu.mig_mode = values.switch(at("mig_mode/current_mig"))
    gpu.mig_mode_pending = values.switch(at("mig_mode/pending_mig"))
    gpu.mig_devices = _mig_devices(element)
    gpu.addressing_mode = at("addressing_mode")
    gpu.virtualization_mode = at("gpu_virtualization_mode/virtualization_mode")
    gpu.recovery_action = at("gpu_recovery_action")
    gpu.reset_required = values.switch(at("gpu_reset_status/reset_required"))
    gpu.throttle_reasons = _throttle(element)
    gpu.utilization_gpu_percent = values.whole(at("utilization/gpu_util"), "%")
    gpu.utilization_memory_percent = values.whole(at("utilization/memory_util"), "%")
    gpu.clock_sm_mhz = values.whole(at("clocks/sm_clock"), "MHz")
    gpu.clock_memory_mhz = values.whole(at("clocks/mem_clock"), "MHz")
    gpu.clock_sm_max_mhz = values.whole(at("max_clocks/sm_clock"), "MHz")
    _pcie(gpu, element)
    _ecc(gpu, element)
    _rows(gpu, element)
    _heat_and_power(gpu, element)
    _fabric(gpu, element)
    gpu.processes = _processes(element)
    return gpu


def _lanes(text: Optional[str]) -> Optional[int]:
    lanes = values.whole(text, "x", "")
    return lanes if lanes is not None and 0 < lanes <= 32 else None


def _pcie(gpu: Gpu, element: Element) -> None:
    link = "pci/pci_gpu_link_info"
    gpu.pcie_gen_current = values.integer(element.at(f"{link}/pcie_gen/current_link_gen"))
    gpu.pcie_gen_max = values.integer(element.at(f"{link}/pcie_gen/max_link_gen"))
    gpu.pcie_gen_device_max = values.integer(element.at(f"{link}/pcie_gen/max_device_link_gen"))
    gpu.pcie_gen_host_max = values.integer(element.at(f"{link}/pcie_gen/max_host_link_gen"))
    gpu.pcie_width_current = _lanes(element.at(f"{link}/link_widths/current_link_width"))
    gpu.pcie_width_max = _lanes(element.at(f"{link}/link_widths/max_link_width"))
    gpu.pcie_replays = values.integer(element.at("pci/replay_counter"))


def _throttle(element: Element) -> Optional[dict[str, Optional[bool]]]:
    """Return the reasons under the names that both generations share (``gpu_idle``, ``hw_slowdown``, …)."""
    section = element.child("clocks_event_reasons", "clocks_throttle_reasons")
    if section is None or not section.children:
        return None
    reasons: dict[str, Optional[bool]] = {}
    for child in section.children:
        match = re.match(r"\Aclocks_(?:event|throttle)_reason_(\w+)\Z", child.tag)
        if match and not child.children:
            reasons[match.group(1)] = values.switch(child.text)
    return reasons or None


def _sum(counters: dict[str, Optional[int]], scope: str, names: tuple[str, ...]) -> Optional[int]:
    """Return the sum of those counters that this card has; None where it has none or one of them is unknown."""
    parts = [counters[f"{scope}.{name}"] for name in names if f"{scope}.{name}" in counters]
    known = [count for count in parts if count is not None]
    return sum(known) if parts and len(known) == len(parts) else None


_CORRECTABLE = ("sram_correctable", "dram_correctable", "single_bit.total")
_UNCORRECTABLE = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "dram_uncorrectable",
    "double_bit.total",
)


def _ecc(gpu: Gpu, element: Element) -> None:
    gpu.ecc_mode = values.switch(element.at("ecc_mode/current_ecc"))
    gpu.ecc_mode_pending = values.switch(element.at("ecc_mode/pending_ecc"))
    section = element.child("ecc_errors")
    if section is None:
        return
    counters: dict[str, Optional[int]] = {}
    for scope in ("volatile", "aggregate"):
        found = section.child(scope)
        for child in found.children if found is not None else []:
            if child.tag == "sram_threshold_exceeded":
                continue
            if not child.children:
                counters[f"{scope}.{child.tag}"] = values.integer(child.text)
            for grandchild in child.children:
                counters[f"{scope}.{child.tag}.{grandchild.tag}"] = values.integer(grandchild.text)
    gpu.ecc_counters = counters
    gpu.ecc_volatile_correctable = _sum(counters, "volatile", _CORRECTABLE)
    gpu.ecc_volatile_uncorrectable = _sum(counters, "volatile", _UNCORRECTABLE)
    gpu.ecc_aggregate_correctable = _sum(counters, "aggregate", _CORRECTABLE)
    gpu.ecc_aggregate_uncorrectable = _sum(counters, "aggregate", _UNCORRECTABLE)
    gpu.sram_threshold_exceeded = values.switch(
        element.at("ecc_errors/aggregate/sram_threshold_exceeded", "ecc_errors/sram_threshold_exceeded")
    )
    gpu.unrepairable_memory = values.switch(element.at("ecc_errors/unrepairable_memory"))
    gpu.channel_repair_pending = values.switch(element.at("ecc_errors/channel_repair_pending"))
    gpu.tpc_repair_pending = values.switch(element.at("ecc_errors/tpc_repair_pending"))


def _rows(gpu: Gpu, element: Element) -> None:
    pages = "retired_pages"
    gpu.retired_pages_single_bit = values.integer(element.at(f"{pages}/multiple_single_bit_retirement/retired_count"))
    gpu.retired_pages_double_bit = values.integer(element.at(f"{pages}/double_bit_retirement/retired_count"))
    gpu.retired_pages_pending = values.switch(element.at(f"{pages}/pending_retirement", f"{pages}/pending_blacklist"))
    rows = "remapped_rows"
    gpu.remapped_rows_correctable = values.integer(element.at(f"{rows}/remapped_row_corr"))
    gpu.remapped_rows_uncorrectable = values.integer(element.at(f"{rows}/remapped_row_unc"))
    gpu.remapped_rows_pending = values.switch(element.at(f"{rows}/remapped_row_pending"))
    gpu.remapped_rows_failure = values.switch(element.at(f"{rows}/remapped_row_failure"))
    section = element.child(rows)
    histogram = section.child("row_remapper_histogram") if section is not None else None
    for child in histogram.children if histogram is not None else []:
        name = (
            child.tag[len("row_remapper_histogram_") :]
            if child.tag.startswith("row_remapper_histogram_")
            else child.tag
        )
        gpu.row_remapper_banks[name] = values.whole(child.text, "bank(s)", "banks", "bank", "")


def _heat_and_power(gpu: Gpu, element: Element) -> None:
    at = element.at
    gpu.temperature_c = values.whole(at("temperature/gpu_temp"), "C")
    gpu.temperature_memory_c = values.whole(at("temperature/memory_temp"), "C")
    gpu.temperature_slowdown_c = values.whole(at("temperature/gpu_temp_slow_threshold"), "C")
    gpu.temperature_to_limit_c = values.whole(at("temperature/gpu_temp_tlimit"), "C")
    new, old = "gpu_power_readings", "power_readings"
    gpu.power_draw_w = values.quantity(
        at(f"{new}/instant_power_draw", f"{new}/power_draw", f"{new}/average_power_draw", f"{old}/power_draw"), "W"
    )
    gpu.power_limit_w = values.quantity(
        at(f"{new}/current_power_limit", f"{new}/power_limit", f"{old}/enforced_power_limit", f"{old}/power_limit"), "W"
    )
    gpu.power_default_limit_w = values.quantity(at(f"{new}/default_power_limit", f"{old}/default_power_limit"), "W")


def _fabric(gpu: Gpu, element: Element) -> None:
    gpu.fabric_state = element.at("fabric/state")
    gpu.fabric_status = element.at("fabric/status")
    section = element.child("fabric")
    health = section.child("health") if section is not None else None
    for child in health.children if health is not None else []:
        gpu.fabric_health[child.tag] = values.known(child.text)


def _mig_devices(element: Element) -> Optional[int]:
    section = element.child("mig_devices")
    if section is None:
        return None
    devices = [child for child in section.children if child.tag == "mig_device"]
    if devices:
        return len(devices)
    return 0 if section.text.strip().lower() == "none" else None


def _processes(element: Element) -> Optional[list[GpuProcess]]:
    """Return the processes; None where the section is missing or says N/A (a hidden process list is not an empty
    one).
    """
    section = element.child("processes")
    if section is None or (not section.children and section.text.strip()):
        return None
    found = []
    for child in section.children:
        if child.tag == "process_info":
            kind = child.at("type")
            found.append(
                GpuProcess(
                    pid=values.integer(child.at("pid")),
                    name=child.at("process_name"),
                    type=kind,
                    used_mib=values.mebibytes(child.at("used_memory")),
                )
            )
    return found


def parse_topology(text: str) -> tuple[Optional[dict[str, dict[str, str]]], dict[str, str], dict[str, str]]:
    """Read ``nvidia-smi topo -m``: device -> device -> link, device -> CPU affinity, device -> NUMA affinity.

    Columns are tab separated, the header is underlined with escape codes on a terminal, and the affinity columns come
    and go with the generation; a row whose cells do not fit the header is left out.
    """
    clean = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line for line in clean.splitlines() if line.strip()]
    header_at = next((n for n, line in enumerate(lines) if re.match(r"\s+GPU\d+\b", line)), None)
    if header_at is None:
        return None, {}, {}
    header = [cell.strip() for cell in lines[header_at].split("\t")]
    header = [cell for cell in header if cell]
    devices = [cell for cell in header if re.match(r"\A(?:GPU|NIC|mlx)\S*\Z", cell)]
    extra = header[len(devices) :]
    matrix: dict[str, dict[str, str]] = {}
    cpus: dict[str, str] = {}
    numa: dict[str, str] = {}
    for line in lines[header_at + 1 :]:
        cells = [cell.strip() for cell in line.split("\t")]
        if cells[0] not in devices:
            continue
        row = [cell for cell in cells[1:] if cell] if "\t" in line else []
        if len(row) < len(devices):
            continue
        matrix[cells[0]] = dict(zip(devices, row))
        for name, cell in zip(extra, row[len(devices) :]):
            if name.lower() == "cpu affinity":
                cpus[cells[0]] = cell
            elif name.lower() == "numa affinity":
                numa[cells[0]] = cell
    return (matrix or None), cpus, numa


def parse_nvlink(text: str) -> dict[str, tuple[int, int]]:
    """Read ``nvidia-smi nvlink -s``: UUID -> links that are up and links that are down."""
    found: dict[str, tuple[int, int]] = {}
    uuid = ""
    for line in text.splitlines():
        match = re.search(r"\(UUID:\s*(GPU-[0-9A-Za-z-]+)\)", line)
        if match and line.startswith("GPU "):
            uuid = match.group(1)
            found[uuid] = (0, 0)
        link = re.match(r"\s*Link\s+\d+:\s*(.+?)\s*\Z", line)
        if link and uuid:
            up, down = found[uuid]
            if re.match(r"\A[\d.]+\s*GB/s", link.group(1)):
                found[uuid] = (up + 1, down)
            elif "inactive" in link.group(1).lower():
                found[uuid] = (up, down + 1)
    return found


def parse_module_version(text: str) -> tuple[Optional[str], Optional[str]]:
    """Read /proc/driver/nvidia/version: version and ``open`` or ``proprietary``; None where it says neither."""
    line = next(
        (line for line in text.splitlines() if "NVRM version" in line), text.splitlines()[0] if text.strip() else ""
    )
    match = re.search(r"\b(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\b", line)
    version = match.group(1) if match else None
    if version is None:
        return None, None
    return version, "open" if "open kernel module" in line.lower() else "proprietary"


_KNOWN_ROOT = frozenset(
    {"timestamp", "driver_version", "cuda_version", "attached_gpus", "gpu", "hic_info", "unit_info"}
)

_OPEN_SECTIONS = frozenset(
    {
        "supported_clocks",
        "clocks_event_reasons",
        "clocks_throttle_reasons",
        "clocks_event_reasons_counters",
        "row_remapper_histogram",
        "accounted_processes",
        "mig_devices",
        "platformInfo",
        "platform_info",
        "inforom_version",
        "health",
        "power_profiles",
        "power_smoothing",
        "aggregate_uncorrectable_sram_sources",
        "single_bit",
        "double_bit",
        "retired_pagelist",
        "vgpu_software_licensed_product",
        "driver_model",
        "capabilities",
        "encoder_stats",
        "fbc_stats",
    }
)
"""Sections whose children are read as they come, or that no check looks at."""

_KNOWN = frozenset(
    [
        "product_name",
        "product_brand",
        "product_architecture",
        "display_mode",
        "display_active",
        "display_attached",
        "persistence_mode",
        "addressing_mode",
        "mig_mode",
        "current_mig",
        "pending_mig",
        "accounting_mode",
        "accounting_mode_buffer_size",
        "serial",
        "uuid",
        "pdi",
        "minor_number",
        "vbios_version",
        "multigpu_board",
        "board_id",
        "board_part_number",
        "gpu_part_number",
        "gpu_fru_part_number",
        "gpu_module_id",
        "inforom_bbx_flush",
        "latest_timestamp",
        "latest_duration",
        "gpu_operation_mode",
        "current_gom",
        "pending_gom",
        "c2c_mode",
        "gpu_virtualization_mode",
        "virtualization_mode",
        "host_vgpu_mode",
        "vgpu_heterogeneous_mode",
        "gpu_recovery_action",
        "gpu_reset_status",
        "reset_required",
        "drain_and_reset_recommended",
        "gsp_firmware_version",
        "ibmnpu",
        "relaxed_ordering_mode",
        "pci",
        "pci_bus",
        "pci_device",
        "pci_domain",
        "pci_base_class",
        "pci_sub_class",
        "pci_device_id",
        "pci_bus_id",
        "pci_sub_system_id",
        "pci_gpu_link_info",
        "pcie_gen",
        "max_link_gen",
        "current_link_gen",
        "device_current_link_gen",
        "max_device_link_gen",
        "max_host_link_gen",
        "link_widths",
        "max_link_width",
        "current_link_width",
        "pci_bridge_chip",
        "bridge_chip_type",
        "bridge_chip_fw",
        "replay_counter",
        "replay_rollover_counter",
        "tx_util",
        "rx_util",
        "atomic_caps_inbound",
        "atomic_caps_outbound",
        "fan_speed",
        "performance_state",
        "sparse_operation_mode",
        "fb_memory_usage",
        "bar1_memory_usage",
        "cc_protected_memory_usage",
        "total",
        "reserved",
        "used",
        "free",
        "compute_mode",
        "utilization",
        "gpu_util",
        "memory_util",
        "encoder_util",
        "decoder_util",
        "jpeg_util",
        "ofa_util",
        "dram_encryption_mode",
        "current_dram_encryption",
        "pending_dram_encryption",
        "ecc_mode",
        "current_ecc",
        "pending_ecc",
        "ecc_errors",
        "volatile",
        "aggregate",
        "sram_correctable",
        "sram_uncorrectable",
        "sram_uncorrectable_parity",
        "sram_uncorrectable_secded",
        "dram_correctable",
        "dram_uncorrectable",
        "sram_threshold_exceeded",
        "channel_repair_pending",
        "tpc_repair_pending",
        "unrepairable_memory",
        "retired_pages",
        "multiple_single_bit_retirement",
        "double_bit_retirement",
        "retired_count",
        "pending_blacklist",
        "pending_retirement",
        "remapped_rows",
        "remapped_row_corr",
        "remapped_row_corr_inactive",
        "remapped_row_unc",
        "remapped_row_unc_inactive",
        "remapped_row_pending",
        "remapped_row_failure",
        "temperature",
        "gpu_temp",
        "gpu_temp_tlimit",
        "gpu_temp_max_threshold",
        "gpu_temp_slow_threshold",
        "gpu_temp_max_gpu_threshold",
        "gpu_temp_max_tlimit_threshold",
        "gpu_temp_slow_tlimit_threshold",
        "gpu_temp_max_gpu_tlimit_threshold",
        "gpu_target_temperature",
        "memory_temp",
        "gpu_temp_max_mem_threshold",
        "gpu_temp_max_mem_tlimit_threshold",
        "supported_gpu_target_temp",
        "gpu_target_temp_min",
        "gpu_target_temp_max",
        "power_readings",
        "gpu_power_readings",
        "gpu_memory_power_readings",
        "module_power_readings",
        "power_state",
        "power_management",
        "power_draw",
        "average_power_draw",
        "instant_power_draw",
        "power_limit",
        "current_power_limit",
        "requested_power_limit",
        "default_power_limit",
        "enforced_power_limit",
        "min_power_limit",
        "max_power_limit",
        "clocks",
        "applications_clocks",
        "default_applications_clocks",
        "deferred_clocks",
        "max_clocks",
        "max_customer_boost_clocks",
        "graphics_clock",
        "sm_clock",
        "mem_clock",
        "video_clock",
        "clock_policy",
        "auto_boost",
        "auto_boost_default",
        "voltage",
        "graphics_volt",
        "fabric",
        "state",
        "status",
        "cliqueId",
        "clique_id",
        "clusterUuid",
        "cluster_uuid",
        "processes",
        "process_info",
        "gpu_instance_id",
        "compute_instance_id",
        "pid",
        "type",
        "process_name",
        "used_memory",
    ]
)


def _collect_unknown(element: Element, path: str, unknown: dict[str, None]) -> None:
    """Note every element below ``element`` whose name no generation known here had."""
    for child in element.children:
        where = f"{path}/{child.tag}"[:200]
        if child.tag in _OPEN_SECTIONS:
            continue
        if child.tag not in _KNOWN:
            if len(unknown) < MAX_UNKNOWN:
                unknown[where] = None
            continue
        _collect_unknown(child, where, unknown)
