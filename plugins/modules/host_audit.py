#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a host once and judges it against the serving checklist."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_audit
short_description: Judge a host against the serving checklist
version_added: "0.1.0"
description:
  - Reads the host once, as M(metal.serve.host_facts) does, and runs every check over what was read.
  - Returns a verdict a check with what was found, what should be, the proof and the remedy.
    A verdict is V(pass), V(warn), V(fail), V(unknown) or V(not_applicable).
  - Changes nothing. Only where O(textfile) is given, the verdicts are written there as metrics.
  - A check that fails itself, or a reading that hangs, costs its own verdict, which is then V(unknown).
options:
  host:
    description: Name of the host in the result and in waivers; the host's own name where it is empty.
    type: str
    default: ""
  policy:
    description:
      - Thresholds, what the host is expected to be, and waivers, as in schemas/policy.json.
      - What is left out has the default of the deployment checklist.
    type: dict
    default: {}
  areas:
    description: Areas of checks, the part of an id before the dot, for example V(gpu); all where it is empty.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that the reading may take, more than 0 and at most 600.
    type: float
    default: 40.0
  root:
    description: Folder below which this bundle keeps models and engines.
    type: str
    default: /var/lib/metalserve
  textfile:
    description:
      - File for the node exporter's textfile collector, replaced as a whole. Empty for none.
      - Where its folder is missing or cannot be written, RV(notes) say so; the verdicts come all the same.
      - In check mode, and where O(areas) are not all, nothing is written.
    type: str
    default: ""
  from_snapshot:
    description: Folder of a snapshot on the host to judge instead of the host itself.
    type: str
  return_facts:
    description: Return the facts too, which are large.
    type: bool
    default: false
  return_snapshot:
    description: Return the files of the masked snapshot too, which are larger.
    type: bool
    default: false
author:
  - The Metalserve authors (@metalserve)
attributes:
  check_mode:
    description: Judges alike in check mode; only O(textfile) is not written.
    support: full
  diff_mode:
    description: There is nothing to show but the verdicts.
    support: none
seealso:
  - module: metal.serve.audit_report
  - module: metal.serve.host_facts
"""

EXAMPLES = r"""
- name: Judge the host
  metal.serve.host_audit:
    host: "{{ inventory_hostname }}"
    policy:
      driver_minimum: "570.86.15"
      expected: {gpus: 8}
      waivers:
        - {id: topology.cpu_governor, reason: "the firmware owns it", until: "2027-06-30"}
  register: __audit

- name: Judge its GPUs alone
  metal.serve.host_audit:
    areas: [gpu]
"""

RETURN = r"""
host:
  description: Name of the host.
  returned: always
  type: str
  sample: node-a
verdicts:
  description: One a check, the worst first; schemas/verdicts.json describes every key.
  returned: always
  type: list
  elements: dict
  sample: [{"id": "numa.balancing", "verdict": "fail", "current": "1", "desired": "0", "severity": "major"}]
counts:
  description: How many verdicts there are of each kind; waived ones are counted under V(waived) alone.
  returned: always
  type: dict
  sample: {"fail": 1, "unknown": 0, "warn": 0, "pass": 44, "not_applicable": 20, "waived": 0}
seconds:
  description: How long it took.
  returned: always
  type: float
  sample: 0.61
notes:
  description: What did not work besides, one sentence each, for example that the textfile could not be written.
  returned: always
  type: list
  elements: str
  sample: []
host_facts:
  description: The facts, as M(metal.serve.host_facts) returns them.
  returned: with O(return_facts)
  type: dict
snapshot:
  description: The files of the masked snapshot, path to text.
  returned: with O(return_snapshot)
  type: dict
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import areas_of, audit, policy_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import count
from ansible_collections.metal.serve.plugins.module_utils.checklist.publish import publish
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import (
    DEFAULT_TIMEOUT,
    LiveSource,
    people,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import snapshot_files


def run(module: AnsibleModule) -> dict[str, Any]:
    """Judge and return the module's result. Raises ValueError with a sentence for the user."""
    given = module.params
    policy, areas = policy_of(given["policy"]), areas_of(given["areas"])
    if not 0 < given["timeout"] <= 600:
        raise ValueError(
            f"timeout: {given['timeout']:g} is out of range; more than 0 and at most 600 seconds are right"
        )
    source = given["from_snapshot"] or LiveSource(LiveHost(metalserve_root=given["root"].rstrip("/")))
    done = audit(source, policy, given["host"], areas, given["timeout"])
    result: dict[str, Any] = {
        "changed": False,
        "host": done.host,
        "verdicts": [verdict.as_dict() for verdict in done.verdicts],
        "counts": count(done.verdicts),
        "seconds": done.seconds,
        "notes": [],
    }
    if given["textfile"] and areas:
        result["notes"].append(f"Not published: only {', '.join(areas)} was judged.")
    elif given["textfile"] and not module.check_mode:
        problem = publish(given["textfile"], result, time.time())
        result["changed"] = not problem
        result["notes"] += [problem] if problem else []
    if given["return_facts"]:
        result["host_facts"] = done.collected.facts.to_dict()
    if given["return_snapshot"]:
        as_root = done.collected.facts.collected_as_root
        result["snapshot"] = snapshot_files(done.collected.results, people(), as_root=as_root)
    return result


def main() -> None:
    """Read the parameters, judge, return."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": ""},
            "policy": {"type": "dict", "default": {}},
            "areas": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "float", "default": DEFAULT_TIMEOUT},
            "root": {"type": "str", "default": "/var/lib/metalserve"},
            "textfile": {"type": "str", "default": ""},
            "from_snapshot": {"type": "str"},
            "return_facts": {"type": "bool", "default": False},
            "return_snapshot": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except ValueError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
