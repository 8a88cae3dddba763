#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_switch
short_description: Stop an engine, change its release, start it
version_added: 0.1.0
description:
  - The steps of a redeploy on a node. Each state is one to be in; asking twice does no harm.
  - Until a change is V(settled) the file C(redeploy.json) of its replica says what served before.
options:
  root:
    description: Folder of everything this bundle keeps on a node.
    type: path
    default: /var/lib/metalserve
  state:
    description:
      - V(observed) says what is there; with O(verify) the model files of the current and the named release are compared
        with their manifest.
      - V(stopped) stops the units and waits until the containers are down and the GPUs free.
      - V(activated) points C(current) to the named release. The engine must be stopped.
      - V(started) starts the units. It does not wait until they serve.
      - V(proven) notes that the current release passed its gate.
      - V(settled) closes the record of the change, and removes the releases, containers and image names that neither
        C(current) nor C(previous) needs.
      - V(noted_out) notes on the node that the gateways send it nothing, and who asked for it; V(noted_in) ends the note.
    type: str
    choices: [observed, stopped, activated, started, proven, settled, noted_out, noted_in]
    required: true
  replicas:
    description: Names of replicas; all of the node where none is given.
    type: list
    elements: str
    default: []
  releases:
    description: Release by replica, for V(activated) and for O(verify).
    type: dict
    default: {}
  measured:
    description: What the gate measured, by replica, for V(proven).
    type: dict
    default: {}
  verify:
    description: Compare the model files with their manifest.
    type: bool
    default: false
  graceful:
    description: Let a stopping engine finish what is in flight; false where nothing can be.
    type: bool
    default: true
  wait:
    description: Seconds that V(stopped) waits before it reports what is left.
    type: int
    default: 15
  run:
    description: Id of the run that asks.
    type: str
    default: ''
  by:
    description: Who asks, user@host, for V(noted_out).
    type: str
    default: ''
  phase:
    description: Phase to write into the lock of this run, whose heartbeat is renewed.
    type: str
    default: ''
attributes:
  check_mode:
    description: Changes nothing in check mode.
    support: full
  diff_mode:
    description: Shows the change of C(current).
    support: full
  action:
    description: A node that cannot be reached fails the task.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: See what runs
  metal.serve.engine_switch:
    state: observed
  register: __release_seen
"""

RETURN = r"""
replicas:
  description: >-
    Each replica with current, previous, record, running, unit, container, releases, served, gate (what its gate
    measured) and spare (release.json of C(previous), for a container that must be created again).
  returned: always
  type: list
  elements: dict
waiting:
  description: What V(stopped) still waits for.
  returned: always
  type: list
  elements: str
"""

import os
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic
from ansible_collections.metal.serve.plugins.module_utils.release import content, guard, lock, state

PIN = "metalserve/pinned"
"""Local image name that keeps an image from `docker image prune`: one tag per release that may run."""

KILL_S = 5
"""Seconds between SIGTERM and SIGKILL for an engine that has nothing to finish."""


class SwitchError(Exception):
    """A step that cannot be done; one sentence."""


class Run:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.changed = False
        self.diff: list[dict[str, str]] = []
        names = self.p["replicas"] or state.known_replicas(self.p["root"])
        self.replicas = [state.Replica(self.p["root"], name) for name in names]

    def command(self, *argv: str) -> tuple[int, str]:
        """Run a program; return its code and what it printed."""
        code, out, err = self.module.run_command(list(argv))
        return code, f"{out}{err}".strip()

    def must(self, *argv: str) -> None:
        """Run a program that has to succeed."""
        code, text = self.command(*argv)
        if code != 0:
            raise SwitchError(f"{' '.join(argv)}: {text[-300:] or f'code {code}'}")

    def container(self, replica: state.Replica, release: str = "") -> tuple[str, str]:
        """Return the name of a release's container (``current`` where none is named) and its state, "" if none."""
        release = release or state.read_link(replica.current)
        if not release:
            return "", ""
        name = content.container_name(replica.name, release)
        code, text = self.command("docker", "container", "inspect", "--format", "{{.State.Status}}", name)
        return name, text.splitlines()[0] if code == 0 and text else ""

    def unit(self, replica: state.Replica) -> str:
        """Return ActiveState/SubState of the unit."""
        _code, text = self.command("systemctl", "show", replica.unit, "--property=ActiveState,SubState")
        found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return f"{found.get('ActiveState', 'unknown')}/{found.get('SubState', '')}"

    def describe(self, replica: state.Replica) -> dict[str, Any]:
        """Return one entry of the result."""
        name, status = self.container(replica)
        unit = self.unit(replica)
        current, previous = state.read_link(replica.current), state.read_link(replica.previous)
        folder = os.path.join(replica.folder, "releases")
        spare = state.read_release(replica, previous) if previous else None
        return {
            "replica": replica.name,
            "current": current,
            "previous": previous,
            "record": state.read_json(replica.record),
            "running": unit == "active/running" and status == "running",
            "unit": unit,
            "container": name,
            "releases": sorted(os.listdir(folder)) if os.path.isdir(folder) else [],
            "served": os.path.exists(os.path.join(replica.release(current), state.SERVED)),
            "gate": state.read_json(os.path.join(replica.release(current), state.GATE)) or {},
            "spare": dict(spare.document) if spare else {},
        }

    # --- states ----------------------------------------------------------------------------------------------------

    def observed(self) -> list[str]:
        """Compare the models, where asked."""
        wrong = []
        for replica in self.replicas if self.p["verify"] else []:
            for release in {state.read_link(replica.current), self.p["releases"].get(replica.name, "")} - {""}:
                found = state.read_release(replica, release)
                if found is None and self.module.check_mode:
                    continue
                if found is None:
                    raise SwitchError(f"{replica.name}: release {release[:12]} is not on this node; run it again")
                try:
                    guard.check_model(str(found.document["model_path"]), str(found.document["manifest_path"]))
                except guard.GuardError as error:
                    wrong.append(f"{replica.name}, release {release[:12]}: {error}")
        if wrong:
            raise SwitchError("; ".join(sorted(set(wrong))))
        return []

    def stopped(self) -> list[str]:
        """Stop the units; return what is still going on after O(wait) seconds."""
        ends = time.monotonic() + self.p["wait"]
        for replica in self.replicas:
            unit = self.unit(replica).partition("/")[0]
            name, status = self.container(replica)
            if unit in ("inactive", "failed") and status != "running":
                continue
            self.changed = True
            if self.module.check_mode:
                continue
            if unit != "deactivating":
                self.must("systemctl", "stop", "--no-block", replica.unit)
            if not self.p["graceful"] and status == "running":
                self.command("docker", "stop", "--time", str(KILL_S), name)
        while not self.module.check_mode:
            left = [words for replica in self.replicas for words in self.left(replica)]
            if not left or time.monotonic() >= ends:
                return left
            time.sleep(0.5)
        return []

    def left(self, replica: state.Replica) -> list[str]:
        """Return what keeps a replica from being down: its unit, its container, memory of its GPUs."""
        unit = self.unit(replica).partition("/")[0]
        _name, status = self.container(replica)
        if unit not in ("inactive", "failed") or status == "running":
            return [f"{replica.name}: unit {unit}, container {status or 'gone'}"]
        found = state.read_current(replica)
        gpus = [str(gpu) for gpu in found.document.get("gpus", [])] if found else []
        try:
            guard.check_gpus(gpus, guard.run_command, 0.0, time.sleep)
        except guard.GuardError as error:
            return [f"{replica.name}: {error}"]
        return []

    def activated(self) -> list[str]:
        """Point ``current`` to another release."""
        units_changed = False
        for replica in self.replicas:
            release = str(self.p["releases"].get(replica.name, ""))
            found = state.read_release(replica, release) if release else None
            if found is None and self.module.check_mode:
                # What was to be prepared is not there in a check.
                self.changed = True
                continue
            if found is None:
                raise SwitchError(f"{replica.name}: release {release[:12] or '(none)'} is not on this node")
            name, status = self.container(replica, release)
            if not status:
                raise SwitchError(f"{replica.name}: container {name} is not there, so its release cannot start")
            before = state.read_link(replica.current)
            record = state.read_json(replica.record)
            if before == release and record and record.get("to") == release:
                continue
            self.changed = True
            header = {"before_header": replica.current, "after_header": replica.current}
            self.diff.append({**header, "before": f"{before}\n", "after": f"{release}\n"})
            if self.module.check_mode:
                continue
            # A unit that waits to try its engine again would start the new one by itself.
            self.must("systemctl", "stop", replica.unit)
            units_changed |= self.drop_in(replica, found)
            state.open_change(replica, release, self.p["run"], time.time())
        if units_changed:
            self.must("systemctl", "daemon-reload")
        return []

    def drop_in(self, replica: state.Replica, found: state.Found) -> bool:
        """Give the unit the times of the release; True where they are others."""
        stop_s = int(found.document["content"]["unit"]["stop_s"])
        try:
            with open(replica.drop_in, encoding="utf-8") as stream:
                before = stream.read()
        except FileNotFoundError:
            before = ""
        wanted = state.drop_in_text(stop_s, state.GUARD_TIME_S)
        if before == wanted:
            return False
        os.makedirs(os.path.dirname(replica.drop_in), mode=0o755, exist_ok=True)
        write_atomic(replica.drop_in, wanted, 0o644)
        return True

    def started(self) -> list[str]:
        """Start the units."""
        for replica in self.replicas:
            if self.unit(replica).partition("/")[0] == "active":
                continue
            self.changed = True
            if not self.module.check_mode:
                self.command("systemctl", "reset-failed", replica.unit)
                self.must("systemctl", "start", "--no-block", replica.unit)
        return []

    def proven(self) -> list[str]:
        """Note that the gate was passed."""
        for replica in self.replicas:
            if self.module.check_mode:
                self.changed |= os.path.exists(replica.record)
            else:
                self.changed |= state.prove_change(replica, self.p["measured"].get(replica.name) or {})
        return []

    def settled(self) -> list[str]:
        """Close the changes, pin what may run again, and remove the rest."""
        for replica in self.replicas:
            if self.module.check_mode:
                self.changed |= os.path.exists(replica.record)
                continue
            self.changed |= state.settle_change(replica)
            links = (state.read_link(replica.current), state.read_link(replica.previous))
            for release in sorted(set(links) - {""}):
                self.pin(replica, release)
            for release in state.stale_releases(replica):
                self.forget(replica, release)
        return []

    def pin(self, replica: state.Replica, release: str) -> None:
        """Give the image of a release a name of ours. Its container keeps it too, unless somebody removes that."""
        found = state.read_release(replica, release)
        image = str(found.document.get("image", "")) if found else ""
        if image:
            self.command("docker", "image", "tag", image, f"{PIN}:{content.container_name(replica.name, release)}")

    def forget(self, replica: state.Replica, release: str) -> None:
        """Remove a release that nothing points to, with its container and its image's name."""
        name, status = self.container(replica, release)
        if status == "running":
            return
        if status:
            self.must("docker", "container", "rm", name)
        self.command("docker", "image", "rm", f"{PIN}:{name}")
        state.remove_release(replica, release)
        self.changed = True

    def noted_out(self) -> list[str]:
        """Note that the replicas are to get no requests; a note that is there already stays."""
        for replica in self.replicas:
            if os.path.exists(replica.rotation):
                continue
            self.changed = True
            if not self.module.check_mode:
                state.note_out(replica, self.p["by"], self.p["run"], time.time())
        return []

    def noted_in(self) -> list[str]:
        """Remove the note."""
        for replica in self.replicas:
            self.changed |= os.path.exists(replica.rotation) if self.module.check_mode else state.note_in(replica)
        return []

    def run(self) -> dict[str, Any]:
        """Do what O(state) says."""
        if self.p["phase"] and not self.module.check_mode:
            path = os.path.join(self.p["root"], lock.NAME)
            if not lock.renew(path, self.p["run"], self.p["phase"], time.time()):
                raise SwitchError(
                    f"the lock {path} is not held by run {self.p['run']} any more: another run took it over"
                )
        waiting = getattr(self, self.p["state"])()
        return {
            "changed": self.changed,
            "diff": self.diff,
            "waiting": waiting,
            "replicas": [self.describe(replica) for replica in self.replicas],
        }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "state": {
                "type": "str",
                "required": True,
                "choices": [
                    "observed",
                    "stopped",
                    "activated",
                    "started",
                    "proven",
                    "settled",
                    "noted_out",
                    "noted_in",
                ],
            },
            "replicas": {"type": "list", "elements": "str", "default": []},
            "releases": {"type": "dict", "default": {}},
            "measured": {"type": "dict", "default": {}},
            "verify": {"type": "bool", "default": False},
            "graceful": {"type": "bool", "default": True},
            "wait": {"type": "int", "default": 15},
            "run": {"type": "str", "default": ""},
            "by": {"type": "str", "default": ""},
            "phase": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        result = Run(module).run()
    except (SwitchError, state.StateError, lock.LockError, guard.GuardError) as error:
        module.fail_json(msg=str(error))
    except KeyError as error:
        module.fail_json(msg=f"a release lacks {error}")
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['root']}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
