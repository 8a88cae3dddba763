# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The watchdog kills what hangs, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.common import files
from ansible_collections.metal.serve.plugins.module_utils.models import manifest
from ansible_collections.metal.serve.plugins.module_utils.release import guard, tool, watchdog
from ansible_collections.metal.serve.plugins.module_utils.release.watchdog import Look, Memory, Watchdog, reason

WEDGED_S = 10.0
NAMES = {"running": "e:running", "waiting": "e:waiting", "progress": "e:steps"}


def after(looks: Sequence[tuple[float, Look]]) -> Memory:
    memory = Memory()
    for now, look in looks:
        memory = memory.take(look, now)
    return memory


def test_an_engine_that_starts_may_be_silent() -> None:
    memory = after([(now, Look(False)) for now in (0.0, 300.0, 900.0)])
    assert reason(memory, 900.0, WEDGED_S, idle=True) == ""


def test_silence_counts_at_once_only_where_nothing_moves() -> None:
    memory = after([(100.0, Look(True, 3, 7)), (103.0, Look(False))])
    assert reason(memory, 108.0, WEDGED_S, idle=True) == ""
    assert reason(memory, 109.0, WEDGED_S, idle=False) == ""
    assert "has not answered for 9 s and its processes stand still" in reason(memory, 109.0, WEDGED_S, idle=True)
    assert "has not answered for 120 s" in reason(memory, 220.0, WEDGED_S, idle=False)


def test_stuck_is_work_without_a_step() -> None:
    stuck = after([(now, Look(True, 2, 7)) for now in (100.0, 110.0, 120.0)])
    assert "no step for 20 s" in reason(stuck, 120.0, WEDGED_S, idle=False)
    assert reason(stuck, 120.0, WEDGED_S * 1.1, idle=False) == ""
    stepping = after([(now, Look(True, 2, now)) for now in (100.0, 110.0, 900.0)])
    assert reason(stepping, 900.0, WEDGED_S, idle=False) == ""
    unused = after([(now, Look(True, 0, 7)) for now in (100.0, 110.0, 900.0)])
    assert reason(unused, 900.0, WEDGED_S, idle=False) == ""
    # Work that came after a long rest begins its own time.
    late = after([(100.0, Look(True, 0, 7)), (900.0, Look(True, 0, 7)), (903.0, Look(True, 1, 7))])
    assert reason(late, 910.0, WEDGED_S, idle=False) == ""
    silent_kind = after([(now, Look(True, 0, None)) for now in (100.0, 900.0)])
    assert reason(silent_kind, 900.0, WEDGED_S, idle=False) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("e:steps 3", 3),
        ('e:steps{a="x y"} 3\ne:steps{a="b"} 4', 7),
        ("e:steps_total 3", None),
        ("e:steps x", 0.0),
        ("", None),
    ],
)
def test_a_metric_is_summed(text: str, value: float | None) -> None:
    assert watchdog.counted(text, "e:steps") == (value if text != "e:steps x" else None)
    assert watchdog.counted(text, "") is None


class Node:
    """systemctl and docker of a node with one engine, whose process is a real one of this machine."""

    def __init__(self, pid: int, unit: str = "active", age_s: float = 600.0) -> None:
        self.pid, self.unit, self.age_s = pid, unit, age_s
        self.killed: list[str] = []

    def __call__(self, argv: Sequence[str]) -> tuple[int, str]:
        if argv[0] == "systemctl":
            return (0 if self.unit == "active" else 3), self.unit
        if argv[1] == "kill":
            self.killed.append(argv[-1])
            return 0, ""
        begun = datetime.now(timezone.utc) - timedelta(seconds=self.age_s)
        return 0, f"{self.pid} {begun:%Y-%m-%dT%H:%M:%S}.123456789Z"


@pytest.fixture
def stopped_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.kill(process.pid, signal.SIGSTOP)
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "engines" / "short-0" / "current"
    folder.mkdir(parents=True)
    release = {
        "container_name": "metalserve-short-0-ab",
        "address": "127.0.0.1",
        "health": {"metrics": "/metrics", "metrics_port": 9},
        "metrics": NAMES,
        "plan": {"times": {"wedged_after_s": WEDGED_S}},
    }
    (folder / "release.json").write_text(json.dumps(release))
    return tmp_path


def watched(root: Path, node: Node, monkeypatch: pytest.MonkeyPatch, silent_s: float = 10.0) -> dict[str, str]:
    """Return what is killed of an engine that answered once and then no more."""
    dog = Watchdog(str(root), node, pause=0.01)
    monkeypatch.setattr(watchdog, "look_at", lambda _release: Look(True, 1, 7))
    assert dog.watch(100.0) == {}
    monkeypatch.setattr(watchdog, "look_at", lambda _release: Look(False))
    return dog.watch(100.0 + silent_s)


def test_a_stopped_engine_is_killed(root: Path, stopped_process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(stopped_process)
    assert "stand still" in watched(root, node, monkeypatch)["short-0"]
    assert node.killed == ["metalserve-short-0-ab"]


@pytest.mark.parametrize("case", ["out", "changing", "stopping", "started since", "busy", "brief"])
def test_others_are_left_alone(root: Path, stopped_process: int, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    node = Node(stopped_process)
    if case in ("out", "changing"):
        (root / "engines" / "short-0" / f"{'rotation' if case == 'out' else 'redeploy'}.json").write_text("{}")
    if case == "stopping":
        node.unit = "deactivating"
    if case == "started since":
        node.age_s = 4.0
    if case == "busy":
        monkeypatch.setattr(Watchdog, "stands_still", lambda *_: False)
    assert watched(root, node, monkeypatch, silent_s=6.0 if case == "brief" else 10.0) == {}
    assert node.killed == []


def test_processes_below_count_too() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        ends = time.monotonic() + 20
        while watchdog.processes(process.pid)[0] < 0.3:
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert not watchdog.processes(process.pid)[1]
        os.killpg(process.pid, signal.SIGSTOP)
        while not watchdog.processes(process.pid)[1]:
            assert time.monotonic() < ends
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_file_that_nodes_run(tmp_path: Path) -> None:
    path = tmp_path / "engine-watchdog.pyz"
    path.write_bytes(tool.archive([files, manifest, guard], watchdog))
    wrong = subprocess.run([sys.executable, "-I", str(path), "a", "b"], check=False, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (2, "usage: engine-watchdog [ROOT]\n")
