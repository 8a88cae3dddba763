# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The gateway's nginx: balancing, keep-alive, buffering, times, retries, sizes, TLS, what is open, what its log says."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterator
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    broke,
    moment,
    not_read,
    unread,
    why_down,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    CheckFunction,
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.common.sizes import MIB, format_size, parse_size
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    UNLIMITED,
    Directive,
    HostFacts,
    find_directives,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_nginx import resolve
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT
from ansible_collections.metal.serve.plugins.module_utils.telemetry.access_log import CAUSES, count_causes, parse_row

GATEWAY = ("gateway",)
TAGS = ("gateway",)
FAIL_TIMEOUT_MAXIMUM_S = 300.0
NGINX_READ_TIMEOUT_S = 60.0
NGINX_BODY_SIZE = MIB
UVICORN_KEEPALIVE_S = 5.0  # what engines do where nobody told them otherwise
# Causes that are no engine's, and that somebody can mend: too small a body, clients that wait too short a time.
OUR_CAUSES = ("body_limit", "client_limit", "gateway")
_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def needs_nginx(function: CheckFunction) -> CheckFunction:
    """Wrap a check of the configuration: not applicable without nginx, unknown where nginx -T could not be read."""

    def checked(facts: HostFacts, policy: Policy) -> Finding:
        if facts.nginx.config_error:
            return unknown(f"nginx refuses its configuration: {facts.nginx.config_error}")
        if facts.nginx.config is None:
            if facts.probe("nginx").state == ABSENT:
                return not_applicable("no nginx on this host")
            return not_read(facts, "nginx")
        return function(facts, policy)

    return checked


def needs_proxying(function: CheckFunction) -> CheckFunction:
    """Wrap a check of what nginx proxies: where it proxies nothing there is nothing to praise."""

    @needs_nginx
    def checked(facts: HostFacts, policy: Policy) -> Finding:
        if not any(True for _location in proxied(facts)):
            return not_applicable("nginx proxies nothing")
        return function(facts, policy)

    return checked


def first(directive: Optional[Directive]) -> str:
    """Return a directive's first argument; empty where it has none."""
    return directive.args[0] if directive is not None and directive.args else ""


def direct_peers(facts: HostFacts) -> list[tuple[Directive, str]]:
    """Return each proxy_pass that names a host itself, and no upstream, with that host.

    A variable in the name may stand for anything: ``pool_$name`` is an upstream where one is called ``pool_short``.
    """
    config = facts.nginx.config or []
    named = {first(one) for one in find_directives(config, "upstream")}
    found = []
    for one in find_directives(config, "proxy_pass", "grpc_pass"):
        match = re.match(r"\w+://(\[[^\]]*\]|[^/:;]+)(:\d+)?", first(one))
        if match is None or match.group(1).startswith("$") or first(one).startswith(("http://unix", "https://unix")):
            continue
        pattern = ".+".join(re.escape(part) for part in re.split(r"\$(?:\w+|\{\w+\})", match.group(1)))
        if not any(re.fullmatch(pattern, name) for name in named):
            found.append((one, match.group(1) + (match.group(2) or "")))
    return found


def seconds(text: str) -> Optional[float]:
    """Return an nginx time (``180s``, ``1m30s``, ``500ms``) in seconds; None for what is none."""
    parts = re.findall(r"(\d+)(ms|s|m|h|d|w|)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text.replace(" ", ""):
        return None
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def upstreams(facts: HostFacts) -> list[Directive]:
    """Return the upstream blocks that locations proxy to (others serve nobody)."""
    config = facts.nginx.config or []
    named = {
        match.group(1)
        for one in find_directives(config, "proxy_pass", "grpc_pass")
        for match in [re.match(r"\w+://([^/:;$]+)", one.args[0] if one.args else "")]
        if match
    }
    by_variable = any("$" in (one.args[0] if one.args else "") for one in find_directives(config, "proxy_pass"))
    found = find_directives(config, "upstream")
    return [one for one in found if by_variable or (one.args and one.args[0] in named)]


def proxied(facts: HostFacts) -> Iterator[tuple[Directive, dict[str, Directive]]]:
    """Yield each location that proxies, with the directives in force there (its own, else inherited)."""

    def walk(
        block: list[Directive], inherited: dict[str, Directive]
    ) -> Iterator[tuple[Directive, dict[str, Directive]]]:
        here = dict(inherited)
        headers = [one for one in block if one.name == "proxy_set_header"]
        for one in block:
            if one.block is None and one.name != "proxy_set_header":
                here[one.name] = one
        if headers:
            here = {key: value for key, value in here.items() if not key.startswith("proxy_set_header ")}
            for one in headers:
                here[f"proxy_set_header {one.args[0].lower() if one.args else ''}"] = one
        for one in block:
            if one.block is None:
                continue
            if one.name == "location" and one.child("proxy_pass") is not None:
                inside = dict(here)
                own = [item for item in one.block if item.name == "proxy_set_header"]
                if own:
                    inside = {key: value for key, value in inside.items() if not key.startswith("proxy_set_header ")}
                for item in one.block:
                    if item.name == "proxy_set_header":
                        inside[f"proxy_set_header {item.args[0].lower() if item.args else ''}"] = item
                    elif item.block is None:
                        inside[item.name] = item
                yield one, inside
            if one.name in ("http", "server", "location"):
                yield from walk(one.block, here)

    yield from walk(facts.nginx.config or [], {})


def place(directive: Directive) -> str:
    """Return where a directive stands, for the reader."""
    return f"{directive.file}:{directive.line}"


@check(
    "gateway.configuration",
    title="nginx accepts its configuration",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="a configuration that nginx refuses is served from memory until the next restart, and then nothing is served",
    remedy="site.yml --tags gateway writes and tests a whole new tree",
    source="https://nginx.org/en/docs/switches.html (nginx -t)",
)
def configuration(facts: HostFacts, policy: Policy) -> Finding:
    if facts.nginx.config_error:
        return failed(facts.nginx.config_error, "accepted")
    if facts.nginx.config is None:
        if facts.probe("nginx").state == ABSENT:
            return not_applicable("no nginx on this host")
        return not_read(facts, "nginx")
    return passed("accepted", "accepted")


@check(
    "gateway.running",
    title="nginx runs, and listens where its configuration says",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="every other check of the gateway reads files: with nginx stopped, or not reloaded, they are fine and no client is "
    "answered",
    remedy="systemctl status nginx, nginx -t; site.yml --tags gateway starts it",
    source="docs/gateway.md",
)
def running(facts: HostFacts, policy: Policy) -> Finding:
    desired = "nginx active, every listen of its configuration open"
    if facts.probe("nginx").state == ABSENT:
        if "gateway" in policy["expected"]["roles"]:
            return failed("no nginx on this host", desired)
        return not_applicable("no nginx on this host")
    unit = facts.services.get("nginx.service")
    if unit is not None and why_down(unit):
        return failed(why_down(unit), desired)
    if facts.nginx.config is None or facts.network.listeners is None:
        return not_read(facts, "nginx", "sockets", "proc_net_tcp")
    ports = sorted(_listen_ports(facts))
    if not ports:
        return unknown("its configuration listens on no TCP port", desired)
    holders = {port: {one.process for one in facts.network.listeners if one.port == port} for port in ports}
    wrong = [f"nothing listens on port {port}" for port in ports if not holders[port]]
    wrong += [
        f"port {port} is held by {', '.join(sorted(str(one) for one in held))}"
        for port, held in holders.items()
        if held and not held & {"nginx", None}
    ]
    return failed("; ".join(wrong), desired) if wrong else passed(f"listens on {', '.join(map(str, ports))}", desired)


def _listen_ports(facts: HostFacts) -> set[int]:
    """Return the TCP ports of every ``listen`` below http and stream."""
    found = set()
    for one in find_directives(facts.nginx.config or [], "listen"):
        address = first(one)
        if address.startswith("unix:") or {"quic", "udp"} & set(one.args):
            continue
        match = re.search(r"(?:\A|:)(\d{1,5})\Z", address)
        found.add(int(match.group(1)) if match else 80)
    return found


@check(
    "gateway.zone_with_balancing",
    title="Balancing counts across workers (zone)",
    severity="major",
    applies_to=GATEWAY,
    tags=TAGS,
    why="without a zone each worker balances and counts by itself: least_conn and max_conns mean little",
    remedy="a zone line in the upstream",
    source="https://nginx.org/en/docs/http/ngx_http_upstream_module.html#zone",
)
@needs_nginx
def zone_with_balancing(facts: HostFacts, policy: Policy) -> Finding:
    blocks = upstreams(facts)
    if not blocks:
        return not_applicable("no upstream is proxied to")
    bare = [
        f"{one.args[0]} ({place(one)})"
        for one in blocks
        if one.child("zone") is None
        and not find_directives(one.block or [], "balancer_by_lua_block", "balancer_by_lua_file")
    ]
    if bare:
        return failed(f"no zone: {', '.join(bare)}", "zone in every upstream")
    return passed(f"{len(blocks)} upstreams", "zone in every upstream")


@check(
    "gateway.upstream_keepalive",
    title="Connections to engines are kept and reused",
    severity="major",
    applies_to=GATEWAY,
    tags=TAGS,
    why="each request would open a connection; the usual map that sends 'Connection: close' turns keep-alive off again",
    remedy="keepalive in the upstream, proxy_http_version 1.1 and an empty Connection header",
    source="https://nginx.org/en/docs/http/ngx_http_upstream_module.html#keepalive",
)
@needs_proxying
def upstream_keepalive(facts: HostFacts, policy: Policy) -> Finding:
    wrong = [
        f"{one.args[0]}: no keepalive"
        for one in upstreams(facts)
        if one.child("keepalive") is None and "enable_keepalive" not in str(one)
    ]
    closing_maps = {
        one.args[1]
        for one in find_directives(facts.nginx.config or [], "map")
        if len(one.args) > 1 and any("close" in item.args for item in one.block or [])
    }
    for location, force in proxied(facts):
        header = force.get("proxy_set_header connection")
        value = header.args[1] if header is not None and len(header.args) > 1 else None
        version = force.get("proxy_http_version")
        if version is None or version.args != ["1.1"]:
            wrong.append(f"{place(location)}: HTTP/1.0 to the engine")
        if value not in ("", "keep-alive") and (value is None or value in closing_maps or not _keeps(value)):
            wrong.append(f"{place(location)}: Connection header {'not emptied' if value is None else f'from {value}'}")
    wrong += [
        f"{place(one)}: {peer} is no upstream, so nothing is kept"
        for one, peer in direct_peers(facts)
        if not is_loopback(peer)  # a door of its own further in: a connection there costs nothing
    ]
    desired = "keepalive, HTTP/1.1, empty Connection header"
    return failed("; ".join(wrong), desired) if wrong else passed("kept", desired)


def _keeps(value: str) -> bool:
    """Tell whether a Connection header comes from a variable that a map makes (a client's own may say close)."""
    return value.startswith("$") and value != "$http_connection"


@check(
    "gateway.streaming_unbuffered",
    title="Streams pass unbuffered",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="buffering holds tokens back: the first token comes 10 times later while the measured gap between tokens looks better",
    remedy="proxy_buffering off",
    source="reports: first token 22 -> 287 ms, gap 5.49 -> 1.58 ms",
)
@needs_proxying
def streaming_unbuffered(facts: HostFacts, policy: Policy) -> Finding:
    held = [
        place(location)
        for location, force in proxied(facts)
        if force.get("proxy_buffering") is None or force["proxy_buffering"].args != ["off"]
    ]
    return (
        failed(f"buffered: {', '.join(held)}", "proxy_buffering off") if held else passed("off", "proxy_buffering off")
    )


@check(
    "gateway.time_chain",
    title="nginx waits longer than an engine is silent, and drops idle connections before the engine does",
    severity="major",
    applies_to=GATEWAY,
    tags=TAGS,
    why="a read timeout below the longest silent prefill turns long prompts into 504, and clients repeat them; an engine that "
    "closes idle connections first resets requests",
    remedy="the times of the pool plan (docs/planning.md#times)",
    source="reports: a 120-s timeout with three client retries tripled the load; uvicorn's 5 s below the proxy's idle time",
)
@needs_proxying
def time_chain(facts: HostFacts, policy: Policy) -> Finding:
    wrong, dark = [], []
    silent, idle_limit = policy["expected"]["longest_silent_prefill_s"], policy["expected"]["engine_keepalive_s"]
    # Where Lua chooses the peer it sets the times too, from the same plan; nginx -T does not show them.
    in_lua = bool(find_directives(facts.nginx.config or [], "balancer_by_lua_block", "balancer_by_lua_file"))
    for location, force in proxied(facts):
        read = seconds(first(force["proxy_read_timeout"])) if "proxy_read_timeout" in force else NGINX_READ_TIMEOUT_S
        if read is None:
            dark.append(f"{place(location)}: proxy_read_timeout is not a plain time")
        elif "proxy_read_timeout" not in force and not (in_lua and "$" in first(force.get("proxy_pass"))):
            wrong.append(f"{place(location)}: proxy_read_timeout is nginx's default of 60 s")
        elif silent is None and read < NGINX_READ_TIMEOUT_S:
            wrong.append(f"{place(location)}: reads for {read:g} s, less than nginx's default")
        elif "proxy_read_timeout" in force and silent is not None and read <= silent:
            wrong.append(f"{place(location)}: reads for {read:g} s, a prefill may be silent for {silent:g} s")
    for one in upstreams(facts):
        idle = one.child("keepalive_timeout")
        held = seconds(first(idle)) if idle is not None else 60.0
        if held is None:
            dark.append(f"{one.args[0]}: keepalive_timeout is not a plain time")
        elif idle_limit is not None and held >= idle_limit:
            wrong.append(f"{one.args[0]}: idle {held:g} s, engines close after {idle_limit:g} s")
        elif idle_limit is None and held >= UVICORN_KEEPALIVE_S:
            dark.append(f"{one.args[0]}: idle {held:g} s; after how long the engines close is not declared")
    if wrong:
        return failed("; ".join(wrong), "read timeout set; upstream idle below the engine's")
    return unknown("; ".join(dark)) if dark else passed("ordered", "read timeout set; upstream idle below the engine's")


@check(
    "gateway.body_size",
    title="Long prompts fit",
    severity="major",
    applies_to=GATEWAY,
    tags=TAGS,
    why="nginx's default of 1 MiB answers a 30,000-token contract with 413",
    remedy="client_max_body_size from the plan",
    source="https://nginx.org/en/docs/http/ngx_http_core_module.html#client_max_body_size",
)
@needs_proxying
def body_size(facts: HostFacts, policy: Policy) -> Finding:
    desired, planned = "client_max_body_size from the plan", policy["expected"]["body_limit_bytes"]
    wrong, dark, sizes = [], [], []
    for location, force in proxied(facts):
        text = first(force.get("client_max_body_size"))
        size = _size(text) if text else 0
        if not text:
            wrong.append(f"{place(location)}: nginx's default of 1 MiB")
        elif size is None:
            dark.append(f"{place(location)}: client_max_body_size {text!r} is no size")
        elif 0 < size < NGINX_BODY_SIZE:
            wrong.append(f"{place(location)}: {format_size(size)}")
        else:
            sizes.append(size or UNLIMITED)  # 0 is nginx's word for no bound
    if planned and not dark and not wrong and max(sizes) < planned:
        wrong.append(f"at most {format_size(max(sizes))}; the longest prompts take {format_size(planned)}")
    if wrong or dark:
        return failed("; ".join(wrong), desired) if wrong else unknown("; ".join(dark), desired)
    return passed("set", "client_max_body_size from the plan")


def _size(text: str) -> Optional[int]:
    try:
        return parse_size(text)
    except ValueError:
        return None


@check(
    "gateway.failure_counting",
    title="Failures are counted sanely, load is not counted as failure",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="a fail_timeout of hours ejects a peer for hours; a single peer that is ejected is an outage; an engine's 503 or 429 "
    "is load, and counting it as death empties the pool under a burst",
    remedy="max_fails=3 fail_timeout=30s, max_fails=0 for a single live peer, no http_503/http_429 in proxy_next_upstream",
    source="reports: fail_timeout=10000s, a second 'down' entry that disables the single-server exemption",
)
@needs_proxying
def failure_counting(facts: HostFacts, policy: Policy) -> Finding:
    wrong = []
    for one in upstreams(facts):
        servers = [item for item in one.block or [] if item.name == "server"]
        live = [item for item in servers if "down" not in item.args]
        for item in live:
            options = dict(part.split("=", 1) for part in item.args if "=" in part)
            pause = seconds(options.get("fail_timeout", "10s"))
            if pause is None:
                wrong.append(f"{place(item)}: fail_timeout {options['fail_timeout']!r} is no time")
            elif pause > FAIL_TIMEOUT_MAXIMUM_S and options.get("max_fails") != "0":
                wrong.append(f"{place(item)}: fail_timeout {options['fail_timeout']} ejects for {pause / 3600:.1f} h")
            if len(live) == 1 and len(servers) > 1 and options.get("max_fails") != "0":
                wrong.append(f"{place(item)}: the one live peer of {one.args[0]} can be ejected (max_fails is not 0)")
            if len(live) > 1 and options.get("max_fails") == "0" and "backup" not in item.args:
                wrong.append(f"{place(item)}: max_fails=0: a dead peer of {one.args[0]} is asked again and again")
    for one in find_directives(facts.nginx.config or [], "proxy_next_upstream"):
        counted = [word for word in one.args if word in ("http_503", "http_429")]
        if counted and "non_idempotent" not in one.args:
            wrong.append(f"{place(one)}: {', '.join(counted)} counts load as failure, and a POST is not even retried")
        elif counted:
            wrong.append(f"{place(one)}: {', '.join(counted)} counts load as failure")
    desired = "bounded fail_timeout, single peers never ejected, 503 and 429 not counted"
    return failed("; ".join(wrong), desired) if wrong else passed("sane", desired)


@check(
    "gateway.retry_on_timeout",
    title="A generation that timed out is not sent again",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="with 'timeout' and 'non_idempotent' together nginx sends a running generation to a second engine: double load, and "
    "possibly two answers",
    remedy="no timeout in proxy_next_upstream where non_idempotent stands",
    source="https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_next_upstream",
)
@needs_proxying
def retry_on_timeout(facts: HostFacts, policy: Policy) -> Finding:
    both = [
        place(one)
        for one in find_directives(facts.nginx.config or [], "proxy_next_upstream")
        if {"timeout", "non_idempotent"} <= set(one.args)
    ]
    desired = "never both"
    return failed(f"both: {', '.join(both)}", desired) if both else passed("not both", desired)


@check(
    "gateway.resolver",
    title="Upstream names are resolved again, or are addresses",
    severity="major",
    applies_to=GATEWAY,
    tags=TAGS,
    why="nginx resolves a name once, at its start: a container with a new address then gets nothing, or another's requests",
    remedy="addresses in upstreams, or a resolver and the resolve parameter",
    source="reports: three hours lost to a stale address while the page looked fine",
)
@needs_proxying
def resolver(facts: HostFacts, policy: Policy) -> Finding:
    has_resolver = bool(find_directives(facts.nginx.config or [], "resolver"))
    stale = []
    for one in upstreams(facts):
        for item in one.block or []:
            named = item.name == "server" and bool(item.args) and _is_name(item.args[0])
            if named and not (has_resolver and "resolve" in item.args):
                stale.append(f"{place(item)}: {item.args[0]}")
    stale += [f"{place(one)}: {peer}" for one, peer in direct_peers(facts) if _is_name(peer)]
    desired = "addresses, or resolver with resolve"
    return failed("; ".join(stale), desired) if stale else passed("addresses", desired)


def _is_name(peer: str) -> bool:
    host = peer.rsplit(":", 1)[0].strip("[]")
    if peer.startswith("unix:"):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


@check(
    "gateway.access_log_causes",
    title="The access log shows no cause that the configuration makes",
    severity="major",
    applies_to=GATEWAY,
    why="each kind of error row has one cause: the log says whether the engine, the client or nginx's own settings did it",
    remedy="docs/gateway.md lists the causes and what mends each",
    source="docs/gateway.md",
)
def access_log_causes(facts: HostFacts, policy: Policy) -> Finding:
    if facts.probe("nginx").state == ABSENT and not facts.nginx.access_log:
        return not_applicable("no nginx on this host")
    if facts.nginx.access_log is None:
        return not_read(facts, "access_logs")
    if facts.probe("access_logs").state == ABSENT:
        return unknown("there is no access log to read")
    lines = facts.nginx.access_log
    unread_lines = [line for line in lines if parse_row(line) is None]
    causes = count_causes(lines, facts.nginx.error_log or [])
    engine = {name: number for name, number in causes.items() if CAUSES[name].engine or name in OUR_CAUSES}
    shown = dict(sorted(causes.items(), key=lambda pair: -pair[1]))
    said = tuple(f"{name}: {CAUSES[name].why} {CAUSES[name].remedy}".strip() for name in shown)
    if engine:
        return warned(shown, "no row that an engine or the gateway's own settings made", *said)
    if unread_lines:
        return unknown(f"{len(unread_lines)} rows of another format than the gateway's", None, unread_lines[-1][:160])
    if broke(facts, "error_logs"):
        return not_read(facts, "error_logs")
    # What clients do, and load that was turned away (429, an engine's 503), is no fault of this host.
    return passed(shown or "no error rows", "no row that an engine or the gateway's own settings made", *said)


@check(
    "gateway.worker_connections",
    title="Workers may hold the connections they accept",
    severity="major",
    applies_to=GATEWAY,
    tags=TAGS,
    why="each proxied request takes two connections of a worker; above worker_connections new ones wait or are refused",
    remedy="worker_connections and worker_rlimit_nofile from the plan",
    source="https://nginx.org/en/docs/ngx_core_module.html#worker_connections",
)
@needs_nginx
def worker_connections(facts: HostFacts, policy: Policy) -> Finding:
    config = facts.nginx.config or []
    connections = [
        int(one.args[0]) for one in find_directives(config, "worker_connections") if one.args and one.args[0].isdigit()
    ]
    files = [
        int(one.args[0])
        for one in find_directives(config, "worker_rlimit_nofile")
        if one.args and one.args[0].isdigit()
    ]
    if not connections and find_directives(config, "worker_connections"):
        return unknown("worker_connections is not a number")
    number = connections[-1] if connections else 512
    desired = ">= 4096 connections, twice as many files"
    if number < 4096:
        return warned(f"{number} connections", desired)
    if not files or files[-1] < 2 * number:
        return failed(f"{number} connections, {files[-1] if files else 'default'} files", desired)
    return passed(f"{number} connections, {files[-1]} files", desired)


@check(
    "gateway.tls_expiry",
    title="Certificates are valid for a while yet",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="an expired certificate is an outage that everybody saw coming",
    remedy="renew it; the generated one is renewed by site.yml --tags gateway",
    source="policy: tls_days_minimum",
)
def tls_expiry(facts: HostFacts, policy: Policy) -> Finding:
    if facts.certificates is None or (not facts.certificates and unread(facts, "certificates")):
        if facts.probe("nginx").state == ABSENT:
            return not_applicable("no nginx on this host")
        return not_read(facts, "certificates")
    if not facts.certificates:
        return warned("nginx names no certificate", "TLS")
    wanted = policy["tls_days_minimum"]
    known = {one.path for one in facts.certificates}
    named = {one.args[0] for one in find_directives(facts.nginx.config or [], "ssl_certificate") if one.args}
    # Which file a variable stands for is decided per connection.
    unseen = sorted({resolve(one) for one in named if "$" not in one and not one.startswith("data:")} - known)
    now: Optional[datetime.datetime] = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    if facts.source == "snapshot" and facts.collected_at is not None:
        now = moment(facts.collected_at)
    short, days = [], []
    dark = [f"{one}: not read" for one in unseen]
    for one in facts.certificates:
        begin, end = moment(one.not_before), moment(one.not_after)
        if end is None or now is None:
            dark.append(
                f"{one.path}: {one.error or ('not readable' if end is None else 'when it was read is not said')}"
            )
            continue
        left = (end - now).days
        days.append(left)
        if begin is not None and begin > now:
            short.append(f"{one.path}: not valid before {one.not_before}")
        if left < wanted:
            short.append(f"{one.path}: {'expired' if left < 0 else f'{left} days left'}")
    if short:
        return failed("; ".join(short), f">= {wanted} days")
    return (
        unknown("; ".join(dark), f">= {wanted} days") if dark else passed(f"{min(days)} days left", f">= {wanted} days")
    )


def listens(server: Directive) -> list[str]:
    """Return the addresses that a server block listens on; nginx's own default where it says none."""
    return [one.args[0] for one in server.block or [] if one.name == "listen" and one.args] or ["*:80"]


def is_loopback(listen: str) -> bool:
    """Tell whether only this machine reaches a listen address."""
    return listen.startswith(("127.", "[::1]", "unix:", "localhost"))


def _tells(directive: Directive) -> bool:
    """Tell whether a directive gives out, or changes, how the service runs."""
    lua = directive.name.startswith("content_by_lua") and "admin" in " ".join(directive.args)
    return directive.name == "stub_status" or lua


def _denies_all(directive: Directive) -> bool:
    return any(one.name == "deny" and one.args == ["all"] for one in directive.block or [])


@check(
    "gateway.listen",
    title="Prompts and keys arrive over TLS alone",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="a server that proxies to engines on a port without TLS takes keys and prompts in clear text, and a second public "
    "door has none of the first one's limits",
    remedy="listen ... ssl for what proxies; plain HTTP only redirects",
    source="https://nginx.org/en/docs/http/configuring_https_servers.html",
)
@needs_nginx
def listen(facts: HostFacts, policy: Policy) -> Finding:
    open_doors, doors = [], []
    for server in find_directives(facts.nginx.config or [], "server"):
        if server.block is None or not find_directives(server.block, "proxy_pass", "grpc_pass"):
            continue
        for one in [one for one in server.block if one.name == "listen" and one.args] or [server]:
            address = one.args[0] if one is not server else "*:80"
            doors.append(address)
            if "ssl" not in one.args and "quic" not in one.args and not is_loopback(address):
                open_doors.append(f"{address} ({place(one)})")
    if open_doors:
        return failed(f"without TLS: {', '.join(open_doors)}", "ssl on every listen that proxies")
    if not doors:
        if "gateway" in policy["expected"]["roles"]:
            return failed("no server proxies to an engine", "a server that proxies, with ssl")
        return not_applicable("nginx proxies nothing")
    if "gateway" in policy["expected"]["roles"] and all(is_loopback(one) for one in doors):
        return failed(f"{', '.join(sorted(set(doors)))} alone: no client reaches it", "a public listen with ssl")
    return passed(sorted(set(doors)), "ssl on every listen that proxies")


@check(
    "gateway.private_status",
    title="Status and admin pages listen on loopback alone",
    severity="critical",
    applies_to=GATEWAY,
    tags=TAGS,
    why="stub_status and admin endpoints tell, or change, how the service runs",
    remedy="listen 127.0.0.1 for the server that has them, or allow/deny",
    source="https://nginx.org/en/docs/http/ngx_http_stub_status_module.html",
)
@needs_nginx
def private_status(facts: HostFacts, policy: Policy) -> Finding:
    opened = []
    for server in find_directives(facts.nginx.config or [], "server"):
        if server.block is None:
            continue
        if all(is_loopback(one) for one in listens(server)):
            continue
        for location in [server, *find_directives(server.block, "location")]:
            private = [one for one in location.block or [] if _tells(one)]
            if private and not (_denies_all(location) or _denies_all(server)):
                opened.append(f"{private[0].name} at {place(location)} on {', '.join(listens(server))}")
    desired = "loopback, or allow/deny"
    return failed("; ".join(opened), desired) if opened else passed("not public", desired)
