# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU node may go on to Docker; the machines are constructed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.filter.hosts import gpu_host_findings
from ansible_collections.metal.serve.plugins.module_utils.hardware import parse_nvidia
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
from ansible_collections.metal.serve.plugins.module_utils.runtime import preflight as pf

FIXTURES = Path(__file__).parents[2] / "fixtures" / "hardware"

FIT = pf.GpuHost(
    distribution="ubuntu",
    gpus_on_bus=8,
    gpus_in_driver=8,
    nvswitch=True,
    driver_loaded="570.124.06",
    driver_installed="570.124.06",
    driver_versions=("570.124.06",),
    fabric_manager="570.124.06",
    fabric_manager_active=True,
    package_source="distribution",
)
PLAIN = replace(FIT, nvswitch=False, fabric_manager="", fabric_manager_active=None)


def judge(host: pf.GpuHost, expected: int | None = 8) -> pf.Findings:
    return pf.findings(host, expected, "580")


@pytest.mark.parametrize("host", [FIT, PLAIN, replace(FIT, gpus_in_driver=9)])
def test_a_fit_machine_passes(host: pf.GpuHost) -> None:
    assert judge(host) == pf.Findings()


def test_a_fabric_manager_without_nvswitch_is_nobodys_business() -> None:
    assert judge(replace(PLAIN, fabric_manager="570.133.20", fabric_manager_active=False)) == pf.Findings()


@pytest.mark.parametrize(
    ("distribution", "source", "nvswitch", "branch", "packages"),
    [
        ("ubuntu", "", False, "570", "nvidia-driver-570-server-open"),
        ("ubuntu", "", True, "580", "nvidia-driver-580-server-open nvidia-fabricmanager-580 libnvidia-nscq-580"),
        ("ubuntu", "nvidia", True, "570", "nvidia-open-570 nvidia-fabricmanager-570 libnvidia-nscq-570"),
        ("debian", "", False, "580", "nvidia-open-580"),
        ("debian", "", True, "570", "nvidia-open-570 nvidia-fabricmanager-570 libnvidia-nscq-570"),
        ("debian", "", True, "580", "nvidia-open-580 nvidia-fabricmanager=580.* libnvidia-nscq=580.*"),
    ],
)
def test_no_driver_names_the_exact_set(
    distribution: str, source: str, nvswitch: bool, branch: str, packages: str
) -> None:
    bare = pf.GpuHost(distribution, gpus_on_bus=8, nvswitch=nvswitch, package_source=source)
    found = pf.findings(bare, 8, branch)
    assert " ".join(found.packages) == packages
    assert found.problems[0].startswith("No NVIDIA driver is installed")
    assert ("NVSwitches" in found.message) == nvswitch
    assert ("NVIDIA's own repository" in found.message) == (distribution == "debian" and not source)
    assert found.message.endswith("apt-get install " + packages)


def test_an_installed_driver_that_is_not_loaded_asks_for_a_reboot_and_for_no_package() -> None:
    found = judge(replace(PLAIN, driver_loaded="", gpus_in_driver=None, nouveau_loaded=True))
    assert found.packages == ()
    assert "nouveau holds the GPUs" in found.message
    assert found.pending[0].startswith("reboot:")


@pytest.mark.parametrize(
    ("distribution", "source", "driver", "packages"),
    [
        ("ubuntu", "distribution", "570.124.06", "nvidia-fabricmanager-570=570.124.06* libnvidia-nscq-570=570.124.06*"),
        ("ubuntu", "nvidia", "570.124.06", "nvidia-fabricmanager-570=570.124.06-1 libnvidia-nscq-570=570.124.06-1"),
        ("debian", "nvidia", "580.65.06", "nvidia-fabricmanager=580.65.06-1 libnvidia-nscq=580.65.06-1"),
    ],
)
@pytest.mark.parametrize("present", ["", "550.54.15"])
def test_a_missing_or_other_fabric_manager_stops_an_nvswitch_machine(
    distribution: str, source: str, driver: str, packages: str, present: str
) -> None:
    host = replace(
        FIT,
        distribution=distribution,
        package_source=source,
        driver_loaded=driver,
        driver_installed=driver,
        fabric_manager=present,
    )
    found = judge(host)
    assert " ".join(found.packages) == packages
    assert driver in found.message
    assert present in found.message


def test_a_fabric_manager_that_does_not_run_stops_the_host() -> None:
    found = judge(replace(FIT, fabric_manager_active=False))
    assert "not running" in found.message
    assert found.packages == ()


@pytest.mark.parametrize(
    ("seen", "bus", "words"),
    [
        (7, 7, "hardware is missing"),
        (7, 8, "the driver refused some"),
        (0, 8, "reports 0 GPUs"),
        (None, 8, "nvidia-smi failed"),
    ],
)
def test_fewer_gpus_than_expected_stop_the_host(seen: int | None, bus: int, words: str) -> None:
    found = judge(replace(FIT, gpus_in_driver=seen, gpus_on_bus=bus))
    assert words in found.message
    assert "metalserve_expected_gpus is 8" in found.message
    assert judge(replace(FIT, gpus_in_driver=seen, gpus_on_bus=bus), None).problems == ()


def test_no_gpu_on_the_bus_is_said_as_that() -> None:
    found = judge(replace(PLAIN, gpus_on_bus=0))
    assert "metalserve_accelerator" in found.message
    assert found.packages == ()


def test_an_upgraded_driver_is_pending_and_does_not_stop_the_host() -> None:
    found = judge(replace(PLAIN, driver_loaded="550.90.07", driver_installed="550.107.02"))
    assert found.problems == ()
    assert "550.90.07 is loaded but 550.107.02 is installed" in found.pending[0]


def test_a_half_upgrade_is_told() -> None:
    found = judge(replace(PLAIN, driver_installed="", driver_versions=("570.124.06", "570.133.20")))
    assert found.problems == ()
    assert "570.124.06, 570.133.20" in found.pending[0]


def test_all_problems_are_told_at_once() -> None:
    found = judge(replace(FIT, fabric_manager="", gpus_in_driver=7))
    assert len(found.problems) == 2


@pytest.mark.parametrize("branch", ["", "latest", "57", "5700"])
def test_what_is_no_branch_is_refused(branch: str) -> None:
    with pytest.raises(ValueError, match="not an NVIDIA driver"):
        pf.findings(FIT, 8, branch)


@pytest.mark.parametrize(
    ("package", "upstream"),
    [
        ("550.107.02-0ubuntu0.24.04.1", "550.107.02"),
        ("570.124.06-1", "570.124.06"),
        ("1:535.261.03-1~deb12u1", "535.261.03"),
        ("580.159.03", "580.159.03"),
        ("1.18.1-1", ""),
        ("", ""),
    ],
)
def test_upstream_version_of_a_package(package: str, upstream: str) -> None:
    assert pf.upstream_version(package) == upstream


def facts(**changes: Any) -> HostFacts:
    value: dict[str, Any] = {
        "os": {"id": "ubuntu"},
        "pci": {"gpus": [{}] * 8, "nvswitches": [{}] * 4},
        "driver": {
            "version_loaded": "570.124.06",
            "version_installed": "570.124.06",
            "versions_installed": ["570.124.06"],
            "attached_gpus": 8,
        },
        "gpus": [{"fabric_state": "Completed"}] * 8,
        "kernel": {"nouveau_loaded": False},
        "packages": {
            "items": [
                {"name": "nvidia-fabricmanager-570", "version": "570.124.06-0ubuntu0.24.04.1", "status": "ii"},
                {"name": "nvidia-fabricmanager-550", "version": "550.1.1-0ubuntu1", "status": "rc"},
            ]
        },
        "services": {"nvidia-fabricmanager.service": {"load_state": "loaded", "active_state": "active"}},
    }
    value.update(changes)
    return HostFacts.from_dict(value)


def test_facts_become_the_machine() -> None:
    assert pf.from_facts(facts()) == FIT


def test_facts_that_know_nothing_become_a_machine_of_which_nothing_is_known() -> None:
    nothing = pf.from_facts(HostFacts())
    assert nothing == pf.GpuHost("")
    assert "No NVIDIA driver" in judge(nothing).message


def test_an_nvswitch_that_the_bus_hides_is_known_by_its_fabric() -> None:
    hidden = facts(pci={"gpus": [{}] * 8, "nvswitches": []})
    assert pf.from_facts(hidden).nvswitch
    plain = facts(pci={"gpus": [{}] * 8, "nvswitches": []}, gpus=[{"fabric_state": "N/A"}] * 8)
    assert not pf.from_facts(plain).nvswitch


def test_a_real_dump_of_one_gpu_without_nvswitch_passes() -> None:
    dump = (FIXTURES / "h200-580.159.04.xml").read_text(encoding="utf-8")
    machine = HostFacts()
    machine.driver.version_loaded = "580.159.04"
    machine.gpus = parse_nvidia.parse_smi(dump).gpus
    host = pf.from_facts(machine)
    assert (host.gpus_in_driver, host.nvswitch) == (1, False)
    assert judge(host, 1) == pf.Findings()
    assert "reports 1 GPUs" in judge(host, 2).message


def test_the_role_learns_whether_a_fabric_manager_must_run_at_boot() -> None:
    hidden = facts(pci={"gpus": [{}] * 8, "nvswitches": []})
    assert gpu_host_findings(hidden.to_dict(), 8)["nvswitch"] is True
    assert gpu_host_findings(HostFacts().to_dict(), 8)["nvswitch"] is False
