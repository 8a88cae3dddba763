# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""GPU readings of the shipped agent: real pynvml over a stand-in library, values as nvidia-smi said them of an H200."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import parse_scrape

from .helpers import FIXTURES, MIB, SOURCE, agent_file, h200, nvml_folder, scrape, state

UUID = {"gpu": "0", "uuid": str(h200()["uuid"])}


def test_an_h200_reads_as_nvidia_smi_says(tmp_path: Path) -> None:
    found = scrape(tmp_path, state(h200()), agent=agent_file())

    def value(name: str, /, **labels: str) -> float:
        (sample,) = found.select(name, **UUID, **labels)
        return sample.value

    assert value("metalserve_gpu_memory_total_bytes") == 143771 * MIB
    assert value("metalserve_gpu_memory_reserved_bytes") == 616 * MIB
    assert value("metalserve_gpu_memory_used_bytes") == 0
    assert value("metalserve_gpu_bar1_total_bytes") == 262144 * MIB
    assert value("metalserve_gpu_temperature_celsius") == 37
    assert value("metalserve_gpu_power_watts") == pytest.approx(126.71)
    assert value("metalserve_gpu_power_limit_watts") == 700
    assert value("metalserve_gpu_energy_joules_total") == 123_456
    assert value("metalserve_gpu_pcie_replays_total") == 2
    assert value("metalserve_gpu_ecc_enabled") == 1
    assert value("metalserve_gpu_ecc_errors_total", type="uncorrected", period="aggregate") == 0
    assert value("metalserve_gpu_row_remap_pending") == 0
    assert value("metalserve_gpu_row_remap_failure") == 0
    assert value("metalserve_gpu_throttle_active", reason="idle") == 1
    assert value("metalserve_gpu_throttle_active", reason="hw_thermal") == 0
    assert value("metalserve_gpu_info", name="NVIDIA H200", bus_id="0000:00:06", driver="580.159.04") == 1
    assert found.select("metalserve_gpus")[0].value == 1
    assert found.select("metalserve_expected_gpus")[0].value == 8


def test_the_stand_in_says_what_a_real_h200_said(tmp_path: Path) -> None:
    text = (FIXTURES / "metrics" / "agent-h200-580.159.04.prom").read_text(encoding="utf-8")
    real, found = parse_scrape(text), scrape(tmp_path, state(h200()))
    assert found.names() == real.names()
    assert {(s.name, *sorted(s.labels)) for s in found.samples} == {(s.name, *sorted(s.labels)) for s in real.samples}


def test_what_a_card_does_not_have_is_no_sample_and_no_error(tmp_path: Path) -> None:
    gpu = {**h200(), "remap.correctable": None, "energy": None}
    found = scrape(tmp_path, state(gpu))
    assert not found.select("metalserve_gpu_row_remap_pending")
    assert not found.select("metalserve_gpu_energy_joules_total")
    assert found.select("metalserve_agent_unsupported_reads", read="row_remap")[0].value == 1
    assert found.select("metalserve_agent_unsupported_reads", read="nvlink")[0].value == 1
    assert all(sample.value == 0 for sample in found.select("metalserve_agent_errors_total"))


def test_a_failing_read_costs_its_own_sample_only(tmp_path: Path) -> None:
    found = scrape(tmp_path, state(h200(), h200(), **{"fail.1.power": 999}))
    assert [sample.labels["gpu"] for sample in found.select("metalserve_gpu_power_watts")] == ["0"]
    assert len(found.select("metalserve_gpu_memory_used_bytes")) == 2
    assert found.select("metalserve_agent_errors_total", source="nvml", reason="unknown")[0].value == 1


def test_a_lost_gpu_is_not_counted_and_gives_no_zeros(tmp_path: Path) -> None:
    found = scrape(tmp_path, state(h200(), {**h200(), "uuid": "GPU-1"}, **{"fail.1.temperature": 15}))
    assert found.select("metalserve_gpus")[0].value == 1
    assert {sample.labels["gpu"] for sample in found.samples if "gpu" in sample.labels} == {"0"}
    assert found.select("metalserve_agent_errors_total", reason="gpu_is_lost")[0].value == 1


@pytest.mark.parametrize(("call", "code", "reason"), [("init", 9, "driver_not_loaded"), ("count", 999, "unknown")])
def test_without_a_driver_nothing_is_said_of_gpus(call: str, code: int, reason: str, tmp_path: Path) -> None:
    found = scrape(tmp_path, state(h200(), **{f"fail.{call}": code}))
    names = {sample.name for sample in found.samples if sample.name.startswith("metalserve_gpu")}
    assert names <= {"metalserve_gpu_xid_source_info"}  # the kernel's log can be read without a driver
    assert found.select("metalserve_agent_errors_total", source="nvml", reason=reason)[0].value == 1


def test_an_old_driver_is_asked_by_the_old_names(tmp_path: Path) -> None:
    found = scrape(tmp_path, state({**h200(), "throttle": 0x40}), old_driver=True)
    assert found.select("metalserve_gpu_throttle_active", reason="hw_thermal")[0].value == 1
    assert found.select("metalserve_gpu_memory_used_bytes")[0].value == 616 * MIB  # it counts the reserve as used
    assert not found.select("metalserve_gpu_memory_reserved_bytes")
    assert all(sample.value == 0 for sample in found.select("metalserve_agent_errors_total"))


def test_nvlinks_with_one_down(tmp_path: Path) -> None:
    links = {"nvlinks": 2, "nvlink.0": 1, "nvlink.1": 0, **{f"nvlink.0.error.{n}": n + 5 for n in range(4)}}
    found = scrape(tmp_path, state({**h200(), **links}))
    assert [s.value for s in found.select("metalserve_gpu_nvlink_active")] == [1, 0]
    errors = {s.labels["type"]: s.value for s in found.select("metalserve_gpu_nvlink_errors_total")}
    assert errors == {"replay": 5, "recovery": 6, "crc_flit": 7, "crc_data": 8}


def test_it_runs_on_python_3_9(tmp_path: Path) -> None:
    python = next(iter(sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python3"))), None)
    if python is None:
        pytest.skip("no Python 3.9 here")
    found = scrape(tmp_path, state(h200()), python=str(python), agent=agent_file())
    assert found.select("metalserve_gpus")[0].value == 1


def test_xid_events_from_nvml_where_there_is_no_kernel_log(tmp_path: Path) -> None:
    (tmp_path / "nvml").write_text(state(h200(), xid="0 79"), encoding="utf-8")
    program = textwrap.dedent(
        """
        import threading, time
        from metalserve_agent.readings import Errors
        from metalserve_agent.xid import XidWatcher

        watcher = XidWatcher(Errors(), lambda: ("0000:00:06", "0000:00:07"), kmsg="/nonexistent")
        threading.Thread(target=watcher.run, daemon=True).start()
        end = time.monotonic() + 5
        while time.monotonic() < end and not any(r.name.endswith("xid_last") for r in watcher.read()):
            time.sleep(0.01)
        for reading in watcher.read():
            print(reading.name, *reading.labels, int(reading.value))
        watcher.stop()
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PYTHONPATH": f"{SOURCE}:{SOURCE.parents[2] / 'collections'}",
            "LD_LIBRARY_PATH": str(nvml_folder(False)),
            "METALSERVE_STAND_IN_NVML": str(tmp_path / "nvml"),
        },
    )
    assert result.stdout.splitlines() == [
        "metalserve_gpu_xid_source_info nvml 1",
        "metalserve_gpu_xid_events_total 0000:00:06 1",
        "metalserve_gpu_xid_events_total 0000:00:07 0",
        "metalserve_gpu_xid_last 0000:00:06 79",
    ]
