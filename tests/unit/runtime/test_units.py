# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What an interrupted run left with new files and old settings is found, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.runtime import units

ROOT = Path(__file__).parents[3]
NOW, MONOTONIC = 1_790_000_000.0, 5_000.0
STARTED_S = 4_000.0  # on the monotonic clock, so 1,000 s ago
SHOWN = """ActiveState=active
NeedDaemonReload=no
StateChangeTimestampMonotonic=4000000000

ActiveState=inactive
NeedDaemonReload=yes
StateChangeTimestampMonotonic=0
"""


def test_blocks_are_the_units_in_order() -> None:
    shown = units.parse_show(SHOWN, ["a.service", "b.service"])
    assert shown["a.service"]["ActiveState"] == "active"
    assert units.outdated(shown) == ["b.service"]


@pytest.mark.parametrize("text", ["", SHOWN + "\nActiveState=active\n"])
def test_another_number_of_blocks_is_no_answer(text: str) -> None:
    with pytest.raises(ValueError, match="instead of 2"):
        units.parse_show(text, ["a.service", "b.service"])


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (NOW - 1_001, []),  # before the start
        (NOW - 999, ["a.service"]),  # after it
        (0.0, []),  # no file
    ],
)
def test_a_file_that_is_newer_than_the_start(written: float, found: list[str]) -> None:
    shown = units.parse_show(SHOWN, ["a.service", "b.service"])
    # The second unit does not run: it reads its files when it starts.
    assert units.behind(shown, {"a.service": written, "b.service": NOW}, NOW, MONOTONIC) == found


def test_a_clock_that_was_set_forward_does_not_matter() -> None:
    """At a boot the clock may be years behind until the network is there; files keep their old times."""
    shown = units.parse_show(SHOWN, ["a.service", "b.service"])
    assert units.behind(shown, {"a.service": NOW - 86_400}, NOW, MONOTONIC) == []


@pytest.mark.parametrize(("age_s", "behind"), [(2.0, []), (-0.5, ["a.service"])])
def test_the_module_asks_systemd(tmp_path: Path, age_s: float, behind: list[str]) -> None:
    """With a systemctl of the test's own, on the machine's own clocks."""
    moment = time.clock_gettime(time.CLOCK_MONOTONIC)
    file = tmp_path / "settings"
    file.write_text("x")
    os.utime(file, (time.time() - age_s, time.time() - age_s))
    (tmp_path / "systemctl").write_text(
        f"#!/bin/sh\nprintf 'ActiveState=active\\nNeedDaemonReload=yes\\nStateChangeTimestampMonotonic={int(moment * 1e6)}\\n'\n"
    )
    (tmp_path / "systemctl").chmod(0o755)
    arguments = {"ANSIBLE_MODULE_ARGS": {"units": {"a.service": [str(file), str(tmp_path / "none")]}}}
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.metal.serve.plugins.modules.unit_behind", json.dumps(arguments)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "collections")},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["behind"] == behind
    assert answer["outdated"] == ["a.service"]
    assert answer["changed"] is False
