#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_rotation
short_description: See and change which replicas a gateway sends requests to
version_added: 0.1.0
description:
  - Asks the gateway's own admin endpoint on the loopback address. A change needs no reload and is in force with the
    answer; the gateway keeps it on its disk.
  - Runs on a gateway in mode lua.
options:
  state:
    description:
      - V(read) says what is there, with the KV cache of each engine that answers.
      - V(out) wants the replicas out, V(in) wants them in.
      - V(drained) waits until nothing of this gateway is in flight on them.
      - V(healthy) waits until the gateway finds them healthy.
      - V(steady) watches for O(wait) seconds that they stay healthy, and reports those that did not.
    type: str
    choices: [read, out, in, drained, healthy, steady]
    required: true
  replicas:
    description: Replicas as C(host/replica); of those that the gateway does not know nothing is wanted.
    type: list
    elements: str
    default: []
  run:
    description: Id of the run that asks.
    type: str
    default: ''
  by:
    description: Who asks, for those who look at it later.
    type: str
    default: metalserve
  wait:
    description: Seconds that V(drained) and V(healthy) wait before they report what is left.
    type: int
    default: 5
  phase:
    description: Phase to write into the lock of this run, whose heartbeat is renewed.
    type: str
    default: ''
  root:
    description: Folder of everything this bundle keeps on a host.
    type: path
    default: /var/lib/metalserve
  port:
    description: Port of the admin endpoint.
    type: int
    default: 8081
  textfile_dir:
    description: Folder of the node exporter's textfile collector; where it exists, what is out is written there for an alert.
    type: path
    default: /var/lib/prometheus/node-exporter
  engines:
    description: Engine kind by pool, to read the engines' own metrics.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Changes nothing in check mode and waits for nothing.
    support: full
  diff_mode:
    description: Shows which replicas change.
    support: full
  action:
    description: A gateway that cannot be reached fails the task.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Take a replica out
  metal.serve.gateway_rotation:
    state: out
    replicas: [node-a/short-0]
    run: drain-20260921T141320Z-1f2e
    by: ada@desk
"""

RETURN = r"""
replicas:
  description: >-
    What the gateway says of each replica: replica, pool, in, by, run, since, healthy, reason, in_flight, address, kv_usage.
  returned: always
  type: list
  elements: dict
waiting:
  description: Replicas that are not yet, or not any more, as they should be, with what is in flight or why they are ill.
  returned: always
  type: list
  elements: str
config:
  description: What C(nginx -t) says of the configuration on the disk where it is broken, for V(read); else empty.
  returned: always
  type: str
"""

import http.client
import json
import os
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic
from ansible_collections.metal.serve.plugins.module_utils.engines import ready
from ansible_collections.metal.serve.plugins.module_utils.release import lock, rotation
from ansible_collections.metal.serve.plugins.module_utils.telemetry.aggregate import KV_USAGE, engine_load
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import ScrapeError, parse_scrape


class GatewayError(Exception):
    """The gateway cannot be asked; one sentence."""


def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the admin endpoint's answer. Raises GatewayError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise GatewayError(f"the gateway's admin endpoint 127.0.0.1:{port} does not answer: {error}") from None
    finally:
        connection.close()
    if response.status == 404 and path == "/state":
        raise GatewayError(
            "this gateway runs in mode plain, which has no rotation; set gateway_mode to lua and run the tag gateway, "
            "or go by hand: docs/operations.md, Without a rotation"
        )
    if response.status != 200:
        raise GatewayError(f"the gateway answers {response.status} to {path}: {text.strip()[:300]}")
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def entries(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat entry per replica of ``GET /state``."""
    found = []
    for pool in answer.get("pools") or []:
        # An empty table of Lua comes as an object.
        for item in pool.get("replicas") or []:
            desired, observed = item["desired"], item["observed"]
            found.append(
                {
                    "replica": str(item["replica"]),
                    "pool": str(pool["pool"]),
                    "in": bool(desired["in"]),
                    "by": str(desired.get("by") or ""),
                    "run": str(desired.get("run") or ""),
                    "since": desired.get("since"),
                    "healthy": bool(observed["healthy"]),
                    "reason": str(observed.get("reason") or ""),
                    "in_flight": int(item["in_flight"]),
                    "address": str(item["address"]),
                    "kv_usage": None,
                }
            )
    return found


def add_kv_usage(replicas: list[dict[str, Any]], kinds: dict[str, Any]) -> None:
    """Ask the engines themselves how full their caches are; what does not answer stays unknown."""
    for item in replicas:
        kind = str(kinds.get(item["pool"], ""))
        if kind not in KV_USAGE or not item["healthy"]:
            continue
        host, _colon, port = item["address"].rpartition(":")
        answer = ready.ask(host.strip("[]"), int(port), "/metrics", timeout=2.0)
        try:
            item["kv_usage"] = engine_load([parse_scrape(answer.body)], kind).kv_usage if answer.status == 200 else None
        except ScrapeError:
            item["kv_usage"] = None


class Run:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.wanted = set(self.p["replicas"])

    def look(self) -> list[dict[str, Any]]:
        """Return what the gateway says of the replicas that are asked for, of all where none is named."""
        found = entries(ask(self.p["port"], "GET", "/state"))
        return [item for item in found if item["replica"] in self.wanted] if self.wanted else found

    def read(self) -> dict[str, Any]:
        """Return what is there."""
        found = self.look()
        self.publish()
        add_kv_usage(found, self.p["engines"])
        return {"replicas": found, "config": self.config()}

    def config(self) -> str:
        """Return nginx's own words where it would refuse its configuration, as one that was edited by hand."""
        program = self.module.get_bin_path("nginx", opt_dirs=["/usr/sbin"])
        if program is None:
            return ""
        code, out, err = self.module.run_command([program, "-t", "-q"])
        lines = [line for line in f"{out}{err}".splitlines() if "[emerg]" in line or "[alert]" in line]
        return "" if code == 0 else lines[0] if lines else "nginx -t fails"

    def publish(self) -> None:
        """Write what is out, whoever took it out, for the alert."""
        folder = self.p["textfile_dir"]
        path = os.path.join(folder, rotation.NAME)
        if self.module.check_mode or not os.path.isdir(folder):
            return
        text = rotation.textfile(entries(ask(self.p["port"], "GET", "/state")))
        try:
            with open(path, encoding="utf-8") as stream:
                before = stream.read()
        except FileNotFoundError:
            before = ""
        if text != before:
            write_atomic(path, text, 0o644)

    def turn(self, inside: bool) -> dict[str, Any]:
        """Want the replicas in or out. One that is out already stays with whoever took it out."""
        before = self.look()
        change = [item for item in before if item["in"] != inside]
        for item in change:
            if not self.module.check_mode:
                wish = {"replica": item["replica"], "in": inside, "by": self.p["by"], "run": self.p["run"]}
                ask(self.p["port"], "POST", "/rotation", wish)
        self.publish()
        words = ("out of rotation", "in rotation") if inside else ("in rotation", "out of rotation")
        return {
            "changed": bool(change),
            "replicas": before if self.module.check_mode else self.look(),
            "diff": [
                {"before": f"{item['replica']}: {words[0]}\n", "after": f"{item['replica']}: {words[1]}\n"}
                for item in change
            ],
        }

    def wait(self, what: str) -> dict[str, Any]:
        """Wait until nothing is left, or for O(wait) seconds. Two looks must agree that nothing is in flight."""
        if self.module.check_mode:
            return {"replicas": self.look()}
        ends = time.monotonic() + self.p["wait"]
        quiet = 0
        while True:
            found = self.look()
            if what == "drained":
                left = [f"{item['replica']}: {item['in_flight']} in flight" for item in found if item["in_flight"]]
            else:
                left = [f"{item['replica']}: {item['reason']}" for item in found if not item["healthy"]]
            quiet = 0 if left else quiet + 1
            enough = bool(left) if what == "steady" else quiet >= (2 if what == "drained" else 1)
            if enough or time.monotonic() >= ends:
                return {"replicas": found, "waiting": left}
            time.sleep(0.3)

    def run(self) -> dict[str, Any]:
        """Do what O(state) says."""
        if self.p["phase"] and not self.module.check_mode:
            path = os.path.join(self.p["root"], lock.NAME)
            if not lock.renew(path, self.p["run"], self.p["phase"], time.time()):
                raise GatewayError(
                    f"the lock {path} is not held by run {self.p['run']} any more: another run took it over"
                )
        state = self.p["state"]
        base: dict[str, Any] = {"changed": False, "waiting": [], "config": ""}
        if state == "read":
            return {**base, **self.read()}
        if state in ("in", "out"):
            return {**base, **self.turn(state == "in")}
        return {**base, **self.wait(state)}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "required": True,
                "choices": ["read", "out", "in", "drained", "healthy", "steady"],
            },
            "replicas": {"type": "list", "elements": "str", "default": []},
            "run": {"type": "str", "default": ""},
            "by": {"type": "str", "default": "metalserve"},
            "wait": {"type": "int", "default": 5},
            "phase": {"type": "str", "default": ""},
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "port": {"type": "int", "default": 8081},
            "textfile_dir": {"type": "path", "default": "/var/lib/prometheus/node-exporter"},
            "engines": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        result = Run(module).run()
    except (GatewayError, lock.LockError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    except (KeyError, ValueError, TypeError) as error:
        module.fail_json(msg=f"the gateway's state cannot be read: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
