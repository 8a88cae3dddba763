# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Probes of what serves: nginx, Prometheus and exporters, engines, models; and of network, clock, space, access
control.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any
from urllib.parse import quote

from ansible_collections.metal.serve.plugins.module_utils.hardware import (
    masking,
    parse_nginx,
    parse_services,
    parse_system,
    values,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import find_directives
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost, state_of
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ABSENT,
    ERROR,
    NOT_COLLECTED,
    OK,
    Item,
    Probe,
    command_path,
    snapshot_path,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_host import (
    command_probe,
    file_probe,
    files_probe,
    stat_item,
)
from ansible_collections.metal.serve.plugins.module_utils.models.faults import UNFINISHED
from ansible_collections.metal.serve.plugins.module_utils.models.manifest import (
    ManifestError,
    hash_entries,
    walk_files,
)

EXPORTERS = {
    "node": 9100,
    "nginx": 9113,
    "gateway_log": 3903,
    "agent": 9600,
    "dcgm": 9400,
}
"""Exporters that are scraped where something listens on their port: name -> port."""

PROMETHEUS_PORT = 9090
ACCESS_LOGS = ("/var/log/metalserve/*access*.log", "/var/log/nginx/*access*.log")
ERROR_LOGS = ("/var/log/metalserve/*error*.log", "/var/log/nginx/*error*.log")
LOG_TAIL = 512 * 1024
NAMES_WINDOW_S = 600
PROGRESS_WAITS_S = (0.0, 0.25, 0.5)
MODEL_FILES = 5000
"""Bounds: bytes of a log's end, files of a model; seconds of metric names, pauses between scrapes of a busy engine."""


def _nginx(host: LiveHost) -> list[Item]:
    """Dump the configuration. API keys in it are hidden right here: no fact and no snapshot ever holds one."""
    found = host.command(["nginx", "-T"], 15.0, missing=ABSENT)
    return [Item(found.path, found.state, masking.mask_nginx(found.text), found.error)]


def _logs(host: LiveHost, patterns: tuple[str, ...]) -> list[Item]:
    items = []
    for pattern in patterns:
        items += [host.file(path, LOG_TAIL, tail=True) for path in host.glob(pattern)[:16]]
    return items or [Item(snapshot_path(patterns[0]), ABSENT)]


def _named_files(host: LiveHost, *directives: str) -> list[str]:
    """Return the files that nginx's configuration names with ``directives``."""
    text = host.found["nginx"].text() if "nginx" in host.found else None
    if text is None:
        return []
    try:
        config = parse_nginx.parse_config(parse_nginx.split_dump(text))
    except parse_nginx.BadConfig:
        return []
    named = [one.args[0] for one in find_directives(config, *directives) if one.args]
    return sorted({parse_nginx.resolve(path) for path in named if "$" not in path})


def _certificates(host: LiveHost) -> list[Item]:
    """Ask openssl about the certificates that nginx names; the certificates themselves are not kept."""
    if "nginx" not in host.found or host.found["nginx"].state != OK:
        return [
            Item("certificates", NOT_COLLECTED, "", "nginx's configuration was not read, so no certificate is named")
        ]
    items = []
    for path in _named_files(host, "ssl_certificate")[:50]:
        argv = [
            "openssl",
            "x509",
            "-in",
            path,
            "-noout",
            "-startdate",
            "-enddate",
            "-subject",
            "-ext",
            "subjectAltName",
        ]
        items.append(host.command(argv, 3.0, at=f"certificates{path}.txt"))
    return items or [Item("certificates", ABSENT)]


def listening(host: LiveHost, port: int) -> str:
    """Return an address on which something listens at ``port``, the loopback where it is every address; '' where
    nothing.
    """
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for listener in parse_system.parse_proc_net_tcp(host.file(path).text):
            if listener.port == port:
                return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(listener.address, listener.address)
    return ""


def _proc_net_tcp(host: LiveHost) -> list[Item]:
    """Keep the listening sockets; connections are nobody's business."""
    items = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        found = host.file(path, 16 * 1024 * 1024)
        kept = [line for line in found.text.splitlines() if " 0A " in line or "local_address" in line]
        items.append(Item(found.path, found.state, "".join(f"{line}\n" for line in kept), found.error))
    return items


def _prometheus(host: LiveHost) -> list[Item]:
    address = listening(host, PROMETHEUS_PORT)
    if not address and host.which("prometheus") is None:
        return [Item("prometheus/rules.json", ABSENT)]
    if not address:
        why = f"Prometheus is installed, but nothing listens on port {PROMETHEUS_PORT}"
        return [Item("prometheus/rules.json", ERROR, "", why)]
    return [
        host.http(address, PROMETHEUS_PORT, "/api/v1/rules", "prometheus/rules.json", 8.0),
        host.http(address, PROMETHEUS_PORT, "/api/v1/targets?state=active", "prometheus/targets.json", 8.0),
        host.http(address, PROMETHEUS_PORT, "/api/v1/status/buildinfo", "prometheus/buildinfo.json", 8.0),
        host.http(address, PROMETHEUS_PORT, "/api/v1/metadata", "prometheus/metadata.json", 8.0),
        host.http(
            address,
            PROMETHEUS_PORT,
            f"/api/v1/label/__name__/values?start={int(time.time()) - NAMES_WINDOW_S}",
            "prometheus/names.json",
            8.0,
        ),
    ]


def _scrapes(host: LiveHost) -> list[Item]:
    """Scrape the exporters and engines that listen on this machine."""
    wanted = dict(EXPORTERS)
    for replica, port in _engine_ports(host).items():
        wanted[replica] = port
    items = []
    for name, port in sorted(wanted.items()):
        place = f"scrapes/{name}.prom"
        address = listening(host, port)
        items.append(host.http(address, port, "/metrics", place, 5.0) if address else Item(place, ABSENT))
    return items


def _health(host: LiveHost) -> list[Item]:
    items = []
    for replica, document in sorted(_current_releases(host).items()):
        place, port = f"health/{replica}.txt", parse_services.release_port(document)
        if port is None:
            continue
        address = listening(host, port)
        if not address:
            items.append(Item(place, ERROR, "", f"nothing listens on port {port}"))
            continue
        live = values.as_str(values.get(document, "health", "live")) or "/health"
        items.append(host.http(address, port, live, place, 3.0))
    return items or [Item("health", ABSENT)]


def _current_releases(host: LiveHost) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in host.glob(f"{host.metalserve_root}/engines/*/current/release.json"):
        document, _error = values.json_object(host.file(path).text)
        if document is not None:
            found[path.split("/")[-3]] = document
    return found


def _engine_ports(host: LiveHost) -> dict[str, int]:
    ports = {name: parse_services.release_port(document) for name, document in _current_releases(host).items()}
    return {name: port for name, port in ports.items() if port is not None}


def _progress(host: LiveHost) -> list[Item]:
    """Scrape engines that have work once more, until their progress shows: one scrape cannot tell busy from wedged."""
    first = host.found["scrapes"].texts() if "scrapes" in host.found else {}
    items = []
    for replica, document in sorted(_current_releases(host).items()):
        port, names = parse_services.release_port(document), parse_services.progress_names(document)
        before = parse_services.selected_samples(first.get(f"scrapes/{replica}.prom", ""), names.values())
        if port is None or not parse_services.in_flight(before, names):
            continue
        place, began = f"progress/{replica}.prom", time.monotonic()
        found = Item(place, ERROR, "", f"nothing listens on port {port}")
        for pause in PROGRESS_WAITS_S:
            time.sleep(pause)
            address = listening(host, port)
            if not address:
                break
            found = host.http(address, port, "/metrics", place, 3.0)
            after = parse_services.selected_samples(found.text, names.values())
            if parse_services.total(after, names["progress"]) != parse_services.total(before, names["progress"]):
                break
        kept = [line for line in found.text.splitlines() if line.startswith(tuple(names.values()))]
        text = f"# interval_s {time.monotonic() - began:.2f}\n" + "".join(f"{line}\n" for line in kept)
        items.append(Item(place, found.state, text if found.state == OK else "", found.error))
    return items or [Item("progress", ABSENT)]


def _engines(host: LiveHost) -> list[Item]:
    """Read releases and links of each replica."""
    base = f"{host.metalserve_root}/engines"
    state, names, error = host.listdir(base)
    if state != OK:
        return [Item(snapshot_path(base), state, "", error)]
    items: list[Item] = []
    for name in names[:64]:
        for link in ("current", "previous"):
            target = host.link(f"{base}/{name}/{link}")
            if target is not None:
                items.append(Item(snapshot_path(f"{base}/{name}/{link}"), OK, os.path.basename(target) + "\n"))
        for pattern in ("releases/*/release.json", "releases/*/config.yaml", "rotation.json"):
            items += [host.file(path) for path in host.glob(f"{base}/{name}/{pattern}")[:32]]
        items += _rendered(host, f"{base}/{name}")
    return items or [Item(snapshot_path(base), ABSENT)]


def _rendered(host: LiveHost, folder: str) -> list[Item]:
    """Read the other files of the current release that its content lists; secrets are no part of that list."""
    current = host.link(f"{folder}/current")
    if current is None:
        return []
    release = f"{folder}/releases/{os.path.basename(current)}"
    document, _error = values.json_object(host.file(f"{release}/release.json").text)
    listed = values.get(document, "content", "files")
    names = [name for name in listed if name != "config.yaml"] if isinstance(listed, dict) else []
    safe = [name for name in names[:16] if not re.search(r"(?:\A|/)\.\.?(?:/|\Z)|\A/|key", name)]
    return [host.file(f"{release}/{name}") for name in safe]


def _models(host: LiveHost) -> list[Item]:
    """Read manifests and list the files of each revision: sizes, times and inodes, no content."""
    base = f"{host.metalserve_root}/models"
    state, names, error = host.listdir(base)
    if state != OK:
        return [Item(snapshot_path(base), state, "", error)]
    items: list[Item] = []
    for name in names[:64]:
        _state, inside, _error = host.listdir(f"{base}/{name}")
        for entry in inside[:64]:
            path = f"{base}/{name}/{entry}"
            if entry.endswith(".manifest.json"):
                items.append(host.file(path, 8 * 1024 * 1024))
            elif not entry.startswith(".") and os.path.isdir(host.real(path)):
                items.append(_model_listing(host, name, entry, path))
                items += host.files(f"{path}/*.safetensors.index.json") if host.glob(f"{path}/*.index.json") else []
    return items or [Item(snapshot_path(base), ABSENT)]


def _model_listing(host: LiveHost, name: str, revision: str, path: str) -> Item:
    place = f"stat/models/{name}/{revision}.txt"
    lines: list[str] = []
    top = host.real(path)
    try:
        for folder, _folders, files in os.walk(top, followlinks=True):
            for file in sorted(files):
                full = os.path.join(folder, file)
                relative = os.path.relpath(full, top)
                try:
                    status = os.stat(full)
                except FileNotFoundError:
                    lines.append(f"? ? ? ? {relative}\n")  # a link that leads nowhere
                    continue
                lines.append(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {relative}\n")
                if len(lines) > MODEL_FILES:
                    return Item(place, ERROR, "".join(lines), f"{path}: more than {MODEL_FILES} files")
        lines += _unfinished_blobs(top)
    except OSError as error:
        return Item(place, ERROR, "".join(lines), f"{path}: {error.strerror}")
    return Item(place, OK, "".join(lines))


def _unfinished_blobs(folder: str) -> list[str]:
    """Return a line per unfinished download beside a snapshot of a download cache (``…/snapshots/<commit>``)."""
    real = os.path.realpath(folder)
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), "blobs")
    if os.path.basename(os.path.dirname(real)) != "snapshots" or not os.path.isdir(blobs):
        return []
    names = [name for name in sorted(os.listdir(blobs)) if name.endswith(UNFINISHED)]
    return [f"{os.stat(os.path.join(blobs, name)).st_size} ? ? ? blobs/{name}\n" for name in names]


def _model_hashes(host: LiveHost) -> list[Item]:
    """Hash every file of every model that has a manifest: minutes, so only on request."""
    items: list[Item] = []
    for path in host.glob(f"{host.metalserve_root}/models/*/*.manifest.json"):
        name, revision = path.split("/")[-2], path.split("/")[-1][: -len(".manifest.json")]
        place, folder = f"hashes/models/{name}/{revision}.txt", host.real(path[: -len(".manifest.json")])
        try:
            entries = hash_entries(folder, walk_files(folder))
        except (OSError, ManifestError) as error:
            items.append(Item(place, ERROR, "", str(error)[:300]))
            continue
        items.append(Item(place, OK, "".join(f"{entry.sha256} {entry.path}\n" for entry in entries)))
    return items or [Item("hashes", ABSENT)]


def _secrets(host: LiveHost) -> list[Item]:
    """List modes of files that hold secrets; none of them is opened."""
    paths = ["/etc/metalserve/secrets"]
    for pattern in (
        "/etc/metalserve/secrets/*",
        "/etc/metalserve/tls/*.key",
        "/etc/nginx/metalserve/current/*keys*",
        "/etc/nginx/metalserve/current/engine_auth.conf",
        "/etc/nginx/metalserve/current/tls/*.key",
        f"{host.metalserve_root}/engines/*/releases/*/*key*",
    ):
        paths += host.glob(pattern)
    paths += _named_files(host, "ssl_certificate_key")
    return [stat_item(host, "stat/secrets.txt", sorted(set(paths)))]


def _disks(host: LiveHost) -> list[Item]:
    """Ask df, each path in a process of its own: a mount that does not answer then costs that path only."""
    docker, _error = (
        values.json_object(host.found["docker_info"].text()) if "docker_info" in host.found else (None, None)
    )
    root = values.as_str(values.get(docker, "DockerRootDir")) or "/var/lib/docker"
    items = []
    for path in dict.fromkeys(("/", root, host.metalserve_root)):
        place = "disks/root.txt" if path == "/" else f"disks{path}.txt"
        found = host.command(["df", "-P", "-B1", path], 4.0, at=place)
        gone = found.state == ERROR and "No such file" in found.error
        items.append(Item(place, ABSENT) if gone else found)
    return items


class _Timex(ctypes.Structure):
    """The head of the kernel's struct timex (adjtimex(2)); the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def _clock(_host: LiveHost) -> list[Item]:
    """Ask the kernel itself: timedatectl says the same, but starts a service for it, which can take seconds."""
    place = "listings/adjtimex.txt"
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        return [Item(place, state_of(OSError(number, "")), "", f"adjtimex: {os.strerror(number)}")]
    text = f"state={state}\nstatus={timex.status}\nmaxerror_us={timex.maxerror}\nesterror_us={timex.esterror}\n"
    return [Item(place, OK, text)]


def _container_processes(host: LiveHost) -> list[Item]:
    """Read limits and allowed processors of the first process of each running container, as the kernel has them."""
    if "docker_containers" not in host.found or host.found["docker_containers"].state != OK:
        return [Item("containers", NOT_COLLECTED, "", "the containers were not read")]
    items: list[Item] = []
    for path, text in host.found["docker_containers"].texts().items():
        if not path.startswith("docker/containers/"):
            continue
        answer, _error = values.json_object(text)
        number, pid = values.get(answer, "Id"), values.as_int(values.get(answer, "State", "Pid"))
        if isinstance(number, str) and pid:
            for name in ("limits", "status"):
                found = host.file(f"/proc/{pid}/{name}", 16384, at=f"containers/{quote(number)[:64]}/{name}")
                if found.state != ABSENT:
                    items.append(found)
    return items or [Item("containers", ABSENT)]


SERVICE_PROBES: tuple[Probe, ...] = (
    Probe(
        "nginx",
        "nginx",
        (command_path(["nginx", "-T"]), "files/etc/nginx/*"),
        _nginx,
        16.0,
        says="the gateway's configuration, keys hidden",
    ),
    command_probe(
        "nginx_version", "nginx", ("nginx", "-V"), "version and modules of nginx", 10.0, (0,), True, missing=ABSENT
    ),
    Probe(
        "access_logs",
        "nginx",
        tuple(snapshot_path(one) for one in ACCESS_LOGS),
        lambda host: _logs(host, ACCESS_LOGS),
        says="the end of the access logs",
    ),
    Probe(
        "error_logs",
        "nginx",
        tuple(snapshot_path(one) for one in ERROR_LOGS),
        lambda host: _logs(host, ERROR_LOGS),
        says="the end of nginx's error logs",
    ),
    Probe(
        "certificates",
        "nginx",
        ("certificates/*",),
        _certificates,
        20.0,
        second_round=True,
        says="validity of the certificates that nginx names",
    ),
    Probe(
        "prometheus", "monitoring", ("prometheus/*.json",), _prometheus, 25.0, says="rules and targets of Prometheus"
    ),
    files_probe(
        "prometheus_files",
        "monitoring",
        ("/etc/prometheus/*.yml", "/etc/prometheus/*.yaml", "/etc/prometheus/rules/*", "/etc/prometheus/rules.d/*"),
        "configuration and rule files of Prometheus",
    ),
    files_probe(
        "dashboards",
        "monitoring",
        (
            "/etc/metalserve/dashboards/*.json",
            "/var/lib/grafana/dashboards/*.json",
            "/usr/share/grafana/dashboards/*.json",
        ),
        "dashboards",
    ),
    Probe("scrapes", "monitoring", ("scrapes/*.prom",), _scrapes, 30.0, says="exporters and engines of this machine"),
    Probe("engines", "metalserve", ("files/*/engines/*",), _engines, says="releases of engine replicas"),
    Probe("engine_health", "metalserve", ("health/*.txt",), _health, 30.0, says="health endpoints of engines"),
    Probe(
        "engine_progress",
        "metalserve",
        ("progress/*.prom",),
        _progress,
        20.0,
        second_round=True,
        says="a second scrape of engines that have work",
    ),
    Probe(
        "model_hashes",
        "deep",
        ("hashes/models/*",),
        _model_hashes,
        3600.0,
        says="SHA-256 of every file of the models; on request only",
        on_request=True,
    ),
    Probe(
        "models",
        "metalserve",
        ("files/*/models/*", "stat/models/*"),
        _models,
        20.0,
        says="manifests and files of models",
    ),
    Probe(
        "secrets",
        "security",
        ("stat/secrets.txt",),
        _secrets,
        second_round=True,
        says="modes of files that hold secrets",
    ),
    Probe(
        "container_processes",
        "docker",
        ("containers/*/limits", "containers/*/status"),
        _container_processes,
        second_round=True,
        says="limits and processors in force in running containers",
    ),
    command_probe("sockets", "network", ("ss", "-Hltnp"), "listening sockets"),
    Probe(
        "proc_net_tcp",
        "network",
        (snapshot_path("/proc/net/tcp"), snapshot_path("/proc/net/tcp6")),
        _proc_net_tcp,
        says="listening sockets, from the kernel",
    ),
    command_probe("nft", "network", ("nft", "list", "ruleset"), "firewall"),
    Probe(
        "clock",
        "time",
        ("listings/adjtimex.txt", command_path(["timedatectl", "show"])),
        _clock,
        says="whether the kernel's clock is synchronised",
    ),
    command_probe("chrony", "time", ("chronyc", "-n", "tracking"), "offset of the clock", missing=ABSENT),
    Probe("disks", "disk", ("disks/*",), _disks, 15.0, second_round=True, says="space"),
    file_probe("selinux", "security", "/sys/fs/selinux/enforce", "SELinux"),
    file_probe("apparmor", "security", "/sys/module/apparmor/parameters/enabled", "AppArmor"),
)
