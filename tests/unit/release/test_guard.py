# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Before a start: GPUs free, model as it arrived, patience after failures; as a module and as the file on nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.common import files
from ansible_collections.metal.serve.plugins.module_utils.models import manifest
from ansible_collections.metal.serve.plugins.module_utils.release import guard, tool
from tests.unit.models.helpers import SHARDS, flip_byte, model_folder

GPU0, GPU1 = (f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(2))


class Machine:
    """Answers the programs that the guard runs."""

    def __init__(self, processes: Sequence[str] = (), running: str = "false", restarts: str = "0") -> None:
        self.processes = list(processes)
        self.running = running
        self.restarts = restarts
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> tuple[int, str]:
        self.asked.append(" ".join(argv))
        if argv[0] == "docker":
            return (1, "No such container") if self.running == "" else (0, self.running)
        if argv[0] == "systemctl":
            return 0, self.restarts
        if "--query-gpu=uuid" in argv:
            return 0, f"{GPU0}\n{GPU1}"
        return 0, self.processes.pop(0) if self.processes else ""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "models" / "m" / "r1")
    manifest.save(f"{folder}.manifest.json", manifest.build(str(folder), "m", "r1"))
    release = tmp_path / "engines" / "short-0" / "current"
    release.mkdir(parents=True)
    document = {
        "container_name": "metalserve-short-0-ab",
        "gpus": [GPU0],
        "model_path": str(folder),
        "manifest_path": f"{folder}.manifest.json",
    }
    (release / "release.json").write_text(json.dumps(document))
    return tmp_path


def start(root: Path, machine: Machine) -> str:
    return guard.before_start("short-0", str(root), str(root / "run"), machine)


def test_all_well(root: Path) -> None:
    assert start(root, Machine()).endswith("5 files as they arrived, 0 of them hashed again")


def test_foreign_process_is_named_and_not_killed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "GPU_FREE_S", 0.0)
    pid = os.getpid()
    machine = Machine([f"{GPU0}, {pid}, 22000 MiB, VLLM::EngineCore"])
    with pytest.raises(guard.GuardError, match=rf"process {pid} \(.*python.*\) holds 22000 MiB of {GPU0}"):
        start(root, machine)
    assert not [words for words in machine.asked if "kill" in words]


def test_process_on_another_gpu_is_no_obstacle(root: Path) -> None:
    start(root, Machine([f"{GPU1}, 1, 22000 MiB, other"]))


def test_memory_that_is_being_given_back_is_waited_for() -> None:
    slept: list[float] = []
    machine = Machine([f"{GPU0}, 999999, 1 MiB, dying", f"{GPU0}, 999999, 1 MiB, dying", ""])
    guard.check_gpus([GPU0], machine, 45.0, slept.append)
    assert slept == [3.0, 3.0]


def test_missing_gpu_is_named(root: Path) -> None:
    with pytest.raises(guard.GuardError, match="has no such GPU"):
        guard.check_gpus(["GPU-9"], Machine(), 0.0, lambda _s: None)


def test_no_driver_is_no_pass() -> None:
    with pytest.raises(guard.GuardError, match="nvidia-smi is not installed"):
        guard.check_gpus([GPU0], lambda argv: (127, f"{argv[0]} is not installed"), 0.0, lambda _s: None)


def test_unreadable_process_list_is_no_pass() -> None:
    with pytest.raises(guard.GuardError, match="cannot be read"):
        guard.parse_gpu_processes(f"{GPU0}, [N/A], [N/A]")


def test_cpu_replica_asks_no_driver(root: Path) -> None:
    release = root / "engines" / "short-0" / "current" / "release.json"
    release.write_text(json.dumps({**json.loads(release.read_text()), "gpus": []}))
    machine = Machine()
    start(root, machine)
    assert not [words for words in machine.asked if words.startswith("nvidia-smi")]


def test_changed_model_is_refused(root: Path) -> None:
    flip_byte(root / "models" / "m" / "r1" / SHARDS[0], 99)
    with pytest.raises(guard.GuardError, match=f"{SHARDS[0]}: its content changed"):
        start(root, Machine())


def test_unsealed_model_is_refused(root: Path) -> None:
    os.unlink(root / "models" / "m" / "r1.manifest.json")
    with pytest.raises(guard.GuardError, match="was never completed"):
        start(root, Machine())


def test_touched_model_is_hashed_once(root: Path) -> None:
    os.utime(root / "models" / "m" / "r1" / "config.json")
    assert start(root, Machine()).endswith("1 of them hashed again")
    assert start(root, Machine()).endswith("0 of them hashed again")


def test_living_engine_is_taken_hold_of_again(root: Path) -> None:
    machine = Machine([f"{GPU0}, 1, 22000 MiB, its own"], running="true")
    assert start(root, machine) == "metalserve-short-0-ab is running already"


def test_missing_container_says_what_to_do(root: Path) -> None:
    with pytest.raises(guard.GuardError, match=r"run site\.yml"):
        start(root, Machine(running=""))


def test_failures_wait_longer_each_time() -> None:
    starts: list[float] = []
    now, delays = 1000.0, []
    for _ in range(9):
        delay, starts = guard.backoff(starts, now)
        delays.append(delay)
        now += delay + 30
    assert delays == [0, 0, 10, 20, 40, 80, 160, 300, 300]
    assert guard.backoff(starts, now + guard.STEADY_S)[0] == 0.0, "it served long enough to start at once"


@given(st.lists(st.floats(0, 1e6), max_size=30), st.floats(0, 1e6))
def test_wait_is_bounded_whatever_is_remembered(starts: list[float], now: float) -> None:
    delay, remembered = guard.backoff(starts, now)
    assert 0.0 <= delay <= guard.LONGEST_DELAY_S
    assert len(remembered) <= 13


def test_start_that_somebody_asked_for_never_waits(tmp_path: Path) -> None:
    slept: list[float] = []
    (tmp_path / "short-0.starts").write_text(json.dumps([100.0, 110.0, 120.0]))
    guard.wait_after_failures("short-0", str(tmp_path), Machine(restarts="0"), 130.0, slept.append)
    assert slept == []
    (tmp_path / "short-0.starts").write_text(json.dumps([100.0, 110.0, 120.0]))
    guard.wait_after_failures("short-0", str(tmp_path), Machine(restarts="3"), 130.0, slept.append)
    assert slept == [20.0]


@pytest.mark.parametrize("text", ["", "{", "[null]", '"x"'])
def test_damaged_memory_of_starts_is_forgotten(tmp_path: Path, text: str) -> None:
    (tmp_path / "short-0.starts").write_text(text)
    guard.wait_after_failures("short-0", str(tmp_path), Machine(restarts="1"), 130.0, lambda _s: None)


def test_file_that_nodes_run(tmp_path: Path) -> None:
    archive = tool.archive([files, manifest], guard)
    assert archive == tool.archive([files, manifest], guard)
    path = tmp_path / "engine-guard.pyz"
    path.write_bytes(archive)
    done = subprocess.run(
        [sys.executable, "-I", str(path), "before-start", "short-0", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("short-0 must not start: ")
    assert "no release of short-0 was ever put on this node" in done.stderr
    wrong = subprocess.run([sys.executable, "-I", str(path)], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Traceback" not in done.stderr + wrong.stderr
