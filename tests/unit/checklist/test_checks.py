# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The checks against recorded and constructed hosts: no false green, no false alarm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import exit_code, judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import merge_policy

from .facts_of import ALL, facts, verdict_of

DUMP = (Path(__file__).parents[2] / "fixtures" / "hardware" / "h200-580.159.04.xml").read_text(encoding="utf-8")
SMI = "commands/nvidia-smi_-q_-x.txt"
NUMA = "files/proc/sys/kernel/numa_balancing"


def dump(**changed: str) -> dict[str, str]:
    """Return the H200's dump with single elements (first of their name) set to other texts."""
    text = DUMP
    for name, value in changed.items():
        text, count = re.subn(rf"<{name}>[^<]*</{name}>", f"<{name}>{value}</{name}>", text, count=1)
        assert count == 1, name
    return {SMI: text}


def nodes(count: int) -> dict[str, str]:
    """Return sysfs of ``count`` NUMA nodes."""
    return {f"files/sys/devices/system/node/node{one}/cpulist": f"{one}\n" for one in range(count)}


def test_an_empty_folder_gives_no_pass_and_exit_2() -> None:
    verdicts = judge(facts({}), merge_policy(None), "node-a", checks=ALL.values())
    assert [one.id for one in verdicts if one.verdict == "pass"] == []
    assert exit_code(verdicts) == 2


def test_no_check_raises_on_a_recorded_h200() -> None:
    verdicts = judge(facts({SMI: DUMP}), merge_policy(None), "node-a", checks=ALL.values())
    assert [one.current for one in verdicts if "the check itself failed" in str(one.current)] == []
    passed = {one.id for one in verdicts if one.verdict == "pass"}
    assert {"gpu.bar1_minimum", "gpu.bar1_p2p", "gpu.pcie_link", "gpu.compute_mode", "gpu.throttling"} <= passed


@pytest.mark.parametrize(
    ("bar1", "memory", "peer", "minimum", "p2p"),
    [
        ("262144 MiB", "143771 MiB", True, "pass", "pass"),
        ("65536 MiB", "40960 MiB", True, "pass", "pass"),
        ("256 MiB", "24564 MiB", True, "pass", "fail"),
        ("256 MiB", "24564 MiB", False, "pass", "warn"),
        ("32768 MiB", "49140 MiB", True, "pass", "fail"),
        ("32768 MiB", "49140 MiB", False, "pass", "warn"),
        ("128 MiB", "24564 MiB", False, "fail", "warn"),
        ("N/A", "24564 MiB", True, "unknown", "unknown"),
    ],
)
def test_bar1(bar1: str, memory: str, peer: bool, minimum: str, p2p: str) -> None:
    text = re.sub(r"(<bar1_memory_usage>\s*<total>)[^<]*", rf"\g<1>{bar1}", DUMP, count=1)
    text = re.sub(r"(<fb_memory_usage>\s*<total>)[^<]*", rf"\g<1>{memory}", text, count=1)
    host = facts({SMI: text})
    assert verdict_of("gpu.bar1_minimum", host).verdict == minimum
    assert verdict_of("gpu.bar1_p2p", host, expected={"peer_to_peer": peer}).verdict == p2p


def test_a_short_bridge_is_named() -> None:
    text = re.sub(r"(<bar1_memory_usage>\s*<total>)[^<]*", r"\g<1>256 MiB", DUMP, count=1)
    line = "pcieport 0000:00:1d.4: BAR 15: no space for [mem size 0xc00000000 64bit pref]"
    host = facts({SMI: text, "commands/dmesg.txt": f"[    1.0] {line}\n"})
    found = verdict_of("gpu.bar1_p2p", host, expected={"peer_to_peer": True})
    assert found.verdict == "fail"
    assert "0000:00:1d.4" in json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"pcie_gen": "1", "performance_state": "P8"}, "pass"),
        ({"current_link_width": "8x"}, "fail"),
        ({"pcie_gen": "1", "performance_state": "P0", "clocks_event_reason_gpu_idle": "Not Active"}, "fail"),
        ({"current_link_width": "N/A"}, "unknown"),
    ],
)
def test_pcie_link(changed: dict[str, str], word: str) -> None:
    text = dump(**{key: value for key, value in changed.items() if key != "pcie_gen"})[SMI]
    if "pcie_gen" in changed:
        text, count = re.subn(r"(<current_link_gen>)[^<]*", rf"\g<1>{changed['pcie_gen']}", text, count=1)
        assert count == 1
        if changed["performance_state"] == "P0":
            text = re.sub(r"(<gpu_util>)[^<]*", r"\g<1>95 %", text, count=1)
    assert verdict_of("gpu.pcie_link", facts({SMI: text})).verdict == word


@pytest.mark.parametrize(
    ("files", "index", "word"),
    [
        ({NUMA: "1\n", **nodes(2)}, {}, "fail"),
        ({NUMA: "2\n", **nodes(2)}, {}, "fail"),
        ({NUMA: "0\n", **nodes(2)}, {}, "pass"),
        ({NUMA: "1\n", **nodes(1)}, {}, "not_applicable"),
        (nodes(2), {"numa_balancing": "absent"}, "pass"),
        (nodes(2), {"numa_balancing": "denied"}, "unknown"),
        (nodes(2), {}, "unknown"),
    ],
)
def test_numa_balancing(files: dict[str, str], index: dict[str, str], word: str) -> None:
    made: dict[str, Any] = dict(files)
    if index:
        made["index.json"] = json.dumps({"schema_version": 1, "probes": index})
    assert verdict_of("numa.balancing", facts(made)).verdict == word


def test_a_driver_that_moved_under_the_loaded_module_waits_for_a_reboot() -> None:
    loaded = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
    dpkg = "ii  libnvidia-compute-550:amd64  550.107.02-0ubuntu0.24.04.1  amd64  NVIDIA libcompute package\n"
    host = facts({"files/proc/driver/nvidia/version": loaded, "commands/dpkg_-l.txt": dpkg})
    found = verdict_of("driver.loaded_matches_installed", host)
    assert found.verdict == "fail"
    assert "reboot pending" in str(found.current)
    assert "550.107.02" in str(found.current)


@pytest.mark.parametrize(
    ("package", "word"),
    [
        ("libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1)", "fail"),
        ("linux-firmware:amd64 (1.187.9, 1.187.10)", "pass"),
    ],
)
def test_unattended_upgrades_of_driver_packages(package: str, word: str) -> None:
    history = (
        "Start-Date: 2021-04-20  06:12:01\nCommandline: /usr/bin/unattended-upgrade\n"
        f"Upgrade: {package}\nEnd-Date: 2021-04-20  06:12:40\n"
    )
    host = facts(
        {
            "files/var/log/apt/history.log": history,
            "commands/dpkg_-l.txt": "ii  linux-firmware  1.187.10  all  Firmware\n",
            "files/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  460.73.01  x\n",
        }
    )
    assert verdict_of("driver.packages_held", host).verdict == word
