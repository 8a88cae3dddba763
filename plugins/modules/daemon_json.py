#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Merge settings into Docker's daemon.json."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: daemon_json
short_description: Merge settings into Docker's daemon.json and remember them
version_added: 0.1.0
description:
  - Merges O(settings) and O(defaults) into the file, deeply and as JSON. What others wrote survives; lists become
    the union.
  - Remembers every value that it wrote in O(state_path), with what stood there before. A value that is no longer
    asked for goes back to that, unless somebody changed it meanwhile.
  - A file that is not valid is refused with its position and left as it is. A file that needs no change keeps its
    very bytes.
  - The new file is validated by C(dockerd --validate) before it replaces the old one, where this Docker has the option.
  - A running dockerd takes over at once what it can without a restart (SIGHUP). What needs a restart is returned, in
    later runs too, until dockerd was restarted.
options:
  path:
    description: The file.
    type: path
    default: /etc/docker/daemon.json
  state_path:
    description: Where to remember what was written.
    type: path
    default: /var/lib/metalserve/daemon-json.state
  settings:
    description: Settings that win over what stands in the file.
    type: dict
    default: {}
  defaults:
    description: Settings that fill in what is absent, or was written by this module before.
    type: dict
    default: {}
  log_rotation:
    description:
      - C(max_size) and C(max_file) of containers' logs, filled in as defaults if the log driver in the file rotates
        by these options (json-file or local). dockerd does not start with them under another driver.
    type: dict
    suboptions:
      max_size:
        description: Size such as C(100m) at which a log is rotated.
        type: str
        required: true
      max_file:
        description: Number of files to keep.
        type: int
        required: true
  command:
    description: Command line with which dockerd is started. A setting that is a flag there too is refused, because
      dockerd does not start then.
    type: list
    elements: str
    default: []
  validate:
    description: Whether to ask C(dockerd --validate), where it exists.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: Says what would be written.
  diff_mode:
    support: full
    description: Shows both files before and after.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Keep containers alive while dockerd restarts
  metal.serve.daemon_json:
    settings:
      live-restore: true
    log_rotation:
      max_size: 100m
      max_file: 3
"""

RETURN = r"""
changed_keys:
  description: Settings that changed, as dotted paths.
  returned: always
  type: list
  elements: str
kept:
  description: Defaults that were left out because the file says otherwise.
  returned: always
  type: list
  elements: str
restart_for:
  description: Settings that changed since dockerd started and that it takes over at a restart only.
  returned: always
  type: list
  elements: str
reloaded:
  description: Settings that a running dockerd took over at once.
  returned: always
  type: list
  elements: str
content:
  description: The merged content.
  returned: always
  type: dict
"""

import os
import signal
import stat
import tempfile
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic
from ansible_collections.metal.serve.plugins.module_utils.runtime import daemon_json, docker_state


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise daemon_json.DaemonJsonError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise daemon_json.DaemonJsonError(
            f"{path} is not UTF-8 text (byte {error.start}). It was left as it is."
        ) from None


def _daemon() -> tuple[int, float]:
    """Return the process id of dockerd and when it started, in seconds since the epoch; zeros where none runs."""
    try:
        pid = int(_read("/run/docker.pid").strip())
        ticks = docker_state.parse_start_ticks(_read(f"/proc/{pid}/stat"))
        return pid, docker_state.parse_boot_time(_read("/proc/stat")) + ticks / os.sysconf("SC_CLK_TCK")
    except (ValueError, OSError):
        return 0, 0.0


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0o644


def _validate(module: AnsibleModule, text: str) -> None:
    """Let dockerd read the new text; fail with its words if it refuses. 20.10 has no such option."""
    program = module.get_bin_path("dockerd", opt_dirs=["/usr/sbin", "/usr/bin", "/usr/local/bin"])
    if program is None:
        return
    _rc, usage, more = module.run_command([program, "--help"])
    if "--validate" not in usage + more:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8", dir=module.tmpdir) as candidate:
        candidate.write(text)
        candidate.flush()
        rc, out, err = module.run_command([program, "--validate", "--config-file", candidate.name])
    if rc != 0:
        words = (err or out).strip().replace(candidate.name, module.params["path"])
        module.fail_json(msg=f"dockerd refuses the new {module.params['path']}, so the old one stays: {words}")


def _pending(state: dict[str, Any], merged: daemon_json.Merge, started_at: float) -> list[dict[str, Any]]:
    """Return what waits for a restart of dockerd: earlier changes that are newer than its start, and those of now."""
    now = round(time.time(), 3)
    waiting = [entry for entry in state.get("waiting", []) if started_at and entry["at"] > started_at]
    if started_at:
        waiting += [
            {"key": ".".join(path), "at": now}
            for path in merged.changed
            if daemon_json.daemon_action([path], merged.content) == "restart"
        ]
    latest = {entry["key"]: entry for entry in waiting}
    return [latest[key] for key in sorted(latest)]


def main() -> None:
    """Read, merge, validate, write."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "state_path": {"type": "path", "default": "/var/lib/metalserve/daemon-json.state"},
            "settings": {"type": "dict", "default": {}},
            "defaults": {"type": "dict", "default": {}},
            "log_rotation": {
                "type": "dict",
                "options": {
                    "max_size": {"type": "str", "required": True},
                    "max_file": {"type": "int", "required": True},
                },
            },
            "command": {"type": "list", "elements": "str", "default": []},
            "validate": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    path, state_path = os.path.realpath(module.params["path"]), module.params["state_path"]
    try:
        old = _read(path)
        existing = daemon_json.parse(old, module.params["path"])
        old_state = _read(state_path)
        state = daemon_json.parse(old_state, state_path)
        records = daemon_json.records_from_json(state.get("owned", []), state_path)
    except daemon_json.DaemonJsonError as error:
        module.fail_json(msg=str(error))
        return

    settings, defaults = module.params["settings"], dict(module.params["defaults"])
    rotation = module.params["log_rotation"]
    if rotation is not None:
        defaults.update(daemon_json.log_defaults({**existing, **settings}, rotation["max_size"], rotation["max_file"]))
    merged = daemon_json.merge(existing, settings, defaults, records)
    new = daemon_json.render(merged.content) if merged.changed else old

    pid, started_at = _daemon()
    waiting = _pending(state, merged, started_at)
    reloadable = [path for path in merged.changed if daemon_json.daemon_action([path], merged.content) == "reload"]
    owned = daemon_json.records_to_json(merged.records)
    new_state = canonical_json({"owned": owned, "waiting": waiting})
    state_changed = owned != state.get("owned", []) or bool(merged.changed)
    if not state_changed:
        # Forgetting a change that dockerd took over meanwhile is no change of the machine.
        new_state = old_state

    if merged.changed:
        conflicts = daemon_json.flag_conflicts(module.params["command"], merged.content)
        if conflicts:
            flags = ", ".join(conflicts)
            module.fail_json(
                msg=f"dockerd is started with flags for {flags}, which {path} would give as well; it would not start."
                " Remove the flags from docker.service (or DOCKER_OPTS). The file was left as it is."
            )
        if module.params["validate"]:
            _validate(module, new)
    if not module.check_mode:
        try:
            # The memory first: a run that is interrupted in between then finds its own values, not somebody else's.
            if state_changed:
                os.makedirs(os.path.dirname(state_path), mode=0o755, exist_ok=True)
                write_atomic(state_path, new_state)
            if merged.changed:
                os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
                write_atomic(path, new, _mode(path))
            if pid and reloadable:
                os.kill(pid, signal.SIGHUP)
        except OSError as error:
            module.fail_json(msg=f"{error.filename or path} cannot be written: {error.strerror}")

    module.exit_json(
        changed=bool(merged.changed) or state_changed,
        changed_keys=[".".join(item) for item in merged.changed],
        kept=[".".join(item) for item in merged.kept],
        restart_for=[entry["key"] for entry in waiting],
        reloaded=[".".join(item) for item in reloadable] if pid else [],
        content=merged.content,
        diff=[
            {"before_header": path, "after_header": path, "before": old, "after": new},
            {"before_header": state_path, "after_header": state_path, "before": old_state, "after": new_state},
        ],
    )


if __name__ == "__main__":
    main()
