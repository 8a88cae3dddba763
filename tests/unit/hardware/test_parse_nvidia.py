# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi's answers over the generations: what is known is exact, what is not known is None and never a default."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Gpu
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_nvidia import (
    BadXml,
    parse_module_version,
    parse_nvlink,
    parse_smi,
    parse_topology,
    pci_address,
)

from .helpers import REPOSITORY, h200


def plain(gpu: Gpu) -> dict[str, Any]:
    """Return a GPU as a flat mapping: tables are spread by key."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(gpu).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": one for key, one in value.items()})
        else:
            flat[name] = value
    return flat


def test_h200_is_read_exactly() -> None:
    log = parse_smi(h200())
    assert (log.driver_version, log.cuda_version, log.attached_gpus) == ("580.159.04", "13.0", 1)
    assert log.unknown_fields == []
    assert log.problems == []
    (gpu,) = log.gpus
    expected = {
        "name": "NVIDIA H200",
        "architecture": "Hopper",
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "pci_bus_id": "0000:00:06.0",
        "memory_total_mib": 143771,
        "memory_reserved_mib": 616,
        "memory_used_mib": 0,
        "memory_free_mib": 143156,
        "bar1_total_mib": 262144,
        "pcie_gen_current": 5,
        "pcie_gen_max": 5,
        "pcie_gen_host_max": None,
        "pcie_width_current": 16,
        "pcie_width_max": 16,
        "performance_state": "P0",
        "persistence_mode": True,
        "compute_mode": "Default",
        "mig_mode": False,
        "mig_devices": 0,
        "ecc_mode": True,
        "ecc_volatile_uncorrectable": 0,
        "ecc_aggregate_correctable": 0,
        "remapped_rows_uncorrectable": 0,
        "remapped_rows_pending": False,
        "remapped_rows_failure": False,
        "retired_pages_pending": None,
        "temperature_c": 37,
        "temperature_to_limit_c": 50,
        "power_draw_w": 126.71,
        "power_limit_w": 700.0,
        "clock_sm_mhz": 1980,
        "fabric_state": None,
        "recovery_action": "None",
        "processes": [],
    }
    seen = plain(gpu)
    assert {name: seen[name] for name in expected} == expected
    assert gpu.idle is True
    assert gpu.active_throttle_reasons() == []


# The first part of the answer, up to the long list of supported clocks, is what facts come from.
LEAF = re.compile(r"<(\w+)>([^<>\n]+)</\1>")
WORDS = ("N/A", "[N/A]", "Unknown Error", "[Unknown Error]", "Requested functionality has been deprecated", "", "ERR!")


def leaves() -> list[tuple[int, int, str]]:
    """Return start, end and name of each leaf value of the recorded answer."""
    text = h200()
    end = text.index("<supported_clocks>")
    return [(m.start(2), m.end(2), m.group(1)) for m in LEAF.finditer(text, 0, end)]


def test_every_field_not_available_in_turn_is_never_a_default() -> None:
    text = h200()
    before = plain(parse_smi(text).gpus[0])
    allowed = {"power_draw_w", "pci_bus_id"}  # another reading of the same thing takes its place
    changed: set[str] = set()
    for number, (start, end, name) in enumerate(leaves()):
        word = WORDS[number % len(WORDS)]
        after = plain(parse_smi(text[:start] + word + text[end:]).gpus[0])
        assert after.keys() == before.keys()
        for field, value in after.items():
            if value != before[field]:
                changed.add(field)
                assert value is None or field in allowed, f"{name} = {word!r} made {field} {value!r}"
    known = {field for field, value in before.items() if value not in (None, [], 0) or isinstance(value, bool)}
    attributes = {"index", "processes"}
    assert known - changed - allowed - attributes == set(), "a fact that no element feeds, or a test that does nothing"


@pytest.mark.parametrize("word", WORDS)
def test_everything_not_available_at_once(word: str) -> None:
    text = h200()
    cut = text.index("<supported_clocks>")
    text = LEAF.sub(lambda m: f"<{m[1]}>{word}</{m[1]}>", text[:cut]) + text[cut:]
    gpu = plain(parse_smi(text).gpus[0])
    # What is left: position, the address in the element's own attribute, and that its process list was empty.
    left = {name: value for name, value in gpu.items() if value is not None}
    left.pop("mig_devices", None)
    assert left == {"index": 0, "pci_bus_id": "0000:00:06.0", "processes": []}


def minimal(body: str, dtd: str = "nvsmi_device_v12.dtd") -> str:
    """Return an answer with one GPU."""
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "{dtd}">\n<nvidia_smi_log>'
        f'<driver_version>535.54.03</driver_version><gpu id="00000000:3B:00.0">{body}</gpu></nvidia_smi_log>'
    )


@pytest.mark.parametrize(
    ("body", "draw", "limit"),
    [
        ("<power_readings><power_draw>25.58 W</power_draw><power_limit>300 W</power_limit></power_readings>", 25.58,
         300),
        ("<power_readings><power_draw>25.58 W</power_draw><enforced_power_limit>280 W</enforced_power_limit>"
         "<power_limit>300.00 W</power_limit></power_readings>", 25.58, 280),
        ("<gpu_power_readings><power_draw>67.03 W</power_draw><current_power_limit>500.00 W</current_power_limit>"
         "</gpu_power_readings>", 67.03, 500),
        ("<gpu_power_readings><average_power_draw>126.74 W</average_power_draw><instant_power_draw>126.71 W"
         "</instant_power_draw><current_power_limit>700 W</current_power_limit></gpu_power_readings>", 126.71, 700),
        ("<gpu_power_readings><instant_power_draw>N/A</instant_power_draw></gpu_power_readings>", None, None),
        ("<gpu_power_readings><instant_power_draw>126 mW</instant_power_draw></gpu_power_readings>", None, None),
    ],
)  # fmt: skip
def test_power_under_its_three_names(body: str, draw: Any, limit: Any) -> None:
    log = parse_smi(minimal(body))
    assert (log.gpus[0].power_draw_w, log.gpus[0].power_limit_w) == (draw, limit)
    assert log.unknown_fields == []


@pytest.mark.parametrize("word", ["event", "throttle"])
def test_throttle_reasons_under_both_names(word: str) -> None:
    section = f"clocks_{word}_reasons"
    reason = f"clocks_{word}_reason"
    gpu = parse_smi(
        minimal(
            f"<{section}><{reason}_gpu_idle>Active</{reason}_gpu_idle><{reason}_hw_slowdown>Active</{reason}_hw_slowdown>"
            f"<{reason}_sw_power_cap>Not Active</{reason}_sw_power_cap></{section}>"
        )
    ).gpus[0]
    assert gpu.throttle_reasons == {"gpu_idle": True, "hw_slowdown": True, "sw_power_cap": False}
    assert gpu.active_throttle_reasons() == ["hw_slowdown"]


def test_one_unknown_reason_hides_the_verdict() -> None:
    gpu = parse_smi(
        minimal(
            "<clocks_event_reasons><clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>"
            "<clocks_event_reason_hw_slowdown>N/A</clocks_event_reason_hw_slowdown></clocks_event_reasons>"
        )
    ).gpus[0]
    assert gpu.throttle_reasons == {"gpu_idle": False, "hw_slowdown": None}
    assert gpu.active_throttle_reasons() is None


def test_no_reasons_at_all_are_not_no_throttling() -> None:
    assert (
        parse_smi(minimal("<clocks_event_reasons>N/A</clocks_event_reasons>")).gpus[0].active_throttle_reasons() is None
    )
    assert parse_smi(minimal("")).gpus[0].active_throttle_reasons() is None


def test_ecc_of_older_cards() -> None:
    gpu = parse_smi(
        minimal(
            "<ecc_errors><volatile><single_bit><l1_cache>2</l1_cache><total>3</total></single_bit>"
            "<double_bit><total>1</total></double_bit></volatile></ecc_errors>"
            "<retired_pages><multiple_single_bit_retirement><retired_count>4</retired_count>"
            "</multiple_single_bit_retirement><pending_retirement>Yes</pending_retirement></retired_pages>"
        )
    ).gpus[0]
    assert (gpu.ecc_volatile_correctable, gpu.ecc_volatile_uncorrectable) == (3, 1)
    assert gpu.ecc_aggregate_uncorrectable is None
    assert (gpu.retired_pages_single_bit, gpu.retired_pages_pending) == (4, True)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    body = (
        "<ecc_errors><volatile><sram_uncorrectable>N/A</sram_uncorrectable>"
        "<dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>"
    )
    assert parse_smi(minimal(body)).gpus[0].ecc_volatile_uncorrectable is None


@pytest.mark.parametrize("form", ["<remapped_rows>N/A</remapped_rows>", "", "<remapped_rows></remapped_rows>"])
def test_rows_that_are_not_said(form: str) -> None:
    gpu = parse_smi(minimal(form)).gpus[0]
    assert (gpu.remapped_rows_uncorrectable, gpu.remapped_rows_pending, gpu.remapped_rows_failure) == (None, None, None)


def test_rows_that_wait_for_a_reset() -> None:
    body = (
        "<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>4</remapped_row_unc>"
        "<remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure></remapped_rows>"
    )
    gpu = parse_smi(minimal(body)).gpus[0]
    assert (gpu.remapped_rows_uncorrectable, gpu.remapped_rows_pending, gpu.remapped_rows_failure) == (4, True, False)


def test_processes() -> None:
    body = (
        "<processes><process_info><pid>725</pid><type>C</type><process_name>VLLM::EngineCore</process_name>"
        "<used_memory>61234 MiB</used_memory></process_info>"
        "<process_info><pid>726</pid><type>C</type><process_name>[Not Found]</process_name>"
        "<used_memory>N/A</used_memory>"
        "</process_info></processes>"
    )
    first, second = parse_smi(minimal(body)).gpus[0].processes or []
    assert (first.pid, first.name, first.used_mib) == (725, "VLLM::EngineCore", 61234)
    assert (second.pid, second.name, second.used_mib) == (726, None, None)


def test_a_hidden_process_list_is_not_an_empty_one() -> None:
    assert parse_smi(minimal("<processes>N/A</processes>")).gpus[0].processes is None
    assert parse_smi(minimal("")).gpus[0].processes is None
    assert parse_smi(minimal("<processes>\n</processes>")).gpus[0].processes == []


def test_fabric() -> None:
    body = (
        "<fabric><state>Completed</state><status>Success</status><health><bandwidth>Full</bandwidth>"
        "<route_unhealthy>N/A</route_unhealthy></health></fabric>"
    )
    gpu = parse_smi(minimal(body)).gpus[0]
    assert (gpu.fabric_state, gpu.fabric_status) == ("Completed", "Success")
    assert gpu.fabric_health == {"bandwidth": "Full", "route_unhealthy": None}


def test_unknown_elements_are_named() -> None:
    log = parse_smi(minimal("<framebuffer_usage><total>80 GiB</total></framebuffer_usage><pci><lanes>16</lanes></pci>"))
    assert log.unknown_fields == ["gpu/framebuffer_usage", "gpu/pci/lanes"]
    assert log.gpus[0].memory_total_mib is None


def test_the_count_must_agree() -> None:
    text = minimal("").replace("<gpu id", "<attached_gpus>8</attached_gpus><gpu id")
    assert parse_smi(text).problems == ["nvidia-smi counts 8 GPUs but describes 1"]


@pytest.mark.parametrize(
    ("text", "mib"),
    [("143771 MiB", 143771), ("80 GiB", 81920), ("1048576 KiB", 1024), ("143771", None), ("-5 MiB", None),
     ("1e5 MiB", None), ("N/A", None), ("143771 MiB extra", None), ("143771 parsecs", None)],
)  # fmt: skip
def test_sizes_need_a_unit_that_is_known(text: str, mib: Any) -> None:
    assert (
        parse_smi(minimal(f"<fb_memory_usage><total>{text}</total></fb_memory_usage>")).gpus[0].memory_total_mib == mib
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot the system to recover this GPU",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "<nvidia_smi_log>",
        "<html></html>",
        "<nvidia_smi_log></nvidia_smi_log><nvidia_smi_log/>",
        h200()[:5000],
        '<?xml version="1.0" encoding="no-such"?><nvidia_smi_log/>',
        "<a>" * 100_000,
    ],
)
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(BadXml):
        parse_smi(text)


def test_entities_are_refused() -> None:
    bomb = '<!DOCTYPE nvidia_smi_log [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {chr(98 + n)} "{("&" + chr(97 + n) + ";") * 10}">' for n in range(9)
    )
    with pytest.raises(BadXml, match="entities"):
        parse_smi(bomb + "]><nvidia_smi_log><driver_version>&j;</driver_version></nvidia_smi_log>")
    external = '<!DOCTYPE nvidia_smi_log [<!ENTITY x SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&x;</nvidia_smi_log>'
    with pytest.raises(BadXml, match="entities"):
        parse_smi(external)


@given(st.text(max_size=300))
@settings(max_examples=100)
def test_soup_in_a_value_never_raises(soup: str) -> None:
    safe = soup.replace("&", "").replace("<", "").replace(">", "")
    text = minimal(f"<fb_memory_usage><total>{safe}</total></fb_memory_usage>")
    try:
        gpu = parse_smi(text).gpus[0]
    except BadXml:
        return  # characters that XML forbids
    assert gpu.memory_total_mib is None or re.match(r"\A[+-]?[\d.]+\s*\w+\Z", safe.strip())


@pytest.mark.parametrize(
    ("text", "address"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("0000:3b:00.1", "0000:3b:00.1"), ("3b:00.0", "0000:3b:00.0"),
     ("00010000:3B:00.0", "00010000:3b:00.0"), ("N/A", None), ("", None), ("zz:00.0", None)],
)  # fmt: skip
def test_pci_addresses(text: str, address: Any) -> None:
    assert pci_address(text) == address


def test_topology_with_nics_and_affinity() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A\n"
        "GPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\t X \t\t\t\t\n\n"
        "Legend:\n\n  X    = Self\n"
    )
    matrix, cpus, numa = parse_topology(text)
    assert matrix == {
        "GPU0": {"GPU0": "X", "GPU1": "NV18", "NIC0": "PIX"},
        "GPU1": {"GPU0": "NV18", "GPU1": "X", "NIC0": "SYS"},
        "NIC0": {"GPU0": "PIX", "GPU1": "SYS", "NIC0": "X"},
    }
    assert cpus == {"GPU0": "0-55", "GPU1": "56-111"}
    assert numa == {"GPU0": "0", "GPU1": "1"}


def test_topology_that_is_none() -> None:
    assert parse_topology("Failed to initialize NVML: Driver/library version mismatch") == (None, {}, {})


def test_nvlink() -> None:
    text = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)\n\t Link 0: <inactive>\n\t Link 1: 26.562 GB/s\n"
    )
    assert parse_nvlink(text) == {"GPU-aaaa": (2, 0), "GPU-bbbb": (1, 1)}


@pytest.mark.parametrize(
    ("text", "version", "kind"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\nGCC version: 12.2",
         "550.90.07", "proprietary"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)",
         "580.159.04", "open"),
        ("Kernel Module  550.90.07", "550.90.07", "proprietary"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02\n", "470.57.02", "proprietary"),
        ("", None, None),
        ("no version here\n", None, None),
    ],
)  # fmt: skip
def test_loaded_driver(text: str, version: Any, kind: Any) -> None:
    assert parse_module_version(text) == (version, kind)


def public_dumps() -> list[Path]:
    """Return dumps of other cards, if any: METALSERVE_PUBLIC_DUMPS, else the folder beside the checkout."""
    named = os.environ.get("METALSERVE_PUBLIC_DUMPS")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "fixtures" / "nvidia-smi" / "public"
    return sorted(folder.glob("*.xml"))


@pytest.mark.skipif(
    not public_dumps(), reason="no dumps of other cards here; METALSERVE_PUBLIC_DUMPS names their folder"
)
def test_dumps_of_other_cards() -> None:
    for path in public_dumps():
        log = parse_smi(path.read_text(encoding="utf-8", errors="replace"))
        assert log.unknown_fields == [], path.name
        assert log.gpus, path.name
        for gpu in log.gpus:
            assert gpu.name, path.name
            assert gpu.uuid, path.name
            assert gpu.memory_total_mib, path.name
            assert gpu.pci_bus_id, path.name
            assert gpu.performance_state, path.name
            assert gpu.temperature_c is not None, path.name
            text = path.read_text(encoding="utf-8", errors="replace")
            said = re.search(r"power_readings>.*?power_draw>([\d.]+) W<", text, re.DOTALL)
            assert (gpu.power_draw_w is not None) == (said is not None), path.name
