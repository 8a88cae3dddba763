# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration is replaced whole, after nginx has accepted it, or not at all."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.module_utils.gateway import tree as nginx
from ansible_collections.metal.serve.plugins.module_utils.gateway.tree import Tree
from ansible_collections.metal.serve.plugins.modules import nginx_probe, nginx_tree

MAIN = "pid {root}/pid;\nerror_log {root}/log;\nevents {{}}\nhttp {{ include metalserve/current/http.conf; }}\n"
HTTP = 'server { listen 127.0.0.1:1; include metalserve/current/keys.conf; return 200 "@metalserve_release@"; }\n'
KEYS = 'if ($http_authorization = "very-secret-key") { return 204; }\n'


class Machine:
    """A folder that stands for /etc/nginx, with nginx itself and a systemctl that notes what it is asked."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "nginx"
        self.root.mkdir()
        self.calls = root / "calls"
        self.active, self.running = False, ""
        tools = root / "bin"
        tools.mkdir()
        words = "2026/11/30 16:43:45 [emerg] 7#7: bind() to 0.0.0.0:443 failed (98: Address already in use)"
        self.error_log = root / "error.log"
        self.error_log.write_text("2026/11/30 16:43:44 [emerg] 7#7: an older one\n")
        (tools / "systemctl").write_text(
            f'#!/bin/sh\necho "$1" >> {self.calls}\n'
            f'test "$1" = reload && echo "{words}" >> {self.error_log}\ntest -e {root}/active\n'
        )
        (tools / "systemctl").chmod(0o755)
        self._active_file = root / "active"
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        monkeypatch.setattr(nginx_tree, "running_release", lambda _url: self.running)

    def start(self, running: str) -> None:
        """Let the unit be active, with a loaded release."""
        self._active_file.touch()
        self.running = running

    def run(self, check: bool = False, **changes: Any) -> dict[str, Any]:
        """Run the module; return what it says."""
        params = {
            "root": str(self.root),
            "main": MAIN.format(root=self.root),
            "files": {"http.conf": HTTP},
            "secret_files": {"keys.conf": KEYS},
            "status_url": "http://127.0.0.1:1/release",
            "nginx": "/usr/sbin/nginx",
            "error_log": str(self.error_log),
            "wait": 0,
            "_ansible_check_mode": check,
            "_ansible_diff": True,
            **changes,
        }
        said = io.StringIO()
        with patch_module_args(params), redirect_stdout(said), pytest.raises(SystemExit):
            nginx_tree.main()
        result: dict[str, Any] = json.loads(said.getvalue())
        return result

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Return every path with its kind, content and time."""
        found: dict[str, tuple[Any, ...]] = {}
        for path in sorted(self.root.rglob("*")):
            if path.name in ("pid", "log"):
                continue
            if path.is_symlink():
                found[str(path)] = ("link", os.readlink(path))
            elif path.is_file():
                found[str(path)] = (path.read_bytes(), path.stat().st_mtime_ns)
        return found

    def reloads(self) -> int:
        """Return how often a reload was asked for."""
        return self.calls.read_text().split().count("reload") if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_first_run_writes_everything_and_the_second_nothing(machine: Machine) -> None:
    first = machine.run()
    assert first["changed"]
    current = machine.root / "metalserve" / "current"
    assert os.readlink(current) == f"releases/{first['release']}"
    assert f'"{first["release"]}"' in (current / "http.conf").read_text()
    assert stat.S_IMODE((current / "keys.conf").stat().st_mode) == 0o600
    assert not list(machine.root.glob(".metalserve-*")), "the private copy was left behind"
    before = machine.snapshot()
    assert not machine.run()["changed"]
    assert machine.snapshot() == before
    assert machine.reloads() == 0


def test_a_check_names_the_files_that_the_run_then_makes(machine: Machine) -> None:
    checked = machine.run(check=True)
    assert checked["changed"]
    assert not machine.snapshot()
    machine.run()
    made = {path for path in machine.snapshot() if not path.startswith(".")}
    assert {diff["after_header"] for diff in checked["diff"]} == made
    assert not machine.run(check=True)["changed"]


def test_copied_files_do_not_decide_the_folder_but_the_identity(machine: Machine, tmp_path: Path) -> None:
    source = tmp_path / "server.crt"
    checked = machine.run(check=True, copied_files={"tls/server.crt": str(source)})
    assert str(source) in {diff["after_header"] for diff in checked["diff"]}
    missing = machine.run(copied_files={"tls/server.crt": str(source)})
    assert missing["failed"]
    assert str(source) in missing["msg"]
    source.write_text("one")
    first = machine.run(copied_files={"tls/server.crt": str(source)})
    assert first["release"] == checked["release"]
    identity = (machine.root / "metalserve/current/http.conf").read_text().split('"')[1]
    assert identity.startswith(first["release"] + "-")
    source.write_text("renewed")
    assert machine.run(copied_files={"tls/server.crt": str(source)})["changed"]
    assert (machine.root / "metalserve/current/tls/server.crt").read_text() == "renewed"
    assert identity not in (machine.root / "metalserve/current/http.conf").read_text()


def test_what_nginx_refuses_changes_nothing_and_its_line_is_told(machine: Machine) -> None:
    machine.run()
    before = machine.snapshot()
    said = machine.run(files={"http.conf": "server { listen 127.0.0.1:1; }\nlisten_on 5;\n"})
    assert said["failed"]
    assert (
        f'unknown directive "listen_on" in {machine.root}/metalserve/current/http.conf:2: listen_on 5;' in said["msg"]
    )
    assert machine.snapshot() == before
    assert machine.reloads() == 0


def test_a_trial_that_fails_refuses_the_tree(machine: Machine) -> None:
    trial = "daemon off;\nmaster_process off;\nevents {}\nhttp { include missing.conf; }\n"
    said = machine.run(files={"http.conf": HTTP, "lua/trial.conf": trial}, trials=["lua/trial.conf"])
    assert said["failed"]
    assert "missing.conf" in said["msg"]
    assert not machine.snapshot()


def test_what_lua_says_on_two_lines_is_told_on_one() -> None:
    output = "nginx: [error] init_by_lua error: error loading module 'x' from file '/a/b.lua':\n\t/a/b.lua:1: odd\n"
    said = nginx.explain(output, "/a", "/etc/nginx", Tree(b"", {}))
    assert said == (
        "[error] init_by_lua error: error loading module 'x' from file '/etc/nginx/b.lua': /etc/nginx/b.lua:1: odd"
    )


def test_code_is_told_where_it_lies(machine: Machine) -> None:
    files = {"http.conf": HTTP, "lua/code.conf": "# @metalserve_tree@\n"}
    said = machine.run(files=files)
    folder = machine.root / "metalserve" / "releases" / said["release"]
    assert (folder / "lua" / "code.conf").read_text() == f"# {folder}\n"
    assert not machine.run(files=files)["changed"]


def test_a_refused_secret_is_not_repeated(machine: Machine) -> None:
    said = machine.run(secret_files={"keys.conf": "very-secret-key another;\n"})
    assert said["failed"]
    assert "very-secret-key" not in json.dumps(said)
    assert "keys.conf:1, a file with secrets" in said["msg"]


def test_secrets_are_in_no_difference(machine: Machine) -> None:
    assert "very-secret-key" not in json.dumps(machine.run(check=True))
    machine.run()
    said = machine.run(secret_files={"keys.conf": KEYS.replace("very-secret-key", "next-secret-key")})
    assert said["changed"]
    assert "metalserve/current/keys.conf" in said["written"]
    assert "secret-key" not in json.dumps(said)


@pytest.mark.parametrize("broken", ["nginx.conf", "metalserve/current/http.conf", "metalserve/current/keys.conf"])
def test_a_file_broken_by_hand_is_put_back(machine: Machine, broken: str) -> None:
    machine.run()
    good = {path: value[0] for path, value in machine.snapshot().items()}
    (machine.root / broken).write_text("broken {")
    assert machine.run(check=True)["changed"]
    assert machine.run()["changed"]
    assert {path: value[0] for path, value in machine.snapshot().items()} == good


def test_added_removed_and_opened_files_are_put_right(machine: Machine) -> None:
    machine.run()
    current = machine.root / "metalserve" / "current"
    (current / "extra.conf").write_text("")
    assert machine.run()["changed"]
    assert not (current / "extra.conf").exists()
    (current / "http.conf").unlink()
    assert machine.run()["changed"]
    assert (current / "http.conf").exists()
    (current / "keys.conf").chmod(0o644)
    assert machine.run()["changed"]
    assert stat.S_IMODE((current / "keys.conf").stat().st_mode) == 0o600
    (machine.root / "metalserve" / "current").unlink()
    assert machine.run()["changed"]
    assert (current / "http.conf").exists()


def test_a_run_that_was_cut_off_before_the_reload_is_completed(machine: Machine) -> None:
    release = machine.run()["release"]
    machine.start(running="an-older-one")
    assert machine.run(check=True)["changed"]
    assert machine.reloads() == 0
    machine.run()
    assert machine.reloads() == 1
    machine.start(running=release)
    assert not machine.run()["changed"]
    assert machine.reloads() == 1


def test_a_tree_that_is_not_taken_over_is_taken_back(machine: Machine) -> None:
    first = machine.run()
    machine.start(running=first["release"])
    before = {path: value[0] for path, value in machine.snapshot().items()}
    said = machine.run(files={"http.conf": HTTP.replace("127.0.0.1:1", "127.0.0.1:2")})
    assert said["failed"]
    assert "did not take it over (bind() to 0.0.0.0:443 failed (98: Address already in use))" in said["msg"]
    after = {path: value[0] for path, value in machine.snapshot().items()}
    assert {path: value for path, value in after.items() if path in before} == before
    assert nginx.current_release(str(machine.root)) == first["release"]


def test_old_releases_are_pruned(machine: Machine) -> None:
    for port in range(1, 7):
        machine.run(files={"http.conf": HTTP.replace("127.0.0.1:1", f"127.0.0.1:{port}")}, keep=3)
    kept = os.listdir(machine.root / "metalserve" / "releases")
    assert len(kept) == 3
    assert nginx.current_release(str(machine.root)) in kept


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", ".hidden", "a//b", ""])
def test_names_stay_below_the_tree(machine: Machine, name: str) -> None:
    said = machine.run(files={name: "", "http.conf": HTTP})
    assert said["failed"]
    assert "must be relative" in said["msg"]


def test_a_folder_in_the_links_place_is_named(machine: Machine) -> None:
    (machine.root / "metalserve" / "current").mkdir(parents=True)
    said = machine.run()
    assert said["failed"]
    assert "it must be a link" in said["msg"]


def test_the_hash_depends_on_names_and_contents_alone() -> None:
    one = Tree(b"m", {"a": b"1", "b": b"2"})
    assert one.release == Tree(b"m", {"b": b"2", "a": b"1"}).release
    others = [
        Tree(b"n", {"a": b"1", "b": b"2"}),
        Tree(b"m", {"a": b"2", "b": b"1"}),
        Tree(b"m", {"a": b"1", "c": b"2"}),
        Tree(b"m", {"a": b"1"}),
    ]
    assert one.release not in {other.release for other in others}


def test_versions_are_read_from_both_programs() -> None:
    version = subprocess.run(["/usr/sbin/nginx", "-v"], capture_output=True, text=True, check=True).stderr
    assert nginx_probe.parse_version(version).count(".") == 2
    assert nginx_probe.parse_version("nginx-light:\n  Installed: (none)\n  Candidate: 1.22.1-9+deb12u9\n") == "1.22.1"
    assert nginx_probe.parse_version("  Candidate: 1:1.26.3-3\n") == "1.26.3"
    assert nginx_probe.parse_version("  Candidate: (none)\n") == ""


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nID=debian\n', True),
        ('ID=debian\nVERSION_ID="13"\n', True),
        ('ID=debian\nVERSION_ID="11"\n', False),
        ('VERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n', True),
        ('ID=ubuntu\nVERSION_ID="22.04"\n', False),
        ('ID="rhel"\nVERSION_ID="9.4"\n', False),
        ("ID=debian\n", False),
        ("", False),
    ],
)
def test_lua_is_used_where_the_distribution_has_a_matching_module(text: str, fits: bool) -> None:
    assert nginx_probe.lua_fits(text) is fits
