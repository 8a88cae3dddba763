# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The action host_snapshot: reads on the host, writes on the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ansible_collections.metal.serve.plugins.action.host_snapshot import ActionModule

ANSWER = {
    "host_facts": {"probes": {"meminfo": {"state": "ok"}, "rpm": {"state": "absent"}, "nft": {"state": "denied"}}},
    "snapshot": {"index.json": "{}", "files/proc/meminfo": "MemTotal: 1 kB\n"},
}


def run(answer: dict[str, Any], check: bool = False, **arguments: Any) -> dict[str, Any]:
    """Run the action; the module on the host answers ``answer``."""
    task = mock.MagicMock(args=arguments, check_mode=check, diff=False, async_val=0, action="metal.serve.host_snapshot")
    connection = mock.MagicMock(_shell=mock.MagicMock(tmpdir="/tmp/none"))
    action = ActionModule(task, connection, mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), mock.MagicMock())
    with mock.patch.object(action, "_execute_module", return_value=answer) as called:
        result: dict[str, Any] = action.run(task_vars={})
    assert called.call_args.kwargs["module_args"]["return_snapshot"] is True
    return result


def test_it_is_written(tmp_path: Path) -> None:
    result = run(ANSWER, dest=str(tmp_path / "node-a"))
    assert result["changed"] is True
    assert result["files"] == 2
    assert result["states"] == {"absent": ["rpm"], "denied": ["nft"]}
    assert (tmp_path / "node-a" / "files/proc/meminfo").read_text(encoding="utf-8") == "MemTotal: 1 kB\n"


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    assert run(ANSWER, check=True, dest=str(tmp_path / "node-a"))["changed"] is True
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [{"failed": True, "msg": "no python"}, {"msg": "no python"}])
def test_a_host_that_was_not_read(tmp_path: Path, answer: dict[str, Any]) -> None:
    result = run(answer, dest=str(tmp_path / "node-a"))
    assert (result["failed"], result["msg"]) == (True, "no python")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "work.txt").write_text("x", encoding="utf-8")
    result = run(ANSWER, dest=str(tmp_path))
    assert result["failed"] is True
    assert "is no snapshot" in result["msg"]
    assert (tmp_path / "work.txt").exists()
