# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/audit on snapshots: standard library alone, exact JSON, exit codes, one sentence for each wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ansible_collections.metal.serve.plugins.module_utils.checklist.cli import main

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "schemas" / "verdicts.json").read_text(encoding="utf-8"))


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Return a folder with one reading: NUMA balancing is on, and there are two nodes."""
    folder = tmp_path / "node-a"
    for path, text in {
        "files/proc/sys/kernel/numa_balancing": "1\n",
        "files/sys/devices/system/node/node0/cpulist": "0-7\n",
        "files/sys/devices/system/node/node1/cpulist": "8-15\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    try:
        code = main(str(ROOT), [str(one) for one in arguments])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_it_needs_the_standard_library_alone(snapshot: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(ROOT / "scripts/audit"), "--snapshot", str(snapshot), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 2
    assert json.loads(done.stdout)["host"] == "node-a"


def test_json_is_host_and_verdicts(capsys: pytest.CaptureFixture[str], snapshot: Path) -> None:
    code, out, _err = run(capsys, "--snapshot", snapshot, "--json")
    found = json.loads(out)
    assert code == 2
    assert list(found) == ["host", "verdicts"]
    jsonschema.validate(found, SCHEMA)
    (numa,) = [one for one in found["verdicts"] if one["id"] == "numa.balancing"]
    assert (numa["verdict"], numa["waiver"]) == ("fail", None)


def test_the_table_and_the_areas(capsys: pytest.CaptureFixture[str], snapshot: Path) -> None:
    code, out, _err = run(capsys, "--snapshot", snapshot, "--tags", "numa")
    assert code == 2
    assert "numa.balancing" in out
    assert "gpu.count" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert ", 1 not fit to serve. Exit code 2" in out.splitlines()[-1]


def test_an_empty_folder_passes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _err = run(capsys, "--snapshot", tmp_path, "--json")
    assert code == 2
    assert {one["verdict"] for one in json.loads(out)["verdicts"]} <= {"unknown", "not_applicable"}


WAIVER = {"id": "numa.balancing", "reason": "measured, no difference", "until": "2999-12-31"}


@pytest.mark.parametrize(
    ("changed", "code", "waiver", "ended"),
    [
        ({}, 0, True, False),
        ({"hosts": ["node-a"]}, 0, True, False),
        ({"hosts": ["node-b"]}, 2, False, False),
        ({"until": "2020-01-01"}, 2, False, True),
    ],
)
def test_a_waiver_from_the_policy_file(
    capsys: pytest.CaptureFixture[str], snapshot: Path, changed: dict[str, Any], code: int, waiver: bool, ended: bool
) -> None:
    (snapshot / "files/proc/sys/vm").mkdir()
    (snapshot / "files/proc/sys/vm/swappiness").write_text("1\n", encoding="utf-8")
    policy = snapshot.parent / "policy.json"
    policy.write_text(json.dumps({"waivers": [{**WAIVER, **changed}]}), encoding="utf-8")
    got, out, _err = run(capsys, "--snapshot", snapshot, "--policy", policy, "--tags", "numa", "--json")
    (numa,) = [one for one in json.loads(out)["verdicts"] if one["id"] == "numa.balancing"]
    assert got == code
    assert (numa["verdict"], numa["waiver"] is not None, numa["ended_waiver"] is not None) == ("fail", waiver, ended)


def test_a_policy_in_yaml_changes_a_threshold(capsys: pytest.CaptureFixture[str], snapshot: Path) -> None:
    policy = snapshot.parent / "policy.yml"
    policy.write_text("# ours\nnuma_balancing: 1\nexpected:\n  roles: [engine]\n", encoding="utf-8")
    _code, out, _err = run(capsys, "--snapshot", snapshot, "--policy", policy, "--tags", "numa", "--json")
    words = {one["id"]: one["verdict"] for one in json.loads(out)["verdicts"]}
    assert words["numa.balancing"] == "pass"


@pytest.mark.parametrize(
    ("arguments", "policy", "said"),
    [
        (("--snapshot", "/no/such/folder"), None, "/no/such/folder is no folder"),
        (("--snapshot", "."), "", "holds no mapping of policy keys"),
        (("--snapshot", "."), "[1]", "holds no mapping of policy keys"),
        (("--snapshot", "."), '{"waivers": [], "waivers": []}', "waivers stands in it twice"),
        (("--snapshot", "."), "{", "is not JSON: "),
        (("--snapshot", "."), "a: &b 1", "is not the simple YAML that is read here"),
        (
            ("--snapshot", "."),
            "driver_minimun: '1'",
            "driver_minimun: no such policy key; did you mean driver_minimum?",
        ),
        (
            ("--snapshot", "."),
            "waivers:\n  - {id: gpu.cuont, reason: r, until: 2027-01-31}",
            "waivers[0].id: there is no check 'gpu.cuont'; did you mean gpu.count?",
        ),
        (
            ("--snapshot", "."),
            "waivers:\n  - {id: gpu.count, reason: r, until: 31.1.2027}",
            "waivers[0].until: '31.1.2027' is not a date such as 2027-01-31",
        ),
        (("--snapshot", "."), '{"tls_days_minimum": NaN}', "tls_days_minimum: nan is not a number from 0"),
        (("--snapshot", "."), "driver_minimum: new", "driver_minimum: 'new' is not a text with a version"),
        (("--snapshot", ".", "--tags", "gpuu"), None, "no area 'gpuu' of checks; did you mean gpu?"),
        (("--snapshot", ".", "--limit", "a"), None, "--limit belongs to -i."),
        (("--snapshot", ".", "-l", "a"), None, "--limit belongs to -i."),
        (("-i", "hosts.yml", "--host", "a"), None, "--host belongs to --snapshot."),
        (("-i", "/no/such/inventory"), None, "-i /no/such/inventory: there is no such inventory."),
        (("--snapshot", ".", "-i", "x"), None, "not allowed with argument"),
        ((), None, "one of the arguments --snapshot -i/--inventory --list is required"),
    ],
)
def test_wrong_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], policy: str | None, said: str
) -> None:
    more: list[str | Path] = []
    if policy is not None:
        path = tmp_path / "policy"
        path.write_text(policy, encoding="utf-8")
        more = ["--policy", path]
    code, out, err = run(capsys, *arguments, *more)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_every_check_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _err = run(capsys, "--list", "--tags", "numa")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["numa.balancing", "numa.container_cpus"]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (None, "When this was read is not said"),
        ("2020-01-01T00:00:00Z", "It was read at 2020-01-01T00:00:00Z, "),
        ("2999-01-01T00:00:00Z", "which is still to come"),
        ("soon", "When this was read is not said"),
    ],
)
def test_an_old_snapshot_says_how_old_it_is(
    capsys: pytest.CaptureFixture[str], snapshot: Path, at: str | None, said: str
) -> None:
    (snapshot / "index.json").write_text(json.dumps({"collected_at": at} if at else {}), encoding="utf-8")
    _code, out, _err = run(capsys, "--snapshot", snapshot)
    assert said in " ".join(out.split())
    (snapshot / "index.json").write_text(
        json.dumps({"collected_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}), encoding="utf-8"
    )
    _code, out, _err = run(capsys, "--snapshot", snapshot)
    assert "note " not in out
