# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Security: who reaches the engines, who reaches Docker, who reads the keys."""

from __future__ import annotations

import ipaddress
import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    by_one,
    engine_containers,
    not_read,
    replica_of,
    unread,
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
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import FileMode, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT

LOOPBACK = ("127.", "::1", "[::1]")


@check(
    "security.docker_socket",
    title="docker.sock is for root and one group alone",
    severity="critical",
    applies_to=("engine",),
    why="whoever can write to the socket is root on the node",
    remedy="chmod 0660 /run/docker.sock and SocketMode=0660 in docker.socket; owner root",
    source="https://docs.docker.com/engine/security/#docker-daemon-attack-surface",
)
def docker_socket(facts: HostFacts, policy: Policy) -> Finding:
    desired = "0660 root:docker or stricter"
    if facts.docker.socket_mode is None:
        if facts.probe("docker_socket").state == ABSENT:
            return not_applicable("no Docker socket on this host")
        return not_read(facts, "docker_socket")
    if not re.match(r"\A[0-7]{3,5}\Z", facts.docker.socket_mode):
        return unknown(f"mode {facts.docker.socket_mode!r} is no mode", desired)
    mode, owner = int(facts.docker.socket_mode, 8), facts.docker.socket_owner or "?"
    return (failed if mode & 0o007 or not owner.startswith("root:") else passed)(
        f"{facts.docker.socket_mode} {owner}", desired
    )


@check(
    "security.docker_tcp",
    title="dockerd listens on no TCP port without client certificates",
    severity="critical",
    applies_to=("engine",),
    why="an open Docker port gives root on the node to the network",
    remedy="take tcp:// out of hosts in daemon.json and of the unit, or demand client certificates (tlsverify)",
    source="https://docs.docker.com/engine/security/protect-access/",
)
def docker_tcp(facts: HostFacts, policy: Policy) -> Finding:
    docker, settings = facts.docker, facts.docker.daemon_json or {}
    hosts = settings.get("hosts")
    written = [str(one) for one in hosts if str(one).startswith("tcp://")] if isinstance(hosts, list) else []
    open_at = [*docker.tcp_listeners, *written]
    if open_at and settings.get("tlsverify") is True:
        return warned(f"{', '.join(open_at)}, with client certificates", "none")
    if open_at:
        return failed(", ".join(open_at), "none")
    if facts.probe("docker_version").state == ABSENT and facts.probe("docker_socket").state == ABSENT:
        return not_applicable("no Docker on this host")
    if unread(facts, "sockets", "docker_daemon_json"):
        return not_read(facts, "sockets", "docker_daemon_json")
    ports = facts.network.listeners or []
    if ports and not any(one.process for one in ports):
        return unknown("who listens is not shown (that needs root)", "none")
    return passed("none", "none")


@check(
    "security.secret_files",
    title="Secret files are readable by their owner alone",
    severity="critical",
    why="a key that others can read is everybody's key",
    remedy="chmod 0600 (0640 with a group that needs it), owner root; then change the key: it may have been read. An engine's "
    "own key is closed again by site.yml --tags engines",
    source="docs/architecture.md",
)
def secret_files(facts: HostFacts, policy: Policy) -> Finding:
    files = facts.metalserve.secrets
    if not files:
        if facts.probe("secrets").state == ABSENT:
            return not_applicable("no secrets of this bundle on this host")
        return not_read(facts, "secrets")

    def one(file: FileMode) -> Optional[tuple[str, str]]:
        if file.kind == "link":
            return None  # a link's own mode says nothing; what it leads to is listed where it lies
        if file.mode is None:
            return "unknown", f"{file.path}: mode not known"
        return ("fail", f"{file.path} {file.mode}") if int(file.mode, 8) & 0o027 else None

    return worst(by_one(files, one), "no access for others, no writing for the group", f"{len(files)} files")


@check(
    "security.keys_in_inspect",
    title="No key in docker inspect",
    severity="critical",
    applies_to=("engine",),
    why="environment and arguments of a container are readable by everybody in the docker group, and end up in bug reports",
    remedy="give the key in a file that is mounted read-only; redeploy (playbooks/redeploy.yml), and change the key",
    source="docs/engines.md",
)
def keys_in_inspect(facts: HostFacts, policy: Policy) -> Finding:
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    if not facts.docker.containers:
        return not_applicable("no container on this host")
    shown = [
        f"{one.name or one.id[:12]}: {', '.join([*one.secrets_in_environment, *one.secrets_in_arguments])}"
        for one in facts.docker.containers
        if one.secrets_in_environment or one.secrets_in_arguments
    ]
    if shown:
        return failed("; ".join(shown), "none")
    return passed(f"none in {len(facts.docker.containers)} containers", "none")


@check(
    "security.selinux",
    title="SELinux enforces, where the system comes with it",
    severity="minor",
    why="permissive or off, a container that breaks out is held back by nothing of the system's own; on Debian and Ubuntu "
    "that is AppArmor's part",
    remedy="setenforce 1 and SELINUX=enforcing in /etc/selinux/config, after a look at the denials in the audit log",
    source="https://docs.docker.com/engine/security/",
)
def selinux(facts: HostFacts, policy: Policy) -> Finding:
    if facts.os.family is None:
        return not_read(facts, "os_release")
    if facts.os.family != "redhat":
        return not_applicable(f"{facts.os.id} does not come with SELinux")
    if facts.security.selinux is None:
        return not_read(facts, "selinux")
    return (passed if facts.security.selinux == "enforcing" else warned)(facts.security.selinux, "enforcing")


@check(
    "security.engine_ports",
    title="Engine ports answer gateways and monitors alone",
    severity="critical",
    applies_to=("engine",),
    tags=("engines",),
    why="an engine's own endpoints have no key, no limit and no log: the gateway is the one public door",
    remedy="load the table inet metalserve (metalserve-firewall.service); listen on the private address",
    source="docs/engines.md: who may connect",
)
def engine_ports(facts: HostFacts, policy: Policy) -> Finding:
    desired = "every engine port dropped for all but gateways and monitors"
    published = [
        f"{one.name or one.id[:12]} at {port}"
        for one in engine_containers(facts) or []
        if not replica_of(one)
        for port in one.ports
        if not port.startswith(LOOPBACK)
    ]
    if published:
        return failed(f"published by Docker, past the firewall's table: {', '.join(published)}", desired)
    known = [engine.port for engine in facts.metalserve.engines or [] if engine.port]
    ports = sorted({*policy["expected"]["engine_ports"], *known})
    # The port of a replica stands in its current release; without it nothing can be said of that replica.
    dark = [engine.replica for engine in facts.metalserve.engines or [] if not engine.port]
    silent = unknown(f"on which port {', '.join(dark)} listens is not known", desired)
    if not ports:
        if facts.metalserve.engines is None:
            return not_read(facts, "engines")
        return silent if dark else not_applicable("no engine of this bundle on this host")
    listeners = facts.network.listeners
    if listeners is None:
        return not_read(facts, "sockets", "proc_net_tcp")
    reachable = [one for one in listeners if one.port in ports and not one.address.startswith(LOOPBACK)]
    if facts.network.nft_tables is None or facts.network.nft_ruleset is None:
        return not_read(facts, "nft")
    if "inet metalserve" not in facts.network.nft_tables:
        return failed("the firewall's table inet metalserve is not loaded", desired)
    guard = Guard(facts.network.nft_ruleset)
    hole = _hole(guard, ports)
    if hole:
        return failed(hole, desired)
    if guard.unknown:
        return unknown(f"whom it lets in is not known: {'; '.join(guard.unknown)}", desired)
    if dark and not policy["expected"]["engine_ports"]:
        return silent
    expected = [*policy["expected"]["gateways"], *policy["expected"]["monitors"]]
    strangers = [one for one in guard.allowed if expected and not facts.masked and one not in expected]
    if strangers:
        return warned(f"also lets in {', '.join(strangers)}", f"{', '.join(expected)} alone")
    everywhere = [f"{one.address}:{one.port}" for one in reachable if one.address in ("0.0.0.0", "::", "*")]
    if everywhere:
        return warned(f"listens on every address: {', '.join(everywhere)}; the firewall alone closes it", desired)
    return passed(f"ports {', '.join(map(str, ports))}", desired)


def _hole(guard: Guard, ports: list[int]) -> str:
    """Return how strangers get through the firewall's table; empty where they do not."""
    outside = [str(port) for port in ports if not guard.drops(port)]
    if outside:
        return f"ports {', '.join(outside)} are not dropped by the table"
    return f"lets everybody in: {'; '.join(guard.opened)}" if guard.opened else ""


class Guard:
    """The table ``inet metalserve`` of ``nft list ruleset``: which ports it drops, whom it lets in before."""

    def __init__(self, ruleset: str) -> None:
        """Read the table; anything else in the ruleset is not looked at."""
        begin = ruleset.find("table inet metalserve {")
        after = re.search(r"^table ", ruleset[begin + 1 :], re.MULTILINE)
        table = ruleset[begin : begin + 1 + after.start()] if after else ruleset[begin:]
        self.sets = {
            name: [one.strip() for one in elements.split(",") if one.strip()]
            for name, elements in re.findall(r"set (\w+) \{[^}]*?elements = \{([^}]*)\}", table)
        }
        chains = re.findall(r"^\s*chain \w+ \{$(.*?)^\s*\}$", table, re.DOTALL | re.MULTILINE)
        lines: list[str] = next((one.splitlines() for one in chains if "hook input" in one), [])
        verdict = re.compile(r"\b(drop|reject|accept)\b")
        self.rules = [line.strip() for line in lines if verdict.search(line) and "hook" not in line]
        self.first_drop = next(
            (index for index, line in enumerate(self.rules) if "accept" not in line), len(self.rules)
        )
        before = self.rules[: self.first_drop]
        sources = [line for line in before if re.search(r"\bsaddr\b", line)]
        declared = set(re.findall(r"^\s*set (\w+) \{", table, re.MULTILINE))
        named = [(line, set(re.findall(r"@(\w+)", line))) for line in before]
        self.unknown = [line for line, names in named if names - declared]
        self.allowed = [one for line in sources for one in self._values(line, "saddr")]
        narrow = re.compile(r'\bsaddr\b|\biif(name)? "?lo"?|\bct state\b')
        self.opened = [line for line in before if not narrow.search(line)]
        self.opened += [line for line in sources if re.search(r"\bsaddr !=", line)]
        self.opened += [one for one in self.allowed if _everybody(one)]

    def drops(self, port: int) -> bool:
        """Tell whether a rule drops ``port`` for those who were not accepted before."""
        for line in self.rules[self.first_drop :]:
            for text in self._values(line, "dport") if "accept" not in line else []:
                low, _dash, high = text.partition("-")
                if low.isdigit() and int(low) <= port <= int(high if high.isdigit() else low):
                    return True
        return False

    def _values(self, line: str, word: str) -> list[str]:
        match = re.search(rf"\b{word} (?:@(\w+)|\{{([^}}]*)\}}|(\S+))", line)
        if match is None:
            return []
        if match.group(1):
            return self.sets.get(match.group(1), [])
        return [one.strip() for one in (match.group(2) or match.group(3)).split(",") if one.strip()]


def _everybody(source: str) -> bool:
    """Tell whether an address of a set is a network so wide that it is no list of gateways (a prefix of 0 to 7, or as many
    addresses as a range).
    """
    try:
        first, _dash, last = source.partition("-")
        if last:
            low, high = ipaddress.ip_address(first.strip()), ipaddress.ip_address(last.strip())
            return (int(high) - int(low)) >> (low.max_prefixlen - 8) > 0
        return ipaddress.ip_network(source, strict=False).prefixlen < 8
    except ValueError:
        return False
