#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_ready
short_description: Wait until engines truly serve
version_added: 0.1.0
description:
  - An engine serves when it lists its model and completes a prompt. Until then its unit, its container, its log
    and its processes are watched, and a start that cannot succeed any more fails at once, with the reason and the
    end of the log.
  - The action of the same name asks this module again and again and shows how far each engine is.
options:
  root:
    description: Folder of everything this bundle keeps on a node.
    type: path
    default: /var/lib/metalserve
  replicas:
    description: Names of the replicas to wait for; their C(current) releases say how to ask them.
    type: list
    elements: str
    required: true
  api_key:
    description: The engines' API key.
    type: str
    default: ''
  timeout:
    description: Seconds until a start counts as failed; the action's limit.
    type: int
    default: 900
  wait:
    description: Seconds that one call of the module looks before it reports.
    type: int
    default: 5
  patience:
    description: Seconds after which the action comes back with what is not ready yet, without failing; 0 never does.
    type: int
    default: 0
  answer_timeout:
    description: Seconds that one answer may take.
    type: int
    default: 60
  run:
    description: Id of a redeploy whose lock on this node is renewed with each look.
    type: str
    default: ''
  seen:
    description: Replicas whose working process was seen by an earlier call.
    type: list
    elements: str
    default: []
  restarts:
    description: How often each unit had restarted its engine at the first call.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Waits for nothing in check mode.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  action:
    description: Runs as an action that calls the module repeatedly.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Wait until the engine serves
  metal.serve.engine_ready:
    replicas: [short-0]
    api_key: "{{ metalserve_engine_api_key }}"
    timeout: 900
"""

RETURN = r"""
replicas:
  description: Each replica with ready, failed (the reason), doing (words) and log (its end).
  returned: always
  type: list
  elements: dict
seen:
  description: Replicas whose working process was seen.
  returned: always
  type: list
  elements: str
restarts:
  description: O(restarts), completed.
  returned: always
  type: dict
"""

import json
import os
import re
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.engines import ready
from ansible_collections.metal.serve.plugins.module_utils.release import lock, state

KERNEL_CLOCK_S = 120


class Look:
    """One look at one replica."""

    def __init__(self, module: AnsibleModule, name: str) -> None:
        self.module = module
        self.replica = state.Replica(module.params["root"], name)
        current = state.read_current(self.replica)
        if current is None:
            raise ValueError(f"{name} has no release on this node; run the tag engines first")
        self.release = current.release
        self.document = current.document

    def command(self, *argv: str) -> str:
        """Return what a program prints, both channels; ``""`` where it fails."""
        code, out, err = self.module.run_command(list(argv))
        return f"{out}{err}" if code == 0 else ""

    def unit(self) -> ready.Unit:
        """Ask systemd."""
        text = self.command(
            "systemctl", "show", self.replica.unit, "--property=ActiveState,SubState,NRestarts,ExecMainStatus"
        )
        found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return ready.Unit(
            found.get("ActiveState", "unknown"),
            found.get("SubState", ""),
            int(found.get("NRestarts") or 0),
            int(found.get("ExecMainStatus") or 0),
        )

    def container(self) -> tuple[ready.Container | None, str]:
        """Ask Docker for the container and the moment it was started."""
        text = self.command("docker", "container", "inspect", "--format", "{{.Id}} {{json .State}}", self.name)
        if not text:
            return None, ""
        identity, _space, state_text = text.splitlines()[0].partition(" ")
        found = json.loads(state_text)
        started = str(found.get("StartedAt", ""))
        killed = bool(found.get("OOMKilled")) or self.killed_for_memory(identity, started)
        return ready.Container(str(found.get("Status", "")), int(found.get("ExitCode", 0)), killed), started

    def killed_for_memory(self, identity: str, started: str) -> bool:
        """Ask the kernel's log, whose clock may be off by some minutes on a host that has been up for long."""
        if not started or started.startswith("0001"):
            return False
        since = time.localtime(ready.started_at(started) - KERNEL_CLOCK_S)
        return ready.killed_for_memory(
            self.command("dmesg", "--since", time.strftime("%Y-%m-%d %H:%M:%S", since)), identity
        )

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self.document["container_name"])

    def journal(self) -> str:
        """Return the end of the unit's journal, where the checks before a start speak."""
        return self.command("journalctl", "--unit", self.replica.unit, "--lines=30", "--output=cat", "--no-pager")

    def look(self, seen: set[str], restarts: dict[str, int]) -> dict[str, Any]:
        """Return ready, failed, doing and log."""
        document = self.document
        good, words = (
            self.joined()
            if document.get("headless")
            else ready.serves(
                str(document["address"]),
                int(document["port"]),
                document["health"],
                str(document["served_name"]),
                self.module.params["api_key"],
                float(self.module.params["answer_timeout"]),
            )
        )
        if good:
            new = state.mark_served(self.replica, self.release)
            return self.result(ready=True, doing=words, new=new)
        container, started = self.container()
        log = self.command("docker", "logs", "--since", started, "--tail", "500", self.name) if started else ""
        patterns = document["log"]
        core_gone = self.core_gone(patterns["core"], seen) if container and container.status == "running" else False
        unit = self.unit()
        before = int(restarts.setdefault(self.replica.name, unit.restarts))
        reason = ready.failure(unit, container, ready.fatal_line(log, patterns["fatal"]), core_gone, before)
        if reason:
            return self.result(failed=reason, log=ready.tail(log) or ready.tail(self.journal()))
        waiting = "checks before the start" if unit.sub == "start-pre" else ready.stage(log, patterns["stages"])
        return self.result(doing=waiting or words, log=ready.tail(log))

    def joined(self) -> tuple[bool, str]:
        """Return whether a part that answers no requests itself is up; the part that does waits for it."""
        unit = self.unit()
        return unit.active == "active" and unit.restarts == 0, "joined the other nodes of its replica"

    def core_gone(self, pattern: str, seen: set[str]) -> bool:
        """Return whether the working process was there before and is not now."""
        if not pattern:
            return False
        there = re.search(pattern, self.command("docker", "top", self.name, "-eo", "pid,args")) is not None
        if there:
            seen.add(self.replica.name)
        return not there and self.replica.name in seen

    def result(
        self, ready: bool = False, failed: str = "", doing: str = "", log: list[str] | None = None, new: bool = False
    ) -> dict[str, Any]:
        """Return one entry of the result."""
        return {
            "replica": self.replica.name,
            "ready": ready,
            "failed": failed,
            "doing": doing,
            "log": log or [],
            "new": new,
        }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "replicas": {"type": "list", "elements": "str", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "int", "default": 900},
            "wait": {"type": "int", "default": 5},
            "patience": {"type": "int", "default": 0},
            "answer_timeout": {"type": "int", "default": 60},
            "run": {"type": "str", "default": ""},
            "seen": {"type": "list", "elements": "str", "default": []},
            "restarts": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    p = module.params
    os.environ["LC_ALL"] = "C.UTF-8"
    if module.check_mode:
        module.exit_json(changed=False, replicas=[], seen=[], restarts={})
    seen, restarts = set(p["seen"]), dict(p["restarts"])
    ends = time.monotonic() + p["wait"]
    try:
        if p["run"]:
            lock.renew(os.path.join(p["root"], lock.NAME), p["run"], "ready", time.time())
        looks = [Look(module, name) for name in p["replicas"]]
        while True:
            found = [look.look(seen, restarts) for look in looks]
            if all(item["ready"] for item in found) or any(item["failed"] for item in found):
                break
            if time.monotonic() >= ends:
                break
            time.sleep(1.0)
    except (ValueError, KeyError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=any(item["new"] for item in found), replicas=found, seen=sorted(seen), restarts=restarts)


if __name__ == "__main__":
    main()
