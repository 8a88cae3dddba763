# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduled audit as one file: a host judges itself, the monitor asks all of them, what is wrong is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.metal.serve.plugins.action.agent_bundle import AUDIT_MAIN, AUDIT_VERSION, audit_members
from ansible_collections.metal.serve.plugins.filter.audit import audit_targets
from ansible_collections.metal.serve.plugins.module_utils.checklist import scheduled
from ansible_collections.metal.serve.plugins.module_utils.telemetry.bundle import bundle

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that hosts get."""
    path = tmp_path_factory.mktemp("program") / "metalserve-audit.pyz"
    path.write_bytes(bundle(audit_members(), AUDIT_MAIN, AUDIT_VERSION)[0])
    return path


@pytest.fixture(scope="module")
def unpacked(program: Path) -> Path:
    """Return its content as a folder, which runs as the file does but keeps its bytecode between runs."""
    with zipfile.ZipFile(program) as archive:
        archive.extractall(program.parent / "unpacked")
    return program.parent / "unpacked"


def run(program: Path, *words: str | Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the file as a host does."""
    environment = {**os.environ, "PATH": path + os.environ["PATH"]}
    command = [sys.executable, "-I", "-S", str(program), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_host_judges_itself_and_publishes(program: Path, tmp_path: Path) -> None:
    settings = tmp_path / "audit.json"
    policy = {"expected": {"roles": ["engine"], "accelerator": "cpu"}}
    textfile = tmp_path / "metalserve_audit.prom"
    settings.write_text(
        json.dumps({"host": "node-a", "policy": policy, "root": "/var/lib/metalserve", "textfile": str(textfile)})
    )
    done = run(program, "node", settings)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["host"], answer["notes"]) == ("node-a", [])
    assert f'id="{answer["verdicts"][0]["id"]}"' in textfile.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        ([], "", "usage: "),
        (["host"], "", "usage: "),
        (["node"], "{", "JSONDecodeError"),
        (["node"], "{}", "KeyError"),
        (["node"], '{"host": "a", "root": "/x", "textfile": "", "policy": {"gpu": 1}}', "gpu: no such policy key"),
    ],
)
def test_settings_that_cannot_be_used(
    unpacked: Path, tmp_path: Path, words: list[str], content: str, said: str
) -> None:
    (tmp_path / "settings").write_text(content, encoding="utf-8")
    done = run(unpacked, *words, *([tmp_path / "settings"] if content else []))
    assert done.returncode == 64
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


SSH = """#!/bin/sh
for word; do last=$word; done
case "$last" in
  *@192.0.2.1) cat "$(dirname "$0")/answer.json" ;;
  *@192.0.2.2) echo "ssh: connect to host 192.0.2.2 port 22: No route to host" >&2; exit 255 ;;
  *@192.0.2.3) echo "sudo: a password is required" >&2; exit 1 ;;
  *) echo "Welcome" ;;
esac
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the monitor's settings for four hosts, behind an ssh that answers as they would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH, encoding="utf-8")
    (folder / "ssh").chmod(0o755)
    fine = {"id": "a.b", "verdict": "pass", "title": "t", "severity": "major", "current": 1, "desired": 1}
    fine.update(evidence=[], why="w", remedy="r", tags=[], source="s")
    (folder / "answer.json").write_text(json.dumps({"host": "a", "verdicts": [fine], "notes": ["n"]}), encoding="utf-8")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (tmp_path / "reports").mkdir()
    hosts = [
        {"host": name, "address": f"192.0.2.{number}", "port": 22, "strict": False}
        for number, name in enumerate("abcd", 1)
    ]
    paths = {"key": "/k", "known_hosts": "/h", "reports": str(tmp_path / "reports")}
    return {"user": "metalserve-audit", "hosts": hosts, **paths}


def test_the_monitor_asks_all_hosts_and_says_which_were_not_judged(
    fleet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert scheduled.fleet(fleet) == 2
    report = json.loads(Path(fleet["reports"], "audit.json").read_text(encoding="utf-8"))
    errors = {host["host"]: host["error"] for host in report["hosts"]}
    assert errors == {
        "a": "",
        "b": "unreachable: ssh: connect to host 192.0.2.2 port 22: No route to host",
        "c": "its audit ended with 1: sudo: a password is required",
        "d": "its answer holds no verdicts (JSONDecodeError)",
    }
    assert "4 hosts" in capsys.readouterr().out
    fleet["hosts"] = fleet["hosts"][:1]
    assert scheduled.fleet(fleet) == 0
    assert "0 new, 0 mended, 0 unchanged" in capsys.readouterr().out


def test_the_command_gives_no_password_and_trusts_no_changed_host(fleet: dict[str, Any]) -> None:
    words = scheduled.ssh_command({"address": "192.0.2.9", "port": 2222}, fleet)
    assert {"BatchMode=yes", "StrictHostKeyChecking=accept-new", "IdentitiesOnly=yes"} <= set(words)
    assert words[-3:] == ["-p", "2222", "metalserve-audit@192.0.2.9"]


def test_how_the_monitor_reaches_a_host() -> None:
    hostvars = {
        "a": {"metalserve_address": "10.0.0.1", "ansible_host": "192.0.2.1", "ansible_port": 2222},
        "b": {"metalserve_audit_strict": True},
    }
    assert audit_targets(["b", "a"], hostvars) == [
        {"host": "a", "address": "10.0.0.1", "port": 2222, "strict": False},
        {"host": "b", "address": "b", "port": 22, "strict": True},
    ]


def test_the_key_may_do_one_thing() -> None:
    tasks = {one["name"]: one for one in yaml.safe_load((ROOT / "roles/audit_timer/tasks/node.yml").read_text())}
    line = tasks["Let the monitor's key run it, and nothing else"]["ansible.builtin.copy"]["content"]
    assert line.startswith('restrict,command="sudo -n {{ __audit_timer_program }} node" ')
    assert line.count("\n") == 1
