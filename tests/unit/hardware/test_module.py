# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The module host_facts as Ansible calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.modules import host_facts

from .helpers import write


def call(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    """Run the module and return its answer."""
    with patch_module_args(arguments), pytest.raises(SystemExit):
        host_facts.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_live(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, subset=["numa", "memory"])
    assert answer["changed"] is False
    facts = answer["host_facts"]
    assert facts["memory"]["total_kib"] > 0
    assert facts["probes"]["nvidia_smi"]["state"] == "not_collected"


def test_snapshot_is_written_returned_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "s"
    checked = call(capsys, subset=["memory"], snapshot_dir=str(target), _ansible_check_mode=True)
    assert checked["changed"] is True
    assert not target.exists()
    made = call(capsys, subset=["memory"], snapshot_dir=str(target), return_snapshot=True)
    assert (target / "files/proc/meminfo").read_text(encoding="utf-8") == made["snapshot"]["files/proc/meminfo"]
    read = call(capsys, subset=["all"], from_snapshot=str(target))
    assert read["changed"] is False
    assert read["host_facts"]["memory"] == made["host_facts"]["memory"]
    assert read["host_facts"]["source"] == "snapshot"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"subset": ["gpus"]}, "subset: 'gpus' is no group of facts"),
        ({"timeout": 0}, "timeout: 0 is out of range"),
        ({"timeout": 1e9}, "timeout: 1e+09 is out of range"),
        ({"from_snapshot": "/no/such/folder"}, "/no/such/folder is no folder"),
        ({"from_snapshot": "/a", "snapshot_dir": "/b"}, "a snapshot is read or made, not both"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], words: str) -> None:
    answer = call(capsys, **arguments)
    assert answer["failed"] is True
    assert words in answer["msg"]
    assert "Traceback" not in answer["msg"]


def test_a_foreign_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", {"work.txt": "x"})
    answer = call(capsys, subset=["memory"], snapshot_dir=str(folder))
    assert answer["failed"] is True
    assert "is no snapshot" in answer["msg"]
    assert (folder / "work.txt").exists()
