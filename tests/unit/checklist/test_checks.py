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


@pytest.mark.parametrize(
    ("printed", "word"),
    [
        ("GPU 0: NVIDIA H200 (UUID: {uuid})\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n", "pass"),
        ("GPU 0: NVIDIA H200 (UUID: {uuid})\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n", "fail"),
        ("GPU 0: NVIDIA H200 (UUID: {uuid})\n", "not_applicable"),
        # Seen on a virtual machine with one card of eight.
        ("\n", "not_applicable"),
        ("Something else\n", "unknown"),
    ],
)
def test_nvlink(printed: str, word: str) -> None:
    match = re.search(r"<uuid>(GPU-[^<]+)", DUMP)
    assert match
    host = facts({SMI: DUMP, "commands/nvidia-smi_nvlink_-s.txt": printed.format(uuid=match.group(1))})
    found = verdict_of("topology.nvlink", host)
    assert found.verdict == word
    if word == "unknown":
        assert found.current == "nvidia_nvlink: read, but it does not say"


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


# Peer-to-peer: ACS, IOMMU, NVLink ------------------------------------------------------------------------------------


def two_cards(link: str, **files: str) -> dict[str, str]:
    """Return two cards that are joined by ``link``, and more files by path with ``__`` for ``/``."""
    card = re.search(r"<gpu id=.*?</gpu>", DUMP, re.DOTALL)
    assert card is not None
    text = DUMP.replace(card.group(0), card.group(0) + card.group(0).replace("GPU-0", "GPU-1", 1))
    topology = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{link}\t0-7\nGPU1\t{link}\t X \t0-7\n"
    more = {path.replace("__", "/"): one for path, one in files.items()}
    return {SMI: text, "commands/nvidia-smi_topo_-m.txt": topology, **more}


def bridges(control: str) -> str:
    """Return lspci -vvv of a bridge with these ACS controls."""
    return (
        "0000:00:01.1 PCI bridge: AMD Root Port\n\tBus: primary=00, secondary=01, subordinate=01, sec-latency=0\n"
        f"\tCapabilities: [2a0 v1] Access Control Services\n\t\tACSCap:\tSrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+\n"
        f"\t\tACSCtl:\t{control}\n"
    )


ON, OFF = (
    "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+",
    "SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd-",
)


@pytest.mark.parametrize(
    ("link", "split", "text", "word"),
    [
        ("PHB", 2, bridges(ON), "fail"),
        ("PHB", 2, bridges(OFF), "pass"),
        ("PHB", 2, bridges(OFF.replace("ReqRedir-", "ReqRedir+")), "fail"),
        ("SYS", 2, bridges(ON), "fail"),
        ("NV18", 2, bridges(ON), "not_applicable"),
        ("PHB", 1, bridges(ON), "not_applicable"),
        ("PHB", 2, None, "unknown"),
    ],
)
def test_acs(link: str, split: int, text: str | None, word: str) -> None:
    files = two_cards(link) if text is None else {**two_cards(link), "commands/lspci_-D_-vvv.txt": text}
    assert verdict_of("topology.acs", facts(files), expected={"tensor_parallel": split}).verdict == word


@pytest.mark.parametrize(
    ("link", "groups", "cmdline", "word"),
    [
        ("PHB", "0\n1\n", "quiet", "warn"),
        ("PHB", "0\n1\n", "quiet iommu=pt", "pass"),
        ("PHB", "0\n1\n", "intel_iommu=on", "warn"),
        ("PHB", None, "quiet", "unknown"),
        ("NV18", "0\n", "quiet", "not_applicable"),
    ],
)
def test_iommu(link: str, groups: str | None, cmdline: str, word: str) -> None:
    files = {**two_cards(link), "files/proc/cmdline": cmdline}
    if groups is not None:
        files["listings/sys_kernel_iommu_groups.txt"] = groups
    assert verdict_of("topology.iommu", facts(files), expected={"tensor_parallel": 2}).verdict == word


# Memory that is free -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "share", "word"),
    [
        ("48517 MiB", "32195 MiB", 0.95, "fail"),
        ("20315 MiB", "20244 MiB", 1.0, "fail"),  # 19.77 of 19.84 GiB: 71 MiB short
        ("143771 MiB", "132270 MiB", 0.92, "warn"),  # exactly what is needed, no margin
        ("143771 MiB", "132269 MiB", 0.92, "fail"),
        ("143771 MiB", "132782 MiB", 0.92, "pass"),
        ("143771 MiB", "N/A", 0.92, "unknown"),
        ("143771 MiB", "143000 MiB", None, "not_applicable"),
    ],
)
def test_free_memory(total: str, free: str, share: float | None, word: str) -> None:
    text = re.sub(r"(<fb_memory_usage>\s*<total>)[^<]*", rf"\g<1>{total}", DUMP, count=1)
    text = re.sub(r"(<fb_memory_usage>.*?<free>)[^<]*", rf"\g<1>{free}", text, count=1, flags=re.DOTALL)
    found = verdict_of("gpu.free_memory", facts({SMI: text}), expected={"gpu_memory_utilization": share})
    assert found.verdict == word, found


# CUDA of the image ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brand", "driver", "ceiling", "image", "word"),
    [
        ("NVIDIA", "580.159.04", "13.0", "13.0", "pass"),
        ("NVIDIA", "580.159.04", "13.0", "12.9", "pass"),
        ("NVIDIA", "580.159.04", "13.0", "13.2", "warn"),
        ("GeForce", "580.159.04", "13.0", "13.2", "fail"),
        ("Titan", "580.159.04", "13.0", "13.2", "fail"),
        ("NVIDIA", "535.183.01", "12.2", "13.0", "fail"),
        ("NVIDIA", "535.183.01", "12.2", "12.8", "warn"),
        ("NVIDIA", "520.61.05", "11.8", "12.8", "fail"),
        ("N/A", "580.159.04", "13.0", "13.2", "unknown"),
        ("NVIDIA", "580.159.04", "N/A", "13.2", "unknown"),
    ],
)
def test_cuda_of_the_image(brand: str, driver: str, ceiling: str, image: str, word: str) -> None:
    host = facts(dump(product_brand=brand, driver_version=driver, cuda_version=ceiling))
    assert verdict_of("driver.supports_image_cuda", host, expected={"image_cuda": image}).verdict == word


# Who holds memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "unknown"),  # a process, and nothing is known about it
        ({"processes/77/cgroup": "0::/user.slice\n"}, "fail"),
        ({"processes/77/cgroup": f"0::/system.slice/docker-{'a' * 64}.scope\n"}, "unknown"),  # Docker was not read
        (
            {"processes/77/cgroup": f"0::/system.slice/docker-{'a' * 64}.scope\n", "docker/containers.json": "[]"},
            "fail",
        ),
        ({"index.json": '{"probes": {"docker_version": "absent", "docker_containers": "absent"}}'}, "fail"),
    ],
)
def test_foreign_processes(files: dict[str, str], word: str) -> None:
    fields = "<pid>77</pid><type>C</type><process_name>x</process_name><used_memory>500 MiB</used_memory>"
    one = f"<processes><process_info>{fields}</process_info></processes>"
    text = re.sub(r"<processes>.*?</processes>", one, DUMP, count=1, flags=re.DOTALL)
    found = verdict_of("gpu.foreign_processes", facts({SMI: text, **files}))
    assert found.verdict == word
    assert "PID 77 x 500 MiB" in str(found.current)


# Xid, graded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "remapped", "word", "said"),
    [
        (79, "No", "fail", "reset the GPU"),
        (48, "No", "fail", "reset the GPU"),
        (74, "No", "fail", "replace the card"),
        (64, "Yes", "fail", "replace the card"),
        (64, "No", "fail", "reset the GPU"),
        (63, "No", "pass", "nothing to mend"),
        (31, "No", "pass", "nothing to mend"),
        (13, "No", "pass", "nothing to mend"),
        (999, "No", "warn", "999"),
    ],
)
def test_xid_grades(code: int, remapped: str, word: str, said: str) -> None:
    line = f"[ 12.3] NVRM: Xid (PCI:0000:01:00): {code}, pid=1, name=x, what it said\n"
    found = verdict_of("driver.xid_history", facts({**dump(remapped_row_failure=remapped), "commands/dmesg.txt": line}))
    assert found.verdict == word
    assert said in str(found.current)


def test_rows_of_other_log_formats_are_read_too() -> None:
    line = "time=x status=504 urt=60.001 uct=0.001 upstream=10.0.0.11:8100\n"
    found = verdict_of("gateway.access_log_causes", facts({"files/var/log/nginx/access.log": line}))
    assert found.current == {"read_timeout": 1}


@pytest.mark.parametrize(
    ("name", "mode", "wanted", "word"),
    [
        ("NVIDIA H200", "Disabled", None, "pass"),
        ("NVIDIA H200", "Enabled", None, "fail"),
        ("NVIDIA H200", "Enabled", True, "pass"),
        ("NVIDIA H200", "N/A", None, "unknown"),
        ("NVIDIA A100-SXM4-80GB", "N/A", None, "unknown"),
        ("NVIDIA A10G", "N/A", None, "not_applicable"),
        ("Tesla T4", "N/A", None, "not_applicable"),
        ("Tesla T4", "N/A", True, "unknown"),
        ("N/A", "N/A", None, "unknown"),
    ],
)
def test_mig(name: str, mode: str, wanted: bool | None, word: str) -> None:
    text = DUMP.replace("NVIDIA H200", name)
    text, count = re.subn(r"(<(?:current|pending)_mig>)[^<]*", rf"\g<1>{mode}", text)
    assert count == 2
    assert verdict_of("gpu.mig_mode", facts({SMI: text}), expected={"mig": wanted}).verdict == word


@pytest.mark.parametrize(
    ("attached", "wanted", "word"),
    [("1", 1, "pass"), ("1", 2, "fail"), ("2", 1, "unknown"), ("N/A", 1, "pass"), ("1", None, "unknown")],
)
def test_count(attached: str, wanted: int | None, word: str) -> None:
    assert verdict_of("gpu.count", facts(dump(attached_gpus=attached)), expected={"gpus": wanted}).verdict == word
