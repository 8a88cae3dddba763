#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: release_lock
short_description: Take, renew and give back the lock of a redeploy on a host
version_added: 0.1.0
description:
  - The lock is the file C(<root>/redeploy.lock). A lock whose heartbeat is older than 120 s is taken over, so is one
    whose process is gone from the very controller that asks; the action of the same name knows that.
options:
  root:
    description: Folder of everything this bundle keeps on a host.
    type: path
    default: /var/lib/metalserve
  state:
    description:
      - V(held) takes it, renews it or takes it over, or fails with who holds it.
      - V(renewed) writes the heartbeat of a lock that this run holds.
      - V(absent) gives back what this run holds.
      - V(read) says who holds it.
    type: str
    choices: [held, renewed, absent, read]
    default: held
  run:
    description: Id of the run.
    type: str
    required: true
  phase:
    description: What the run does now.
    type: str
    default: ''
  replaces:
    description: Id of a run whose process is gone; its lock is taken over whatever its age.
    type: str
    default: ''
  by:
    description: Who asks, user@host; the action sets it.
    type: str
    default: ''
  machine:
    description: Machine id of the controller; the action sets it.
    type: str
    default: ''
  boot:
    description: Boot id of the controller; the action sets it.
    type: str
    default: ''
  pid:
    description: Process id of the run on the controller; the action sets it.
    type: int
    default: 0
  pid_started:
    description: When that process started, in clock ticks since boot; the action sets it.
    type: int
    default: 0
attributes:
  check_mode:
    description: Writes nothing in check mode; a lock that is held by somebody else fails all the same.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  action:
    description: Runs as an action that says who asks.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Keep others from changing this gateway
  metal.serve.release_lock:
    run: redeploy-20260921T141320Z-1f2e
"""

RETURN = r"""
verdict:
  description: One of take, renew, take over and refuse; empty for V(read) and V(absent).
  returned: always
  type: str
holder:
  description: Who held it before; empty where nobody did.
  returned: always
  type: dict
age_s:
  description: Seconds since its heartbeat.
  returned: always
  type: float
"""

import fcntl
import os
import time
from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.release import lock


def held(path: str, p: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Take, renew or take over."""
    me = lock.Holder(p["run"], p["by"], p["machine"], p["boot"], p["pid"], p["pid_started"], phase=p["phase"])
    now = time.time()
    before = lock.read(path)
    is_gone = before is not None and before.run == p["replaces"] != ""
    if check_mode:
        verdict = lock.judge(before, me, lock.age(before, now) if before else 0.0, is_gone)
        return {"changed": verdict in (lock.TAKE, lock.TAKE_OVER), "verdict": verdict, **described(before, now)}
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(f"{path}.guard", "w", encoding="utf-8") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        verdict, before = lock.hold(path, me, now, is_gone)
    return {"changed": verdict in (lock.TAKE, lock.TAKE_OVER), "verdict": verdict, **described(before, now)}


def described(holder: lock.Holder | None, now: float) -> dict[str, Any]:
    """Return the holder and the age of its heartbeat."""
    return {"holder": asdict(holder) if holder else {}, "age_s": round(lock.age(holder, now), 1) if holder else 0.0}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "state": {"type": "str", "choices": ["held", "renewed", "absent", "read"], "default": "held"},
            "run": {"type": "str", "required": True},
            "phase": {"type": "str", "default": ""},
            "replaces": {"type": "str", "default": ""},
            "by": {"type": "str", "default": ""},
            "machine": {"type": "str", "default": ""},
            "boot": {"type": "str", "default": ""},
            "pid": {"type": "int", "default": 0},
            "pid_started": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    p = module.params
    path = os.path.join(p["root"], lock.NAME)
    try:
        if p["state"] == "held":
            module.exit_json(**held(path, p, module.check_mode))
        before, now = lock.read(path), time.time()
        changed = False
        if p["state"] == "renewed" and not module.check_mode and not lock.renew(path, p["run"], p["phase"], now):
            module.fail_json(msg=f"{path} is not held by run {p['run']} any more", verdict="", **described(before, now))
        if p["state"] == "absent":
            mine = before is not None and before.run == p["run"]
            changed = mine if module.check_mode else lock.give_back(path, p["run"])
        module.exit_json(changed=changed, verdict="", **described(before, now))
    except lock.LockError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
