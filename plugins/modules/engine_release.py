#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_release
short_description: Compare and write the releases of a node's engines
version_added: 0.1.0
description:
  - A release is an image digest, a rendered configuration, a model's manifest and the container's arguments,
    under one hash, in C(<root>/engines/<replica>/releases/<hash>/). The link C(current) names the one that runs.
  - A replica that serves with another release is left alone, to the last file. The difference is returned.
options:
  root:
    description: Folder of everything this bundle keeps on a node.
    type: path
    default: /var/lib/metalserve
  state:
    description:
      - V(compared) writes nothing and says what should be done with each replica.
      - V(activated) writes the releases of replicas where nothing serves, and points C(current) to them.
      - V(prepared) writes the releases of replicas that run another one, and points nothing to them, for a redeploy to come.
    type: str
    choices: [compared, activated, prepared]
    required: true
  replicas:
    description: The replicas planned for this node, each with C(spec), C(files) (name to text) and C(plan).
    type: list
    elements: dict
    required: true
  secrets:
    description: Secret texts by file name; they are written into releases and never returned.
    type: dict
    default: {}
  model_digests:
    description: Digest by model name, for models whose manifest is not on the node yet (check mode).
    type: dict
    default: {}
  containers:
    description: Containers on the node, as M(metal.serve.engine_facts) returns them.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: See what differs
  metal.serve.engine_release:
    state: compared
    replicas: "{{ __engine_replicas }}"
    secrets: {api-key: "{{ metalserve_engine_api_key }}"}
    containers: "{{ __engine_facts.containers }}"
  register: __engine_compared
"""

RETURN = r"""
replicas:
  description: Each planned replica with what should be, or was, done.
  returned: always
  type: list
  elements: dict
  contains:
    replica:
      description: Its name.
      type: str
    action:
      description: One of unchanged, start, create, replace and redeploy.
      type: str
    release:
      description: Hash of the planned release.
      type: str
    container_name:
      description: Name of the planned container.
      type: str
    container:
      description: Arguments of the planned container.
      type: dict
    differences:
      description: What differs from the release that is there, as name, current and desired.
      type: list
    current_container:
      description: Name of the container of the release that is there.
      type: str
    served:
      description: Whether the planned release has served before.
      type: bool
units_changed:
  description: Whether systemd must read its units again.
  returned: always
  type: bool
redeploy:
  description: One line per difference of a replica that serves with another release.
  returned: always
  type: list
  elements: str
keys_differ:
  description: Replicas that serve with another API key.
  returned: always
  type: list
  elements: str
moved:
  description: Replicas that serve at another address or port, with both.
  returned: always
  type: list
  elements: str
stale_containers:
  description: Stopped containers of releases that neither C(current) nor C(previous) names.
  returned: always
  type: list
  elements: str
"""

import http.client
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic
from ansible_collections.metal.serve.plugins.module_utils.models import manifest
from ansible_collections.metal.serve.plugins.module_utils.release import content, decide, state


def answers(address: str, port: int, path: str) -> bool:
    """Return whether an engine answers 200 at its health path."""
    connection = http.client.HTTPConnection(address, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Run:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.containers: dict[str, dict[str, Any]] = {str(item["name"]): item for item in self.p["containers"]}
        self.diff: list[dict[str, str]] = []
        self.changed = False
        self.units_changed = False

    def manifest_of(self, spec: dict[str, Any]) -> tuple[str, str]:
        """Return the path of the model's manifest and its digest; the digest given where the model is to come."""
        path = f"{spec['model_path']}.manifest.json"
        sealed = manifest.load(path)
        if sealed is not None:
            return path, sealed.digest
        known = str(self.p["model_digests"].get(spec["model"], ""))
        if not known and not self.module.check_mode:
            raise ValueError(
                f"{path} is missing: model {spec['model']} {spec['revision']} is not on this node; "
                f"run the tag models first"
            )
        return path, known

    def examine(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the planned release of one replica, and what to do with it."""
        spec: dict[str, Any] = item["spec"]
        name = str(spec["replica"])
        replica = state.Replica(self.p["root"], name)
        secrets = {key: str(self.p["secrets"].get(key, "")) for key in spec["secrets"]}
        manifest_path, digest = self.manifest_of(spec)
        values = content.content(spec, item["files"], digest, secrets)
        release = content.release_hash(values)
        container = content.container_name(name, release)
        current = state.read_current(replica)
        current_container = content.container_name(name, current.release) if current else ""
        running = bool(self.containers.get(current_container, {}).get("running"))
        unproven = running and current is not None and not current.served
        alive = unproven and answers(str(spec["address"]), int(spec["port"]), str(spec["health"]["live"]))
        decision = decide.decide(current, release, values, running, alive)
        folder = replica.release(release)
        document = {
            "replica": name,
            "release": release,
            "container_name": container,
            "pool": spec["pool"],
            "image": spec["image"],
            "address": spec["address"],
            "port": spec["port"],
            "served_name": spec["served_name"],
            "headless": bool(spec.get("headless", False)),
            "gpus": spec["gpus"],
            "model_path": spec["model_path"],
            "manifest_path": manifest_path,
            "cache_dir": spec["cache_dir"],
            "health": spec["health"],
            "drain": spec["drain"],
            "log": spec["log"],
            "metrics": spec["metrics"],
            # Arguments to create the container again, should somebody have removed it.
            "container": resolved(spec, folder, release),
            "content": values,
            "plan": item.get("plan", {}),
        }
        files = {**item["files"], **secrets}
        modes = {**dict.fromkeys(secrets, 0o400), **{e["name"]: int(e["mode"], 8) for e in spec["files"]}}
        known = state.read_release(replica, release)
        return {
            "replica": replica,
            "moved": decide.moved(current, str(spec["address"]), int(spec["port"])),
            "spec": spec,
            "release": release,
            "decision": decision,
            "current_container": current_container,
            "keep_previous": bool(current and current.served),
            "container_name": container,
            "container": resolved(spec, folder, release),
            "files": state.release_files(replica, release, document, files, modes),
            "secret_names": set(secrets),
            "served": bool(known and known.served) or bool(alive),
        }

    def write(self, found: dict[str, Any], activate: bool) -> None:
        """Write one release, and with ``activate`` make it the current one."""
        replica: state.Replica = found["replica"]
        spec: dict[str, Any] = found["spec"]
        for path, (text, mode) in found["files"].items():
            secret = os.path.basename(path) in found["secret_names"]
            self.put(path, text, mode, secret, owner_of(spec))
        self.make_folder(str(spec["cache_dir"]), owner_of(spec))
        if not activate:
            return
        drop_in = state.drop_in_text(int(spec["unit"]["stop_s"]), state.GUARD_TIME_S)
        self.units_changed |= self.put(replica.drop_in, drop_in, 0o644)
        if state.read_link(replica.current) != found["release"]:
            self.note(replica.current, state.read_link(replica.current), found["release"])
            if not self.module.check_mode:
                state.activate(replica, found["release"], found["keep_previous"])
        if not self.module.check_mode:
            for stale in state.stale_releases(replica):
                state.remove_release(replica, stale)

    def put(self, path: str, text: str, mode: int, secret: bool = False, owner: tuple[int, int] = (0, 0)) -> bool:
        """Write a file where it differs; True if it did."""
        before = read_text(path)
        if before == text:
            return False
        hidden = "(not shown)\n"
        self.note(path, hidden if secret and before else before or "", hidden if secret else text)
        if not self.module.check_mode:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            write_atomic(path, text, mode)
            if mode & 0o077 == 0 and os.geteuid() == 0:
                os.chown(path, *owner)
        return True

    def make_folder(self, path: str, owner: tuple[int, int]) -> None:
        """Make the cache's folder."""
        if os.path.isdir(path):
            return
        self.note(path, "", "(folder)\n")
        if not self.module.check_mode:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, 0o700)
            os.chown(path, *owner)

    def note(self, path: str, before: str, after: str) -> None:
        """Remember a change for the diff."""
        self.changed = True
        self.diff.append({"before_header": path, "after_header": path, "before": before, "after": after})

    def strangers(self, planned: set[str]) -> list[str]:
        """Return a line per replica that still runs here and is in no plan any more."""
        return [
            f"{item['replica']}: runs, is no longer planned here"
            for item in self.p["containers"]
            if item["running"] and item["replica"] not in planned
        ]

    def stale(self, found: list[dict[str, Any]]) -> list[str]:
        """Return the containers that no release needs any more; never one that runs."""
        kept = set()
        for entry in found:
            replica: state.Replica = entry["replica"]
            for link in (replica.current, replica.previous):
                release = state.read_link(link)
                if release:
                    kept.add(content.container_name(replica.name, release))
        mine = {entry["replica"].name for entry in found}
        stopped = {entry["current_container"] for entry in found if entry["decision"].action == decide.REPLACE}
        return [
            name
            for name, item in sorted(self.containers.items())
            if item["replica"] in mine and name not in kept and (name in stopped or not item["running"])
        ]

    def run(self) -> dict[str, Any]:
        """Do what O(state) says and return the result."""
        found = [self.examine(item) for item in self.p["replicas"]]
        wanted = self.p["state"]
        for entry in found:
            action = entry["decision"].action
            writes = ("create", "replace", "start") if wanted == "activated" else ("create", "replace", "redeploy")
            if wanted != "compared" and action in writes:
                self.write(entry, activate=wanted == "activated")
        lines = [
            f"{entry['replica'].name}: {content.difference_line(item)}"
            for entry in found
            if entry["decision"].action == decide.REDEPLOY
            for item in entry["decision"].differences
        ]
        return {
            "changed": self.changed,
            "diff": self.diff,
            "units_changed": self.units_changed,
            "replicas": [described(entry) for entry in found],
            "redeploy": lines + self.strangers({entry["replica"].name for entry in found}),
            "keys_differ": [
                entry["replica"].name
                for entry in found
                if entry["decision"].action == decide.REDEPLOY
                and any(item["name"].startswith("secrets.") for item in entry["decision"].differences)
            ],
            "moved": [
                f"{entry['replica'].name} ({entry['moved']})"
                for entry in found
                if entry["decision"].action == decide.REDEPLOY and entry["moved"]
            ],
            "stale_containers": self.stale(found),
        }


def owner_of(spec: dict[str, Any]) -> tuple[int, int]:
    """Return the user and group id that the engine runs with."""
    user, _colon, group = str(spec["container"]["user"]).partition(":")
    return int(user), int(group or user)


def resolved(spec: dict[str, Any], folder: str, release: str) -> dict[str, Any]:
    """Return the container's arguments with the release's folder and labels in place."""
    return {
        **spec["container"],
        "image": spec["image"],
        "env": dict(spec["environment"]),
        "entrypoint": list(spec["command"][:1]),
        "command": list(spec["command"][1:]),
        "labels": {**spec["container"]["labels"], "metalserve.release": release},
        "volumes": [
            f"{content.placed(item['source'], folder)}:{item['target']}:{'ro' if item['read_only'] else 'rw'}"
            for item in spec["mounts"]
        ],
    }


def described(entry: dict[str, Any]) -> dict[str, Any]:
    """Return one replica of the result."""
    return {
        "replica": entry["replica"].name,
        "action": entry["decision"].action,
        "differences": entry["decision"].differences,
        "release": entry["release"],
        "container_name": entry["container_name"],
        "container": entry["container"],
        "current_container": entry["current_container"],
        "served": entry["served"],
    }


def read_text(path: str) -> str | None:
    """Return a file's text, None where there is none."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "state": {"type": "str", "required": True, "choices": ["compared", "activated", "prepared"]},
            "replicas": {"type": "list", "elements": "dict", "required": True},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "model_digests": {"type": "dict", "default": {}},
            "containers": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        result = Run(module).run()
    except (ValueError, KeyError) as error:
        module.fail_json(msg=str(error) if isinstance(error, ValueError) else f"a replica lacks {error}")
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
