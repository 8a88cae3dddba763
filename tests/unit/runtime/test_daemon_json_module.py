# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The module around the merge: files, modes, check mode, words for a person."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.modules import daemon_json


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dockerd runs and none is asked to validate, whatever this machine has."""
    monkeypatch.setattr(daemon_json, "_daemon", lambda: (0, 0.0))
    monkeypatch.setattr(daemon_json, "_validate", lambda module, text: None)


def call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: bool = False, fails: bool = False, **arguments: Any
) -> dict[str, Any]:
    arguments = {"path": str(tmp_path / "docker/daemon.json"), "state_path": str(tmp_path / "lib/state"), **arguments}
    if check:
        arguments["_ansible_check_mode"] = True
    with patch_module_args(arguments), pytest.raises(SystemExit) as ended:
        daemon_json.main()
    assert bool(ended.value.code) == fails
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


WANTED: dict[str, Any] = {"settings": {"live-restore": True}, "log_rotation": {"max_size": "100m", "max_file": 3}}


def test_check_mode_tells_both_files_and_writes_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = call(tmp_path, capsys, check=True, **WANTED)
    assert result["changed"]
    assert [item["after_header"] for item in result["diff"]] == [
        str(tmp_path / "docker/daemon.json"),
        str(tmp_path / "lib/state"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_real_run_writes_what_check_mode_told_and_the_next_one_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = call(tmp_path, capsys, check=True, **WANTED)
    call(tmp_path, capsys, **WANTED)
    file, state = tmp_path / "docker/daemon.json", tmp_path / "lib/state"
    assert [file.read_text(), state.read_text()] == [item["after"] for item in told["diff"]]
    before = (file.read_bytes(), file.stat().st_mtime_ns, state.stat().st_mtime_ns)
    assert not call(tmp_path, capsys, **WANTED)["changed"]
    assert (file.read_bytes(), file.stat().st_mtime_ns, state.stat().st_mtime_ns) == before


def test_a_file_that_has_it_all_keeps_its_bytes_and_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "docker/daemon.json"
    file.parent.mkdir()
    file.write_text('{"log-driver":"json-file", "log-opts":{"max-size":"5m","max-file":"1"},\n"live-restore":true}')
    before = file.read_bytes()
    result = call(tmp_path, capsys, **WANTED)
    assert not result["changed"]
    assert result["kept"] == ["log-opts.max-file", "log-opts.max-size"]
    assert file.read_bytes() == before
    file.chmod(0o600)
    call(tmp_path, capsys, settings={"debug": True})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = tmp_path / "real.json"
    real.write_text("{}")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/daemon.json").symlink_to(real)
    call(tmp_path, capsys, **WANTED)
    assert (tmp_path / "docker/daemon.json").is_symlink()
    assert json.loads(real.read_text())["live-restore"] is True


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"live-restore": tru}', "line 1, column 18"), (b"\xff{}", "not UTF-8"), (b"[1]", "a JSON list")],
)
def test_a_broken_file_is_refused_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    file = tmp_path / "docker/daemon.json"
    file.parent.mkdir()
    file.write_bytes(content)
    result = call(tmp_path, capsys, fails=True, **WANTED)
    assert words in result["msg"]
    assert str(file) in result["msg"]
    assert file.read_bytes() == content
    assert not (tmp_path / "lib").exists()


def test_a_flag_of_the_running_daemon_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = call(tmp_path, capsys, fails=True, command=["dockerd", "--log-driver", "journald"], **WANTED)
    assert "flags for log-driver" in result["msg"]
    assert not (tmp_path / "docker/daemon.json").exists()


def test_what_waits_for_a_restart_is_told_until_dockerd_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(daemon_json, "_daemon", lambda: (4711, 1.0))
    monkeypatch.setattr("os.kill", lambda pid, number: signals.append(pid))
    first = call(tmp_path, capsys, **WANTED)
    assert first["reloaded"] == ["live-restore"]
    assert first["restart_for"] == ["log-driver", "log-opts"]
    assert signals == [4711]
    again = call(tmp_path, capsys, **WANTED)
    assert (again["changed"], again["restart_for"]) == (False, ["log-driver", "log-opts"])
    assert signals == [4711]
    monkeypatch.setattr(daemon_json, "_daemon", lambda: (4712, 1e12))
    assert call(tmp_path, capsys, **WANTED)["restart_for"] == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docker").write_text("a file where a folder should be")
    result = call(tmp_path, capsys, fails=True, **WANTED)
    assert "cannot be" in result["msg"]
    assert str(tmp_path / "docker") in result["msg"]
