# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reported inputs and their right verdicts, by their number, each with its neighbours: texts in, verdicts out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Verdict

from .facts_of import facts, verdict_of
from .hosts import (
    CONTAINER,
    FIXTURES,
    ROOT,
    SMI,
    changed,
    device_allow,
    engine_node,
    index,
    inspect,
    listing,
    manifest,
    scrape,
    unit,
)

DUMP = (FIXTURES / "hardware" / "h200-580.159.04.xml").read_text(encoding="utf-8")
HISTORY = "files/var/log/apt/history.log"
DPKG = "commands/dpkg_-l.txt"
VERSION = "files/proc/driver/nvidia/version"
ENGINE = "docker/containers/x.json"


def judged(id: str, files: dict[str, str], **policy: Any) -> Verdict:
    """Return the verdict on a snapshot of these files, without an index."""
    return verdict_of(id, facts(files), **policy)


def dump(*pairs: tuple[str, str], times: int = 1) -> str:
    """Return the H200's dump (``times`` such cards) with the first match of each pattern's group replaced."""
    text = DUMP
    for pattern, value in pairs:
        text, count = re.subn(pattern, rf"\g<1>{value}", text, count=1)
        assert count == 1, pattern
    card = re.search(r"<gpu id=.*?</gpu>", text, re.DOTALL)
    assert card is not None
    many = "\n".join(card.group(0).replace("00000000:", f"0000000{number}:") for number in range(times))
    return text.replace(card.group(0), many)


def tag(name: str, value: str) -> tuple[str, str]:
    return rf"(<{name}>)[^<]*", value


# I1: driver.loaded_matches_installed ----------------------------------------------------------------------------------


def loaded(version: str, kind: str = "x86_64 Kernel Module") -> str:
    return f"NVRM version: NVIDIA UNIX {kind}  {version}  Fri May 31 09:35:42 UTC 2024\n"


@pytest.mark.parametrize(
    ("module", "packages", "word"),
    [
        (loaded("550.90.07"), "libnvidia-compute-550 550.107.02-0ubuntu0.24.04.1 ii\n", "fail"),
        (loaded("550.90.07"), "ii  libnvidia-compute-550:amd64  550.107.02-0ubuntu0.24.04.1  amd64  x\n", "fail"),
        (loaded("550.107.02"), "ii  libnvidia-compute-550:amd64  550.107.02-0ubuntu0.24.04.1  amd64  x\n", "pass"),
        (loaded("520.56.06"), "ii  libnvidia-compute-525 525.85.12-0ubuntu1 amd64 x\n", "fail"),
        (loaded("580.159.04", "Open Kernel Module for x86_64"), "ii  libnvidia-compute-580 580.159.04-1 amd64 x\n", "pass"),
        # half an upgrade: one library moved
        (loaded("550.90.07"), "ii  nvidia-dkms-550 550.90.07-1 x\nii  libnvidia-compute-550 550.107.02-1 amd64\n", "fail"),
        # removed, its configuration left: not installed
        (loaded("550.90.07"), "rc  libnvidia-compute-550 550.107.02-1 amd64 x\n", "unknown"),
        # held: installed all the same
        (loaded("550.90.07"), "hi  libnvidia-compute-550 550.107.02-1 amd64 x\n", "fail"),
        # the container toolkit has versions of its own
        (loaded("550.90.07"), "ii  nvidia-container-toolkit 1.17.0-1\nii  libnvidia-compute-550 550.90.07-1\n", "pass"),
        ("nonsense\n", "ii  libnvidia-compute-550 550.107.02-1 amd64 x\n", "unknown"),
    ],
)  # fmt: skip
def test_i1_loaded_driver(module: str, packages: str, word: str) -> None:
    found = judged("driver.loaded_matches_installed", {VERSION: module, DPKG: packages})
    assert found.verdict == word, found
    if word == "fail":
        assert "reboot pending" in str(found.current)
        assert "reboot" in found.remedy
        assert "do not reinstall" in found.remedy


@pytest.mark.parametrize(
    ("packages", "word"),
    [
        ("nvidia-driver-cuda-libs 3:550.107.02-1.el9 x86_64\n", "fail"),
        ("kmod-nvidia-open-dkms 3:550.90.07-1.el9 noarch\nnvidia-driver 3:550.90.07-1.el9 x86_64\n", "pass"),
        ("nvidia-driver-cuda-550.107.02-1.el9.x86_64\n", "fail"),
    ],
)
def test_i1_of_an_rpm_system(packages: str, word: str) -> None:
    found = judged("driver.loaded_matches_installed", {VERSION: loaded("550.90.07"), "commands/rpm_-qa.txt": packages})
    assert found.verdict == word


def test_i1_the_mismatch_that_nvidia_smi_reports() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch\n"
    host = {
        SMI: said,
        "index.json": json.dumps({"probes": {"nvidia_smi": {"state": "error", "error": "exit code 18"}}}),
    }
    assert judged("driver.loaded_matches_installed", host).verdict == "fail"


# I2: driver.packages_held --------------------------------------------------------------------------------------------

MOVED = "libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1)"
FIRMWARE = "linux-firmware:amd64 (1.187.9, 1.187.10)"


def history(packages: str, command: str = "/usr/bin/unattended-upgrade") -> str:
    return f"Start-Date: 2021-04-20  06:12:01\nCommandline: {command}\nUpgrade: {packages}\nEnd-Date: 2021-04-20  06:12:40\n"


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({HISTORY: history(MOVED)}, "fail"),
        ({HISTORY: history(FIRMWARE)}, "pass"),
        ({HISTORY: history(f"{FIRMWARE}, {MOVED}")}, "fail"),
        ({HISTORY: history("libnvidia-container1:amd64 (1.16.0-1, 1.17.0-1)")}, "pass"),
        # a person did it, and it is held since: the hold works
        ({HISTORY: history(MOVED, "apt-get upgrade"), DPKG: "hi  libnvidia-common-460 460.73.01-1 amd64 x\n"}, "pass"),
        # older, packed history counts
        ({f"{HISTORY}.2": history(MOVED), HISTORY: history(FIRMWARE)}, "fail"),
        # moved once, held now
        ({HISTORY: history(MOVED), DPKG: "hi  libnvidia-common-460 460.73.01-1 amd64 x\n"}, "pass"),
        # held by name in another file
        (
            {
                HISTORY: history(FIRMWARE),
                DPKG: "ii  libnvidia-compute-550 550.1-1 amd64 x\n",
                "commands/apt-mark_showhold.txt": "libnvidia-compute-550\n",
            },
            "pass",
        ),
        # installed, not held
        (
            {
                HISTORY: history(FIRMWARE),
                DPKG: "ii  libnvidia-compute-550 550.1-1 amd64 x\n",
                "commands/apt-mark_showhold.txt": "\n",
            },
            "fail",
        ),
        # left out of unattended upgrades instead; a pattern that hits nothing, and one that is no pattern
        *(
            (
                {
                    HISTORY: history(FIRMWARE),
                    DPKG: "ii  libnvidia-compute-550 550.1-1 amd64 x\nii  unattended-upgrades 2.9 all x\n",
                    "commands/apt-mark_showhold.txt": "\n",
                    "commands/apt-config_dump.txt": 'APT::Periodic::Unattended-Upgrade "1";\n'
                    f'Unattended-Upgrade::Package-Blacklist:: "{pattern}";\n',
                },
                word,
            )
            for pattern, word in (("libnvidia-", "pass"), ("nvidia-", "fail"), ("*nvidia", "fail"))
        ),
        # nothing was read that tells
        ({DPKG: "ii  libnvidia-compute-550 550.1-1 amd64 x\n"}, "unknown"),
        ({HISTORY: history(FIRMWARE), DPKG: "ii  libnvidia-compute-550 550.1-1 amd64 x\n"}, "unknown"),
        ({HISTORY: history(FIRMWARE), "index.json": '{"probes": {"dpkg": "denied"}}'}, "unknown"),
        ({DPKG: "ii  docker.io 26 amd64 x\n", "index.json": '{"probes": {"apt_history": "denied"}}'}, "unknown"),
    ],
)
def test_i2_driver_packages_held(files: dict[str, str], word: str) -> None:
    found = judged("driver.packages_held", files)
    assert found.verdict == word, found
    if word == "fail":
        assert "hold missing" in str(found.current)


# I4: gpu.bar1_minimum, gpu.bar1_p2p ----------------------------------------------------------------------------------

BRIDGE = "pcieport 0000:00:1d.4: BAR 15: no space for [mem size 0xc00000000 64bit pref]"


@pytest.mark.parametrize(
    ("bar1", "memory", "minimum", "p2p"),
    [
        ("262144 MiB", "143771 MiB", "pass", ("pass", "pass")),
        ("65536 MiB", "40960 MiB", "pass", ("pass", "pass")),
        ("40960 MiB", "40960 MiB", "pass", ("pass", "pass")),
        ("256 MiB", "24564 MiB", "pass", ("fail", "warn")),
        ("255 MiB", "24564 MiB", "fail", ("fail", "warn")),
        ("32768 MiB", "49140 MiB", "pass", ("fail", "warn")),
        ("N/A", "49140 MiB", "unknown", ("unknown", "unknown")),
        ("32768 MiB", "N/A", "pass", ("unknown", "unknown")),
        ("-1 MiB", "49140 MiB", "unknown", ("unknown", "unknown")),
        ("32768", "49140 MiB", "unknown", ("unknown", "unknown")),
    ],
)
def test_i4_bar1(bar1: str, memory: str, minimum: str, p2p: tuple[str, str]) -> None:
    text = dump((r"(<bar1_memory_usage>\s*<total>)[^<]*", bar1), (r"(<fb_memory_usage>\s*<total>)[^<]*", memory))
    host = facts({SMI: text, "commands/dmesg.txt": f"[    1.0] {BRIDGE}\n"})
    assert verdict_of("gpu.bar1_minimum", host).verdict == minimum
    for needed, word in zip((True, False), p2p, strict=True):
        found = verdict_of("gpu.bar1_p2p", host, expected={"peer_to_peer": needed})
        assert found.verdict == word
        assert ("0000:00:1d.4" in json.dumps(found.as_dict())) is (word in ("fail", "warn"))


@pytest.mark.parametrize(
    ("split", "matrix", "word"),
    [
        (1, None, "warn"),
        (2, None, "unknown"),  # whether NVLink spares peer-to-peer over PCIe is not known
        (2, "NV18", "warn"),
        (2, "PHB", "fail"),
    ],
)
def test_i4_peer_to_peer_is_needed_where_gpus_talk_over_pcie(split: int, matrix: str | None, word: str) -> None:
    files = {SMI: dump((r"(<bar1_memory_usage>\s*<total>)[^<]*", "256 MiB"), times=2)}
    if matrix:
        files["commands/nvidia-smi_topo_-m.txt"] = f"\tGPU0\tGPU1\nGPU0\t X \t{matrix}\nGPU1\t{matrix}\t X \n"
    assert judged("gpu.bar1_p2p", files, expected={"tensor_parallel": split}).verdict == word


# I5: gpu.pcie_link ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "width", "state", "idle", "busy", "word"),
    [
        ("1/4", "16/16", "P8", "Active", "0 %", "pass"),
        ("1/4", "8/16", "P8", "Active", "0 %", "fail"),
        ("1/5", "16/16", "P0", "Not Active", "95 %", "fail"),
        ("4/5", "16/16", "P0", "Not Active", "95 %", "fail"),
        ("5/5", "16/16", "P0", "Not Active", "95 %", "pass"),
        ("1/5", "16/16", "P0", "N/A", "95 %", "fail"),
        ("1/5", "16/16", "P0", "N/A", "0 %", "pass"),
        ("1/5", "16/16", "P0", "N/A", "N/A", "unknown"),
        ("1/5", "16/16", "N/A", "Not Active", "N/A", "fail"),
        ("1/5", "16/16", "P8", "Not Active", "0 %", "pass"),
        ("N/A/5", "16/16", "P0", "Active", "0 %", "unknown"),
        ("1/N/A", "16/16", "P0", "Not Active", "95 %", "unknown"),
        ("5/5", "N/A/16", "P0", "Active", "0 %", "unknown"),
        ("5/5", "16/N/A", "P0", "Active", "0 %", "unknown"),
        ("5/5", "1/16", "P0", "Active", "0 %", "fail"),
    ],
)  # fmt: skip
def test_i5_pcie_link(generation: str, width: str, state: str, idle: str, busy: str, word: str) -> None:
    now, _slash, most = generation.rpartition("/") if not generation.endswith("N/A") else generation.partition("/")
    lanes, _slash, all_lanes = width.rpartition("/") if not width.endswith("N/A") else width.partition("/")
    text = dump(
        tag("current_link_gen", now),
        tag("max_link_gen", most),
        tag("current_link_width", lanes if lanes == "N/A" else f"{lanes}x"),
        tag("max_link_width", all_lanes if all_lanes == "N/A" else f"{all_lanes}x"),
        tag("performance_state", state),
        tag("clocks_event_reason_gpu_idle", idle),
        tag("gpu_util", busy),
    )
    assert judged("gpu.pcie_link", {SMI: text}).verdict == word


def test_i5_what_the_host_can_do_at_most_may_be_unknown() -> None:
    assert "<max_host_link_gen>" in DUMP
    assert judged("gpu.pcie_link", {SMI: dump(tag("max_host_link_gen", "N/A"))}).verdict == "pass"


# I7: numa.balancing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "nodes", "state", "word"),
    [
        ("1", 2, "", "fail"),
        ("2", 2, "", "fail"),
        ("3", 2, "", "fail"),
        ("0", 2, "", "pass"),
        ("1", 1, "", "not_applicable"),
        ("1", 0, "", "unknown"),
        (None, 2, "absent", "pass"),
        *((None, 2, state, "unknown") for state in ("", "denied", "timeout", "error", "not_collected")),
        ("soup", 2, "", "unknown"),
        ("", 2, "", "unknown"),
        ("0", 2, "absent", "unknown"),  # the index says that it is not there, and it is
    ],
)
def test_i7_numa_balancing(value: str | None, nodes: int, state: str, word: str) -> None:
    files = {f"files/sys/devices/system/node/node{one}/cpulist": f"{one}\n" for one in range(nodes)}
    if value is not None:
        files["files/proc/sys/kernel/numa_balancing"] = f"{value}\n"
    if state:
        files["index.json"] = json.dumps({"probes": {"numa_balancing": state}})
    assert judged("numa.balancing", files).verdict == word


# I8: driver.fabric_manager -------------------------------------------------------------------------------------------

SWITCH = "files/sys/bus/pci/devices/0000:07:00.0"


def fabric(state: str, status: str = "N/A", driver: str = "570.124.06", cards: int = 8) -> dict[str, str]:
    text = dump(
        (r"(<fabric>\s*<state>)[^<]*", state), (r"(<fabric>\s*<state>[^<]*</state>\s*<status>)[^<]*", status),
        tag("driver_version", driver), times=cards,
    )  # fmt: skip
    return {SMI: text.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"), VERSION: loaded(driver)}


def package(version: str) -> dict[str, str]:
    return {DPKG: f"ii  nvidia-fabricmanager-570 {version}-1 amd64 x\n"}


FAILED_UNIT = {"commands/systemctl_show.txt": unit("nvidia-fabricmanager.service", ActiveState="failed")}
NOTHING = {"commands/journalctl_-u_nvidia-fabricmanager.txt": "request to query NVSwitch: NV_WARN_NOTHING_TO_DO\n"}
NO_SWITCH = {"commands/lspci_-D_-nn.txt": "0000:01:00.0 VGA compatible controller [0300]: NVIDIA [10de:2684]\n"}


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({**fabric("In Progress"), **package("570.133.20")}, "fail"),
        ({**fabric("Not Started"), **package("570.124.06"), **FAILED_UNIT}, "fail"),
        ({**fabric("Completed", "Success"), **package("570.133.20")}, "fail"),
        ({**fabric("Completed", "Success"), **package("570.124.06")}, "pass"),
        ({**fabric("Completed", "Success")}, "pass"),
        ({**fabric("Completed", "Insufficient Resources"), **package("570.124.06")}, "fail"),
        ({**fabric("Completed"), **package("570.124.06")}, "unknown"),
        ({**fabric("N/A"), **NO_SWITCH, **FAILED_UNIT, **NOTHING}, "not_applicable"),
        ({**fabric("N/A"), **NO_SWITCH, **FAILED_UNIT}, "not_applicable"),
        ({**fabric("N/A"), **NOTHING}, "not_applicable"),
        ({**fabric("N/A"), **NO_SWITCH}, "not_applicable"),
        ({**fabric("N/A")}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_i8_fabric_manager(files: dict[str, str], word: str) -> None:
    found = judged("driver.fabric_manager", files)
    assert found.verdict == word, found
    if files.get(DPKG, "").find("133.20") > 0:
        assert "version" in str(found.current)
    if word == "not_applicable" and "failed" in files.get("commands/systemctl_show.txt", ""):
        assert "disable" in str(found.current)


def test_i8_a_switch_on_the_bus_needs_a_manager() -> None:
    bus = {
        f"{SWITCH}/{name}": text for name, text in (("class", "0x068000"), ("vendor", "0x10de"), ("device", "0x22a3"))
    }
    host = {**fabric("N/A"), **bus, DPKG: "ii  docker.io 26 amd64 x\n"}
    assert judged("driver.fabric_manager", host).verdict == "fail"


# I9: container.device_access -----------------------------------------------------------------------------------------

DROP_IN = f"files/run/systemd/transient/docker-{CONTAINER}.scope.d/50-DeviceAllow.conf"
MAJORS = {"files/proc/devices": "Character devices:\n195 nvidia-frontend\n238 nvidia-uvm\n"}


@pytest.mark.parametrize(
    ("lines", "majors", "word"),
    [
        (device_allow(), MAJORS, "pass"),
        (device_allow("195:", "238:"), MAJORS, "fail"),
        (device_allow("195:", "238:"), {}, "fail"),
        (device_allow("238:"), MAJORS, "fail"),
        (device_allow("238:"), {}, "fail"),
        (device_allow("195:0"), MAJORS, "fail"),
        (device_allow("195:255"), MAJORS, "fail"),
        (device_allow(), {"files/proc/devices": "Character devices:\n195 nvidia-frontend\n509 nvidia-uvm\n"}, "fail"),
        (device_allow().replace("238:0", "509:0"), {}, "pass"),
        ("[Scope]\nDeviceAllow=\nDeviceAllow=char-195 rwm\nDeviceAllow=char-nvidia-uvm rwm\n", MAJORS, "pass"),
        ("", MAJORS, "fail"),
        (None, MAJORS, "unknown"),
    ],
)
def test_i9_device_access(lines: str | None, majors: dict[str, str], word: str) -> None:
    files = {ENGINE: json.dumps(inspect()), **majors}
    if lines is not None:
        files[DROP_IN] = lines
    found = judged("container.device_access", files)
    assert found.verdict == word, found
    if word == "fail":
        assert "has lost, or will lose" in str(found.current)


def test_i9_a_cpu_container_needs_no_device() -> None:
    files = {ENGINE: json.dumps(inspect(HostConfig__DeviceRequests=None)), DROP_IN: device_allow("195:", "238:")}
    assert judged("container.device_access", files).verdict == "pass"


# I10: container.daemon_json ------------------------------------------------------------------------------------------

DAEMON = {
    "data-root": "/d",
    "live-restore": True,
    "log-opts": {"max-size": "100m"},
    "exec-opts": ["native.cgroupdriver=systemd"],
}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (json.dumps(DAEMON), "pass"),
        (json.dumps({**DAEMON, "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}), "pass"),
        (json.dumps({**DAEMON, "log-opts": {"max-size": "100m", "max-file": 3}}), "fail"),
        (json.dumps({**DAEMON, "log-opts": {"max-size": "100m", "max-file": "3"}}), "pass"),
        (json.dumps({**DAEMON, "log-opts": {}}), "fail"),
        (json.dumps({**DAEMON, "log-opts": []}), "fail"),
        (json.dumps({**DAEMON, "log-driver": "journald", "log-opts": {}}), "pass"),
        (json.dumps({**DAEMON, "live-restore": False}), "fail"),
        (json.dumps(DAEMON)[:-1], "fail"),
        ("[]", "fail"),
        (json.dumps(DAEMON) + "}", "fail"),
        ("", "fail"),
        (None, "unknown"),
    ],
)  # fmt: skip
def test_i10_daemon_json(text: str | None, word: str) -> None:
    files = {} if text is None else {"files/etc/docker/daemon.json": text}
    assert judged("container.daemon_json", files).verdict == word


def test_i10_live_restore_that_is_written_and_not_in_force() -> None:
    files = {"files/etc/docker/daemon.json": json.dumps(DAEMON), "docker/info.json": '{"LiveRestoreEnabled": false}'}
    assert "not in force" in str(judged("container.daemon_json", files).current)


@pytest.mark.parametrize(
    ("version", "daemon", "info", "word"),
    [
        ("20.10.24", {}, {"Runtimes": {"runc": {}}}, "fail"),
        ("20.10.24", {"runtimes": {"nvidia": {}}}, {"Runtimes": {"runc": {}}}, "pass"),
        ("20.10.24", {"features": {"cdi": True}}, {"Runtimes": {"runc": {}}}, "fail"),
        ("25.0.0", {}, {}, "fail"),
        ("25.0.0", {"features": {"cdi": True}}, {}, "pass"),
        ("28.1.1", {"features": {"cdi": False}}, {}, "fail"),
        ("28.2.0", {}, {"CDISpecDirs": ["/etc/cdi"]}, "pass"),
        ("29.4.0", {}, {"CDISpecDirs": []}, "fail"),
        (None, {}, {}, "unknown"),
    ],
)
def test_i10_the_way_to_gpus_by_version(version: str | None, daemon: Any, info: Any, word: str) -> None:
    files = {"files/etc/docker/daemon.json": json.dumps(daemon), "docker/info.json": json.dumps(info)}
    if version:
        files["docker/version.json"] = json.dumps({"Version": version})
    assert judged("container.gpu_runtime", files, expected={"accelerator": "nvidia"}).verdict == word


# I11: container.api_version ------------------------------------------------------------------------------------------

SERVER = {"Version": "29.0.0", "ApiVersion": "1.52", "MinAPIVersion": "1.44"}


@pytest.mark.parametrize(
    ("server", "files", "word"),
    [
        (SERVER, {"files/etc/environment": "DOCKER_API_VERSION=1.41\n"}, "fail"),
        (SERVER, {"files/etc/profile.d/d.sh": "export DOCKER_API_VERSION='1.43'\n"}, "fail"),
        (SERVER, {"files/etc/environment": "DOCKER_API_VERSION=1.44\n"}, "pass"),
        (SERVER, {"commands/docker_version.txt": '{"Client": {"ApiVersion": "1.43"}}'}, "fail"),
        (SERVER, {"commands/docker_version.txt": "Client:\n Version: 20.10.24\n API version: 1.41\n"}, "fail"),
        (SERVER, {"commands/docker_version.txt": '{"Client": {"ApiVersion": "1.52"}}'}, "pass"),
        # as numbers, not as text: 1.9 is older than 1.44
        (SERVER, {"files/etc/environment": "DOCKER_API_VERSION=1.9\n"}, "fail"),
        ({**SERVER, "Version": "29.4.0", "ApiVersion": "1.54", "MinAPIVersion": "1.40"},
         {"files/etc/environment": "DOCKER_API_VERSION=1.41\n"}, "pass"),
        ({"ApiVersion": "1.52"}, {"files/etc/environment": "DOCKER_API_VERSION=1.41\n"}, "unknown"),
        (SERVER, {}, "unknown"),
        (SERVER, {"files/etc/environment": "PATH=/bin\n"}, "unknown"),
    ],
)  # fmt: skip
def test_i11_api_version(server: dict[str, str], files: dict[str, str], word: str) -> None:
    assert judged("container.api_version", {"docker/version.json": json.dumps(server), **files}).verdict == word


def test_i11_all_of_it_as_docker_version_prints_it() -> None:
    text = (
        "Client: Docker Engine - Community\n Version:           29.0.0\n API version:       1.43 (downgraded from 1.52)\n\n"
        "Server: Docker Engine - Community\n Engine:\n  Version:          29.0.0\n"
        "  API version:      1.52 (minimum version 1.44)\n"
    )
    assert judged("container.api_version", {"commands/docker_version.txt": text}).verdict == "fail"
    better = text.replace("1.43", "1.51")
    assert judged("container.api_version", {"commands/docker_version.txt": better}).verdict == "pass"


# I12: container.shm, container.stop_timeout, container.init, container.log_rotation -----------------------------------


def foreign(**values: Any) -> dict[str, str]:
    """Return the snapshot of a container that somebody started by hand."""
    answer: dict[str, Any] = {
        "Id": "f" * 64,
        "Name": "/llm",
        "State": {"Status": "running"},
        "Config": {"Image": "vllm/vllm-openai@sha256:" + "a" * 64, "Cmd": ["--tensor-parallel-size", "2"]},
        "HostConfig": {"ShmSize": 67108864, "IpcMode": "private"},
    }
    for path, value in values.items():
        part, name = path.split("__")
        answer[part] = {**answer[part], name: value}
    return {ENGINE: json.dumps(answer)}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "fail"),
        ({"HostConfig__IpcMode": "host"}, "pass"),
        ({"HostConfig__ShmSize": 1024**3}, "pass"),
        ({"HostConfig__ShmSize": 1024**3 - 1}, "fail"),
        ({"HostConfig__ShmSize": None}, "unknown"),
        ({"HostConfig__IpcMode": None}, "unknown"),
        ({"Config__Cmd": ["--tensor-parallel-size=8"]}, "fail"),
        ({"Config__Cmd": ["python3", "-m", "sglang.launch_server", "--tp", "2"]}, "fail"),
        ({"Config__Cmd": ["--tensor-parallel-size", "1"]}, "not_applicable"),
        ({"Config__Cmd": []}, "not_applicable"),
        ({"State__Status": "exited"}, "not_applicable"),
        ({"Config__Image": "somebody/engine:1"}, "fail"),
    ],
)
def test_i12_shared_memory(values: dict[str, Any], word: str) -> None:
    assert judged("container.shm", foreign(**values)).verdict == word


def test_i12_shared_memory_of_a_release() -> None:
    small = json.dumps(inspect(HostConfig__ShmSize=67108864))
    host = {**engine_node(), "docker/containers/engine.json": small}
    assert verdict_of("container.shm", facts(host)).verdict == "fail"


@pytest.mark.parametrize(
    ("timeout", "command", "word"),
    [
        (None, ["--shutdown-timeout", "120"], "fail"),
        (None, [], "fail"),
        (10, ["--shutdown-timeout", "120"], "fail"),
        (120, ["--shutdown-timeout", "120"], "fail"),
        (121, ["--shutdown-timeout=120"], "pass"),
        (130, ["--exit-timeout-secs", "120"], "pass"),
        (10, [], "pass"),
    ],
)
def test_i12_stop_timeout(timeout: int | None, command: list[str], word: str) -> None:
    assert judged("container.stop_timeout", foreign(Config__StopTimeout=timeout, Config__Cmd=command)).verdict == word


@pytest.mark.parametrize(
    ("init", "daemon", "word"),
    [
        (False, None, "warn"),
        (True, None, "pass"),
        (None, '{"init": true}', "pass"),
        (None, "{}", "warn"),
        (None, None, "unknown"),
        (False, '{"init": true}', "warn"),
    ],
)
def test_i12_init(init: bool | None, daemon: str | None, word: str) -> None:
    files = foreign(HostConfig__Init=init)
    if daemon is not None:
        files["files/etc/docker/daemon.json"] = daemon
    assert judged("container.init", files).verdict == word


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ({"Type": "json-file", "Config": {}}, "fail"),
        ({"Type": "json-file", "Config": {"max-file": "3"}}, "fail"),
        ({"Type": "json-file", "Config": {"max-size": ""}}, "fail"),
        ({"Type": "json-file", "Config": {"max-size": "100m"}}, "pass"),
        ({"Type": "journald", "Config": {}}, "pass"),
        ({"Type": "local", "Config": {}}, "pass"),
        ({"Type": "json-file"}, "unknown"),
        (None, "unknown"),
    ],
)
def test_i12_log_rotation(log: Any, word: str) -> None:
    assert judged("container.log_rotation", foreign(HostConfig__LogConfig=log)).verdict == word


# I14: limits.dockerd -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("locked", "files", "rdma", "word"),
    [
        ("8388608", "1048576", True, "fail"),
        ("8388608", "1048576", False, "pass"),
        ("8388608", "1048576", None, "unknown"),
        ("unlimited", "1048576", None, "pass"),
        ("unlimited", "1048576", True, "pass"),
        ("unlimited", "1073741816", None, "warn"),
        ("8388608", "1073741816", None, "warn"),
        ("8388608", "1073741816", True, "fail"),
        ("unlimited", "unlimited", True, "warn"),
        ("unlimited", "1048577", False, "warn"),
        ("unlimited", "100000", False, "pass"),
        ("unlimited", "99999", False, "fail"),
        ("soup", "1048576", True, "unknown"),
        ("unlimited", "soup", True, "unknown"),
    ],
)
def test_i14_dockerd_limits(locked: str, files: str, rdma: bool | None, word: str) -> None:
    text = (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max locked memory         {locked:<20} {locked:<20} bytes\nMax open files            {files:<20} {files:<20} files\n"
    )
    host = facts({"processes/dockerd/limits": text})
    assert verdict_of("limits.dockerd", host, expected={"rdma": rdma}).verdict == word


def test_i14_rdma_is_seen_too() -> None:
    text = "Max locked memory  8388608 8388608 bytes\nMax open files  1048576 1048576 files\n"
    devices = "listings/sys_class_infiniband.txt"
    assert judged("limits.dockerd", {"processes/dockerd/limits": text, devices: "mlx5_0\n"}).verdict == "fail"
    none = {"processes/dockerd/limits": text, "index.json": '{"probes": {"rdma_devices": "absent"}}'}
    assert judged("limits.dockerd", none).verdict == "pass"


# I15: monitoring.metric_contract -------------------------------------------------------------------------------------

SCRAPE_A = 'vllm:gpu_cache_usage_perc 0.4\nvllm:time_per_output_token_seconds_bucket{le="1"} 2\n'
SCRAPE_B = 'vllm:kv_cache_usage_perc 0.4\nvllm:inter_token_latency_seconds_bucket{le="1"} 2\n'
RULES_A = """groups:
- name: engines
  rules:
  - alert: CacheFull
    expr: vllm:gpu_cache_usage_perc > 0.9
    for: 5m
  - alert: Slow
    expr: histogram_quantile(0.99, rate(vllm:time_per_output_token_seconds_bucket[5m])) > 0.1
"""


@pytest.mark.parametrize(
    ("text", "word", "missing"),
    [
        (SCRAPE_A, "pass", []),
        (SCRAPE_B, "fail", ["vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds_bucket"]),
        (SCRAPE_A + SCRAPE_B, "pass", []),
        (SCRAPE_A.splitlines()[0] + "\n", "fail", ["vllm:time_per_output_token_seconds_bucket"]),
        ("node_load1 1\n", "unknown", []),
        ("no scrape at all {\n", "unknown", []),
        (None, "unknown", []),
    ],
)
def test_i15_metric_contract(text: str | None, word: str, missing: list[str]) -> None:
    files = {"files/etc/prometheus/rules/r.yml": RULES_A}
    if text is not None:
        files["scrapes/short-0.prom"] = text
    found = judged("monitoring.metric_contract", files)
    assert found.verdict == word, found
    assert not missing or [line.split(" ")[0] for line in found.evidence] == missing
    for name in missing:
        assert name in str(found.current)


def test_i15_the_name_of_today_is_said() -> None:
    files = {"files/etc/prometheus/rules/r.yml": RULES_A, "scrapes/short-0.prom": SCRAPE_B}
    assert "today vllm:kv_cache_usage_perc" in str(judged("monitoring.metric_contract", files).current)


def test_i15_what_prometheus_knows_counts_for_the_whole_fleet() -> None:
    names = {"prometheus/names.json": json.dumps({"data": ["vllm:kv_cache_usage_perc", "node_load1"]})}
    rules = {"files/etc/prometheus/rules/r.yml": RULES_A}
    assert judged("monitoring.metric_contract", {**rules, **names}).verdict == "fail"
    both = {"prometheus/metadata.json": json.dumps({"data": {
        "vllm:gpu_cache_usage_perc": [{"type": "gauge"}],
        "vllm:time_per_output_token_seconds": [{"type": "histogram"}],
    }})}  # fmt: skip
    assert judged("monitoring.metric_contract", {**rules, **both}).verdict == "pass"


def test_i15_dashboards_and_recorded_names() -> None:
    panel = json.dumps({"panels": [{"targets": [{"expr": "job:kv:max + vllm:num_requests_swapped"}]}]})
    recorded = "groups:\n- name: g\n  rules:\n  - record: job:kv:max\n    expr: max(vllm:kv_cache_usage_perc)\n"
    files = {
        "files/etc/metalserve/dashboards/d.json": panel,
        "files/etc/prometheus/rules/r.yml": recorded,
        "scrapes/short-0.prom": SCRAPE_B,
    }
    found = judged("monitoring.metric_contract", files)
    assert found.verdict == "fail"
    assert found.evidence == ["vllm:num_requests_swapped (it is gone, nothing replaces it)"]


# I18: gateway.streaming_unbuffered -----------------------------------------------------------------------------------

NGINX = "commands/nginx_-T.txt"


def nginx(
    location: str = "", http: str = "", upstream: str = "server 10.0.0.11:8100;", server: str = ""
) -> dict[str, str]:
    """Return nginx -T of a small gateway with more lines at each level."""
    text = f"""# configuration file /etc/nginx/nginx.conf:
events {{ worker_connections 8192; }}
worker_rlimit_nofile 20000;
http {{
    {http}
    upstream engines {{ zone engines 64k; least_conn; keepalive 32; {upstream} }}
    server {{
        listen 443 ssl;
        {server}
        location /v1/ {{
            proxy_pass http://engines;
            {location}
        }}
    }}
}}
"""
    return {NGINX: text}


@pytest.mark.parametrize(
    ("files", "word"),
    [
        (nginx(), "fail"),
        (nginx("proxy_buffering on;"), "fail"),
        (nginx("proxy_buffering off;"), "pass"),
        (nginx(http="proxy_buffering off;"), "pass"),
        (nginx(server="proxy_buffering off;"), "pass"),
        (nginx("proxy_buffering on;", http="proxy_buffering off;"), "fail"),
        (nginx("proxy_buffering off;", server="location /v2/ { proxy_pass http://engines; }"), "fail"),
        ({NGINX: "# configuration file /a:\nhttp { server { listen 80; } }\n"}, "not_applicable"),
        ({NGINX: "# configuration file /a:\nhttp {"}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_i18_streams_unbuffered(files: dict[str, str], word: str) -> None:
    assert judged("gateway.streaming_unbuffered", files).verdict == word


# I19: gateway.access_log_causes --------------------------------------------------------------------------------------

ACCESS, ERRORS = "files/var/log/metalserve/gateway-access.log", "files/var/log/metalserve/gateway-error.log"


def row(status: int, **fields: Any) -> str:
    known = {
        "time": "2026-11-30T12:00:00+00:00",
        "status": status,
        "upstream": "10.0.0.11:8100",
        "connection": 7,
        "rt": "1",
    }
    return json.dumps({**known, **fields}) + "\n"


def said(message: str) -> str:
    return f"2026/11/30 12:00:00 [error] 5#5: *7 {message}, client: 10.0.0.9, server: _\n"


@pytest.mark.parametrize(
    ("line", "error", "cause", "word"),
    [
        (row(504, urt="60.001", uct="0.001"), "", "read_timeout", "warn"),
        (row(499, rt="600.0"), "", "client_limit", "warn"),
        (row(502, uct="0.000", urt="0.001"), said("upstream prematurely closed connection"), "keepalive_race", "warn"),
        (row(502, upstream="engines"), said("no live upstreams while connecting to upstream"), "ejection", "warn"),
        (row(413, upstream="-"), "", "body_limit", "warn"),
        (row(429, upstream="-"), "", "rate_limit", "pass"),
        (row(401, upstream="-"), "", "not_allowed", "pass"),
        (row(499, rt="3.2"), "", "client_left", "pass"),
        (row(503, upstream_status="503"), "", "overload", "pass"),
        (row(500, upstream_status="500"), "", "engine_error", "warn"),
        (row(502, uct="-", urt="-"), said("connect() failed (111: Connection refused) while connecting"), "refused", "warn"),
    ],
)  # fmt: skip
def test_i19_causes(line: str, error: str, cause: str, word: str) -> None:
    found = judged("gateway.access_log_causes", {ACCESS: line, ERRORS: error})
    assert found.current == {cause: 1}
    assert found.verdict == word


def test_i19_rows_that_cannot_be_read_are_no_good_news() -> None:
    for soup in ("504 POST /v1/completions\n", '[99/Foo/2026:12:00:00 +0000] "x" 504 \n', '{"rt": 1}\n'):
        assert judged("gateway.access_log_causes", {ACCESS: soup}).verdict == "unknown"
    assert judged("gateway.access_log_causes", {ACCESS: row(200)}).verdict == "pass"
    assert judged("gateway.access_log_causes", {}).verdict == "unknown"


COMBINED = '10.0.0.9 - - [30/Nov/2026:12:00:00 +0000] "POST /v1/x?status=200 HTTP/1.1" {} 160 "-" "curl" {}\n'


@pytest.mark.parametrize(
    ("line", "error", "cause"),
    [
        (COMBINED.format(504, ""), "", "read_timeout"),
        (COMBINED.format(504, 'rt=60.1 uct="0.001" urt="60.001"'), "", "read_timeout"),
        (COMBINED.format(502, "uct=0.000 urt=0.001"), "", "keepalive_race"),
        (COMBINED.format(429, ""), "", "rate_limit"),
        # without a connection's number: where all errors of these seconds say the same
        (COMBINED.format(502, "uct=- urt=0.000"), said("no live upstreams while connecting to upstream"), "ejection"),
        (row(502, connection=None, upstream="-", uct="-"), said("no live upstreams while connecting"), "ejection"),
        (COMBINED.format(200, ""), said("upstream prematurely closed connection"), "served"),
        (
            COMBINED.format(502, "uct=- urt=0.000"),
            said("no live upstreams while connecting to upstream") + said("connect() failed (111: Connection refused)"),
            "gateway",
        ),
    ],
)
def test_i19_rows_in_nginx_s_own_form(line: str, error: str, cause: str) -> None:
    found = judged("gateway.access_log_causes", {ACCESS: line, ERRORS: error})
    assert cause in (found.current if isinstance(found.current, dict) else {"served": 1})
    assert (found.verdict == "pass") == (cause in ("rate_limit", "served"))


# I23: model.manifest -------------------------------------------------------------------------------------------------

INDEX = f"{ROOT}/models/m/r1/model.safetensors.index.json"
SHARDS = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
LIST = "stat/models/m/r1.txt"
MANIFEST = f"{ROOT}/models/m/r1.manifest.json"


def test_i23_a_cache_with_an_unfinished_download() -> None:
    files = {
        INDEX.replace("/model.s", "/snapshots/c0/model.s"): SHARDS,
        LIST: "9 1 1 1 snapshots/c0/model-00001-of-00002.safetensors\n5 1 1 2 blobs/ab12.incomplete\n",
    }
    found = judged("model.manifest", files)
    assert found.verdict == "fail"
    assert "ab12.incomplete is an unfinished download" in str(found.current)
    assert "lists 2 shards, missing: model-00002-of-00002.safetensors" in str(found.current)


@pytest.mark.parametrize(
    ("files", "word", "words"),
    [
        ({}, "pass", ""),
        ({MANIFEST: manifest(size=3087467144), LIST: listing(**{
            "model-00001-of-00002.safetensors": "7108390387 1 2 71 model-00001-of-00002.safetensors"})},
         "fail", "has 7108390387 bytes, its manifest says 3087467144"),
        ({LIST: listing(**{"model-00002-of-00002.safetensors": None})}, "fail", "missing"),
        ({LIST: listing(**{"config.json": None})}, "fail", "config.json is missing"),
        ({LIST: listing(more=["1 2 3 4 extra.bin"])}, "fail", "extra.bin is not in the manifest"),
        ({LIST: listing(more=["1 2 3 4 x.part"])}, "fail", "unfinished download"),
        ({LIST: listing(**{"model-00001-of-00002.safetensors": "? ? ? ? model-00001-of-00002.safetensors"})},
         "fail", "link to nothing"),
        # the same size, written to since: only hashing tells
        ({MANIFEST: manifest(mtime_ns=5)}, "unknown", "touched"),
        ({MANIFEST: manifest(ctime_ns=5)}, "unknown", "touched"),
        ({MANIFEST: manifest(inode=5)}, "unknown", "touched"),
        ({LIST: None}, "unknown", "not listed"),
        ({MANIFEST: None}, "unknown", "no manifest"),
        ({MANIFEST: "soup"}, "fail", "cannot be read"),
        ({MANIFEST: '{"files": []}'}, "fail", "lists no files"),
        ({MANIFEST: manifest().replace('"size": 700', '"size": 701')}, "fail", "somebody edited it"),
    ],
)  # fmt: skip
def test_i23_files_against_the_manifest(files: dict[str, Any], word: str, words: str) -> None:
    host = {MANIFEST: manifest(), LIST: listing(), INDEX: SHARDS, **files}
    found = judged("model.manifest", {path: text for path, text in host.items() if text is not None})
    assert found.verdict == word, found
    assert words in str(found.current)


def test_i23_deep_compares_content() -> None:
    hashes = "".join(f"{one['sha256']} {one['path']}\n" for one in json.loads(manifest())["files"])
    host = {MANIFEST: manifest(mtime_ns=5), LIST: listing(), INDEX: SHARDS}
    deep = {**host, "hashes/models/m/r1.txt": hashes}
    assert judged("model.manifest", host, model_deep=True).verdict == "unknown"
    assert judged("model.manifest", deep, model_deep=True).verdict == "pass"
    assert (
        judged("model.manifest", {**deep, "hashes/models/m/r1.txt": hashes.replace("0001 ", "000f ")}).verdict == "fail"
    )
    partly = hashes.split("\n", 1)[1]
    assert judged("model.manifest", {**deep, "hashes/models/m/r1.txt": partly}, model_deep=True).verdict == "unknown"


def test_i23_a_model_that_an_engine_serves_must_be_there_and_sealed() -> None:
    host = engine_node()
    gone = {path: text for path, text in host.items() if "models/m" not in path}
    absent = {**gone, "index.json": index(models="absent")}
    assert verdict_of("model.manifest", facts(absent)).verdict == "fail"
    assert verdict_of("model.manifest", facts({**host, MANIFEST: "{}"})).verdict == "fail"
    unsealed = {path: text for path, text in host.items() if path != MANIFEST}
    assert verdict_of("model.manifest", facts(unsealed)).verdict == "fail"


# I24: container.image_pinned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "word"),
    [
        ("vllm/vllm-openai:latest", "fail"),
        ("vllm/vllm-openai", "fail"),
        ("10.0.0.5:5000/vllm-openai", "fail"),
        ("10.0.0.5:5000/vllm-openai:latest", "fail"),
        ("vllm/vllm-openai:v0.26.0", "warn"),
        ("vllm/vllm-openai:nightly", "warn"),
        ("vllm/vllm-openai@sha256:" + "a" * 64, "pass"),
        ("vllm/vllm-openai:v0.26.0@sha256:" + "a" * 64, "pass"),
        ("vllm/vllm-openai@sha256:" + "a" * 63, "warn"),
        ("sha256:" + "b" * 64, "unknown"),
        (None, "unknown"),
    ],
)
def test_i24_image_of_a_container_that_is_not_ours(image: str | None, word: str) -> None:
    assert judged("container.image_pinned", foreign(Config__Image=image)).verdict == word


@pytest.mark.parametrize(
    ("image", "word"),
    [
        ("registry.test:5000/vllm@sha256:" + "ab" * 32, "pass"),
        ("registry.test:5000/vllm@sha256:" + "cd" * 32, "fail"),
        ("registry.test:5000/vllm:0.26.0", "fail"),
    ],
)
def test_i24_image_of_a_release(image: str, word: str) -> None:
    host = {**engine_node(), "docker/containers/engine.json": json.dumps(inspect(Config__Image=image))}
    assert verdict_of("container.image_pinned", facts(host)).verdict == word


@pytest.mark.parametrize(("digest", "word"), [("ab" * 32, "pass"), ("cd" * 32, "warn")])
def test_i24_the_image_that_the_inventory_plans(digest: str, word: str) -> None:
    planned = {"short-0": {"image": f"registry.test:5000/vllm@sha256:{digest}"}}
    assert verdict_of("container.image_pinned", facts(engine_node()), expected={"releases": planned}).verdict == word


def test_the_helpers_make_what_they_say() -> None:
    assert changed({"a/b": "1", "c": "2"}, a__b=None) == {"c": "2"}
    assert "num_requests_running" in scrape()
