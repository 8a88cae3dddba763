# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The disk of the virtual machine: what a killed build leaves mounted is never removed with it."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "molecule/metal/machine.py"
SPEC = importlib.util.spec_from_file_location("metal_machine", SOURCE)
assert SPEC is not None
assert SPEC.loader is not None
machine = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(machine)


def test_what_is_mounted_survives_the_folder(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "disk.new"
    (precious / "inner").mkdir(parents=True)
    (precious / "inner" / "file").write_text("of this machine")
    for point in ("root/proc", "root/proc-of-another"):
        (folder / point).mkdir(parents=True)
    if subprocess.run(["mount", "--bind", precious, folder / "root/proc"], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here: not root")
    machine.remove(folder)
    assert not folder.exists()
    assert (precious / "inner" / "file").read_text() == "of this machine"


def test_what_cannot_be_unmounted_stops_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk.new" / "file").mkdir(parents=True)
    mounts = f"1 2 0:1 / {tmp_path}/disk.new/root/sys ro - sysfs sysfs ro\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda _: mounts)
    with pytest.raises(SystemExit, match="root/sys is still mounted"):
        machine.remove(tmp_path / "disk.new")
    assert (tmp_path / "disk.new" / "file").exists()
