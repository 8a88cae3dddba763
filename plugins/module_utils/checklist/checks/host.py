# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Host: supported system, clock, disk, kernel command line; and who may reach what."""

from __future__ import annotations

import re

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import Policy, not_read
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, format_size
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT

MANAGED = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}


@check(
    "host.supported_os",
    title="Operating system is one that is managed",
    severity="major",
    why="Debian 12/13 and Ubuntu 22.04/24.04 are managed and tested; the RHEL family is audited only",
    remedy="install a managed system, or keep the host out of site.yml and audit it only",
    source="README: supported systems",
)
def supported_os(facts: HostFacts, policy: Policy) -> Finding:
    desired = "Debian 12/13 or Ubuntu 22.04/24.04"
    if facts.os.id is None:
        return not_read(facts, "os_release")
    name = f"{facts.os.id} {facts.os.version_id or '?'}"
    if facts.os.version_id in MANAGED.get(facts.os.id, ()):
        return passed(name, desired)
    if facts.os.family == "redhat":
        return warned(f"{name}: audited only", desired)
    return failed(name, desired)


@check(
    "host.time_synchronised",
    title="Clock is synchronised",
    severity="major",
    why="certificates, locks and the comparison of logs and metrics rest on one time",
    remedy="enable chrony or systemd-timesyncd with servers that the node reaches",
    source="https://prometheus.io/docs/introduction/faq/ (clock skew)",
)
def time_synchronised(facts: HostFacts, policy: Policy) -> Finding:
    limit = policy["clock_offset_seconds_maximum"]
    if facts.time.offset_s is not None and abs(facts.time.offset_s) > limit:
        return failed(f"{facts.time.offset_s:+.3f} s off", f"within {limit:g} s")
    if facts.host.virtualization in ("docker", "lxc", "lxc-libvirt", "podman", "systemd-nspawn"):
        return not_applicable(f"a container ({facts.host.virtualization}): the machine under it keeps the clock")
    if facts.time.synchronized is None:
        return not_read(facts, "clock", "chrony")
    if not facts.time.synchronized:
        return failed(f"not synchronised (service: {facts.time.service or 'none'})", f"within {limit:g} s")
    return passed(f"synchronised by {facts.time.service or 'an unknown service'}", f"within {limit:g} s")


@check(
    "host.disk_free",
    title="Disk holds the next image and model",
    severity="major",
    why="a release needs the new image, the new model and the previous ones at once; a full disk stops Docker and logging",
    remedy="remove old releases and images that no release names, or grow the disk",
    source="model store: preflight of image + 2 x model + previous",
)
def disk_free(facts: HostFacts, policy: Policy) -> Finding:
    wanted = policy["disk_free_gib_minimum"] * GIB
    if facts.disks is None:
        return not_read(facts, "disks")
    dark = [f"{disk.path}: {disk.error or 'not known'}" for disk in facts.disks if disk.free_bytes is None]
    short = [
        f"{disk.path}: {format_size(disk.free_bytes)} free"
        for disk in facts.disks
        if disk.free_bytes is not None and disk.free_bytes < wanted
    ]
    desired = f">= {policy['disk_free_gib_minimum']} GiB free"
    if short:
        return failed("; ".join(short), desired)
    if dark or not facts.disks:
        return unknown("; ".join(dark) or "no path was looked at", desired)
    return passed([f"{disk.path}: {format_size(disk.free_bytes or 0)} free" for disk in facts.disks], desired)


NOTED = {
    "noacs": "turns ACS off (peer-to-peer over PCIe)",
    "pci": "",
    "iommu": "",
    "intel_iommu": "",
    "amd_iommu": "",
    "nokaslr": "a workaround for CUDA error 802",
    "cgroup_enable": "",
    "systemd.unified_cgroup_hierarchy": "",
    "swapaccount": "",
    "mitigations": "",
}


@check(
    "host.kernel_cmdline",
    title="Kernel command line of note (reported, not judged)",
    severity="minor",
    applies_to=("engine",),
    why="IOMMU, ACS and KASLR settings explain peer-to-peer and start-up faults; they are shown beside them",
    remedy="nothing to mend",
    source="reports: iommu=pt, pci=noacs, nokaslr",
)
def kernel_cmdline(facts: HostFacts, policy: Policy) -> Finding:
    if facts.kernel.cmdline is None:
        return not_read(facts, "cmdline")
    noted = [word for word in facts.kernel.cmdline.split() if word.split("=", 1)[0] in NOTED or "noacs" in word]
    return not_applicable(", ".join(noted) if noted else "nothing of note")


@check(
    "security.docker_socket",
    title="docker.sock is for root and the docker group alone",
    severity="critical",
    applies_to=("engine",),
    why="whoever can write to the socket is root on the node",
    remedy="chmod 0660, owner root:docker; no TCP listener without client certificates",
    source="https://docs.docker.com/engine/security/#docker-daemon-attack-surface",
)
def docker_socket(facts: HostFacts, policy: Policy) -> Finding:
    desired = "0660 root:docker or stricter, no TCP"
    if facts.docker.tcp_listeners:
        return failed(f"dockerd listens on {', '.join(facts.docker.tcp_listeners)}", desired)
    if facts.docker.socket_mode is None:
        if facts.probe("docker_socket").state == ABSENT:
            return not_applicable("no Docker socket on this host")
        return not_read(facts, "docker_socket")
    mode, owner = int(facts.docker.socket_mode, 8), facts.docker.socket_owner or "?"
    current = f"{facts.docker.socket_mode} {owner}"
    if mode & 0o007 or not owner.startswith("root:"):
        return failed(current, desired)
    return passed(current, desired)


@check(
    "security.secret_files",
    title="Secret files are readable by their owner alone",
    severity="critical",
    tags=("engines", "gateway"),
    why="a key that others can read is everybody's key",
    remedy="chmod 0600 (0640 with a group that needs it), owner root",
    source="docs/architecture.md",
)
def secret_files(facts: HostFacts, policy: Policy) -> Finding:
    files = facts.metalserve.secrets
    if files is None:
        if facts.probe("secrets").state == ABSENT:
            return not_applicable("no secrets of this bundle on this host")
        return not_read(facts, "secrets")
    dark = [one.path for one in files if one.mode is None]
    loose = [f"{one.path} {one.mode}" for one in files if one.mode is not None and int(one.mode, 8) & 0o007]
    if loose:
        return failed("; ".join(loose), "no access for others")
    if dark:
        return unknown(f"mode not known: {', '.join(dark)}", "no access for others")
    return passed(f"{len(files)} files", "no access for others")


@check(
    "security.keys_in_inspect",
    title="No key in docker inspect",
    severity="critical",
    applies_to=("engine",),
    tags=("engines",),
    why="environment and arguments of a container are readable by everybody in the docker group, and end up in bug reports",
    remedy="give the key in a file that is mounted read-only; redeploy, and change the key",
    source="docs/engines.md",
)
def keys_in_inspect(facts: HostFacts, policy: Policy) -> Finding:
    if facts.docker.containers is None:
        if facts.probe("docker_version").state == ABSENT:
            return not_applicable("no Docker on this host")
        return not_read(facts, "docker_containers")
    shown = [
        f"{one.name}: {', '.join([*one.secrets_in_environment, *one.secrets_in_arguments])}"
        for one in facts.docker.containers
        if one.secrets_in_environment or one.secrets_in_arguments
    ]
    if shown:
        return failed("; ".join(shown), "none")
    return passed(f"none in {len(facts.docker.containers)} containers", "none")


@check(
    "security.engine_ports",
    title="Engine ports answer gateways and monitors alone",
    severity="critical",
    applies_to=("engine",),
    tags=("engines",),
    why="an engine's own endpoints have no key, no limit and no log: the gateway is the one public door",
    remedy="start metalserve-firewall.service; listen on the private address",
    source="docs/engines.md",
)
def engine_ports(facts: HostFacts, policy: Policy) -> Finding:
    desired = "every engine port in the firewall's table, dropped for others"
    ports = sorted(
        {
            *policy["expected"]["engine_ports"],
            *(engine.port for engine in facts.metalserve.engines or [] if engine.port),
        }
    )
    if not ports:
        if facts.metalserve.engines is None:
            return not_read(facts, "engines")
        return not_applicable("no engine of this bundle on this host")
    if facts.network.listeners is None:
        return not_read(facts, "proc_net_tcp")
    listening = [one for one in facts.network.listeners if one.port in ports]
    open_to_all = [f"{one.address}:{one.port}" for one in listening if one.address in ("0.0.0.0", "::", "*")]
    if facts.network.nft_tables is None or facts.network.nft_ruleset is None:
        return not_read(facts, "nft")
    if "inet metalserve" not in facts.network.nft_tables:
        return failed("the firewall's table inet metalserve is not loaded", desired)
    match = re.search(r"table inet metalserve \{.*", facts.network.nft_ruleset, re.DOTALL)
    table = match.group(0) if match else ""
    outside = [port for port in ports if not _covers(table, port)]
    if outside or "drop" not in table:
        return failed(f"ports {', '.join(map(str, outside or ports))} are not closed by the table", desired)
    if open_to_all:
        return warned(f"listens on every address: {', '.join(open_to_all)}; the firewall alone closes it", desired)
    return passed(f"ports {', '.join(map(str, ports))}", desired)


def _covers(table: str, port: int) -> bool:
    """Tell whether a port, alone or in a range, stands in the text of an nft table."""
    ranges = re.findall(r"\b(\d{2,5})(?:-(\d{2,5}))?\b", table)
    return any(int(low) <= port <= int(high or low) for low, high in ranges)
