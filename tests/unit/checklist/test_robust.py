# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Against every kind of bad reading: nothing that is N/A, missing, denied or nonsense ever becomes a pass or an exception."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import exit_code, judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import merge_policy
from ansible_collections.metal.serve.plugins.module_utils.hardware.build import build_facts
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import Item, ProbeResult
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES

from .facts_of import ALL, facts
from .hosts import SMI, engine_node
from .test_hosts import ENGINE, GATEWAY, gateway, monitor

MONITOR = {"roles": ["monitor"], "accelerator": "nvidia"}
HOSTS: dict[str, tuple[Callable[[], dict[str, str]], dict[str, Any]]] = {
    "engine": (engine_node, ENGINE),
    "gateway": (lambda: gateway(False), GATEWAY),
    "monitor": (lambda: monitor("gpu"), MONITOR),
}


@functools.cache
def results(host: str) -> dict[str, ProbeResult]:
    """Return the raw readings of a healthy host."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in HOSTS[host][0]().items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return collect(folder).results


def words(readings: dict[str, ProbeResult], expected: dict[str, Any]) -> dict[str, str]:
    """Return the verdict of every check on these readings."""
    made: HostFacts = build_facts(readings, "snapshot", "2026-12-01T00:00:00Z", True)
    made.masked = False
    return {one.id: one.verdict for one in judge(made, merge_policy({"expected": expected}), "n", checks=ALL.values())}


@functools.cache
def passes() -> set[str]:
    """Return what passes with the recording as it is."""
    return {id for id, word in words(smi(DUMP), ENGINE).items() if word == "pass"}


@functools.cache
def healthy(host: str) -> dict[str, str]:
    return words(results(host), HOSTS[host][1])


def smi(text: str) -> dict[str, ProbeResult]:
    """Return the engine node's readings of GPUs, driver and containers with another answer of nvidia-smi."""
    kept = {
        probe.name for probe in PROBES if probe.group in ("gpu", "driver", "pci", "topology", "kernel_log", "services")
    }
    readings = {name: one for name, one in results("engine").items() if name in kept or name.startswith("docker_con")}
    return {**readings, "nvidia_smi": ProbeResult("nvidia_smi", "ok", "", 0.2, (Item(SMI, "ok", text),))}


# N/A -----------------------------------------------------------------------------------------------------------------

DUMP = engine_node()[SMI]
FIELDS = sorted(set(re.findall(r"<(\w+)>[^<>]+</\1>", DUMP)))
# Fields of the dump, and the check that may not pass without each.
RESTS = {
    "persistence_mode": "driver.persistence",
    "product_name": "gpu.model_and_memory",
    "current_mig": "gpu.mig_mode",
    "compute_mode": "gpu.compute_mode",
    "current_link_gen": "gpu.pcie_link",
    "max_link_gen": "gpu.pcie_link",
    "current_link_width": "gpu.pcie_link",
    "max_link_width": "gpu.pcie_link",
    "total": "gpu.bar1_minimum",
    "current_ecc": "gpu.ecc_and_remapping",
    "remapped_row_pending": "gpu.ecc_and_remapping",
    "remapped_row_failure": "gpu.ecc_and_remapping",
    "clocks_event_reason_hw_slowdown": "gpu.throttling",
    "clocks_event_reason_hw_thermal_slowdown": "gpu.throttling",
    "clocks_event_reason_sw_thermal_slowdown": "gpu.throttling",
    "pid": "gpu.foreign_processes",
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_not_available_never_makes_a_pass(field: str) -> None:
    text = re.sub(rf"<{field}>[^<]*</{field}>", f"<{field}>N/A</{field}>", DUMP)
    found = words(smi(text), ENGINE)
    assert {id for id, word in found.items() if word == "pass"} <= {
        id for id, word in healthy("engine").items() if word == "pass"
    }
    if field in RESTS:
        assert found[RESTS[field]] == "unknown"


def test_every_field_that_a_check_rests_on_is_in_the_recording() -> None:
    assert set(RESTS) <= set(FIELDS)


@pytest.mark.parametrize(
    ("field", "bad", "id", "more"),
    [
        ("remapped_row_pending", "Yes", "gpu.ecc_and_remapping", ("current_ecc", "remapped_row_failure")),
        ("remapped_row_failure", "Yes", "gpu.ecc_and_remapping", ("current_ecc", "remapped_row_failure")),
        ("current_ecc", "Disabled", "gpu.ecc_and_remapping", ("current_ecc", "remapped_row_failure")),
        ("compute_mode", "Prohibited", "gpu.compute_mode", ()),
        ("current_mig", "Enabled", "gpu.mig_mode", ()),
        ("persistence_mode", "Disabled", "driver.persistence", ()),
        ("current_link_width", "8x", "gpu.pcie_link", ("max_link_gen", "current_link_gen")),
        ("clocks_event_reason_hw_slowdown", "Active", "gpu.throttling", ("clocks_event_reason_gpu_idle",)),
        ("clocks_event_reason_sw_thermal_slowdown", "Active", "gpu.throttling", ("clocks_event_reason_gpu_idle",)),
        ("gpu_recovery_action", "Reset", "gpu.ecc_and_remapping", ("current_ecc", "remapped_row_failure")),
    ],
)
def test_what_is_bad_is_not_good_either_when_another_field_is_not_available(
    field: str, bad: str, id: str, more: tuple[str, ...]
) -> None:
    text = re.sub(rf"<{field}>[^<]*</{field}>", f"<{field}>{bad}</{field}>", DUMP)
    assert words(smi(text), ENGINE)[id] in ("fail", "warn")
    for other in ("performance_state", "gpu_util", "pending_mig", "product_brand", "product_name", "total", *more):
        if other == field:
            continue
        blind = re.sub(rf"<{other}>[^<]*</{other}>", f"<{other}>N/A</{other}>", text)
        assert words(smi(blind), ENGINE)[id] != "pass", other


def test_idling_is_no_reason_to_complain() -> None:
    text = DUMP.replace("<clocks_event_reason_gpu_idle>Not Active", "<clocks_event_reason_gpu_idle>Active")
    assert words(smi(text), ENGINE)["gpu.throttling"] == "pass"
    capped = DUMP.replace("<clocks_event_reason_sw_power_cap>Not Active", "<clocks_event_reason_sw_power_cap>Active")
    assert words(smi(capped), ENGINE)["gpu.throttling"] == "pass"


# Probes that failed ---------------------------------------------------------------------------------------------------

# A reading without which the rest still tells all of it: another one says the same, or nothing rests on it here.
SPARE = {
    "engine": {
        "nvidia_params", "nvidia_gpu_information", "nvidia_device_nodes", "pci_bridges", "rdma_devices", "fabric_manager_log",
        "nginx", "access_logs", "engine_progress", "model_hashes", "chrony", "selinux", "virtualization", "iommu_groups",
        "numa_balancing", "mounts", "cgroups", "cgroup_swap", "rpm", "dnf_versionlock", "apt_config",
    },
    "gateway": {"engines", "virtualization", "systemd_units"},  # that nginx holds its ports shows that it runs
    "monitor": {"prometheus_files"},
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a_reading_that_was_denied_makes_what_rests_on_it_unknown_and_nothing_better(host: str) -> None:
    readings, expected, base = results(host), HOSTS[host][1], healthy(host)
    spare = set()
    for name, result in readings.items():
        if result.state not in ("ok", "absent"):
            continue
        items = tuple(Item(item.path, "denied", "", "no") for item in result.items)
        found = words({**readings, name: ProbeResult(name, "denied", "no", 0.1, items)}, expected)
        changes = {id: word for id, word in found.items() if word != base[id]}
        # Off is off, however many nodes there are.
        assert set(changes.values()) <= {"unknown"} or (name, changes) == (
            "numa_nodes",
            {**changes, "numa.balancing": "pass"},
        )
        if not changes:
            spare.add(name)
    assert spare == SPARE[host]


@pytest.mark.parametrize("state", ["denied", "timeout", "error", "not_collected"])
def test_a_host_of_which_nothing_was_read_has_no_pass(state: str) -> None:
    index = {"probes": {probe.name: state for probe in PROBES}}
    host = facts({"index.json": json.dumps(index)})
    for expected in ({}, ENGINE, GATEWAY, MONITOR):
        verdicts = judge(host, merge_policy({"expected": expected}), "n", checks=ALL.values())
        assert [one.id for one in verdicts if one.verdict == "pass"] == []
        assert exit_code(verdicts) == 2


def test_an_empty_folder_has_no_pass() -> None:
    for expected in ({}, ENGINE, GATEWAY, MONITOR):
        verdicts = judge(facts({}), merge_policy({"expected": expected}), "n", checks=ALL.values())
        assert [one.id for one in verdicts if one.verdict == "pass"] == []
        assert exit_code(verdicts) == 2


@pytest.mark.parametrize(
    "text", ["[]", "{", "null", '{"probes": []}', '{"probes": {"dpkg": "fine"}}', '{"probes": {"dpkg": "ok"}}']
)
def test_a_broken_index_has_no_pass(text: str) -> None:
    verdicts = judge(facts({"index.json": text}), merge_policy(None), "n", checks=ALL.values())
    assert [one.id for one in verdicts if one.verdict == "pass"] == []


def test_a_host_without_anything_is_not_judged() -> None:
    host = facts({"index.json": json.dumps({"probes": {probe.name: "absent" for probe in PROBES}})})
    verdicts = judge(host, merge_policy(None), "n", checks=ALL.values())
    assert [one.id for one in verdicts if one.verdict == "pass"] == []
    assert exit_code(verdicts) == 2


# Nonsense ------------------------------------------------------------------------------------------------------------

WORDS = ["N/A", "-1", "9" * 25, "1e999", "nan", "\x00", "\ufffd", "null", "{", "}", "[", "]", "\"", ";", ":", "=", "<gpu>", "%",
         "Active", "true", "[]", "{}", "::", "0x", "\n", " ", "\t", "sha256:", "@", "..", "2026-13-45T99:00:00Z"]  # fmt: skip
SOUP = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(WORDS), max_size=30).map("".join))


def check_all(readings: dict[str, ProbeResult], expected: dict[str, Any]) -> None:
    """Call every check itself, so that nothing is caught on the way."""
    made = build_facts(readings, "snapshot", "2026-12-01T00:00:00Z", True)
    assert [problem for problem in made.problems if "could not be understood" in problem] == []
    policy = merge_policy({"expected": expected})
    for one in ALL.values():
        finding = one.function(made, policy)
        json.dumps([finding.current, finding.desired, finding.evidence])


def garble(text: str, soup: str, at: float, how: str) -> str:
    """Return ``text`` replaced by, cut off at, or with one of its words turned into ``soup``."""
    place = int(len(text) * at)
    if how == "all":
        return soup
    if how == "cut":
        return text[:place]
    spaces = [match.span() for match in re.finditer(r"[\w./-]+", text)]
    if not spaces:
        return text[:place] + soup + text[place:]
    begin, end = spaces[min(int(len(spaces) * at), len(spaces) - 1)]
    return text[:begin] + soup + text[end:]


@given(st.sampled_from(sorted(HOSTS)), SOUP, st.floats(0, 1), st.floats(0, 1), st.sampled_from(["all", "cut", "word"]))
@settings(max_examples=40)
def test_nonsense_in_any_reading_raises_in_no_check(host: str, soup: str, which: float, at: float, how: str) -> None:
    readings = results(host)
    names = sorted(name for name, result in readings.items() if result.items)
    name = names[min(int(len(names) * which), len(names) - 1)]
    items = tuple(
        Item(item.path, item.state, garble(item.text, soup, at, how), item.error) for item in readings[name].items
    )
    check_all({**readings, name: ProbeResult(name, readings[name].state, "", 0.1, items)}, HOSTS[host][1])


@given(st.lists(SOUP, min_size=3, max_size=3), st.sampled_from(sorted(HOSTS)))
@settings(max_examples=6)
def test_nonsense_in_all_readings_raises_in_no_check(soups: list[str], host: str) -> None:
    made = {
        name: ProbeResult(name, "ok", "", 0.1, tuple(
            Item(item.path, "ok", soups[number % 3]) for number, item in enumerate(result.items)))
        for name, result in results(host).items()
    }  # fmt: skip
    check_all(made, HOSTS[host][1])
    check_all(made, {})


# Driver generations --------------------------------------------------------------------------------------------------

# What older drivers call what the recording (580, DTD v13) says; each must be understood, or be said to be unknown.
GENERATIONS = {
    "470, DTD v11": [
        ("clocks_event_reasons", "clocks_throttle_reasons"),
        ("clocks_event_reason_", "clocks_throttle_reason_"),
        ("gpu_power_readings", "power_readings"),
        ("instant_power_draw", "power_draw"),
        ("current_power_limit", "power_limit"),
    ],
    "525, DTD v12": [
        ("clocks_event_reasons", "clocks_throttle_reasons"),
        ("clocks_event_reason_", "clocks_throttle_reason_"),
        ("gpu_power_readings", "power_readings"),
    ],
    "535, DTD v12": [("instant_power_draw", "power_draw"), ("current_power_limit", "power_limit")],
    "580, DTD v13": [],
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_driver_generations_give_the_same_verdicts(name: str) -> None:
    text = DUMP.replace("nvsmi_device_v13.dtd", f"nvsmi_device_{name.rpartition(' ')[2]}.dtd")
    for new, old in GENERATIONS[name]:
        assert new in text, new
        text = text.replace(new, old)
    base, found = words(smi(DUMP), ENGINE), words(smi(text), ENGINE)
    changes = {id: word for id, word in found.items() if word != base[id]}
    assert changes in ({}, {"gpu.fields_understood": "unknown"})
    assert found["gpu.throttling"] == "pass"


@pytest.mark.parametrize(
    ("new", "later", "id"),
    [
        ("clocks_event_reasons", "clocks_reasons_v99", "gpu.throttling"),
        ("current_link_width", "current_width", "gpu.pcie_link"),
        ("remapped_rows", "rows_remapped", "gpu.ecc_and_remapping"),
        ("bar1_memory_usage", "bar1_usage", "gpu.bar1_minimum"),
        ("compute_mode", "mode_of_compute", "gpu.compute_mode"),
        ("persistence_mode", "persistence", "driver.persistence"),
    ],
)
def test_a_field_that_a_later_driver_renames_is_unknown_and_named(new: str, later: str, id: str) -> None:
    text = re.sub(rf"(</?){new}>", rf"\g<1>{later}>", DUMP)
    assert text != DUMP
    readings = smi(text)
    assert words(readings, ENGINE)[id] == "unknown"
    made = build_facts(readings, "snapshot")
    verdict = next(
        one for one in judge(made, merge_policy({"expected": ENGINE}), "n", checks=[ALL["gpu.fields_understood"]])
    )
    assert verdict.verdict == "unknown"
    assert "unknown field" in str(verdict.current)
    assert later in str(verdict.current)


# A system of another family ------------------------------------------------------------------------------------------


def redhat(**changed: str) -> dict[str, str]:
    """Return a Rocky Linux engine node, made by hand as docs/snapshots.md says."""
    host = {
        path: text
        for path, text in engine_node().items()
        if not path.startswith(("commands/dpkg", "commands/apt", "files/var/log/apt"))
    }
    index = json.loads(host["index.json"])
    index["probes"].update({"apt_history": "absent", "dpkg": "absent", "apt_holds": "absent", "apt_config": "absent"})
    for name in ("rpm", "dnf_versionlock", "selinux"):
        del index["probes"][name]
    packages = ("nvidia-driver 3:580.159.04-1.el9 x86_64", "nvidia-driver-cuda-libs 3:580.159.04-1.el9 x86_64",
                "kmod-nvidia-open-dkms 3:580.159.04-1.el9 noarch", "dnf-automatic 4.14-1 noarch")  # fmt: skip
    return {
        **host,
        "index.json": json.dumps(index),
        "files/etc/os-release": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"\n',
        "commands/rpm_-qa.txt": "\n".join(packages) + "\n",
        "files/etc/dnf/plugins/versionlock.list": (
            "nvidia-driver-3:580.159.04-1.el9.*\nnvidia-driver-cuda-libs-3:580.159.04-1.el9.*\n"
            "kmod-nvidia-open-dkms-3:580.159.04-1.el9.*\n"
        ),
        "files/etc/dnf/automatic.conf": "[commands]\napply_updates = yes\n",
        "files/sys/fs/selinux/enforce": "1",
        **{path.replace("__", "/"): text for path, text in changed.items()},
    }


def judged(host: dict[str, str]) -> dict[str, str]:
    verdicts = judge(facts(host), merge_policy({"expected": ENGINE}), "n", checks=ALL.values())
    return {one.id: one.verdict for one in verdicts if one.verdict not in ("pass", "not_applicable")}


def test_a_red_hat_system_is_judged_too_and_said_to_be_audited_only() -> None:
    assert judged(redhat()) == {"host.supported_os": "warn"}


@pytest.mark.parametrize(
    ("path", "text", "id", "word"),
    [
        (
            "files__etc__dnf__plugins__versionlock.list",
            "nvidia-driver-3:580.159.04-1.el9.*\n",
            "driver.packages_held",
            "fail",
        ),
        ("files__etc__dnf__automatic.conf", "[commands]\napply_updates = no\n", None, ""),
        (
            "commands__rpm_-qa.txt",
            "nvidia-driver 3:580.200.01-1.el9 x86_64\n",
            "driver.loaded_matches_installed",
            "fail",
        ),
        ("files__sys__fs__selinux__enforce", "0", "security.selinux", "warn"),
        ("files__sys__fs__selinux__enforce", "soup", "security.selinux", "unknown"),
    ],
)
def test_what_is_broken_on_a_red_hat_system(path: str, text: str, id: str | None, word: str) -> None:
    found = judged(redhat(**{path: text}))
    assert found.pop("host.supported_os") == "warn"
    assert found == ({id: word} if id else {})


def test_dnf_patterns_are_globs() -> None:
    unlocked = {
        "files__etc__dnf__plugins__versionlock.list": "\n",
        "files__etc__dnf__dnf.conf": "[main]\nexcludepkgs=*nvidia*\n",
    }
    assert judged(redhat(**unlocked)) == {"host.supported_os": "warn"}
    assert judged(redhat(**{**unlocked, "files__etc__dnf__dnf.conf": "[main]\nexcludepkgs=kernel*\n"})) == {
        "host.supported_os": "warn",
        "driver.packages_held": "fail",
    }


def test_the_snapshot_of_a_red_hat_system_that_was_made_by_hand() -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "snapshots" / "rocky-9"
    made = collect(str(folder)).facts
    assert made.problems == []
    verdicts = {one.id: one for one in judge(made, merge_policy({"expected": ENGINE}), "n", checks=ALL.values())}
    assert {id: one.verdict for id, one in verdicts.items() if one.verdict in ("fail", "warn", "pass")} == {
        "driver.minimum_version": "pass",
        "driver.loaded_matches_installed": "fail",
        "driver.packages_held": "fail",
        "numa.balancing": "fail",
        "host.supported_os": "warn",
        "security.selinux": "pass",
    }
    assert str(verdicts["driver.packages_held"].current) == "hold missing: nvidia-driver-cuda-libs"
