# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Limits and control groups: open files of sessions, services and daemons, locked memory, control group version."""

from __future__ import annotations

from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    not_read,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    PASS,
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import UNLIMITED, HostFacts, find_directives
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, NOT_COLLECTED

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
    # What is configured holds for the next login: a session that is older than the file says nothing about it.
    values = [
        entry.value
        for entry in facts.limits.entries or []
        if entry.item == "nofile" and entry.domain == "*" and entry.type in ("soft", "-") and entry.value is not None
    ]
    configured = judge_nofile(values[-1], policy, "limits.d") if values else None
    if session is not None and session.nofile_soft is not None:
        now = judge_nofile(session.nofile_soft, policy, "login session, soft limit")
        return configured if now.verdict == PASS and configured is not None and configured.verdict != PASS else now
    # Nothing that is configured makes up for a session that could not be read.
    if facts.limits.entries is None or facts.probe("session_limits").state not in (ABSENT, NOT_COLLECTED):
        return not_read(facts, "session_limits", "limits_conf")
    if configured is None:
        return failed("no nofile line for * in limits.d: the kernel's 1024 holds", f">= {policy['nofile_minimum']}")
    return configured


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
    remedy="a bounded LimitNOFILE in a drop-in of docker.service, effective after a drained restart; with RDMA also "
    "LimitMEMLOCK=infinity there (engines of this bundle bring their own memlock)",
    source="reports: ibv_reg_mr ENOMEM under dockerd's 8 MiB; RLIMIT_NOFILE of 1,073,741,816",
)
def dockerd(facts: HostFacts, policy: Policy) -> Finding:
    limits = facts.limits.processes.get("dockerd")
    if limits is None or limits.nofile_hard is None:
        if facts.probe("docker_version").state == ABSENT:
            return not_applicable("no Docker on this host")
        return not_read(facts, "process_limits")
    found = judge_nofile(limits.nofile_hard, policy, "open files")
    memlock, rdma = limits.memlock_hard, uses_rdma(facts, policy)
    if found.verdict == "fail" or memlock == UNLIMITED or rdma is False:
        return found
    if memlock is not None and rdma:
        return failed(f"locked memory {memlock} bytes", "unlimited (RDMA is in use)")
    if found.verdict == "warn":
        return found
    if memlock is None:
        return unknown("locked memory of dockerd not known")
    return unknown(f"locked memory {memlock} bytes; whether RDMA is in use is not known", "unlimited with RDMA")


def uses_rdma(facts: HostFacts, policy: Policy) -> Optional[bool]:
    """Tell whether RDMA is used: as declared, else whether there is a device for it; None where that is not known."""
    if policy["expected"]["rdma"] is not None:
        return bool(policy["expected"]["rdma"])
    return None if facts.pci.rdma_devices is None else bool(facts.pci.rdma_devices)


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
    limits, config = facts.limits.processes.get("nginx"), facts.nginx.config
    if facts.probe("nginx").state == ABSENT:
        return not_applicable("no nginx on this host")
    if limits is None or limits.nofile_soft is None or config is None:
        return not_read(facts, "process_limits", "nginx")
    own = [one.args[0] for one in find_directives(config, "worker_rlimit_nofile") if one.args]
    if own and limits.nofile_soft <= policy["nofile_maximum"]:
        # The workers set it themselves; gateway.worker_connections judges whether it is enough.
        return passed(f"worker_rlimit_nofile {own[-1]}", f"at most {policy['nofile_maximum']}")
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
