# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Topology: NUMA balancing, CPUs near the GPUs, ACS and IOMMU, NVLink, CPU governor, huge pages."""

from __future__ import annotations

from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.gpu import has_nvlink
from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    by_one,
    cpu_set,
    engine_containers,
    largest_tensor_parallel,
    needs_gpus,
    not_read,
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
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Container, HostFacts, PciBridge
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT

ENGINE = ("engine",)


@check(
    "numa.balancing",
    title="Automatic NUMA balancing is off",
    severity="major",
    applies_to=ENGINE,
    tags=("host",),
    why="its page scans stall serving threads by up to 31 ms and can make a large model's load look hung",
    remedy="sysctl kernel.numa_balancing=0, kept in /etc/sysctl.d",
    source="deployment checklist: numa_balancing = 0; reports: task_numa_work adds 16-31 ms",
)
def balancing(facts: HostFacts, policy: Policy) -> Finding:
    wanted = policy["numa_balancing"]
    if facts.numa.nodes is not None and len(facts.numa.nodes) <= 1:
        return not_applicable("one NUMA node")
    if facts.numa.balancing is None:
        if facts.probe("numa_balancing").state == ABSENT:
            return passed("this kernel has no NUMA balancing", wanted)
        return not_read(facts, "numa_balancing")
    if facts.numa.balancing == wanted:
        return passed(facts.numa.balancing, wanted)
    if facts.numa.nodes is None:
        return unknown(f"numa_balancing is {facts.numa.balancing}; how many NUMA nodes there are is not known", wanted)
    return failed(facts.numa.balancing, wanted, f"{len(facts.numa.nodes)} NUMA nodes")


@check(
    "numa.container_cpus",
    title="Engine containers may use CPUs near their GPUs",
    severity="major",
    applies_to=ENGINE,
    why="a cpuset without a CPU near the GPU sends every copy across sockets and silently disables NUMA binding",
    remedy="let the plan set cpuset and mems from the GPU's NUMA node, and redeploy (playbooks/redeploy.yml)",
    source="reports: a container cpuset disabled NUMA binding",
)
@needs_gpus
def container_cpus(facts: HostFacts, policy: Policy) -> Finding:
    desired = "a cpuset that meets the GPU's local CPUs"
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    mine = [one for one in engine_containers(facts) or [] if one.wants_gpu]
    if not mine:
        return not_applicable("no GPU container runs")

    def one(container: Container) -> Optional[tuple[str, str]]:
        name = container.name or container.id[:12]
        pinned = container.cpus_allowed or container.cpuset_cpus
        allowed = cpu_set(pinned or "")
        given = [gpu for gpu in facts.gpus or [] if gpu.uuid and any(gpu.uuid in item for item in container.device_ids)]
        near = [cpu_set(gpu.local_cpus) if gpu.local_cpus else None for gpu in given or facts.gpus or []]
        if container.cpuset_cpus == "":
            return None  # not pinned: every CPU is there, the near ones too
        if not allowed or None in near:
            return "unknown", f"{name}: its CPUs, or those near its GPUs, are not known"
        far = [cpus for cpus in near if cpus is not None and not allowed & cpus]
        return ("fail", f"{name}: cpuset {pinned} has no CPU near its GPU") if far else None

    return worst(by_one(mine, one), desired, f"{len(mine)} GPU containers")


@check(
    "topology.acs",
    title="No ACS redirection between GPUs that talk over PCIe",
    severity="major",
    applies_to=ENGINE,
    why="ACS on bridges sends peer traffic through the root complex: all-reduces crawl or deadlock",
    remedy="turn ACS off on those bridges (firmware, or setpci at boot), or pci=noacs where the kernel has it",
    source="reports: all-reduce deadlock with ReqRedir+ CmpltRedir+ UpstreamFwd+",
)
@needs_gpus
def acs(facts: HostFacts, policy: Policy) -> Finding:
    talk = _talk_over_pcie(facts, policy)
    if isinstance(talk, Finding):
        return talk
    if facts.pci.bridges is None:
        return not_read(facts, "pci_bridges")

    def one(bridge: PciBridge) -> Optional[tuple[str, str]]:
        if bridge.acs is None:
            return "unknown", f"ACS of bridge {bridge.address} could not be read (lspci -vvv needs root)"
        on = [name for name in ("ReqRedir", "CmpltRedir", "UpstreamFwd") if bridge.acs.get(name)]
        return ("fail", f"{bridge.address}: {' '.join(f'{flag}+' for flag in on)}") if on else None

    return worst(by_one(facts.pci.bridges, one), "off on every bridge above a GPU", "off")


def _talk_over_pcie(facts: HostFacts, policy: Policy) -> Optional[Finding]:
    """Return why ACS and IOMMU do not matter here, or that it is not known; None where GPUs talk over PCIe."""
    split, linked = largest_tensor_parallel(facts, policy), has_nvlink(facts)
    if split is not None and split <= 1:
        return not_applicable("tensor parallel 1: GPUs do not talk to each other")
    if linked is None or (split is None and not linked):
        return not_read(facts, "nvidia_topology", "engines")
    return not_applicable("GPUs talk over NVLink") if linked else None


@check(
    "topology.iommu",
    title="No IOMMU translates between GPUs that talk over PCIe",
    severity="major",
    applies_to=ENGINE,
    why="with translation on, peer traffic between GPUs goes through the IOMMU: all-reduces crawl or hang",
    remedy="iommu=pt on the kernel command line (or the IOMMU off in the firmware), in maintenance",
    source="reports: NCCL hangs without intel_iommu=off or iommu=pt",
)
@needs_gpus
def iommu(facts: HostFacts, policy: Policy) -> Finding:
    talk = _talk_over_pcie(facts, policy)
    if isinstance(talk, Finding):
        return talk
    if facts.kernel.iommu_groups is None or facts.kernel.cmdline is None:
        return not_read(facts, "iommu_groups", "cmdline")
    if facts.kernel.iommu_groups == 0:
        return passed("no IOMMU is on", "off, or passthrough")
    words = facts.kernel.arguments
    through = words.get("iommu") == "pt" or words.get("iommu.passthrough") == "1"
    return (passed if through else warned)(
        f"{facts.kernel.iommu_groups} groups, {'passthrough' if through else 'translating'}", "off, or passthrough"
    )


@check(
    "topology.nvlink",
    title="Every NVLink is up",
    severity="major",
    applies_to=ENGINE,
    why="one link that is down slows every all-reduce of the replica, without an error",
    remedy="look for Xid 74; reseat the bridge or replace the card",
    source="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
)
@needs_gpus
def nvlink(facts: HostFacts, policy: Policy) -> Finding:
    gpus = facts.gpus or []
    some_up = any(gpu.nvlink_active for gpu in gpus)
    down = [f"GPU {gpu.index}: {gpu.nvlink_inactive} down" for gpu in gpus if some_up and gpu.nvlink_inactive]
    if down:
        return failed("; ".join(down), "all links up")
    if any(gpu.nvlink_active is None or gpu.nvlink_inactive is None for gpu in gpus):
        return not_read(facts, "nvidia_nvlink")
    if not some_up:
        if has_nvlink(facts) and len(gpus) > 1:
            return failed("the topology shows NVLink, and no link is up", "all links up")
        return not_applicable("no NVLink is up on any card: cards without it, or a single card in a virtual machine")
    lone = [f"GPU {gpu.index}: none" for gpu in gpus if not gpu.nvlink_active]
    if lone:
        return failed("; ".join(lone), "links on every card")
    return passed(f"{sum(gpu.nvlink_active or 0 for gpu in gpus)} links up", "all links up")


@check(
    "topology.cpu_governor",
    title="CPU governor is performance",
    severity="minor",
    applies_to=ENGINE,
    tags=("host",),
    why="a saving governor adds milliseconds to each step's scheduling on the CPU",
    remedy="set the governor to performance at boot",
    source="kernel documentation: CPU performance scaling",
)
def cpu_governor(facts: HostFacts, policy: Policy) -> Finding:
    governors = facts.cpu.governors
    if governors is None:
        return not_read(facts, "cpu_governors")
    if not governors:
        return not_applicable("no cpufreq on this machine (virtual machine, or the firmware decides)")
    slow = {name: count for name, count in governors.items() if name != "performance"}
    return warned(slow, "performance") if slow else passed(governors, "performance")


@check(
    "topology.transparent_hugepages",
    title="Transparent huge pages (reported, not judged)",
    severity="minor",
    applies_to=ENGINE,
    why="pinned host memory got twice as fast with them on one machine and five times slower on another: measure first",
    remedy="change it only with a measurement before and after on this machine",
    source="reports: contrary effects on two machines",
)
def transparent_hugepages(facts: HostFacts, policy: Policy) -> Finding:
    mode = facts.memory.transparent_hugepages
    if mode is None:
        if facts.probe("thp_enabled").state == ABSENT:
            return not_applicable("this kernel has no transparent huge pages")
        return not_read(facts, "thp_enabled")
    return not_applicable(f"{mode}: reported, not judged")
