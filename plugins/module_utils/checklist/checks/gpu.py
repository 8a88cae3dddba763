# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs: count, model, BAR1, ECC and row remapping, PCIe link, throttling, MIG, compute mode, who holds their memory."""

from __future__ import annotations

import math
import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    by_gpu,
    content_of,
    engine_containers,
    label,
    largest_tensor_parallel,
    needs_driver,
    needs_gpus,
    not_read,
    part,
    replica_of,
    worst,
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
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Gpu, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT

ENGINE = ("engine",)
Said = Optional[tuple[str, str]]


def has_nvlink(facts: HostFacts) -> Optional[bool]:
    """Tell whether every pair of GPUs is joined by NVLink; None where the topology could not be read."""
    matrix = facts.topology.matrix
    if matrix is None:
        return None
    gpus = [name for name in matrix if name.startswith("GPU")]
    pairs = [matrix[one].get(other, "") for one in gpus for other in gpus if one != other]
    return all(link.startswith("NV") for link in pairs)


def needs_peer_to_peer(facts: HostFacts, policy: Policy) -> Optional[bool]:
    """Tell whether GPUs of one replica talk over PCIe: by policy, else where TP > 1 without NVLink; None: not known."""
    expected = policy["expected"]
    if expected["peer_to_peer"] is not None:
        return bool(expected["peer_to_peer"])
    split = largest_tensor_parallel(facts, policy)
    if split is None or split <= 1:
        return None if split is None else False
    linked = has_nvlink(facts)
    return None if linked is None else not linked


@check(
    "gpu.count",
    title="As many GPUs as the inventory says",
    severity="critical",
    applies_to=ENGINE,
    why="a GPU that fell off the bus leaves its replicas without a place, and its metrics vanish instead of alarming",
    remedy="look for Xid 79 and PCIe errors, reseat or replace the card; a reboot in maintenance may bring it back",
    source="reports: series of a lost GPU disappear",
)
@needs_driver
def count(facts: HostFacts, policy: Policy) -> Finding:
    wanted = policy["expected"]["gpus"]
    if facts.gpus is None:
        if facts.probe("nvidia_smi").state == ABSENT and facts.probe("nvidia_version").state == ABSENT:
            return failed("no driver, so no GPU", wanted)
        return not_read(facts, "nvidia_smi")
    on_bus = None if facts.pci.gpus is None else len(facts.pci.gpus)
    seen = len(facts.gpus)
    if wanted is None:
        if on_bus is not None and on_bus > seen:
            return failed(f"{seen} answer, {on_bus} are on the PCI bus", on_bus)
        return unknown(f"{seen} GPUs; how many there should be is not declared (expected.gpus)")
    evidence = () if on_bus is None else (f"{on_bus} on the PCI bus",)
    if seen == wanted and facts.driver.attached_gpus not in (seen, None):
        return unknown(f"nvidia-smi counts {facts.driver.attached_gpus} GPUs and describes {seen}", wanted, *evidence)
    return (passed if seen == wanted else failed)(seen, wanted, *evidence)


@check(
    "gpu.model_and_memory",
    title="GPUs are the model and size that the plan rests on",
    severity="major",
    applies_to=ENGINE,
    why="one smaller or other card in a node shifts CUDA's order and breaks a plan made for equal cards",
    remedy="plan mixed cards as a pool of their own, or replace the odd one",
    source="reports: one small extra GPU shifted the device order",
)
@needs_gpus
def model_and_memory(facts: HostFacts, policy: Policy) -> Finding:
    gpus, expected = facts.gpus or [], policy["expected"]
    if any(gpu.name is None or gpu.memory_total_mib is None for gpu in gpus):
        return unknown("nvidia-smi does not say name and memory of every GPU")
    if any((gpu.memory_total_mib or 0) <= 0 for gpu in gpus):
        return failed("a GPU without memory", "the memory of its model")
    kinds = sorted({f"{gpu.name} {gpu.memory_total_mib} MiB" for gpu in gpus})
    desired = " ".join(
        part
        for part in (expected["gpu_name"], f"{expected['gpu_memory_mib']} MiB" if expected["gpu_memory_mib"] else "")
        if part
    )
    wrong = [
        f"{label(gpu)}: {gpu.name} {gpu.memory_total_mib} MiB"
        for gpu in gpus
        if (expected["gpu_name"] and expected["gpu_name"].lower() not in (gpu.name or "").lower())
        or (expected["gpu_memory_mib"] and abs((gpu.memory_total_mib or 0) - expected["gpu_memory_mib"]) > 1024)
    ]
    if wrong:
        return failed("; ".join(wrong), desired)
    if len(kinds) > 1:
        return warned(kinds, desired or "equal cards")
    return passed(f"{len(gpus)} x {kinds[0]}", desired or "equal cards")


@check(
    "gpu.bar1_minimum",
    title="BAR1 is at least the policy's minimum",
    severity="critical",
    applies_to=ENGINE,
    why="the driver maps memory for the CPU, for RDMA and for peers through BAR1; below the minimum mappings fail under load",
    remedy="turn on 'Above 4G decoding' and 'Resizable BAR' in the firmware, in maintenance",
    source="deployment checklist: GPU BAR1 >= 256 MB",
)
@needs_gpus
def bar1_minimum(facts: HostFacts, policy: Policy) -> Finding:
    wanted = policy["bar1_minimum_mib"]

    def one(gpu: Gpu) -> Said:
        if gpu.bar1_total_mib is None:
            return "unknown", "BAR1 not known"
        return None if gpu.bar1_total_mib >= wanted else ("fail", f"{gpu.bar1_total_mib} MiB")

    sizes = sorted({f"{gpu.bar1_total_mib} MiB" for gpu in facts.gpus or []})
    return worst(by_gpu(facts, one), f">= {wanted} MiB", sizes)


@check(
    "gpu.bar1_p2p",
    title="BAR1 covers the frame buffer, as peer-to-peer over PCIe needs",
    severity="major",
    applies_to=ENGINE,
    why="peers reach a card's memory through BAR1: a window smaller than the memory makes peer-to-peer fail or fall back",
    remedy="turn on Resizable BAR; where a bridge has too small a window, move the card or set pci=realloc, in maintenance",
    source="reports: 32 GB BAR on a 48 GB card; five of six cards resized, one bridge got a 12 GiB window",
)
@needs_gpus
def bar1_p2p(facts: HostFacts, policy: Policy) -> Finding:
    needed = needs_peer_to_peer(facts, policy)
    bridges = [
        f"{message.driver} {message.device} is short: {message.message}"
        for message in facts.kernel_log.bar_messages or []
    ]

    def one(gpu: Gpu) -> Said:
        if gpu.bar1_total_mib is None or gpu.memory_total_mib is None:
            return "unknown", "BAR1 or memory not known"
        if gpu.bar1_total_mib >= gpu.memory_total_mib:
            return None
        text = f"BAR1 {gpu.bar1_total_mib} MiB of {gpu.memory_total_mib} MiB"
        return ("fail" if needed else "warn"), text

    found = by_gpu(facts, one)
    if found[0] or found[1]:
        (found[0] or found[1]).extend(bridges)
    if needed is None and found[1]:
        return unknown(
            "; ".join([*found[1], "whether peer-to-peer is needed is not known (topology, tensor parallel size)"])
        )
    return worst(
        found, "BAR1 >= frame buffer" + (" (peer-to-peer is needed)" if needed else ""), "BAR1 covers the memory"
    )


@check(
    "gpu.ecc_and_remapping",
    title="Memory is healthy: no pending reset, no failed remapping, no uncorrected errors",
    severity="critical",
    applies_to=ENGINE,
    why="a pending row remapping needs a reset before it protects; a failed one corrupts answers while health is green",
    remedy="pending: drain and reset the GPU (maintain.yml). Failed remapping or passed threshold: replace the card",
    source="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
)
@needs_gpus
def ecc_and_remapping(facts: HostFacts, policy: Policy) -> Finding:
    if all(_no_ecc_card(gpu) for gpu in facts.gpus or []):
        return not_applicable("cards of a line without ECC")

    def one(gpu: Gpu) -> Said:
        if gpu.remapped_rows_failure or gpu.unrepairable_memory or gpu.sram_threshold_exceeded:
            return "fail", "replace the card: a remapping failed or errors passed the vendor's threshold"
        pending = (
            gpu.remapped_rows_pending,
            gpu.retired_pages_pending,
            gpu.channel_repair_pending,
            gpu.tpc_repair_pending,
        )
        if any(pending):
            return "fail", "reset pending: rows, pages or repairs wait for it"
        if gpu.reset_required or (gpu.recovery_action or "None") != "None":
            return "fail", f"the driver asks for: {gpu.recovery_action or 'a reset'}"
        if gpu.ecc_volatile_uncorrectable:
            return "fail", f"{gpu.ecc_volatile_uncorrectable} uncorrected errors since the driver was loaded"
        if gpu.ecc_mode is False:
            return "warn", "ECC is off"
        if gpu.ecc_mode is None or gpu.ecc_volatile_uncorrectable is None:
            return None if _no_ecc_card(gpu) else ("unknown", "ECC state not known")
        rows = gpu.remapped_rows_pending is not None and gpu.remapped_rows_failure is not None
        return None if rows or gpu.retired_pages_pending is not None else ("unknown", "remapping state not known")

    return worst(by_gpu(facts, one), "ECC on, nothing pending, nothing failed", "healthy")


def _no_ecc_card(gpu: Gpu) -> bool:
    """Tell whether this is a card line that has no ECC at all, and that says so of this one."""
    line = re.search(r"geforce|titan", f"{gpu.brand or ''} {gpu.name or ''}", re.IGNORECASE)
    return bool(line) and gpu.ecc_mode is None and not gpu.remapped_rows_failure and not gpu.remapped_rows_pending


@check(
    "gpu.pcie_link",
    title="PCIe link has its full width, and its full generation under load",
    severity="major",
    applies_to=ENGINE,
    why="a link at half width halves every copy to the card and raises no Xid; a low generation is normal when idle only",
    remedy="reseat the card or riser; check the slot's bifurcation in the firmware",
    source="reports: downtraining raises no Xid; generation 1 at idle is normal",
)
@needs_gpus
def pcie_link(facts: HostFacts, policy: Policy) -> Finding:
    def one(gpu: Gpu) -> Said:
        width, width_max = gpu.pcie_width_current, gpu.pcie_width_max
        if width is None or width_max is None:
            return "unknown", "link width not known"
        if width < width_max:
            return "fail", f"width {width} of {width_max}"
        generation, generation_max = gpu.pcie_gen_current, gpu.pcie_gen_max
        if generation is None or generation_max is None:
            return "unknown", "link generation not known"
        if generation >= generation_max:
            return None
        loaded = under_load(gpu)
        if loaded is None:
            return "unknown", f"generation {generation} of {generation_max}; whether it is idle is not known"
        return ("fail", f"generation {generation} of {generation_max} under load") if loaded else None

    links = sorted(
        {f"x{gpu.pcie_width_current}, gen {gpu.pcie_gen_current} of {gpu.pcie_gen_max}" for gpu in facts.gpus or []}
    )
    return worst(by_gpu(facts, one), "full width; full generation under load", links)


def under_load(gpu: Gpu) -> Optional[bool]:
    """Tell whether a GPU works: it does not say that it idles, and is in a high performance state or busy."""
    busy = None if gpu.utilization_gpu_percent is None else gpu.utilization_gpu_percent > 10
    if gpu.idle or gpu.idle is None:
        return False if gpu.idle else busy
    if gpu.performance_state is None:
        return True if busy is None else busy
    return gpu.performance_state in ("P0", "P1", "P2") or bool(busy)


HARDWARE_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "hw_power_brake")


@check(
    "gpu.throttling",
    title="Nothing but idling holds the clocks down",
    severity="major",
    applies_to=ENGINE,
    why="heat and power brakes cost tokens per second without any error",
    remedy="check cooling and power supplies; a software power cap under full load is normal",
    source="reports: throttling raises no Xid; the idle reason must be left out",
)
@needs_gpus
def throttling(facts: HostFacts, policy: Policy) -> Finding:
    def one(gpu: Gpu) -> Said:
        if gpu.throttle_reasons is None:
            return "unknown", "clock event reasons not known"
        active = [name for name, on in gpu.throttle_reasons.items() if on and name != "gpu_idle"]
        hardware = [name for name in active if name.startswith("hw_") or name in HARDWARE_REASONS or "thermal" in name]
        if hardware:
            return "fail", ", ".join(sorted(hardware))
        if not any(name.startswith("hw_") for name in gpu.throttle_reasons):
            return "unknown", "whether the hardware holds the clocks down is not said"
        if any(on is None for name, on in gpu.throttle_reasons.items() if name != "gpu_idle"):
            return "unknown", "some clock event reasons are not known"
        normal = (
            "sw_power_cap",
            "applications_clocks_setting",
            "sync_boost",
            "display_clock_setting",
            "display_clocks_setting",
        )
        other = [name for name in active if name not in normal]
        return ("warn", ", ".join(sorted(other))) if other else None

    return worst(by_gpu(facts, one), "none", "none")


@check(
    "gpu.mig_mode",
    title="MIG is as the plan expects",
    severity="major",
    applies_to=ENGINE,
    why="a card in MIG mode shows an engine a slice of its memory, or nothing at all",
    remedy="nvidia-smi -mig 0 and a reset, in maintenance; or declare expected.mig",
    source="https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
)
@needs_gpus
def mig_mode(facts: HostFacts, policy: Policy) -> Finding:
    wanted = bool(policy["expected"]["mig"])
    if not wanted and all(_no_mig_card(gpu) for gpu in facts.gpus or []):
        return not_applicable("cards of a line without MIG")

    def one(gpu: Gpu) -> Said:
        if gpu.mig_mode_pending is not None and gpu.mig_mode is not None and gpu.mig_mode_pending != gpu.mig_mode:
            return "warn", "MIG changes at the next reset"
        if gpu.mig_mode is None:
            return "unknown", "MIG mode not known"
        return None if gpu.mig_mode == wanted else ("fail", f"MIG is {'on' if gpu.mig_mode else 'off'}")

    return worst(by_gpu(facts, one), "on" if wanted else "off", "on" if wanted else "off")


# Cards that can be cut into MIG instances; of others N/A is all that the driver can say.
MIG_CARD = re.compile(r"\b(A100|A30|A800|H\d00|H20|GH200|B\d00|GB\d00|RTX PRO 6000)\b", re.IGNORECASE)


def _no_mig_card(gpu: Gpu) -> bool:
    return gpu.mig_mode is None and gpu.name is not None and MIG_CARD.search(gpu.name) is None


@check(
    "gpu.compute_mode",
    title="Compute mode lets an engine's processes in",
    severity="critical",
    applies_to=ENGINE,
    why="Prohibited lets no process in; Exclusive_Process lets in one, so a second context (a probe, a profiler) breaks",
    remedy="nvidia-smi -c DEFAULT",
    source="https://docs.nvidia.com/deploy/mps/ (compute modes)",
)
@needs_gpus
def compute_mode(facts: HostFacts, policy: Policy) -> Finding:
    def one(gpu: Gpu) -> Said:
        if gpu.compute_mode is None:
            return "unknown", "compute mode not known"
        if gpu.compute_mode == "Default":
            return None
        return ("fail" if "rohibited" in gpu.compute_mode else "warn"), gpu.compute_mode

    return worst(by_gpu(facts, one), "Default", "Default")


@check(
    "gpu.foreign_processes",
    title="No foreign process holds GPU memory",
    severity="critical",
    applies_to=ENGINE,
    why="memory held by a left-over worker or another tenant makes the next engine start fail, tens of MiB short",
    remedy="find out whose process it is and end it by hand; this bundle never kills it",
    source="reports: orphaned engine workers kept memory after a SIGKILL",
)
@needs_gpus
def foreign_processes(facts: HostFacts, policy: Policy) -> Finding:
    containers = facts.docker.containers
    docker_absent = facts.probe("docker_version").state == ABSENT
    ours = {one.id for one in containers or [] if replica_of(one)}

    def one(gpu: Gpu) -> Said:
        if gpu.processes is None:
            return "unknown", "processes not known"
        strangers = [process for process in gpu.processes if process.type != "G" and process.container_id not in ours]
        named = ", ".join(
            f"PID {process.pid} {process.name or '?'} {process.used_mib if process.used_mib is not None else '?'} MiB"
            for process in strangers
        )
        # Outside of every container, or in one that is known not to be ours: foreign beyond doubt.
        surely = [
            item for item in strangers if item.container_id == "" or (item.container_id and containers is not None)
        ]
        if surely or (strangers and (docker_absent or containers == [])):
            return "fail", named
        if strangers:
            return "unknown", f"{named}: whether it is an engine of ours is not known"
        if not gpu.processes and (gpu.memory_used_mib or 0) > 1024:
            return "warn", f"{gpu.memory_used_mib} MiB in use, and no process is shown"
        return None

    return worst(by_gpu(facts, one), "only engines of this bundle", "none")


@check(
    "gpu.free_memory",
    title="Free memory holds the planned utilisation",
    severity="critical",
    applies_to=ENGINE,
    why="the engine takes ceil(total x utilisation) and refuses to start when 70 MiB are missing",
    remedy="free the memory (gpu.foreign_processes names who holds it) or lower gpu_memory_utilization in the pool's settings",
    source="vLLM: 'Free memory on device ... is less than desired GPU memory utilization'",
)
@needs_gpus
def free_memory(facts: HostFacts, policy: Policy) -> Finding:
    containers, share = engine_containers(facts), policy["expected"]["gpu_memory_utilization"]
    settings = [part(content_of(engine), "settings") for engine in facts.metalserve.engines or []]
    planned = [one["gpu_memory_utilization"] for one in settings if _is_share(one.get("gpu_memory_utilization"))]
    share = max(planned, default=None) if share is None else share
    if share is None:
        return not_applicable("no planned utilisation is declared (expected.gpu_memory_utilization)")
    ours = {one.id for one in containers or [] if replica_of(one)}
    taken = [gpu.index for gpu in facts.gpus or [] if any(one.container_id in ours for one in gpu.processes or [])]
    if len(taken) == len(facts.gpus or []):
        return not_applicable("engines of this bundle run on every GPU: the memory is theirs")

    def one(gpu: Gpu) -> Said:
        if gpu.index in taken:
            return None
        if gpu.memory_total_mib is None or gpu.memory_free_mib is None:
            return "unknown", "memory not known"
        # In whole MiB and rounded up: a comparison of GiB with two digits hides the 70 MiB that a start fails by.
        needed = math.ceil(gpu.memory_total_mib * share)
        spare = gpu.memory_free_mib - needed
        if spare < 0:
            return "fail", f"{gpu.memory_free_mib} MiB free, {needed} MiB needed: {-spare} MiB short"
        return ("warn", f"{spare} MiB above what is needed") if spare < policy["gpu_memory_margin_mib"] else None

    desired = f"ceil(total x {share}) free, plus {policy['gpu_memory_margin_mib']} MiB"
    return worst(by_gpu(facts, one), desired, "enough")


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


@check(
    "gpu.fields_understood",
    title="Every field of nvidia-smi's answer is known here",
    severity="minor",
    applies_to=ENGINE,
    why="a driver that renamed a field makes the facts that rest on it silently unknown; the names are the way to see it",
    remedy="send a snapshot with the report (playbooks/snapshot.yml), so that the reader learns the new names",
    source="reports: XML v11 to v12 and driver 570 renamed the power fields",
)
@needs_gpus
def fields_understood(facts: HostFacts, policy: Policy) -> Finding:
    if facts.unknown_fields:
        named = ", ".join(facts.unknown_fields[:12])
        return unknown(f"unknown field: {named}{' ...' if len(facts.unknown_fields) > 12 else ''}", "none")
    return passed("all known", "none unknown")
