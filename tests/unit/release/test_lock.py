# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A live lock refuses, a left one is taken over, and nobody gives back what is not his."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.action import release_lock as action
from ansible_collections.metal.serve.plugins.module_utils.release import lock
from ansible_collections.metal.serve.plugins.module_utils.release.lock import Holder
from ansible_collections.metal.serve.plugins.modules import release_lock as module

A = Holder("redeploy-a", "ada@desk", "m1", "b1", 100, 5000)
B = Holder("redeploy-b", "bob@laptop", "m2", "b9", 200, 7000)
NOW = 1_790_000_000.0


def at(folder: Path) -> str:
    return str(folder / "sub" / lock.NAME)


def test_a_free_lock_is_taken_and_a_live_one_refused(tmp_path: Path) -> None:
    assert lock.hold(at(tmp_path), A, NOW, False) == ("take", None)
    verdict, holder = lock.hold(at(tmp_path), B, NOW + 119, False)
    assert verdict == "refuse"
    assert holder is not None
    assert lock.refusal(holder, "gateway-1") == (
        "gateway-1 is held by ada@desk (run redeploy-a, process 100) since 2026-09-21T14:13:20Z"
    )


def test_a_lock_without_heartbeat_is_taken_over(tmp_path: Path) -> None:
    lock.hold(at(tmp_path), A, NOW, False)
    assert lock.renew(at(tmp_path), A.run, "drain", NOW + 100)
    assert lock.hold(at(tmp_path), B, NOW + 219, False)[0] == "refuse"
    verdict, before = lock.hold(at(tmp_path), B, NOW + 221, False)
    assert (verdict, before and before.phase) == ("take over", "drain")
    assert not lock.renew(at(tmp_path), A.run, "stop", NOW + 222)
    assert not lock.give_back(at(tmp_path), A.run)
    assert lock.give_back(at(tmp_path), B.run)
    assert lock.read(at(tmp_path)) is None


def test_renewing_keeps_the_start(tmp_path: Path) -> None:
    lock.hold(at(tmp_path), A, NOW, False)
    assert lock.hold(at(tmp_path), A, NOW + 50, False)[0] == "renew"
    found = lock.read(at(tmp_path))
    assert found is not None
    assert (found.started, found.heartbeat) == (NOW, NOW + 50)


def test_a_process_is_gone_only_where_that_can_be_known() -> None:
    here = replace(B, machine="m1", boot="b1")
    assert not lock.gone(A, here, {100: 5000})
    assert lock.gone(A, here, {})
    assert lock.gone(A, here, {100: 6000}), "the number was given to another process"
    assert lock.gone(A, replace(here, boot="b2"), {100: 5000}), "the machine was booted since"
    assert not lock.gone(A, B, {}), "another machine's processes are not seen from here"
    assert not lock.gone(replace(A, machine=""), replace(B, machine=""), {})


def test_same_host_and_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    lock.hold(at(tmp_path), A, NOW, False)
    assert lock.hold(at(tmp_path), B, NOW + 1, True)[0] == "take over"


def test_a_clock_that_was_set_back_does_not_make_a_lock_old(tmp_path: Path) -> None:
    lock.hold(at(tmp_path), A, NOW, False)
    assert lock.hold(at(tmp_path), B, NOW - 10_000, False)[0] == "refuse"


@given(st.text(max_size=60))
def test_a_file_that_is_no_lock_is_said(text: str) -> None:
    with pytest.raises(lock.LockError, match="is not a lock"):
        lock.parse(text, "/x")


@given(
    holder=st.one_of(st.none(), st.sampled_from([A, B])),
    age=st.floats(0, 1000),
    gone=st.booleans(),
)
def test_two_live_runs_never_hold_it_both(holder: Holder | None, age: float, gone: bool) -> None:
    verdict = lock.judge(holder, B, age, gone)
    live = holder is not None and holder.run != B.run and age <= lock.STALE_S and not gone
    assert (verdict == "refuse") == live


def asked(run: str, **more: object) -> dict[str, object]:
    return {
        "run": run,
        "by": "ada@desk",
        "machine": "m1",
        "boot": "b1",
        "pid": 100,
        "pid_started": 5000,
        "phase": "prefetch",
        "replaces": "",
        **more,
    }


def test_the_module_refuses_until_the_holders_process_is_known_to_be_gone(tmp_path: Path) -> None:
    path = at(tmp_path)
    assert module.held(path, asked("redeploy-a"), False)["verdict"] == "take"
    refused = module.held(path, asked("redeploy-b"), False)
    assert (refused["verdict"], refused["changed"], refused["holder"]["run"]) == ("refuse", False, "redeploy-a")
    # A check asks and takes nothing.
    assert module.held(path, asked("redeploy-b", replaces="redeploy-a"), True)["verdict"] == "take over"
    assert module.held(path, asked("redeploy-a"), False)["verdict"] == "renew"
    taken = module.held(path, asked("redeploy-b", replaces="redeploy-a"), False)
    assert (taken["verdict"], taken["holder"]["run"]) == ("take over", "redeploy-a")
    assert module.held(path, asked("redeploy-a"), False)["verdict"] == "refuse"


def test_the_action_knows_its_own_process_and_that_an_ended_one_is_gone() -> None:
    mine = action.me("redeploy-a")
    assert mine.pid == os.getppid()
    assert mine.pid_started == action.started_of(os.getppid()) > 0
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert action.started_of(ended.pid) == 0
    holder = replace(mine, run="redeploy-z", pid=ended.pid, pid_started=1)
    assert lock.gone(holder, mine, {ended.pid: action.started_of(ended.pid)})
    assert not lock.gone(mine, mine, {mine.pid: action.started_of(mine.pid)})
