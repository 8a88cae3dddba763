# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Kernel, limits, units, packages, PCI and the kernel's log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware import (
    parse_kernel_log,
    parse_packages,
    parse_pci,
    parse_services,
    parse_system,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import UNLIMITED

CGROUP1 = (
    "tmpfs /sys/fs/cgroup tmpfs rw,nosuid,nodev,noexec,relatime,size=4096k,mode=755 0 0\n"
    "cgroup /sys/fs/cgroup/memory cgroup rw,nosuid,nodev,noexec,relatime,memory 0 0\n"
    "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,nodev,noexec,relatime,cpu,cpuacct 0 0\n"
    "cgroup /sys/fs/cgroup/systemd cgroup rw,nosuid,nodev,noexec,relatime,xattr,name=systemd 0 0\n"
)
CGROUP2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate,memory_recursiveprot 0 0\n"


@pytest.mark.parametrize(
    ("text", "version", "controllers"),
    [
        (CGROUP1, 1, ["cpu", "cpuacct", "memory"]),
        (CGROUP2, 2, []),
        (CGROUP1 + CGROUP2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "), 1, ["cpu", "cpuacct", "memory"]),
        ("proc /proc proc rw 0 0\n", None, []),
        ("36 25 0:31 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n", 2, []),
        ("", None, []),
    ],
)
def test_cgroup_version(text: str, version: Any, controllers: list[str]) -> None:
    assert parse_system.parse_mounted_cgroups(text) == (version, controllers)


def test_os_release_families() -> None:
    ubuntu = parse_system.parse_os_release('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n')
    assert (ubuntu.id, ubuntu.version_id, ubuntu.codename, ubuntu.family) == ("ubuntu", "24.04", "noble", "debian")
    rocky = parse_system.parse_os_release('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n')
    assert (rocky.id, rocky.version_id, rocky.family) == ("rocky", "9.4", "redhat")
    assert parse_system.parse_os_release("").id is None
    assert parse_system.parse_os_release('ID="unclosed\n').id == "unclosed"


def test_cmdline() -> None:
    text = 'root=UUID=x ro quiet pci=noacs iommu=pt nokaslr dyndbg="file a.c +p" nokaslr\n'
    found = parse_system.parse_cmdline(text)
    assert found["pci"] == "noacs"
    assert found["nokaslr"] == ""
    assert found["dyndbg"] == "file a.c +p"


def test_cpuinfo_of_two_sockets() -> None:
    block = (
        "processor\t: {n}\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nphysical id\t: {s}\n"
        "core id\t\t: {c}\nflags\t\t: avx2 avx512f fpu\n\n"
    )
    cpu = parse_system.parse_cpuinfo("".join(block.format(n=n, s=n // 4, c=n % 2) for n in range(8)))
    assert (cpu.logical, cpu.sockets, cpu.cores, cpu.model) == (8, 2, 4, "Xeon")
    assert cpu.flags == ["avx2", "avx512f"]


def test_process_limits() -> None:
    text = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max processes             96365                unlimited            processes \n"
        "Max open files            1073741816           1073741816           files     \n"
        "Max locked memory         8388608              unlimited            bytes     \n"
    )
    limits = parse_system.parse_process_limits(text)
    assert (limits.nofile_soft, limits.nofile_hard) == (1073741816, 1073741816)
    assert (limits.memlock_soft, limits.memlock_hard) == (8388608, UNLIMITED)
    assert (limits.nproc_soft, limits.nproc_hard) == (96365, UNLIMITED)
    assert parse_system.parse_process_limits("Max open files\n").nofile_soft is None


def test_a_login_is_older_than_its_settings_where_it_began_before_them() -> None:
    def older(text: str) -> bool | None:
        return parse_system.parse_session_times(text)

    assert older("login: 10.0\nsettings: 20.0\n") is True
    assert older("login: 20.5\nsettings: 20.0\n") is True  # too near to tell
    assert older("login: 30.0\nsettings: 20.0\n") is False
    assert older("login: 30.0\n") is None
    assert older("login: never\nsettings: 1\n") is None
    assert older("") is None


def test_limits_conf() -> None:
    text = "# * soft nofile 1\n*  soft nofile 100000 # why\nroot hard memlock unlimited\n@ops - nproc x\nbroken line\n"
    first, second, third = parse_system.parse_limits_conf("/etc/security/limits.conf", text)
    assert (first.domain, first.type, first.item, first.value) == ("*", "soft", "nofile", 100000)
    assert second.value == UNLIMITED
    assert third.value is None


def test_units() -> None:
    text = (
        "Id=docker.service\nLoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=enabled\nMainPID=812\n"
        "LimitNOFILE=1048576\nLimitMEMLOCK=infinity\nTimeoutStopUSec=15min\nNeedDaemonReload=no\n"
        "DropInPaths=/etc/systemd/system/docker.service.d/a.conf /etc/systemd/system/docker.service.d/b.conf\n\n"
        "Id=nvidia-fabricmanager.service\nLoadState=not-found\nActiveState=inactive\nMainPID=0\n"
    )
    docker, fabric = parse_system.parse_units(text)
    assert (docker.name, docker.active_state, docker.main_pid) == ("docker.service", "active", 812)
    assert (docker.limit_memlock, docker.timeout_stop_s, docker.need_daemon_reload) == (UNLIMITED, 900.0, False)
    assert docker.drop_ins == [
        "/etc/systemd/system/docker.service.d/a.conf",
        "/etc/systemd/system/docker.service.d/b.conf",
    ]
    assert (fabric.load_state, fabric.restarts) == ("not-found", None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1min 30s", 90.0), ("5m", 300.0), ("15min", 900.0), ("500ms", 0.5), ("2h", 7200.0),
     ("infinity", float(UNLIMITED)),
     ("", None), ("soon", None), ("5", None), ("5 parsecs", None), ("1d", 86400.0)],
)  # fmt: skip
def test_spans(text: str, seconds: Any) -> None:
    assert parse_system.seconds(text) == seconds


def test_devices_only_character() -> None:
    text = "Character devices:\n  1 mem\n195 nvidia-frontend\n195 nvidiactl\n509 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
    assert parse_system.parse_devices(text) == {"mem": 1, "nvidia-frontend": 195, "nvidiactl": 195, "nvidia-uvm": 509}


def test_listening_sockets_of_proc() -> None:
    text = (
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:1F91 00000000:0000 0A 00000000:00000000\n"
        "   1: 0B00000A:1FA4 00000000:0000 0A 00000000:00000000\n"
        "   2: 0100007F:1F91 0100007F:D431 01 00000000:00000000\n"
    )
    found = [(one.address, one.port) for one in parse_system.parse_proc_net_tcp(text)]
    assert found == [("127.0.0.1", 8081), ("10.0.0.11", 8100)]
    assert parse_system.hex_address("0" * 32) == "::"
    assert parse_system.hex_address("00000000000000000000000001000000") == "::1"
    assert parse_system.hex_address("0000000000000000FFFF00000100007F") == "::ffff:127.0.0.1"


def test_sockets_of_ss() -> None:
    text = (
        'LISTEN 0 511 0.0.0.0:443 0.0.0.0:* users:(("nginx",pid=12,fd=6),("nginx",pid=13,fd=6))\n'
        'LISTEN 0 128 [::]:22 [::]:*\nLISTEN 0 4096 *:9100 *:* users:(("prometheus-node",pid=1,fd=3))\n'
        "LISTEN 0 10 127.0.0.53%lo:53 0.0.0.0:*\n"
    )
    found = [(one.address, one.port, one.process) for one in parse_services.sockets(text)]
    assert found == [
        ("0.0.0.0", 443, "nginx"),
        ("::", 22, None),
        ("::", 9100, "prometheus-node"),
        ("127.0.0.53", 53, None),
    ]


# Packages ------------------------------------------------------------------------------------------------------------


def test_dpkg_in_its_forms() -> None:
    text = (
        "Desired=Unknown/Install/Remove/Purge/Hold\n||/ Name Version Architecture Description\n"
        "ii  libnvidia-compute-550:amd64  550.107.02-0ubuntu0.24.04.1  amd64  NVIDIA libcompute package\n"
        "hi  nvidia-driver-550  550.107.02-0ubuntu0.24.04.1  amd64  driver\n"
        "rc  nvidia-driver-535  535.1-0  amd64  old\n"
        "ii  bash  5.2  amd64  shell\n"
        "libnvidia-cfg1-550 550.107.02-0ubuntu0.24.04.1 ii\n"
    )
    found = {item.name: item for item in parse_packages.parse_dpkg(text)}
    assert set(found) == {"libnvidia-compute-550", "nvidia-driver-550", "nvidia-driver-535", "libnvidia-cfg1-550"}
    assert found["libnvidia-compute-550"].version == "550.107.02-0ubuntu0.24.04.1"
    assert (found["nvidia-driver-550"].status, found["nvidia-driver-550"].held) == ("ii", True)
    assert found["nvidia-driver-535"].status == "rc"
    assert found["libnvidia-compute-550"].held is None


def test_rpm_in_its_forms() -> None:
    text = "nvidia-driver 3:570.124.06-1.el9 x86_64\nkmod-nvidia-open-dkms-570.124.06-1.el9.noarch\nbash 5.1-2 x\n"
    found = {item.name: item.version for item in parse_packages.parse_rpm(text)}
    assert found == {"nvidia-driver": "3:570.124.06-1.el9", "kmod-nvidia-open-dkms": "570.124.06-1.el9"}


@pytest.mark.parametrize(
    ("version", "upstream"),
    [("550.107.02-0ubuntu0.24.04.1", "550.107.02"), ("3:570.124.06-1.el9", "570.124.06"),
     ("580.159.04-1", "580.159.04"),
     ("1:525.85.12-1~deb12", "525.85.12"), ("1.17.8-1", "1.17.8")],
)  # fmt: skip
def test_upstream_versions(version: str, upstream: str) -> None:
    assert parse_packages.upstream_version(version) == upstream


HISTORY = (
    "\nStart-Date: 2021-05-01  06:12:01\nCommandline: /usr/bin/unattended-upgrade\n"
    "Upgrade: libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1), "
    "tzdata:amd64 (2021a-0, 2021a-1)\nEnd-Date: 2021-05-01  06:12:40\n"
    "\nStart-Date: 2021-06-01  10:00:00\nCommandline: apt-get install nvidia-driver-460\nRequested-By: alice (1000)\n"
    "Install: nvidia-driver-460:amd64 (460.73.01-0ubuntu0.20.04.1), libnvidia-gl-460:amd64 (460.73.01-0, automatic)\n"
    "Remove: nvidia-driver-450:amd64 (450.1-0)\nEnd-Date: 2021-06-01  10:01:00\n"
)


def test_apt_history() -> None:
    events = parse_packages.parse_apt_history(HISTORY)
    assert [(one.package, one.action, one.old, one.new, one.unattended) for one in events] == [
        ("libnvidia-common-460", "upgrade", "460.56-0ubuntu0.20.04.1", "460.73.01-0ubuntu0.20.04.1", True),
        ("nvidia-driver-460", "install", None, "460.73.01-0ubuntu0.20.04.1", False),
        ("libnvidia-gl-460", "install", None, "460.73.01-0", False),
        ("nvidia-driver-450", "remove", "450.1-0", None, False),
    ]
    assert events[0].date == "2021-05-01 06:12:01"


def test_apt_history_of_firmware_only_has_no_events() -> None:
    head = "Start-Date: 2021-05-01  06:12:01\nCommandline: /usr/bin/unattended-upgrade\n"
    text = head + "Upgrade: linux-firmware:amd64 (1.0, 1.1)\n"
    assert parse_packages.parse_apt_history(text) == []


def test_holds_and_locks() -> None:
    assert parse_packages.parse_holds("libnvidia-compute-550\nnvidia-driver-550:amd64\n\n") == [
        "libnvidia-compute-550",
        "nvidia-driver-550",
    ]
    text = "# note\nnvidia-driver-3:570.124.06-1.el9.*\nkmod-nvidia-open-dkms\nLast metadata expiration check: now\n"
    assert parse_packages.parse_versionlock(text) == ["kmod-nvidia-open-dkms", "nvidia-driver"]


def test_apt_config() -> None:
    text = (
        'APT::Periodic::Unattended-Upgrade "1";\nUnattended-Upgrade::Package-Blacklist "";\n'
        'Unattended-Upgrade::Package-Blacklist:: "nvidia-.*";\n'
        'Unattended-Upgrade::Package-Blacklist:: "libnvidia-.*";\n'
    )
    config = parse_packages.parse_apt_config(text)
    assert config["unattended-upgrade::package-blacklist"] == ["nvidia-.*", "libnvidia-.*"]
    assert config["apt::periodic::unattended-upgrade"] == ["1"]


# PCI -----------------------------------------------------------------------------------------------------------------


def test_sysfs() -> None:
    base = "files/sys/bus/pci/devices/0000:3b:00.0"
    texts = {
        f"{base}/vendor": "0x10de\n",
        f"{base}/device": "0x2335\n",
        f"{base}/class": "0x030200\n",
        f"{base}/numa_node": "-1\n",
        f"{base}/current_link_width": "255\n",
        f"{base}/max_link_width": "16\n",
        f"{base}/current_link_speed": "32.0 GT/s PCIe\n",
        f"{base}/max_link_speed": "Unknown\n",
        f"{base}/resource": "0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
        "0x0000200000000000 0x0000203fffffffff 0x000000000014220c\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
    }
    (device,) = parse_pci.parse_sysfs(texts)
    assert (device.address, device.vendor, device.pci_class) == ("0000:3b:00.0", "10de", "030200")
    assert device.numa_node is None
    assert (device.link_width_current, device.link_width_max) == (None, 16)
    assert (device.link_speed_current, device.link_speed_max) == (32.0, None)
    assert device.bar_sizes == [16 * 2**20, 0, 256 * 2**30]
    assert parse_pci.is_gpu(device)


def test_lspci() -> None:
    text = (
        "0000:3b:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 SXM5 80GB] [10de:2330] (rev a1)\n"
        "0000:05:00.0 Bridge [0680]: NVIDIA Corporation GH100 [H100 NVSwitch] [10de:22a3] (rev a1)\n"
        "00:1f.2 SATA controller [0106]: Intel Corporation [8086:2922]\n"
    )
    gpu, switch, other = parse_pci.parse_lspci(text)
    assert parse_pci.is_gpu(gpu)
    assert parse_pci.is_nvswitch(switch)
    assert not parse_pci.is_gpu(other)
    assert other.address == "0000:00:1f.2"


def test_bridges() -> None:
    text = (
        "0000:3a:00.0 PCI bridge: Intel Corporation Sky Lake-E PCI Express Root Port A (rev 04)\n"
        "\tBus: primary=3a, secondary=3b, subordinate=3c, sec-latency=0\n"
        "\tPrefetchable memory behind bridge: 0000200000000000-0000203fffffffff [size=256G] [64-bit]\n"
        "\tCapabilities: [110 v1] Access Control Services\n"
        "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-\n\n"
        "0000:00:01.0 PCI bridge: no capabilities for you\n\tCapabilities: <access denied>\n\n"
        "0000:00:02.0 PCI bridge: none\n\tCapabilities: [40] Express\n"
    )
    first, denied, without = parse_pci.parse_bridges(text)
    assert first.bus == "3b-3c"
    assert first.acs is not None
    assert (first.acs["ReqRedir"], first.acs["EgressCtrl"]) == (True, False)
    assert denied.acs is None
    assert without.acs == {}


# Kernel log ----------------------------------------------------------------------------------------------------------

LOG = """[    1.234567] pcieport 0000:00:1d.4: BAR 15: no space for [mem size 0xc00000000 64bit pref]
[    1.234568] pci 0000:3b:00.0: BAR 1 [mem size 0x1000000000 64bit pref]: can't assign; no space
[    2.000000] usb 1-1: device descriptor read/64, error -71
[  100.000000] NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
2026-11-30T15:00:00+0000 node-a kernel: NVRM: Xid (PCI:0000:5e:00): 63, Row Remapper: New row marked for remapping
[  101.000000] NVRM: API mismatch: the client has the version 550.107.02, but this kernel module has 550.90.07.
[  102.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.90.07
"""


def test_kernel_log() -> None:
    log = parse_kernel_log.parse_kernel_log(LOG, "dmesg")
    assert log.xids is not None
    assert log.bar_messages is not None
    assert log.nvrm is not None
    assert [(one.code, one.pci, one.time) for one in log.xids] == [
        (79, "0000:3b:00", "100.000000"),
        (63, "0000:5e:00", "2026-11-30T15:00:00+0000"),
    ]
    assert [(one.device, one.driver) for one in log.bar_messages] == [
        ("0000:00:1d.4", "pcieport"),
        ("0000:3b:00.0", "pci"),
    ]
    assert "no space for" in log.bar_messages[0].message
    assert len(log.nvrm) == 1
    assert "API mismatch" in log.nvrm[0]


def test_kernel_log_is_bounded() -> None:
    line = "NVRM: Xid (PCI:0000:3B:00): 31, x\n"
    log = parse_kernel_log.parse_kernel_log(line * 5000)
    assert len(log.xids or []) == parse_kernel_log.MAX_XIDS


# Clock and space -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "synchronized"),
    [("state=0\nstatus=8193\nesterror_us=12\n", True), ("state=5\nstatus=64\n", False), ("state=0\nstatus=64\n", False),
     ("NTPSynchronized=yes\nNTP=yes\n", True), ("NTPSynchronized=no\n", False), ("", None), (None, None)],
)  # fmt: skip
def test_clock(text: Any, synchronized: Any) -> None:
    assert parse_services.time_sync(text, None, {}).synchronized is synchronized


def test_chrony() -> None:
    text = "System time     : 0.002500000 seconds slow of NTP time\nLeap status     : Normal\n"
    found = parse_services.time_sync(None, text, {"chrony.service": "active"})
    assert (found.synchronized, found.offset_s, found.service) == (True, -0.0025, "chrony")


def test_disk() -> None:
    text = "Filesystem 1-blocks Used Available Capacity Mounted on\n/dev/nvme0n1p2 1000 400 550 43% /var/lib/docker\n"
    disk = parse_services.disk("/var/lib/docker", text)
    assert (disk.total_bytes, disk.free_bytes, disk.error) == (1000, 550, None)
    assert parse_services.disk("/x", "df: /x: Input/output error").error


PARSERS: list[Any] = [
    parse_system.parse_os_release,
    parse_system.parse_cmdline,
    parse_system.parse_cpuinfo,
    parse_system.parse_meminfo,
    parse_system.parse_node_meminfo,
    parse_system.parse_process_limits,
    parse_system.parse_modules,
    parse_system.parse_devices,
    parse_system.parse_mounted_cgroups,
    parse_system.parse_units,
    parse_system.parse_proc_net_tcp,
    parse_packages.parse_dpkg,
    parse_packages.parse_rpm,
    parse_packages.parse_holds,
    parse_packages.parse_versionlock,
    parse_packages.parse_apt_config,
    parse_packages.parse_apt_history,
    parse_pci.parse_lspci,
    parse_pci.parse_bridges,
    parse_kernel_log.parse_kernel_log,
    parse_services.loaded_rules,
    parse_services.targets,
    parse_services.sockets,
    parse_services.file_modes,
    parse_services.model_files,
    parse_services.index_files,
]
PIECES = st.sampled_from(
    ["\n", "\t", " ", ":", "=", "Id=", "ii ", "0A", "cgroup", "{", "[", "NVRM: Xid (PCI:", "): ", "(a, b)", "Upgrade: ",
     "9" * 30, "-1", "\x00", "é", "\ud7ff", '"', "Start-Date:", "0x", "GT/s", "0000:3b:00.0"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=60).map("".join)))
@settings(max_examples=60)
def test_soup_never_raises(text: str) -> None:
    for parser in PARSERS:
        parser(text)
    parse_system.seconds(text)
    parse_system.parse_limits_conf("f", text)
    parse_services.time_sync(text, text, {})
    parse_services.certificate("/x", text)
    parse_services.disk("/", text)
    parse_services.rules_in_file("/x", text)
