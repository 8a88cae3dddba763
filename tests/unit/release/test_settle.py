# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The step that closes a change: it waits until the gateways have seen the engine run again, also where a person keeps it out."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.release import lock, state
from tests.unit.release.test_role import LOCAL, ansible_playbook

OLD, NEW = "a" * 64, "b" * 64
RUN = "redeploy-1"


class Admin(BaseHTTPRequestHandler):
    """A gateway with one replica that ada took out, and whose engine it found dead until now."""

    looks = 0

    def do_GET(self) -> None:
        Admin.looks += 1
        healthy = Admin.looks > 3
        replica = {
            "replica": "node/short-0",
            "address": "127.0.0.1:1",
            "in_flight": 0,
            "desired": {"in": False, "by": "ada@desk", "run": "drain-1", "since": 1},
            "observed": {"healthy": healthy, "reason": "" if healthy else "refused"},
        }
        body = json.dumps({"pools": [{"pool": "short", "replicas": [replica]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Admin)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_a_gateway_that_has_not_looked_yet_is_waited_for(tmp_path: Path, port: int) -> None:
    replica = state.Replica(str(tmp_path), "short-0")
    for release in (OLD, NEW):
        os.makedirs(replica.release(release))
        Path(replica.release(release), state.RELEASE_FILE).write_text('{"content": {}}')
    state.activate(replica, OLD, keep_previous=False)
    state.open_change(replica, NEW, RUN, time.time())
    lock.write(str(tmp_path / lock.NAME), lock.Holder(RUN, "ada@desk", heartbeat=time.time()))
    hosts: dict[str, object] = {"engines": {"hosts": {"node": {}}}, "gateways": {"hosts": {"g1": {}}}}
    variables = {**LOCAL, "release_root": str(tmp_path), "gateway_admin_port": port}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": variables, "children": hosts}}))
    tasks = {"import_role": {"name": "metal.serve.release", "tasks_from": "steps/settle"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "engines", "gather_facts": False, "tasks": [tasks]}]))
    extra = {
        "release_run": RUN,
        "release_soak_s": 0,
        "__release_emergency": False,
        "__release_failed": False,
        "__release_step": {"step": "settle", "replicas": ["short-0"], "releases": {}},
    }
    done = ansible_playbook(tmp_path / "hosts.yml", "-e", json.dumps(extra), str(tmp_path / "play.yml"))
    assert done.returncode == 0, done.stdout
    assert not os.path.exists(replica.record)
