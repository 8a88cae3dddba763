# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Topology: NUMA balancing, CPUs near the GPUs, ACS on bridges, NVLink, CPU governor, huge pages."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.gpu import has_nvlink
from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    cpu_set,
    needs_gpus,
    not_read,
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
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
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
    tags=("engines",),
    why="a cpuset without a CPU near the GPU sends every copy across sockets and silently disables NUMA binding",
    remedy="let the plan set cpuset and mems from the GPU's NUMA node, and redeploy",
    source="reports: a container cpuset disabled NUMA binding",
)
@needs_gpus
def container_cpus(facts: HostFacts, policy: Policy) -> Finding:
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    far, judged, dark = [], 0, []
    for container in facts.docker.containers:
        if container.state != "running" or not container.wants_gpu or not container.cpuset_cpus:
            continue
        allowed = cpu_set(container.cpuset_cpus)
        mine = [
            gpu for gpu in facts.gpus or [] if gpu.uuid and any(gpu.uuid in device for device in container.device_ids)
        ]
        local = [cpu_set(gpu.local_cpus) if gpu.local_cpus else None for gpu in mine or facts.gpus or []]
        if allowed is None or any(one is None for one in local):
            dark.append(container.name or container.id[:12])
            continue
        judged += 1
        if any(one is not None and not allowed & one for one in local):
            far.append(f"{container.name}: cpuset {container.cpuset_cpus}")
    if far:
        return failed("; ".join(far), "a cpuset that meets the GPU's local CPUs")
    if dark:
        return unknown(f"CPUs near the GPUs of {', '.join(dark)} are not known")
    return passed(f"{judged} pinned containers", "a cpuset that meets the GPU's local CPUs")


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
    if (policy["expected"]["tensor_parallel"] or 1) <= 1:
        return not_applicable("tensor parallel 1: GPUs do not talk to each other")
    linked = has_nvlink(facts)
    if linked:
        return not_applicable("GPUs talk over NVLink")
    if facts.pci.bridges is None or linked is None:
        return not_read(facts, "pci_bridges", "nvidia_topology")
    redirecting = []
    for bridge in facts.pci.bridges:
        if bridge.acs is None:
            return unknown(f"ACS of bridge {bridge.address} could not be read (lspci -vvv needs root)", "off")
        flags = [name for name in ("ReqRedir", "CmpltRedir", "UpstreamFwd") if bridge.acs.get(name)]
        if flags:
            redirecting.append(f"{bridge.address}: {' '.join(f'{flag}+' for flag in flags)}")
    if redirecting:
        return failed("; ".join(redirecting), "off on every bridge above a GPU")
    return passed("off", "off on every bridge above a GPU")


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
    down = [f"GPU {gpu.index}: {gpu.nvlink_inactive} down" for gpu in gpus if gpu.nvlink_active and gpu.nvlink_inactive]
    if down:
        return failed("; ".join(down), "all links up")
    if any(gpu.nvlink_active is None for gpu in gpus):
        return not_read(facts, "nvidia_nvlink")
    if not any(gpu.nvlink_active for gpu in gpus):
        return not_applicable("no NVLink is up on any card: cards without it, or a single card in a virtual machine")
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
