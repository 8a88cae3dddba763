# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A node that fails stops the run: later batches are not touched, the others of its own batch end what they began.

Case I26: ansible-core carries on under max_fail_percentage: 0 when the failure comes from a nested block under a rescue; the real
task files are run here, with steps of the test's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.release import lock

ROOT = Path(__file__).parents[3]
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}

STEP = """
- name: Note that this node was reached
  ansible.builtin.file:
    path: "{{ touched }}/{{ inventory_hostname }}{{ '.back' if __release_failed else '' }}"
    state: touch
    mode: "0644"
- name: Outer
  block:
    - name: Inner
      block:
        - name: Fail on one node
          ansible.builtin.fail: {msg: the engine is made of cheese}
          when: inventory_hostname == broken
      rescue:
        - name: A rescue that fails as well
          ansible.builtin.fail: {msg: and so is the rescue}
- name: Note that this node got to its end
  ansible.builtin.file: {path: "{{ touched }}/{{ inventory_hostname }}.done", state: touch, mode: "0644"}
"""


class Admin(BaseHTTPRequestHandler):
    """A gateway that knows no replica."""

    def do_GET(self) -> None:
        body = b'{"pools": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def admin_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Admin)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def ansible_playbook(inventory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), *arguments],
        cwd=ROOT,
        # Pipelined as over SSH: one process for a module.
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_PIPELINING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run(folder: Path, port: int, batches: list[list[str]], broken: str) -> tuple[int, str, set[str]]:
    (folder / "steps").mkdir()
    (folder / "touched").mkdir()
    (folder / "steps" / "test.yml").write_text(STEP)
    nodes = [host for batch in batches for host in batch]
    hosts: dict[str, Any] = {
        "engines": {"hosts": {node: {"release_root": str(folder / node)} for node in nodes}},
        "gateways": {"hosts": {"gateway": {}}},
    }
    inventory = {"all": {"vars": LOCAL, "children": hosts}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    tasks = {"import_role": {"name": "metal.serve.release", "tasks_from": "begin"}, "vars": {"release_kind": "test"}}
    order = {
        "add_host": {"name": "{{ item.host }}", "groups": ["{{ item.group }}"]},
        "loop": "{{ batches | metal.serve.release_members }}",
    }
    facts = {"set_fact": {"release_order": "{{ batches }}"}, "delegate_to": "localhost", "delegate_facts": True}
    plays = [
        {"hosts": "engines", "gather_facts": False, "tasks": [tasks, order, facts]},
        {
            "hosts": "{{ groups | metal.serve.release_order }}",
            "serial": "{{ groups | metal.serve.release_sizes }}",
            "gather_facts": False,
            "tasks": [{"import_role": {"name": "metal.serve.release", "tasks_from": "node"}}],
        },
    ]
    (folder / "play.yml").write_text(yaml.safe_dump(plays))
    extra = {
        "batches": batches,
        "broken": broken,
        "touched": str(folder / "touched"),
        "release_work": [{"step": "test", "replicas": [], "releases": {}}],
        "release_goals": {},
        "__release_steps": str(folder / "steps"),
        "__release_plans": [],
        "metalserve_pools": {},
        "gateway_admin_port": port,
    }
    done = ansible_playbook(folder / "hosts.yml", "-e", json.dumps(extra), str(folder / "play.yml"))
    return done.returncode, done.stdout, {path.name for path in (folder / "touched").iterdir()}


def test_a_failure_in_the_second_of_three_batches_stops_the_run(tmp_path: Path, admin_port: int) -> None:
    code, output, touched = run(tmp_path, admin_port, [["node1"], ["node2", "node3"], ["node4"]], "node2")
    assert code != 0
    # node3 ends what it began, node4 is never touched.
    assert touched == {"node1", "node1.done", "node2", "node2.back", "node3", "node3.done"}, output[-3000:]
    assert "node2: A rescue that fails as well: and so is the rescue" in output
    assert "Going back failed too" in output
    assert not list(tmp_path.glob("**/redeploy.lock")), "every lock was given back"


@pytest.mark.parametrize(("age_s", "code"), [(1.0, 2), (lock.STALE_S + 60, 0)])
def test_site_refuses_while_a_redeploy_is_at_work(tmp_path: Path, age_s: float, code: int) -> None:
    """A lock of another machine that lives stops the run with its holder's name; one without heartbeat does not."""
    now = time.time()
    holder = lock.Holder(
        "redeploy-1", "ada@desk", machine="another", pid=4711, started=now - 600, heartbeat=now - age_s
    )
    path = tmp_path / lock.NAME
    lock.write(str(path), holder)
    before = path.read_text()
    local = {**LOCAL, "ansible_become": False}
    hosts: dict[str, Any] = {"engines": {"hosts": {"node": {}}}, "gateways": {"hosts": {"gateway": {}}}}
    inventory = {"all": {"vars": {**local, "metalserve_root": str(tmp_path)}, "children": hosts}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    done = ansible_playbook(tmp_path / "hosts.yml", "--limit", "node", str(ROOT / "playbooks" / "unlocked.yml"))
    assert done.returncode == code, done.stdout
    assert ("gateway is held by ada@desk (run redeploy-1, process 4711" in done.stdout) == (code != 0), done.stdout
    assert path.read_text() == before


def begin(folder: Path, held: str) -> subprocess.CompletedProcess[str]:
    """Begin a run over gateways g1 and g2, of which another machine's live run holds ``held``; each has a folder of its own."""
    now = time.time()
    lock.write(
        str(folder / held / lock.NAME),
        lock.Holder("redeploy-1", "ada@desk", machine="another", pid=4711, started=now - 600, heartbeat=now),
    )
    hosts: dict[str, Any] = {
        "engines": {"hosts": {"node1": {}, "node2": {}}},
        "gateways": {"hosts": {"g1": {}, "g2": {}}},
    }
    # Evaluated for each gateway of the loop.
    root = f"{folder}/{{{{ item | default('node') }}}}"
    inventory = {"all": {"vars": {**LOCAL, "release_root": root}, "children": hosts}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    tasks = {"import_role": {"name": "metal.serve.release", "tasks_from": "begin"}, "vars": {"release_kind": "test"}}
    (folder / "play.yml").write_text(yaml.safe_dump([{"hosts": "engines", "gather_facts": False, "tasks": [tasks]}]))
    return ansible_playbook(folder / "hosts.yml", str(folder / "play.yml"))


def test_who_does_not_get_the_first_gateway_asks_no_other(tmp_path: Path) -> None:
    """Else two runs that begin at once could each hold a part of the gateways, and both would be refused."""
    done = begin(tmp_path, "g1")
    assert done.returncode == 2, done.stdout
    assert "g1 is held by ada@desk (run redeploy-1, process 4711" in done.stdout
    assert not (tmp_path / "g2").exists()


def test_who_does_not_get_all_gateways_keeps_none(tmp_path: Path) -> None:
    done = begin(tmp_path, "g2")
    assert done.returncode == 2, done.stdout
    assert "g2 is held by ada@desk (run redeploy-1, process 4711" in done.stdout
    assert not (tmp_path / "g1" / lock.NAME).exists()
    assert (tmp_path / "g2" / lock.NAME).exists()
