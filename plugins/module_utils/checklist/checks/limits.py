# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Limits and control groups: open files, locked memory, control group version, container limits, shared memory."""

from __future__ import annotations

import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
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
from ansible_collections.metal.serve.plugins.module_utils.common.sizes import format_size, parse_size
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import UNLIMITED, Container, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT

ENGINE = ("engine",)
SERVING = ("engine", "gateway")


def judge_nofile(value: Optional[int], policy: Policy, who: str) -> Finding:
    """Judge one open-files limit against both bounds of the policy."""
    low, high = policy["nofile_minimum"], policy["nofile_maximum"]
    desired = f"{low} to {high}"
    if value is None:
        return unknown(f"open files of {who} not known", desired)
    if value < low:
        return failed(f"{who}: {value}", desired)
    if value > high:
        return warned(
            f"{who}: {'unlimited' if value == UNLIMITED else value}: far too high, closing all takes seconds", desired
        )
    return passed(f"{who}: {value}", desired)


@check(
    "limits.session_nofile",
    title="Sessions may open enough files, and not too many",
    severity="major",
    applies_to=SERVING,
    tags=("host",),
    why="the checklist wants 100,000 for whatever is started from a shell; a huge value makes programs that close every "
    "descriptor hang",
    remedy="a nofile line for every user in /etc/security/limits.d",
    source="deployment checklist: ulimit -n >= 100000",
)
def session_nofile(facts: HostFacts, policy: Policy) -> Finding:
    session = facts.limits.processes.get("session")
    if session is not None and session.nofile_soft is not None:
        return judge_nofile(session.nofile_soft, policy, "login session, soft limit")
    if facts.limits.entries is None:
        return not_read(facts, "session_limits", "limits_conf")
    values = [
        entry.value
        for entry in facts.limits.entries
        if entry.item == "nofile" and entry.domain == "*" and entry.type in ("soft", "-") and entry.value is not None
    ]
    if not values:
        return failed("no nofile line for * in limits.d: the kernel's 1024 holds", f">= {policy['nofile_minimum']}")
    return judge_nofile(values[-1], policy, "limits.d")


@check(
    "limits.service_nofile",
    title="Services may open enough files, and not too many",
    severity="major",
    applies_to=SERVING,
    tags=("host",),
    why="services do not read limits.d: systemd's default holds for them",
    remedy="DefaultLimitNOFILE in /etc/systemd/system.conf.d",
    source="deployment checklist: ulimit -n >= 100000",
)
def service_nofile(facts: HostFacts, policy: Policy) -> Finding:
    if facts.limits.systemd_default_nofile is None:
        return not_read(facts, "systemd_defaults")
    return judge_nofile(facts.limits.systemd_default_nofile, policy, "DefaultLimitNOFILE")


@check(
    "limits.dockerd",
    title="dockerd's own limits suit what its containers inherit",
    severity="major",
    applies_to=ENGINE,
    tags=("runtime",),
    why="8 MiB of locked memory makes RDMA registration fail, and NCCL falls back to TCP without a word; a thousand million "
    "open files make nvidia-smi in a container take 24 s",
    remedy="LimitMEMLOCK=infinity and a bounded LimitNOFILE in a drop-in of docker.service; effective after a drained restart",
    source="reports: ibv_reg_mr ENOMEM under dockerd's 8 MiB; RLIMIT_NOFILE of 1,073,741,816",
)
def dockerd(facts: HostFacts, policy: Policy) -> Finding:
    limits = facts.limits.processes.get("dockerd")
    if limits is None or limits.nofile_hard is None:
        if facts.probe("docker_version").state == ABSENT:
            return not_applicable("no Docker on this host")
        return not_read(facts, "process_limits")
    rdma = policy["expected"]["rdma"]
    rdma = bool(facts.pci.rdma_devices) if rdma is None and facts.pci.rdma_devices is not None else rdma
    memlock = limits.memlock_hard
    shown = "unlimited" if memlock == UNLIMITED else memlock
    if memlock is not None and memlock != UNLIMITED and memlock < 64 * 1024**2:
        if rdma:
            return failed(f"locked memory {shown}", "unlimited (RDMA is in use)")
        if rdma is None:
            return unknown(
                f"locked memory {shown}; whether RDMA is in use is not known", "unlimited where RDMA is in use"
            )
    found = judge_nofile(limits.nofile_hard, policy, "open files")
    if found.verdict == "pass" and memlock is None:
        return unknown("locked memory of dockerd not known")
    return found


@check(
    "limits.nginx",
    title="nginx may open two files per connection it accepts",
    severity="major",
    applies_to=("gateway",),
    tags=("gateway",),
    why="every proxied request takes two descriptors: at the limit nginx refuses connections with 'too many open files'",
    remedy="worker_rlimit_nofile and LimitNOFILE of at least twice worker_connections",
    source="https://nginx.org/en/docs/ngx_core_module.html#worker_rlimit_nofile",
)
def nginx_nofile(facts: HostFacts, policy: Policy) -> Finding:
    limits = facts.limits.processes.get("nginx")
    if limits is None or limits.nofile_soft is None:
        if facts.probe("nginx").state == ABSENT:
            return not_applicable("no nginx on this host")
        return not_read(facts, "process_limits")
    return judge_nofile(limits.nofile_soft, policy, "nginx")


@check(
    "limits.somaxconn",
    title="Listen queues are long enough for a burst",
    severity="minor",
    applies_to=SERVING,
    tags=("host",),
    why="the kernel cuts every listen backlog to net.core.somaxconn: a burst of new connections is dropped above it",
    remedy="sysctl net.core.somaxconn, kept in /etc/sysctl.d",
    source="https://docs.kernel.org/admin-guide/sysctl/net.html",
)
def somaxconn(facts: HostFacts, policy: Policy) -> Finding:
    text, wanted = facts.sysctl.get("net.core.somaxconn", ""), policy["somaxconn_minimum"]
    if not text.strip().isdigit():
        return not_read(facts, "sysctl.net.core.somaxconn")
    return (passed if int(text) >= wanted else warned)(int(text), f">= {wanted}")


@check(
    "cgroup.version",
    title="Control groups can limit memory",
    severity="major",
    applies_to=ENGINE,
    why="without memory limits one engine's host memory takes the others down with it",
    remedy="boot with cgroup_enable=memory, or with version 2",
    source="https://docs.docker.com/engine/containers/resource_constraints/",
)
def cgroup_version(facts: HostFacts, policy: Policy) -> Finding:
    if facts.cgroup.version is None or facts.cgroup.memory_limit is None:
        return not_read(facts, "mounts", "cgroups", "cgroup_controllers")
    if not facts.cgroup.memory_limit:
        return failed(f"version {facts.cgroup.version}, no memory limit", "version 2 with memory")
    return passed(f"version {facts.cgroup.version}", "a version that limits memory")


def engine_containers(facts: HostFacts) -> Optional[list[Container]]:
    """Return the running containers that serve a model, started by this bundle or not; None where Docker was not read."""
    if facts.docker.containers is None:
        return None
    return [one for one in facts.docker.containers if one.state == "running" and is_engine(one)]


def is_engine(container: Container) -> bool:
    """Tell whether a container runs an inference engine, by name, image or command."""
    if (container.name or "").startswith("metalserve-"):
        return True
    text = " ".join([container.image or "", *container.entrypoint, *container.command])
    return bool(re.search(r"vllm|sglang|tritonserver", text))


@check(
    "container.memory",
    title="Engine containers have the planned memory and swap limits",
    severity="major",
    applies_to=ENGINE,
    tags=("engines",),
    why="an engine without a limit can push the node out of memory; a swap limit below what the kernel can hold is dropped "
    "silently and looks like a difference forever",
    remedy="redeploy with the plan's limits (container.memory, container.memory_swap of the pool)",
    source="deployment checklist: --memory=88G --memory-swap=90G",
)
def container_memory(facts: HostFacts, policy: Policy) -> Finding:
    containers = engine_containers(facts)
    if containers is None:
        return not_read(facts, "docker_containers")
    if not containers:
        return not_applicable("no engine container runs")
    wrong, dark, desired = [], [], set()
    for one in containers:
        planned = planned_container(facts, one)
        memory = planned.get("memory_bytes") or _size(policy["container_memory"])
        swap = planned.get("memory_swap_bytes") or _size(policy["container_memory_swap"])
        desired.add(f"{format_size(memory) if memory else 'a limit'}" + (f" / {format_size(swap)}" if swap else ""))
        if one.memory_bytes is None:
            dark.append(f"{one.name}: memory limit not known")
        elif one.memory_bytes == 0 or (memory and one.memory_bytes != memory):
            wrong.append(f"{one.name}: memory {format_size(one.memory_bytes) if one.memory_bytes else 'unlimited'}")
        elif swap and facts.cgroup.swap_limit and one.memory_swap_bytes != swap:
            wrong.append(f"{one.name}: memory+swap {one.memory_swap_bytes}")
    if wrong:
        return failed("; ".join(wrong), ", ".join(sorted(desired)))
    if dark:
        return unknown("; ".join(dark), ", ".join(sorted(desired)))
    if facts.cgroup.swap_limit is False and any("/" in one for one in desired):
        return warned("memory as planned; this kernel cannot limit swap", ", ".join(sorted(desired)))
    return passed("as planned", ", ".join(sorted(desired)))


def planned_container(facts: HostFacts, container: Container) -> dict[str, int]:
    """Return the container limits of the release that ``container`` belongs to; empty where it is not ours."""
    for engine in facts.metalserve.engines or []:
        if not (container.name or "").startswith(f"metalserve-{engine.replica}-"):
            continue
        for release in engine.releases:
            if release.hash == engine.current and isinstance((release.release or {}).get("container"), dict):
                found = (release.release or {})["container"]
                return {key: value for key, value in found.items() if isinstance(value, int)}
    return {}


def _size(text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError:
        return 0


def tensor_parallel(container: Container) -> int:
    """Return the tensor parallel size in a container's command line; 1 where it says none."""
    words = [*container.entrypoint, *container.command]
    text = " ".join(words)
    match = re.search(r"(?:--tensor-parallel-size|--tensor_parallel_size|--tp-size|--tp|-tp)[ =](\d+)", text)
    return int(match.group(1)) if match else 1


@check(
    "container.shm",
    title="Shared memory is large enough, or the host's, where GPUs work together",
    severity="critical",
    applies_to=ENGINE,
    tags=("engines",),
    why="NCCL and the workers' message queue need shared memory: Docker's 64 MiB end in 'ncclShmOpen' errors or hangs",
    remedy="ipc: host, or shm_size of at least 1 GiB per GPU; redeploy",
    source="reports: /dev/shm of 64 MiB with tensor parallelism",
)
def container_shm(facts: HostFacts, policy: Policy) -> Finding:
    containers = engine_containers(facts)
    if containers is None:
        return not_read(facts, "docker_containers")
    wrong, dark, together = [], [], 0
    for one in containers:
        size = max(tensor_parallel(one), policy["expected"]["tensor_parallel"] or 1)
        if size <= 1:
            continue
        together += 1
        if one.ipc_mode == "host":
            continue
        if one.shm_bytes is None or one.ipc_mode is None:
            dark.append(f"{one.name}: shared memory not known")
        elif one.shm_bytes < 1024**3:
            wrong.append(f"{one.name}: {format_size(one.shm_bytes)}, ipc {one.ipc_mode}, tensor parallel {size}")
    if wrong:
        return failed("; ".join(wrong), "ipc host, or >= 1 GiB")
    if dark:
        return unknown("; ".join(dark), "ipc host, or >= 1 GiB")
    if not together:
        return not_applicable("no running engine uses more than one GPU")
    return passed(f"{together} containers", "ipc host, or >= 1 GiB")
