# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Limits and control groups: open files of sessions, services and daemons, locked memory, control group version."""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    CONTAINERS,
    Policy,
    broke,
    not_read,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    FAIL,
    PASS,
    UNKNOWN,
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    UNLIMITED,
    HostFacts,
    LimitsEntry,
    ProcessLimits,
    find_directives,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, NOT_COLLECTED, OK

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
    seen, limits = facts.limits.processes.get("session"), facts.limits
    configured = next_login(facts, policy)
    if seen is not None and seen.nofile_soft is not None and not limits.session_outdated:
        now = judge_nofile(seen.nofile_soft, policy, "login session, soft limit")
        if now.verdict != PASS:
            return replace(now, evidence=() if configured is None else (f"the next login: {configured.current}",))
        return now if configured is None or configured.verdict in (PASS, UNKNOWN) else configured
    # Nothing that is configured makes up for a session that could not be read.
    readable = (ABSENT, NOT_COLLECTED) if seen is None or seen.nofile_soft is None else (OK, ABSENT, NOT_COLLECTED)
    if limits.entries is None or facts.probe("session_limits").state not in readable or broke(facts, "session_pam"):
        return not_read(facts, "session_limits", "limits_conf", "session_pam")
    if configured is None:
        return failed("no nofile line for * in limits.d: the kernel's 1024 holds", f">= {policy['nofile_minimum']}")
    return configured


def next_login(facts: HostFacts, policy: Policy) -> Optional[Finding]:
    """Judge what limits.d gives to whoever logs in next; None where it says nothing for ``*``.

    A login that was seen says nothing about it once the files have changed: ssh keeps connections, and each keeps its limits.
    """
    limits, daemon = facts.limits, facts.limits.processes.get("sshd")
    if limits.sessions_read_limits is False:
        inherited = daemon.nofile_soft if daemon is not None else None
        return judge_nofile(inherited, policy, "sshd, whose sessions do not run pam_limits")
    soft, hard = ([one.value for one in _for_everybody(facts, kind)] for kind in ("soft", "hard"))
    if not soft:
        return None
    wanted, bound = soft[-1], hard[-1] if hard else daemon.nofile_hard if daemon is not None else None
    if wanted is None:
        return unknown("nofile of * in limits.d is not a number")
    value = wanted if bound is None else min(wanted, bound)
    ceiling = facts.sysctl.get("fs.nr_open", "")
    if ceiling.isdigit() and int(ceiling) < value != UNLIMITED:
        return failed(
            f"limits.d: {value} is more than fs.nr_open ({ceiling}): it is refused, and 1024 stays", f"<= {ceiling}"
        )
    old = ""
    if limits.session_outdated:
        old = " (the login that was seen is older)"
        if limits.sessions_read_limits is None:
            return unknown(f"limits.d: {value}; whether sshd applies it is not known{old}")
        own = daemon.nofile_hard if daemon is not None else None
        if facts.host.virtualization in CONTAINERS and (own is None or value > own):
            return unknown(
                f"limits.d: {value}; whether this container may set more than sshd's {own} is not known{old}"
            )
    return judge_nofile(value, policy, f"limits.d{old}")


def _for_everybody(facts: HostFacts, kind: str) -> list[LimitsEntry]:
    return [
        one
        for one in facts.limits.entries or []
        if one.item == "nofile" and one.domain == "*" and one.type in (kind, "-")
    ]


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
    hard, soft = facts.limits.systemd_default_nofile, facts.limits.systemd_default_nofile_soft
    found = judge_nofile(hard, policy, "DefaultLimitNOFILE")
    # systemd's own default is 1024 soft below 524288 hard, and few programs raise their soft limit.
    low = None if soft is None else judge_nofile(soft, policy, "DefaultLimitNOFILESoft")
    return low if low is not None and low.verdict == FAIL else found


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
    memlock, rdma = least_memlock(limits), uses_rdma(facts, policy)
    if found.verdict == "fail" or memlock == UNLIMITED or rdma is False:
        return found
    if memlock is not None and rdma:
        return failed(f"locked memory {memlock} bytes", "unlimited (RDMA is in use)")
    if found.verdict == "warn":
        return found
    if memlock is None:
        return unknown("locked memory of dockerd not known")
    return unknown(f"locked memory {memlock} bytes; whether RDMA is in use is not known", "unlimited with RDMA")


def least_memlock(limits: ProcessLimits) -> Optional[int]:
    """Return the locked memory that holds, in bytes: the soft limit, which is what registering memory meets."""
    known = [one for one in (limits.memlock_soft, limits.memlock_hard) if one is not None]
    return min(known) if known else None


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
