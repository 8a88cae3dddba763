# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/demo and the shell functions it shares with scripts/test."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def shell(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after the shared functions, in ``folder``, as from a terminal: whoever runs the tests in the background has
    them ignore Ctrl-C."""
    return subprocess.run(
        [
            "env",
            "--default-signal=INT",
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"source '{ROOT}/scripts/lib/common.sh'; {code}",
            "demo",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_help_says_what_it_does_and_how_to_undo_it() -> None:
    result = subprocess.run([ROOT / "scripts/demo", "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--down" in result.stdout


def test_unknown_option_is_named_in_one_line() -> None:
    result = subprocess.run([ROOT / "scripts/demo", "--dwon"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "scripts/demo: '--dwon' is no option; see scripts/demo --help\n"


@pytest.mark.parametrize(
    ("system", "lines", "words"),
    [
        ("debian 13", "", ""),
        ("ubuntu 24.04", "", ""),
        ("ubuntu 22.04", 'lab_network_prefix: "172.30.77"', "docs/lab.md"),
        ("ubuntu 22.04", "lab_suite: noble", ""),
        ("fedora 44", "lab_suite: noble", "this machine runs 'fedora 44'"),
    ],
)
def test_a_system_that_cannot_have_a_lab_is_told_before_anything_is_made(
    system: str, lines: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "inventory/lab/group_vars/all"
    folder.mkdir(parents=True)
    (folder / "lab.yml").write_text(f"---\n{lines}\n")
    result = shell(f"unfit_for_lab '{system}'", tmp_path)
    assert result.returncode == 0
    assert (words in result.stdout) if words else result.stdout == ""


def test_failed_step_keeps_its_exit_code_and_log(tmp_path: Path) -> None:
    code = "step Title logs/x.log bash -c 'echo reason; exit 3' || { echo code $?; die 'it went wrong' logs/x.log; }"
    result = shell(code, tmp_path)
    assert result.returncode == 1
    assert "FAILED" in result.stdout
    assert "code 3" in result.stdout
    assert "demo: it went wrong\n" in result.stderr
    assert "reason" in result.stderr
    assert f"{tmp_path}/logs/x.log" in result.stderr


def test_interrupted_step_ends_its_command_and_says_how_to_go_on(tmp_path: Path) -> None:
    code = "step Title x.log bash -c 'echo $$ >pid; sleep 60' & until [ -s pid ]; do sleep 0.1; done; "
    code += "kill -TERM $!; wait $!"
    result = shell(code, tmp_path)
    assert result.returncode == 130
    assert "run it again to go on" in result.stderr
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_unchanged_lock_installs_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text("x==1\n")
    bin_folder = tmp_path / ".venv/bin"
    bin_folder.mkdir(parents=True)
    python = bin_folder / "python"
    python.write_text('#!/bin/sh\ncase $1 in -c) exit 0 ;; *) echo "$@" >>calls; exit 0 ;; esac\n')
    python.chmod(0o755)
    stamp = tmp_path / ".venv/.metalserve-locks"
    stamp.write_text(f"some.lock {hashlib.sha256(lock.read_bytes()).hexdigest()}\n")
    assert shell("install_python_dependencies some.lock", tmp_path).returncode == 0
    assert not (tmp_path / "calls").exists()
    lock.write_text("x==2\n")
    assert shell("install_python_dependencies some.lock", tmp_path).returncode == 0
    assert "--require-hashes -r some.lock" in (tmp_path / "calls").read_text()
    assert stamp.read_text() == f"some.lock {hashlib.sha256(lock.read_bytes()).hexdigest()}\n"


def test_no_python_is_said_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "some.lock").write_text("x==1\n")
    result = shell("find_python() { return 1; }; install_python_dependencies some.lock", tmp_path)
    assert result.returncode == 1
    assert "no Python 3.12 or newer" in result.stderr
    assert "python3.12-venv" in result.stderr
    assert not (tmp_path / ".venv").exists()


def ask_module() -> ModuleType:
    """scripts/lib/ask.py as a module."""
    spec = importlib.util.spec_from_file_location("ask", ROOT / "scripts/lib/ask.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_events_end_at_done_and_skip_comments() -> None:
    lines = [b": keep-alive\n", b'data: {"a": 1}\n', b"\n", b"data: [DONE]\n", b'data: {"a": 2}\n']
    assert list(ask_module().events(lines)) == [{"a": 1}]


@pytest.mark.parametrize("name", ["demo", "lib/common.sh"])
def test_shell_parses(name: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / "scripts" / name], check=False).returncode == 0
