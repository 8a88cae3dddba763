# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Limits, kernel settings, packages and the decision about dockerd."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.runtime import docker_state, limits, packages, sysctl

PROC_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         8388608              unlimited            bytes
"""


def room(hard: int = 524288, memlock: int = 8388608, may_raise: bool = True, nr_open: int = 1073741816) -> limits.Room:
    return limits.Room(hard, memlock, may_raise, nr_open)


def test_proc_limits_are_read() -> None:
    assert limits.parse_proc_limits(PROC_LIMITS, "nofile") == (1024, 524288)
    assert limits.parse_proc_limits(PROC_LIMITS, "memlock") == (8388608, limits.UNLIMITED)
    with pytest.raises(ValueError, match="Max open files"):
        limits.parse_proc_limits("", "nofile")


def test_a_machine_that_may_raise_gets_what_is_asked_for() -> None:
    assert limits.possible(1048576, limits.UNLIMITED, room()) == {"nofile": 1048576, "memlock": limits.UNLIMITED}


def test_a_container_gets_what_its_first_process_may_hand_on() -> None:
    got = limits.possible(1048576, limits.UNLIMITED, room(hard=20000, may_raise=False))
    assert got == {"nofile": 20000, "memlock": 8388608}
    assert "CAP_SYS_RESOURCE" in limits.shortfalls(1048576, got, room(hard=20000, may_raise=False))[0]


def test_nr_open_binds_everybody() -> None:
    got = limits.possible(1048576, 0, room(nr_open=65536))
    assert got["nofile"] == 65536
    assert "fs.nr_open" in limits.shortfalls(1048576, got, room(nr_open=65536))[0]


def test_a_limit_below_the_floor_that_was_asked_for_is_no_shortfall() -> None:
    assert limits.shortfalls(50000, {"nofile": 50000}, room()) == []


@given(wanted=st.integers(1, 2**31), hard=st.integers(1, 2**31), nr_open=st.integers(1, 2**31), may_raise=st.booleans())
def test_a_limit_is_never_above_what_can_be_set(wanted: int, hard: int, nr_open: int, may_raise: bool) -> None:
    got = limits.bounded(wanted, hard, may_raise, nr_open)
    assert got <= wanted
    assert got <= nr_open
    assert may_raise or got <= hard
    assert got in (wanted, nr_open, hard)


@pytest.mark.parametrize(("text", "value"), [("unlimited", -1), ("infinity", -1), (" 42 ", 42), ("-1", -1)])
def test_limits_in_words(text: str, value: int) -> None:
    assert limits.parse_limit(text) == value


@pytest.mark.parametrize("text", ["", "many", "1e6", "-2", "1.5"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a limit"):
        limits.parse_limit(text)


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("CapEff:\t0000003fffffffff", True),
        ("CapEff:\t0000003ffeffffff", False),
        ("CapBnd:\t0000003fffffffff", False),
        ("", False),
    ],
)
def test_the_capability_to_raise(line: str, has: bool) -> None:
    assert limits.has_sys_resource(line) is has


def test_pam_services_without_limits_are_named() -> None:
    services = {
        "sshd": "# session required pam_limits.so\nsession    required     pam_limits.so\n",
        "login": "@include common-session\n",
        "cron": "session optional pam_env.so # pam_limits.so\n",
        "loop": "@include loop\n",
        "common-session": "session required pam_unix.so\nsession optional pam_limits.so\n",
    }
    assert limits.services_without_pam_limits(services) == ["cron", "loop"]


WANTED = {
    "kernel.numa_balancing": "0",
    "net.core.somaxconn": "65535",
    "net.ipv4.ip_local_port_range": "10240 65535",
    "fs.file-max": "2097152",
}
RUNNING = {
    "kernel.numa_balancing": "1",
    "net.core.somaxconn": "4096",
    "net.ipv4.ip_local_port_range": "32768\t60999",
    "fs.file-max": "9223372036854775807",
}


def test_a_machine_with_two_nodes_gets_balancing_off_and_no_lower_floor() -> None:
    assert sysctl.applicable(WANTED, RUNNING, 2) == {k: v for k, v in WANTED.items() if k != "fs.file-max"}


def test_one_node_has_nothing_to_balance() -> None:
    assert "kernel.numa_balancing" not in sysctl.applicable(WANTED, RUNNING, 1)


def test_a_key_that_the_kernel_does_not_know_is_left_out() -> None:
    assert sysctl.applicable(WANTED, {}, 2) == {}


def test_the_choice_does_not_flip_once_it_is_in_force() -> None:
    chosen = sysctl.applicable(WANTED, RUNNING, 2)
    assert sysctl.applicable(WANTED, {**RUNNING, **chosen}, 2) == chosen


def test_a_file_that_is_read_later_and_says_otherwise_is_found() -> None:
    others = [
        ("/etc/sysctl.d/99-local.conf", "# x\nkernel/numa_balancing = 1\n-net.core.somaxconn=65535\n"),
        ("/usr/lib/sysctl.d/50-default.conf", "net.core.somaxconn = 128\n"),
        ("/usr/lib/sysctl.d/95-x.conf", "kernel.numa_balancing = 0\n"),
    ]
    settings = {"kernel.numa_balancing": "0", "net.core.somaxconn": "65535"}
    assert sysctl.overridden(settings, "90-metalserve.conf", others) == {
        "kernel.numa_balancing": "/etc/sysctl.d/99-local.conf"
    }


DPKG = """docker.io\tamd64\t20.10.24+dfsg1-1\tinstall\tinstalled
libnvidia-compute-570\tamd64\t570.124.06-0ubuntu0.24.04.1\tinstall\tinstalled
libnvidia-compute-570\ti386\t570.124.06-0ubuntu0.24.04.1\thold\tinstalled
nvidia-driver-550\tamd64\t550.90.07-1\tdeinstall\tconfig-files
nvidia-utils-570\tamd64\t570.124.06-0ubuntu0.24.04.1\tinstall\thalf-configured
linux-firmware\tall\t1\tinstall\tinstalled
broken line
"""


def test_the_installed_packages_of_a_family_are_found() -> None:
    found = packages.matching(packages.parse_dpkg(DPKG), ["nvidia-.*", "libnvidia-.*"])
    assert [(p.name, p.architecture, p.wanted) for p in found] == [
        ("libnvidia-compute-570", "amd64", "install"),
        ("libnvidia-compute-570", "i386", "hold"),
        ("nvidia-utils-570", "amd64", "install"),
    ]
    with pytest.raises(ValueError, match="regular expression"):
        packages.matching([], ["("])


def test_what_is_missing() -> None:
    listed = packages.parse_dpkg(DPKG)
    wanted = ["docker.io", "docker.io=20.10.24*", "docker.io=26.1.5", "nvidia-driver-550", "python3-requests"]
    assert packages.missing(wanted, listed) == ["docker.io=26.1.5", "nvidia-driver-550", "python3-requests"]
    with pytest.raises(ValueError, match="not a package"):
        packages.missing(["docker.io; reboot"], listed)


APT_DUMP = """Unattended-Upgrade "";
Unattended-Upgrade::Package-Blacklist "";
Unattended-Upgrade::Package-Blacklist:: "nvidia-";
Unattended-Upgrade::Package-Blacklist:: "(broken";
Unattended-Upgrade::Package-Blacklist:: "libnvidia-.*$";
Unattended-Upgrade::Allowed-Origins:: "x";
"""


def test_the_effective_blacklist_is_what_counts() -> None:
    entries = packages.parse_apt_list(APT_DUMP, packages.BLACKLIST_KEY)
    assert entries == ["nvidia-", "(broken", "libnvidia-.*$"]
    names = ["nvidia-utils-570", "libnvidia-compute-570", "xserver-xorg-video-nvidia-570"]
    assert packages.unprotected(names, entries) == ["xserver-xorg-video-nvidia-570"]
    assert packages.unprotected(names, []) == sorted(names)


LISTING: list[dict[str, Any]] = [
    {"Names": ["/metalserve-short-0-0123456789ab"]},
    {"Names": ["/registry"]},
    {"Names": None},
]


def test_our_containers_are_known_by_name() -> None:
    assert docker_state.serving_containers(LISTING) == ["metalserve-short-0-0123456789ab"]


@pytest.mark.parametrize(
    ("restart", "running", "serving", "action"),
    [
        ([], True, [], "none"),
        ([], True, ["metalserve-a"], "none"),
        (["log-opts"], True, [], "restart"),
        (["log-opts"], True, ["metalserve-a"], "pending"),
        (["log-opts"], False, [], "none"),
    ],
)
def test_docker_is_never_restarted_beside_an_engine(
    restart: list[str], running: bool, serving: list[str], action: str
) -> None:
    decision = docker_state.decide(restart, running, serving)
    assert decision.action == action
    assert decision.message.startswith("docker restart pending: log-opts") == (action == "pending")


def test_when_a_process_started() -> None:
    stat = "812 (a) b (c) S 1 812 812 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 12 0 4711 1 2 3"
    assert docker_state.parse_start_ticks(stat) == 4711
    assert docker_state.parse_boot_time("cpu 1\nbtime 1796000000\n") == 1796000000
    with pytest.raises(ValueError, match="/proc/PID/stat"):
        docker_state.parse_start_ticks("")
    with pytest.raises(ValueError, match="btime"):
        docker_state.parse_boot_time("")
