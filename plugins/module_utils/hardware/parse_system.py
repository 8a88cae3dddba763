# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what the kernel and the service manager print. Every function takes text and never raises."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    UNLIMITED,
    Cpu,
    LimitsEntry,
    Listener,
    Memory,
    Os,
    ProcessLimits,
    Service,
)
from ansible_collections.metal.serve.plugins.module_utils.runtime.limits import applies_limits

_ENGINE_FLAGS = ("avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def key_values(text: str, separator: str = "=") -> dict[str, str]:
    """Return ``key<separator>value`` lines as a mapping; the last of equal keys holds."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, sign, value = line.partition(separator)
        if sign and key.strip():
            found[key.strip()] = value.strip()
    return found


def parse_os_release(text: str) -> Os:
    """Read /etc/os-release."""
    fields: dict[str, str] = {}
    for key, value in key_values(text).items():
        try:
            words = shlex.split(value)
        except ValueError:
            words = [value.strip("\"'")]
        fields[key] = " ".join(words)
    like = fields.get("ID_LIKE", "").split()
    name = fields.get("ID") or None
    return Os(
        id=name,
        id_like=like,
        version_id=fields.get("VERSION_ID") or None,
        codename=fields.get("VERSION_CODENAME") or None,
        pretty_name=fields.get("PRETTY_NAME") or None,
        family=_family(name, like),
    )


def _family(name: Optional[str], like: list[str]) -> Optional[str]:
    words = [name or "", *like]
    if any(word in ("debian", "ubuntu") for word in words):
        return "debian"
    if any(word in ("rhel", "fedora", "centos", "rocky", "almalinux", "ol", "amzn") for word in words):
        return "redhat"
    if any(word in ("suse", "sles", "opensuse") for word in words):
        return "suse"
    return name


def parse_cmdline(text: str) -> dict[str, str]:
    """Read /proc/cmdline: name -> value, '' for a bare word; quotes around blanks are honoured."""
    found: dict[str, str] = {}
    for word in re.findall(r'(?:[^\s"]|"[^"]*")+', text):
        key, _sign, value = word.partition("=")
        found[key.replace('"', "")] = value.replace('"', "")
    return found


def parse_cpuinfo(text: str) -> Cpu:
    """Read /proc/cpuinfo (x86 and Arm forms)."""
    cpu = Cpu()
    count = 0
    sockets: set[str] = set()
    cores: set[tuple[str, str]] = set()
    socket = ""
    for line in text.splitlines():
        key, _sign, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if key == "processor":
            count += 1
        elif key == "model name" and cpu.model is None:
            cpu.model = value or None
        elif key in ("vendor_id", "CPU implementer") and cpu.vendor is None:
            cpu.vendor = value or None
        elif key == "physical id":
            socket = value
            sockets.add(value)
        elif key == "core id":
            cores.add((socket, value))
        elif key in ("flags", "Features") and not cpu.flags:
            have = set(value.split())
            cpu.flags = [flag for flag in _ENGINE_FLAGS if flag in have]
    cpu.logical = count or None
    cpu.sockets = len(sockets) or None
    cpu.cores = len(cores) or None
    return cpu


def parse_meminfo(text: str) -> Memory:
    """Read /proc/meminfo."""
    fields = key_values(text, ":")
    return Memory(
        total_kib=values.whole(fields.get("MemTotal"), "kB"),
        available_kib=values.whole(fields.get("MemAvailable"), "kB"),
        swap_total_kib=values.whole(fields.get("SwapTotal"), "kB"),
        swap_free_kib=values.whole(fields.get("SwapFree"), "kB"),
        hugepages_total=values.integer(fields.get("HugePages_Total")),
        hugepage_size_kib=values.whole(fields.get("Hugepagesize"), "kB"),
    )


def parse_node_meminfo(text: str) -> Optional[int]:
    """Read MemTotal of /sys/devices/system/node/node<n>/meminfo in KiB."""
    match = re.search(r"^Node \d+ MemTotal:\s+(\d{1,15}) kB\s*$", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def parse_process_limits(text: str) -> ProcessLimits:
    """Read /proc/<pid>/limits."""
    found = ProcessLimits()
    for line in text.splitlines():
        match = re.match(r"\A(Max [a-z ]+?)\s{2,}(\S+)\s+(\S+)", line)
        if match is None:
            continue
        soft, hard = values.limit(match.group(2)), values.limit(match.group(3))
        if match.group(1) == "Max open files":
            found.nofile_soft, found.nofile_hard = soft, hard
        elif match.group(1) == "Max locked memory":
            found.memlock_soft, found.memlock_hard = soft, hard
        elif match.group(1) == "Max processes":
            found.nproc_soft, found.nproc_hard = soft, hard
    return found


def parse_limits_conf(path: str, text: str) -> list[LimitsEntry]:
    """Read limits.conf or a file of limits.d."""
    entries = []
    for line in text.splitlines():
        words = line.split("#", 1)[0].split()
        if len(words) >= 4 and words[1] in ("soft", "hard", "-"):
            entries.append(LimitsEntry(path, words[0], words[1], words[2], values.limit(words[3])))
    return entries


def parse_session_times(text: str) -> Optional[bool]:
    """Tell whether a login (``login: 1764540000.10``) is older than its settings (``settings: …``); None: not said.

    Less than a second apart counts as older: the clock may have been set a little in between.
    """
    times = key_values(text, ":")
    login, settings = (values.quantity(times.get(name), "") for name in ("login", "settings"))
    return None if login is None or settings is None else login < settings + 1


def parse_session_pam(texts: Mapping[str, str]) -> Optional[bool]:
    """Tell whether a login over SSH runs pam_limits, from sshd's configuration and PAM files by path; None: not known."""
    main, pam = texts.get("/etc/ssh/sshd_config"), texts.get("/etc/pam.d/sshd")
    if main is None or pam is None:
        return None
    read = [main]
    if re.search(r"^\s*include\s.*sshd_config\.d", main, re.IGNORECASE | re.MULTILINE):
        read += [text for path, text in sorted(texts.items()) if path.startswith("/etc/ssh/sshd_config.d/")]
    said = {one.lower() for text in read for one in re.findall(r"(?im)^\s*usepam[\s=]+\"?(\w+)", text)}
    if len(said) > 1:
        return None
    services = {path.rpartition("/")[2]: text for path, text in texts.items() if path.startswith("/etc/pam.d/")}
    return said == {"yes"} and applies_limits(services, "sshd")  # sshd's own default is no


def parse_modules(text: str) -> list[str]:
    """Read /proc/modules: names of the loaded modules."""
    return [line.split()[0] for line in text.splitlines() if re.match(r"\A\w+ \d", line)]


def parse_devices(text: str) -> dict[str, int]:
    """Read the character devices of /proc/devices: name -> major (the lowest of equal names)."""
    found: dict[str, int] = {}
    character = False
    for line in text.splitlines():
        if line.endswith("devices:"):
            character = line.startswith("Character")
            continue
        match = re.match(r"\A\s*(\d{1,6})\s+(\S+)\s*\Z", line, re.ASCII)
        if match and character:
            found.setdefault(match.group(2), int(match.group(1)))
    return found


_CONTROLLERS = frozenset(
    [
        "blkio",
        "cpu",
        "cpuacct",
        "cpuset",
        "devices",
        "freezer",
        "hugetlb",
        "memory",
        "misc",
        "net_cls",
        "net_prio",
        "perf_event",
        "pids",
        "rdma",
    ]
)


def parse_mounted_cgroups(text: str) -> tuple[Optional[int], list[str]]:
    """Read /proc/self/mountinfo (or /proc/mounts): cgroup version, and the controllers mounted with version 1.

    A mixed hierarchy (version 1 controllers beside an empty version 2 mount) counts as 1.
    """
    kinds: set[str] = set()
    controllers: list[str] = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        if dash:
            words = after.split()
            kind, options = (words[0], words[-1]) if words else ("", "")
        else:
            words = before.split()
            kind, options = (words[2], words[3]) if len(words) > 3 else ("", "")
        if kind in ("cgroup", "cgroup2"):
            kinds.add(kind)
        if kind == "cgroup":
            controllers += [word for word in options.split(",") if word in _CONTROLLERS]
    if controllers:
        return 1, sorted(set(controllers))
    return (2 if "cgroup2" in kinds else 1 if kinds else None), []


def parse_units(text: str) -> list[Service]:
    """Read ``systemctl show`` of several units (blocks between empty lines)."""
    return [unit for unit in (_unit(block) for block in re.split(r"\n\s*\n", text)) if unit.name]


def _unit(block: str) -> Service:
    fields = key_values(block)

    def text(name: str) -> Optional[str]:
        return fields.get(name) or None

    return Service(
        name=fields.get("Id", ""),
        load_state=text("LoadState"),
        active_state=text("ActiveState"),
        sub_state=text("SubState"),
        unit_file_state=text("UnitFileState"),
        result=text("Result"),
        main_pid=values.integer(fields.get("MainPID")),
        restarts=values.integer(fields.get("NRestarts")),
        limit_nofile=values.limit(fields.get("LimitNOFILE")),
        limit_memlock=values.limit(fields.get("LimitMEMLOCK")),
        timeout_stop_s=seconds(fields.get("TimeoutStopUSec")),
        need_daemon_reload=values.switch(fields.get("NeedDaemonReload")),
        fragment_path=text("FragmentPath"),
        drop_ins=fields.get("DropInPaths", "").split(),
        after=fields.get("After", "").split(),
        status_text=text("StatusText"),
    )


_SPANS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "w": 604800.0,
    "y": 31557600.0,
    "month": 2629800.0,
}


def seconds(text: Optional[str]) -> Optional[float]:
    """Return a time span of systemd or Prometheus (``1min 30s``, ``5m``, ``infinity``) in seconds; None where it is
    none.
    """
    words = (text or "").strip()
    if words == "infinity":
        return float(UNLIMITED)
    pairs = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", words)
    if not pairs or re.sub(r"\d+(?:\.\d+)?\s*[a-z]+|\s", "", words):
        return None
    total = 0.0
    for number, unit in pairs:
        factor = _SPANS.get(unit) or _SPANS.get(unit.rstrip("s"))
        if factor is None:
            return None
        total += float(number[:18]) * factor
    return total


def parse_proc_net_tcp(text: str) -> list[Listener]:
    """Read the listening sockets of /proc/net/tcp or tcp6. ``process`` is not known from there."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or words[3] != "0A":
            continue
        address, _colon, port = words[1].partition(":")
        if re.match(r"\A(?:[0-9A-Fa-f]{8}|[0-9A-Fa-f]{32})\Z", address) and re.match(r"\A[0-9A-Fa-f]{4}\Z", port):
            found.append(Listener(hex_address(address), int(port, 16)))
    return found


def hex_address(digits: str) -> str:
    """Return an address of /proc/net/tcp in its usual form (the kernel prints 32-bit words in host order, little
    endian).
    """
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    raw = b"".join(words)
    if len(raw) == 4:
        return ".".join(str(byte) for byte in raw)
    if raw == b"\0" * 16:
        return "::"
    if raw == b"\0" * 15 + b"\1":
        return "::1"
    if raw.startswith(b"\0" * 10 + b"\xff\xff"):
        return "::ffff:" + ".".join(str(byte) for byte in raw[12:])
    return ":".join(f"{raw[at] << 8 | raw[at + 1]:x}" for at in range(0, 16, 2))
