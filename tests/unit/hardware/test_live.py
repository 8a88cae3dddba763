# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a live machine: every reading bounded in time and size, every fault a state."""

from __future__ import annotations

import http.server
import os
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.hardware import live, parse_system, probes_host
from ansible_collections.metal.serve.plugins.module_utils.hardware.build import build_facts
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect_live, run_probe
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import Item, Probe, command_path, summarise
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES, choose


def program(folder: Path, name: str, text: str) -> LiveHost:
    """Return a host whose only program is the shell script name."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return LiveHost(search_path=f"{folder}:/usr/bin:/bin")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "a.conf").write_bytes(b"one\xff\x00two")
    host = LiveHost(root=str(tmp_path))
    assert host.file("/etc/a.conf").text == "one\ufffd\ntwo"
    assert host.file("/etc/b.conf").state == "absent"
    assert host.file("/etc/a.conf/c").state == "absent"
    assert host.file("/etc").state == "error"
    os.mkfifo(tmp_path / "etc" / "pipe")
    assert host.file("/etc/pipe").state == "error"
    assert [(item.path, item.state) for item in host.files("/etc/*.conf", "/etc/*.none", "/none/*")] == [
        ("files/etc/a.conf", "ok"),
        ("files/etc/*.none", "absent"),
        ("files/none/*", "absent"),
    ]


def test_large_files_are_cut_and_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 5000 + b"end")
    host = LiveHost(root=str(tmp_path))
    item = host.file("/big", 100)
    assert (item.state, len(item.text)) == ("error", 100)
    assert host.file("/big", 100, tail=True).text.endswith("xend")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_denied(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    (tmp_path / "secret").chmod(0)
    assert LiveHost(root=str(tmp_path)).file("/secret").state == "denied"


def test_states_of_errors() -> None:
    assert live.state_of(PermissionError(13, "x")) == "denied"
    assert live.state_of(OSError(5, "x")) == "error"
    assert live.state_of(TimeoutError()) == "timeout"
    assert live.state_of(FileNotFoundError(2, "x")) == "absent"


def test_commands(tmp_path: Path) -> None:
    host = program(tmp_path, "tool", 'echo out; echo "err: $1" >&2; exit "$2"\n')
    item = host.command(["tool", "a", "0"])
    assert (item.state, item.text, item.path) == ("ok", "out\n", command_path(["tool", "a", "0"]))
    assert host.command(["tool", "a", "0"], both=True).text == "out\nerr: a\n"
    failed = host.command(["tool", "b", "3"])
    assert (failed.state, failed.text) == ("error", "out\n")
    assert failed.error == "tool b 3: exit code 3: err: b"
    assert host.command(["tool", "b", "3"], codes=(0, 3)).state == "ok"
    assert host.command(["no-such-tool"]).state == "error"
    assert host.command(["no-such-tool"], missing="absent").state == "absent"
    denied = program(tmp_path, "nft", "echo 'Operation not permitted (you must be root)' >&2; exit 1\n")
    assert denied.command(["nft"]).state == "denied"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    host = program(tmp_path, "slow", f"sleep 60 & echo $! > {marker}; echo begun; wait\n")
    began = time.monotonic()
    item = host.command(["slow"], timeout=0.5)
    assert time.monotonic() - began < 3
    assert (item.state, item.text) == ("timeout", "begun\n")
    child = int(marker.read_text(encoding="utf-8"))
    for _try in range(50):
        if not os.path.exists(f"/proc/{child}") or " Z " in Path(f"/proc/{child}/stat").read_text(encoding="utf-8"):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of a command that was stopped still runs")


def test_a_command_that_floods_is_stopped(tmp_path: Path) -> None:
    host = program(tmp_path, "flood", "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done\n")
    item = host.command(["flood"], timeout=10, limit=10_000)
    assert (item.state, len(item.text)) == ("error", 10_000)
    assert "more than 10000 bytes" in item.error


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers of a daemon, good and bad."""

    def do_GET(self) -> None:
        if self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _byte in range(100):
                try:
                    self.wfile.write(b"x")
                    self.wfile.flush()
                except OSError:
                    return
                time.sleep(0.05)
            return
        code = {"/ok": 200, "/denied": 403, "/gone": 404, "/broken": 500}[self.path]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b'{"a": 1}')

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class UnixServer(socketserver.ThreadingUnixStreamServer):
    """HTTP on a unix socket."""

    daemon_threads = True

    def get_request(self) -> tuple[object, tuple[str, int]]:  # type: ignore[override]
        request, _address = super().get_request()
        return request, ("local", 0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveHost]:
    """A host whose Docker socket answers."""
    path = str(tmp_path / "docker.sock")
    server = UnixServer(path, Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield LiveHost(docker_socket=path)
    server.shutdown()
    server.server_close()


def test_docker_socket(daemon: LiveHost) -> None:
    assert daemon.docker("/ok", "docker/x.json") == Item("docker/x.json", "ok", '{"a": 1}')
    assert daemon.docker("/denied", "x").state == "denied"
    assert daemon.docker("/gone", "x").state == "absent"
    assert daemon.docker("/broken", "x").state == "error"
    assert daemon.docker("/drip", "x", timeout=0.4).state == "timeout"


def test_no_docker_and_a_dead_one(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    assert LiveHost(docker_socket=nowhere, search_path="/nowhere").docker("/ok", "x").state == "absent"
    installed = program(tmp_path, "dockerd", "exit 0\n")
    installed.docker_socket = nowhere
    assert installed.docker("/ok", "x").state == "error"
    left = socket.socket(socket.AF_UNIX)
    left.bind(nowhere)  # a socket that a dead daemon left behind: nobody listens
    assert installed.docker("/ok", "x").state == "error"
    left.close()


def test_swap_limits_need_a_memory_controller(tmp_path: Path) -> None:
    (swap,) = [one for one in PROBES if one.name == "cgroup_swap"]
    host = LiveHost(root=str(tmp_path))
    assert run_probe(swap, host).state == "not_collected"
    group = tmp_path / "sys/fs/cgroup/system.slice"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n", encoding="utf-8")
    assert run_probe(swap, host).state == "absent"
    (group / "memory.swap.max").write_text("max\n", encoding="utf-8")
    assert run_probe(swap, host).state == "ok"


def test_a_missing_tool_is_not_a_missing_thing(tmp_path: Path) -> None:
    """Without ss, nft, systemctl or dmesg nothing is known; only where the program is the thing it is absent."""
    host = LiveHost(root=str(tmp_path), search_path="/nowhere", docker_socket=str(tmp_path / "none"))
    results = {one.name: run_probe(one, host) for one in PROBES if not one.second_round}
    for name in (
        "sockets",
        "nft",
        "systemd_units",
        "systemd_defaults",
        "kernel_log",
        "lspci",
        "modinfo_nvidia",
        "virtualization",
    ):
        assert results[name].state == "error", name
    for name in ("nvidia_smi", "nvidia_topology", "dpkg", "rpm", "nginx", "docker_client", "docker_version", "chrony"):
        assert results[name].state == "absent", name


def test_a_missing_nvidia_smi_hides_no_gpu(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2335"), ("numa_node", "0")):
        (device / name).write_text(text + "\n", encoding="utf-8")
    host = LiveHost(root=str(tmp_path), search_path="/nowhere")
    facts = build_facts(collect_live(choose(["gpu", "pci"]), 20, host), "live")
    assert facts.gpus is None
    assert [one.address for one in facts.pci.gpus or []] == ["0000:3b:00.0"]
    (device / "class").write_text("0x020000\n", encoding="utf-8")
    facts = build_facts(collect_live(choose(["gpu", "pci"]), 20, host), "live")
    assert facts.gpus == []
    assert facts.pci.gpus == []


def probe(name: str, seconds: float = 0.0, fails: bool = False, timeout: float = 0.3) -> Probe:
    """A probe that takes some time, or raises."""

    def read(_host: LiveHost) -> list[Item]:
        time.sleep(seconds)
        if fails:
            raise RuntimeError("no sense in this")
        return [Item(f"files/{name}", "ok", name)]

    return Probe(name, "test", (f"files/{name}",), read, timeout)


def test_a_dead_probe_costs_its_own_facts_only() -> None:
    probes = [probe("hangs", 30), probe("raises", fails=True), *(probe(f"good{number}") for number in range(40))]
    probes += [probe(f"hangs{number}", 30) for number in range(15)]
    began = time.monotonic()
    results = collect_live(probes, timeout=10)
    assert time.monotonic() - began < 8
    assert results["hangs"].state == "timeout"
    assert results["raises"].state == "error"
    assert results["raises"].error == "RuntimeError: no sense in this"
    assert {results[f"good{number}"].state for number in range(40)} == {"ok"}
    assert results["nvidia_smi"].state == "not_collected"


def test_the_whole_is_bounded() -> None:
    began = time.monotonic()
    results = collect_live([probe(f"slow{number}", 5, timeout=60) for number in range(30)], timeout=0.5)
    assert time.monotonic() - began < 3
    assert {results[f"slow{number}"].state for number in range(30)} == {"timeout"}


def test_summaries() -> None:
    good, gone, denied = Item("a", "ok", "x"), Item("b", "absent"), Item("c", "denied", "", "c: Permission denied")
    assert summarise("n", [good, gone]).state == "ok"
    assert summarise("n", [gone]).state == "absent"
    assert summarise("n", []).state == "absent"
    assert summarise("n", [good, denied, gone]).state == "denied"
    assert summarise("n", [good, denied, gone]).error == "c: Permission denied"
    assert run_probe(probe("x"), LiveHost()).texts() == {"files/x": "x"}


@pytest.mark.parametrize(("hours_ago", "older"), [(1, True), (-1, False)])
def test_a_login_is_as_old_as_its_sshd(tmp_path: Path, hours_ago: int, older: bool) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    begun = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 3600 * hours_ago) * hertz)
    (tmp_path / "proc/40").mkdir(parents=True)
    fields = "40 (sshd: a) b) S 1 " + "0 " * 17 + f"{begun} 0 0\n"
    (tmp_path / "proc/40/stat").write_text(fields, encoding="utf-8")
    (tmp_path / "etc/security/limits.d").mkdir(parents=True)
    conf = tmp_path / "etc/security/limits.d/a.conf"
    conf.write_text("* - nofile 1\n", encoding="utf-8")
    os.utime(conf, (1, 1))  # as after mv of an old copy: its content is new here all the same
    item = probes_host._session_times(LiveHost(root=str(tmp_path)), 40)
    assert parse_system.parse_session_times(item.text) is older


def test_a_login_whose_age_is_not_known_says_so(tmp_path: Path) -> None:
    assert probes_host._session_times(LiveHost(root=str(tmp_path)), 40).state == "not_collected"


def test_of_sshd_only_what_concerns_limits_is_kept(tmp_path: Path) -> None:
    (tmp_path / "etc/ssh").mkdir(parents=True)
    (tmp_path / "etc/ssh/sshd_config").write_text("AllowUsers someone\n  usepam yes\nMatch User x\n", encoding="utf-8")
    items = {item.path: item for item in probes_host._session_pam(LiveHost(root=str(tmp_path)))}
    assert items["files/etc/ssh/sshd_config"].text == "  usepam yes\n"
    assert items["files/etc/pam.d/sshd"].state == "absent"


def test_the_limits_of_a_login_are_those_of_its_sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # sshd (9) > sshd of the login (40) > sudo (50) > this
    for pid, parent, name in ((os.getpid(), 50, "python3"), (50, 40, "sudo"), (40, 9, "sshd"), (9, 1, "sshd")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/stat").write_text(f"{pid} ({name}) S {parent} 0", encoding="utf-8")
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n", encoding="utf-8")
        (tmp_path / f"proc/{pid}/limits").write_text(f"limits of {pid}\n", encoding="utf-8")
    items = {item.path: item.text for item in probes_host._session_limits(LiveHost(root=str(tmp_path)))}
    assert items["processes/session/limits"] == "limits of 40\n"
