# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The view of a redeploy comes from the events alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.release import steps
from ansible_collections.metal.serve.plugins.module_utils.release.progress import FILES, Progress, phase_of

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "roles" / "release" / "tasks"


def event(kind: str, file: str, host: str = "node-a", **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"host": host, "task_path": f"/x/roles/release/tasks/{file}:3", **data}}


def test_every_file_of_the_map_is_there() -> None:
    missing = [name for name in FILES if not (TASKS / name).exists()]
    assert not missing


def test_every_step_has_a_file_and_a_phase() -> None:
    for step in steps.ORDER:
        assert (TASKS / "steps" / f"{step}.yml").is_file()
        assert phase_of(f"/x/roles/release/tasks/steps/{step}.yml:1")
    assert {path.stem for path in (TASKS / "steps").iterdir()} == set(steps.ORDER)


def test_phases_follow_the_tasks() -> None:
    progress = Progress(100.0)
    assert progress.take(event("runner_on_start", "steps/drain.yml"), 100.0) == {
        "event": "phase",
        "host": "node-a",
        "phase": "drain",
        "back": False,
    }
    flying = {"results": [{"replicas": [{"replica": "node-a/s-0", "in_flight": 3}]}, {"replicas": []}]}
    progress.take(event("runner_on_ok", "until_drained.yml", res=flying), 104.0)
    assert progress.lines(110.0)[1].split() == ["node-a", "wait", "6s", "10s", "3"]
    assert progress.take(event("runner_on_ok", "until_drained.yml"), 111.0) is None
    assert progress.exit_code(0) == 0


def test_a_failure_after_a_drain_is_1_and_before_it_2() -> None:
    before, after = Progress(0.0), Progress(0.0)
    before.take(event("runner_on_failed", "begin.yml", task="Lock the gateways", res={"msg": "held by ada"}), 1.0)
    assert before.exit_code(2) == 2
    assert before.summary(2, 3.0)[-1] == "node-a: Lock the gateways: held by ada"
    after.take(event("runner_on_start", "steps/stop.yml"), 1.0)
    assert after.take(event("runner_on_failed", "steps/start.yml", task="Start", res={"msg": "no"}), 2.0) == {
        "event": "failed",
        "host": "node-a",
        "phase": "start",
        "task": "Start",
        "msg": "no",
    }
    after.take(event("runner_on_start", "back.yml"), 3.0)
    after.take(event("runner_on_start", "steps/start.yml"), 4.0)
    assert after.exit_code(2) == 1
    assert "start (back)" in after.lines(5.0)[1]
    assert "node-a (went back)" in after.summary(2, 9.0)[1]


def test_what_is_not_of_the_role_is_no_phase() -> None:
    assert phase_of("/x/roles/engine/tasks/look.yml:3") == ""
    assert phase_of("/x/roles/engine/tasks/lint.yml:3") == "lint"
    assert Progress(0.0).take({"event": "playbook_on_start", "event_data": {}}, 0.0) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["-i", "/nowhere"], "inventory /nowhere does not exist"), (["jump"], "invalid choice: 'jump'")],
)
def test_wrong_use_is_2(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "redeploy"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert words in done.stderr


def test_help_names_the_exit_codes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "redeploy"), "--help"], capture_output=True, text=True, check=True
    )
    assert "Exit codes: 0 all went well; 1 a node failed" in done.stdout
