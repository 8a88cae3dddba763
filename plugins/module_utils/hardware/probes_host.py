# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Probes of the machine itself: system, kernel, processors, memory, limits, packages, units."""

from __future__ import annotations

import glob
import gzip
import os
import re
import stat
import time
import zlib
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost, decode
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

SYSCTLS = (
    "fs.file-max",
    "fs.nr_open",
    "kernel.pid_max",
    "kernel.randomize_va_space",
    "kernel.threads-max",
    "net.core.netdev_max_backlog",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_max",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_tw_reuse",
    "vm.max_map_count",
    "vm.overcommit_memory",
    "vm.swappiness",
    "vm.zone_reclaim_mode",
)
"""Kernel parameters that are read; the probe of each is called ``sysctl.<name>``."""

UNITS = (
    "docker.service",
    "docker.socket",
    "containerd.service",
    "nginx.service",
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-cdi-refresh.service",
    "nvidia-cdi-refresh.path",
    "nvidia-dcgm.service",
    "prometheus.service",
    "prometheus-alertmanager.service",
    "alertmanager.service",
    "prometheus-node-exporter.service",
    "prometheus-nginx-exporter.service",
    "mtail.service",
    "chrony.service",
    "chronyd.service",
    "ntp.service",
    "ntpsec.service",
    "systemd-timesyncd.service",
    "ssh.service",
    "sshd.service",
    "unattended-upgrades.service",
    "apt-daily-upgrade.timer",
    "dnf-automatic.timer",
    "dnf-automatic-install.timer",
    "numad.service",
    "irqbalance.service",
    "nftables.service",
    "firewalld.service",
    "metalserve-agent.service",
    "metalserve-firewall.service",
    "metalserve-*",
)

_UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,Result,MainPID,NRestarts,LimitNOFILE,LimitMEMLOCK,TimeoutStopUSec,"
    "NeedDaemonReload,FragmentPath,DropInPaths,After,StatusText"
)

DAEMONS = ("dockerd", "containerd", "nginx", "sshd", "prometheus")
"""Daemons whose limits are read, by the name of their process."""


def file_probe(name: str, group: str, path: str, says: str) -> Probe:
    """Return a probe that reads one file."""
    return Probe(name, group, (snapshot_path(path),), lambda host: [host.file(path)], says=says)


def files_probe(name: str, group: str, patterns: tuple[str, ...], says: str) -> Probe:
    """Return a probe that reads every file that matches ``patterns``; it is absent only where nothing matches any."""
    return Probe(
        name, group, tuple(snapshot_path(one) for one in patterns), lambda host: _found(host, patterns), says=says
    )


def command_probe(
    name: str,
    group: str,
    argv: tuple[str, ...],
    says: str,
    timeout: float = 10.0,
    codes: tuple[int, ...] = (0,),
    both: bool = False,
    more_paths: tuple[str, ...] = (),
    missing: str = ERROR,
) -> Probe:
    """Return a probe that runs one command without a shell; see LiveHost.command for ``missing``."""

    def read(host: LiveHost) -> list[Item]:
        return [host.command(list(argv), timeout, codes, both=both, missing=missing)]

    return Probe(name, group, (command_path(argv), *more_paths), read, timeout + 1.0, says=says)


def _found(host: LiveHost, patterns: tuple[str, ...]) -> list[Item]:
    return host.files(*patterns)


def _uname(_host: LiveHost) -> list[Item]:
    system, node, release, version, machine = os.uname()
    return [Item(command_path(["uname", "-a"]), OK, f"{system} {node} {release} {version} {machine}\n")]


def _secure_boot(host: LiveHost) -> list[Item]:
    """Read the EFI variable itself: mokutil is often not there, and no EFI means no Secure Boot."""
    place = command_path(["mokutil", "--sb-state"])
    if not os.path.isdir(host.real("/sys/firmware/efi")):
        return [Item(place, OK, "EFI variables are not supported on this system\n")]
    paths = host.glob("/sys/firmware/efi/efivars/SecureBoot-*")
    if paths:
        found = host.file(paths[0])
        raw = found.text.encode("utf-8")
        if found.state == OK and len(raw) >= 5:
            return [Item(place, OK, "SecureBoot enabled\n" if raw[4] == 1 else "SecureBoot disabled\n")]
    return [host.command(["mokutil", "--sb-state"], 3.0, (0, 1, 255), both=True)]


def _iommu_groups(host: LiveHost) -> list[Item]:
    place = "listings/sys_kernel_iommu_groups.txt"
    state, names, error = host.listdir("/sys/kernel/iommu_groups")
    return [Item(place, state, "".join(f"{name}\n" for name in names), error)]


def stat_line(host: LiveHost, path: str) -> Optional[str]:
    """Return ``mode owner group size mtime_ns kind path``, or None where the path is not there. Raises OSError
    otherwise.
    """
    try:
        status = os.lstat(host.real(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    mode = status.st_mode
    kind = (
        "directory"
        if stat.S_ISDIR(mode)
        else "link"
        if stat.S_ISLNK(mode)
        else "socket"
        if stat.S_ISSOCK(mode)
        else "file"
        if stat.S_ISREG(mode)
        else "other"
    )
    owner, group = _user(status.st_uid), _group(status.st_gid)
    return f"{stat.S_IMODE(mode):04o} {owner} {group} {status.st_size} {status.st_mtime_ns} {kind} {path}\n"


def stat_item(host: LiveHost, place: str, paths: list[str]) -> Item:
    """Return one item with a line per path that is there; absent where none is."""
    lines: list[str] = []
    for path in paths:
        try:
            line = stat_line(host, path)
        except OSError as error:
            return Item(place, ERROR, "".join(lines), f"{path}: {error.strerror}")
        if line is not None:
            lines.append(line)
    return Item(place, OK, "".join(lines)) if lines else Item(place, ABSENT)


def _user(number: int) -> str:
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    import grp  # noqa: PLC0415

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _initramfs(host: LiveHost) -> list[Item]:
    release = os.uname().release
    paths = [f"/boot/initrd.img-{release}", f"/boot/initramfs-{release}.img"]
    return [stat_item(host, "stat/initramfs.txt", paths)]


def _modprobe_times(host: LiveHost) -> list[Item]:
    paths = [path for folder in ("/etc", "/lib", "/usr/lib") for path in host.glob(f"{folder}/modprobe.d/*.conf")]
    return [stat_item(host, "stat/modprobe.d.txt", paths)]


def _pids_by_name(host: LiveHost) -> dict[str, list[int]]:
    """Return process name -> pids, lowest first, of the processes that are not in a container of this machine."""
    found: dict[str, list[int]] = {}
    own = host.link("/proc/self/ns/pid")
    for path in glob.glob(host.real("/proc/[0-9]*/comm")):
        theirs = host.link(f"{path[: -len('/comm')]}/ns/pid") if host.root == "/" else own
        if theirs is not None and theirs != own:
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                name = stream.read(64).strip()
        except OSError:
            continue
        found.setdefault(name, []).append(int(path.rsplit("/", 2)[1]))
    return {name: sorted(pids) for name, pids in found.items()}


def _parent(host: LiveHost, pid: int) -> int:
    try:
        with open(host.real(f"/proc/{pid}/stat"), encoding="utf-8", errors="replace") as stream:
            return int(stream.read(4096).rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _login_pid(host: LiveHost, pids: dict[str, list[int]]) -> Optional[int]:
    """Return sshd's own process for the login under which this runs, which PAM gave its limits; None not under sshd.

    Not its first child: that may be sudo, which gives itself root's limits.
    """
    servers = set(pids.get("sshd", [])) | set(pids.get("sshd-session", []))
    pid = os.getpid()
    for _step in range(64):
        if pid <= 1:
            break
        parent = _parent(host, pid)
        if parent in servers:
            return parent
        pid = parent
    return None


_LOGIN_SETTINGS = (
    "/etc/security/limits.conf",
    "/etc/security/limits.d",
    "/etc/security/limits.d/*",
    "/etc/pam.d/*",
    "/etc/ssh/sshd_config",
    "/etc/ssh/sshd_config.d/*",
)
_SESSION_PAM = (
    "/etc/ssh/sshd_config",
    "/etc/ssh/sshd_config.d/*.conf",
    "/etc/pam.d/sshd",
    "/etc/pam.d/common-session",
    "/etc/pam.d/password-auth",
    "/etc/pam.d/system-auth",
)
_SAYS_OF_SESSIONS = re.compile(r"\s*(-?session\s|@include\s|include\s|usepam[\s=])", re.IGNORECASE)

_SWAP_FILES = ("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "/sys/fs/cgroup/*/memory.swap.max")
_MEMORY_FILES = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/*/memory.max")


def _cgroup_swap(host: LiveHost) -> list[Item]:
    """Look for the limit of swap beside the limit of memory: no swap limit can be seen only where memory has one."""
    found = [path for pattern in _SWAP_FILES for path in host.glob(pattern)][:4]
    if found:
        return [host.file(path) for path in found]
    if any(host.glob(pattern) for pattern in _MEMORY_FILES):
        return [Item(snapshot_path(_SWAP_FILES[1]), ABSENT)]
    why = "no control group with a memory controller was found"
    return [Item(snapshot_path(_SWAP_FILES[1]), NOT_COLLECTED, "", why)]


def _process_limits(host: LiveHost) -> list[Item]:
    pids = _pids_by_name(host)
    wanted: list[tuple[str, Optional[int]]] = [("pid1", 1)]
    wanted += [(name, pids[name][0] if name in pids else None) for name in DAEMONS]
    items = []
    for name, pid in wanted:
        place = f"processes/{name}/limits"
        if pid is None:
            items.append(Item(place, ABSENT))
            continue
        items.append(host.file(f"/proc/{pid}/limits", at=place))
        items.append(Item(f"processes/{name}/pid", OK, f"{pid}\n"))
    return items


def _session_limits(host: LiveHost) -> list[Item]:
    place = "processes/session/limits"
    pid = _login_pid(host, _pids_by_name(host))
    if pid is None:
        return [Item(place, NOT_COLLECTED, "", "this was not run over SSH, so no login's limits were seen")]
    return [
        host.file(f"/proc/{pid}/limits", at=place),
        Item("processes/session/pid", OK, f"{pid}\n"),
        _session_times(host, pid),
    ]


def _session_times(host: LiveHost, pid: int) -> Item:
    """Say when the login whose sshd is ``pid`` began and when what sets a login's limits was last changed, in Unix time.

    A connection that ssh keeps open (ControlPersist) gives every command the limits of its beginning.
    """
    place = "processes/session/times"
    try:
        with open(host.real(f"/proc/{pid}/stat"), encoding="utf-8", errors="replace") as stream:
            ticks = int(stream.read(4096).rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        paths = [path for pattern in _LOGIN_SETTINGS for path in host.glob(pattern)]
        states = [os.stat(host.real(path)) for path in paths]
    except (OSError, ValueError, IndexError) as error:
        return Item(place, NOT_COLLECTED, "", f"when this login began: {error}")
    # A file that was put back has its old mtime and a new ctime.
    changed = max((max(one.st_mtime, one.st_ctime) for one in states), default=0.0)
    return Item(place, OK, f"login: {time.time() - age:.2f}\nsettings: {changed:.2f}\n")


def _session_pam(host: LiveHost) -> list[Item]:
    """Read of sshd's configuration and of its PAM files the lines that say whether a session runs pam_limits."""
    items = []
    for item in host.files(*_SESSION_PAM):
        lines = [line for line in item.text.splitlines() if _SAYS_OF_SESSIONS.match(line)]
        items.append(Item(item.path, item.state, "".join(f"{line}\n" for line in lines), item.error))
    return items


def _apt_history(host: LiveHost) -> list[Item]:
    """Read apt's history, the packed older files too (in a snapshot they lie unpacked, without .gz): the newest 12."""
    items = []
    state, names, error = host.listdir("/var/log/apt")
    if state != OK:
        return [Item(snapshot_path("/var/log/apt/history.log"), state, "", error)]
    order = sorted((name for name in names if re.match(r"\Ahistory\.log(?:\.\d+(?:\.gz)?)?\Z", name)), key=_rotation)
    for name in order[:12]:
        path = f"/var/log/apt/{name}"
        if not name.endswith(".gz"):
            items.append(host.file(path))
            continue
        place = snapshot_path(path[: -len(".gz")])
        try:
            with gzip.open(host.real(path)) as stream:
                items.append(Item(place, OK, decode(stream.read(1024 * 1024))))
        except (OSError, EOFError, zlib.error) as problem:
            items.append(Item(place, ERROR, "", f"{path}: {problem}"))
    return items or [Item(snapshot_path("/var/log/apt/history.log"), ABSENT)]


def _rotation(name: str) -> int:
    match = re.search(r"\.(\d+)(?:\.gz)?\Z", name)
    return int(match.group(1)) if match else 0


def _dpkg(host: LiveHost) -> list[Item]:
    form = "${db:Status-Abbrev} ${Package} ${Version} ${Architecture}\n"
    return [
        host.command(["dpkg-query", "-W", f"-f={form}"], 15.0, at=command_path(["dpkg-query", "-W"]), missing=ABSENT)
    ]


def _holds(host: LiveHost) -> list[Item]:
    """Ask dpkg for what ``apt-mark showhold`` would print: apt keeps holds there, and dpkg answers far sooner."""
    place = command_path(["apt-mark", "showhold"])
    found = host.command(["dpkg-query", "-W", "-f=${db:Status-Want} ${Package}\n"], 15.0, at=place, missing=ABSENT)
    held = [line.split()[1] for line in found.text.splitlines() if line.startswith("hold ")]
    return [Item(place, found.state, "".join(f"{name}\n" for name in held), found.error)]


def _rpm(host: LiveHost) -> list[Item]:
    form = "%{NAME} %|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE} %{ARCH}\n"
    return [host.command(["rpm", "-qa", "--qf", form], 15.0, at=command_path(["rpm", "-qa"]), missing=ABSENT)]


def _units(host: LiveHost) -> list[Item]:
    argv = ["systemctl", "show", "--no-pager", "--property", _UNIT_PROPERTIES, *UNITS]
    return [host.command(argv, 15.0, at=command_path(["systemctl", "show"]))]


def _sysctl_probe(name: str) -> Probe:
    return file_probe(f"sysctl.{name}", "sysctl", "/proc/sys/" + name.replace(".", "/"), f"kernel parameter {name}")


def _manager_defaults() -> Probe:
    argv = ("systemctl", "show", "--property", "DefaultLimitNOFILE,DefaultLimitNOFILESoft,DefaultLimitMEMLOCK")
    place = "commands/systemctl_show_defaults.txt"

    def read(host: LiveHost) -> list[Item]:
        return [host.command(list(argv), 10.0, at=place)]

    return Probe("systemd_defaults", "limits", (place,), read, 11.0, says="default limits of the service manager")


HOST_PROBES: tuple[Probe, ...] = (
    Probe("uname", "os", (command_path(["uname", "-a"]),), _uname, says="kernel name, node name, release, machine"),
    files_probe("os_release", "os", ("/etc/os-release", "/usr/lib/os-release"), "distribution"),
    file_probe("uptime", "os", "/proc/uptime", "time since start"),
    command_probe("virtualization", "os", ("systemd-detect-virt",), "container or virtual machine", codes=(0, 1)),
    file_probe("cmdline", "kernel", "/proc/cmdline", "kernel command line"),
    file_probe("modules", "kernel", "/proc/modules", "loaded modules"),
    files_probe(
        "modprobe_d",
        "kernel",
        ("/etc/modprobe.d/*.conf", "/lib/modprobe.d/*.conf", "/usr/lib/modprobe.d/*.conf"),
        "options and blacklists of modules",
    ),
    Probe(
        "modprobe_times", "kernel", ("stat/modprobe.d.txt",), _modprobe_times, says="when modprobe.d files were changed"
    ),
    Probe("initramfs", "kernel", ("stat/initramfs.txt",), _initramfs, says="when the initramfs was built"),
    Probe("secure_boot", "kernel", (command_path(["mokutil", "--sb-state"]),), _secure_boot, says="Secure Boot"),
    file_probe("lockdown", "kernel", "/sys/kernel/security/lockdown", "kernel lockdown"),
    Probe("iommu_groups", "kernel", ("listings/sys_kernel_iommu_groups.txt",), _iommu_groups, says="IOMMU groups"),
    file_probe("tainted", "kernel", "/proc/sys/kernel/tainted", "taint flags"),
    file_probe("cpuinfo", "cpu", "/proc/cpuinfo", "processors"),
    file_probe("cpu_online", "cpu", "/sys/devices/system/cpu/online", "processors that are online"),
    files_probe(
        "cpu_governors", "cpu", ("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor",), "frequency governors"
    ),
    file_probe(
        "cpu_available_governors",
        "cpu",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_available_governors",
        "governors to choose from",
    ),
    file_probe("meminfo", "memory", "/proc/meminfo", "main memory"),
    file_probe("thp_enabled", "memory", "/sys/kernel/mm/transparent_hugepage/enabled", "transparent huge pages"),
    file_probe("thp_defrag", "memory", "/sys/kernel/mm/transparent_hugepage/defrag", "their compaction"),
    files_probe(
        "numa_nodes",
        "numa",
        (
            "/sys/devices/system/node/node[0-9]*/cpulist",
            "/sys/devices/system/node/node[0-9]*/distance",
            "/sys/devices/system/node/node[0-9]*/meminfo",
        ),
        "NUMA nodes",
    ),
    file_probe("numa_balancing", "numa", "/proc/sys/kernel/numa_balancing", "automatic NUMA balancing"),
    file_probe("mounts", "cgroup", "/proc/mounts", "mounts, for the control group version"),
    file_probe("cgroup_controllers", "cgroup", "/sys/fs/cgroup/cgroup.controllers", "controllers of version 2"),
    file_probe("cgroups", "cgroup", "/proc/cgroups", "controllers of the kernel"),
    Probe(
        "cgroup_swap",
        "cgroup",
        tuple(snapshot_path(path) for path in _SWAP_FILES),
        _cgroup_swap,
        says="whether swap can be limited",
    ),
    Probe(
        "process_limits",
        "limits",
        tuple(f"processes/{name}/{file}" for name in ("pid1", *DAEMONS) for file in ("limits", "pid")),
        _process_limits,
        says="limits of PID 1 and of running daemons",
    ),
    Probe(
        "session_limits",
        "limits",
        ("processes/session/limits", "processes/session/pid", "processes/session/times"),
        _session_limits,
        says="limits of a login over SSH, and whether it is older than what sets them",
    ),
    Probe(
        "session_pam",
        "limits",
        tuple(snapshot_path(path) for path in _SESSION_PAM),
        _session_pam,
        says="whether logins over SSH get what limits.d says",
    ),
    files_probe(
        "limits_conf", "limits", ("/etc/security/limits.conf", "/etc/security/limits.d/*.conf"), "configured limits"
    ),
    _manager_defaults(),
    *(_sysctl_probe(name) for name in SYSCTLS),
    Probe(
        "dpkg",
        "packages",
        (command_path(["dpkg-query", "-W"]), command_path(["dpkg", "-l"])),
        _dpkg,
        16.0,
        says="packages of a Debian family system",
    ),
    Probe("rpm", "packages", (command_path(["rpm", "-qa"]),), _rpm, 16.0, says="packages of an RPM system"),
    Probe("apt_holds", "packages", (command_path(["apt-mark", "showhold"]),), _holds, 16.0, says="packages on hold"),
    files_probe(
        "dnf_versionlock",
        "packages",
        ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list", "/etc/dnf/versionlock.toml"),
        "packages locked in dnf",
    ),
    file_probe("dnf_automatic", "packages", "/etc/dnf/automatic.conf", "unattended upgrades of dnf"),
    file_probe("dnf_conf", "packages", "/etc/dnf/dnf.conf", "dnf's exclude list"),
    command_probe(
        "apt_config",
        "packages",
        ("apt-config", "dump"),
        "apt's configuration, unattended upgrades in it",
        missing=ABSENT,
    ),
    Probe(
        "apt_history",
        "history",
        (snapshot_path("/var/log/apt/history.log"), snapshot_path("/var/log/apt/history.log.[0-9]*")),
        _apt_history,
        says="what apt did",
    ),
    Probe(
        "systemd_units", "services", (command_path(["systemctl", "show"]),), _units, 16.0, says="units and their state"
    ),
)
