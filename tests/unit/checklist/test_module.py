# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The module host_audit as Ansible calls it: one answer, nothing written but the textfile that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.modules import host_audit


def call(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    """Run the module and return its answer."""
    with patch_module_args(arguments), pytest.raises(SystemExit):
        host_audit.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_this_machine_is_judged_and_nothing_large_travels(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, host="node-a", policy={"expected": {"accelerator": "cpu"}})
    assert (answer["changed"], answer["host"], answer["notes"]) == (False, "node-a", [])
    words = {one["id"]: one["verdict"] for one in answer["verdicts"]}
    assert words["gpu.count"] == "not_applicable"
    assert sum(answer["counts"].values()) == len(words)
    assert not {"host_facts", "snapshot"} & set(answer)


def test_facts_and_snapshot_come_when_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = call(capsys, from_snapshot=str(tmp_path), return_facts=True, return_snapshot=True)
    assert answer["host_facts"]["source"] == "snapshot"
    assert "index.json" in answer["snapshot"]


def test_the_textfile_is_written_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "audit.prom"
    answer = call(capsys, from_snapshot=str(tmp_path), textfile=str(path))
    assert answer["changed"] is True
    samples = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("metalserve_check{")]
    assert len(samples) == len(answer["verdicts"])
    assert [one.name for one in tmp_path.iterdir()] == ["audit.prom"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"_ansible_check_mode": True}, ""),
        ({"areas": ["gpu"]}, "Not published: only gpu was judged."),
        ({"textfile": "/no/such/folder/audit.prom"}, "Not published: /no/such/folder is not there"),
        ({"textfile": "/proc/audit.prom"}, "Not published: /proc/audit.prom could not be written"),
    ],
)
def test_nothing_is_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    answer = call(capsys, **{"from_snapshot": str(tmp_path), "textfile": str(tmp_path / "audit.prom"), **more})
    assert answer["changed"] is False
    assert not list(tmp_path.iterdir())
    assert said in " ".join(answer["notes"])
    assert len(answer["notes"]) == bool(said)
    assert answer["verdicts"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"policy": {"bar1_minimum": 1}}, "bar1_minimum: no such policy key; did you mean bar1_minimum_mib?"),
        ({"areas": ["gpus"]}, "no area 'gpus' of checks; did you mean gpu?"),
        ({"timeout": 0}, "timeout: 0 is out of range"),
        ({"from_snapshot": "/no/such/folder"}, "/no/such/folder is no folder"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], said: str) -> None:
    answer = call(capsys, **arguments)
    assert answer["failed"] is True
    assert said in answer["msg"]
