#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what a host is and has, once, with a time limit for every reading."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_facts
short_description: Read what matters to LLM serving on a host
version_added: "0.1.0"
description:
  - Reads the accelerators and their driver, NUMA, control groups, limits, packages, units, Docker and more,
    and returns them as one value.
  - Each reading has its own time limit. One that fails, hangs or is denied costs its own facts
    and is named in C(host_facts.probes).
  - A value of V(null) means that it is not known, never that it is not there.
options:
  subset:
    description:
      - Groups of facts to read.
      - V(base) stands for V(cgroup), V(cpu), V(driver), V(gpu), V(kernel), V(limits), V(memory), V(numa), V(os), V(pci)
        and V(sysctl); V(all) for everything. A group's name stands for itself, a probe's name for that probe.
      - Facts that were not asked for have probes in the state V(not_collected).
    type: list
    elements: str
    default: [base]
  timeout:
    description: Seconds that the whole reading may take, more than 0 and at most 600.
    type: float
    default: 40.0
  root:
    description: Folder below which this bundle keeps models and engines.
    type: str
    default: /var/lib/metalserve
  from_snapshot:
    description: Folder of a snapshot on the host to read instead of the host itself.
    type: str
  snapshot_dir:
    description:
      - Folder on the host into which everything that was read is written, masked, as a snapshot.
      - An older snapshot there is replaced; a folder that holds something else is refused.
      - In check mode nothing is written.
    type: str
  return_snapshot:
    description: Return the files of the masked snapshot in RV(snapshot), and write nothing.
    type: bool
    default: false
author:
  - The Metalserve authors (@metalserve)
attributes:
  check_mode:
    description: Reads alike in check mode; only O(snapshot_dir) is not written.
    support: full
  diff_mode:
    description: Changes nothing but O(snapshot_dir), of which no difference is shown.
    support: none
seealso:
  - module: metal.serve.host_snapshot
"""

EXAMPLES = r"""
- name: Read what a plan needs
  metal.serve.host_facts:
  register: __engine_facts

- name: Read everything, and keep it on the host for a bug report
  metal.serve.host_facts:
    subset: [all]
    snapshot_dir: /root/snapshot
  register: __facts
"""

RETURN = r"""
host_facts:
  description: The facts; docs/facts.md and schemas/facts.json describe every field.
  returned: always
  type: dict
  sample: {"schema_version": 1, "gpus": [{"index": 0, "memory_total_mib": 143771}], "numa": {"balancing": 0}}
snapshot:
  description: The files of the snapshot, path to text.
  returned: with O(return_snapshot)
  type: dict
  sample: {"files/proc/sys/kernel/numa_balancing": "0"}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import (
    DEFAULT_TIMEOUT,
    LiveSource,
    collect,
    people,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import choose
from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import (
    SnapshotError,
    snapshot_files,
    write_snapshot,
)


def run(module: AnsibleModule) -> dict[str, Any]:
    """Collect and return the module's result. Raises ValueError with a sentence for the user."""
    given = module.params
    probes = choose(given["subset"])
    if not 0 < given["timeout"] <= 600:
        raise ValueError(
            f"timeout: {given['timeout']:g} is out of range; more than 0 and at most 600 seconds are right"
        )
    if given["from_snapshot"] and (given["snapshot_dir"] or given["return_snapshot"]):
        raise ValueError(
            "from_snapshot: a snapshot is read or made, not both; leave out snapshot_dir and return_snapshot"
        )
    source = given["from_snapshot"] or LiveSource(LiveHost(metalserve_root=given["root"].rstrip("/")))
    collected = collect(source, probes, given["timeout"])
    result: dict[str, Any] = {"changed": False, "host_facts": collected.facts.to_dict()}
    if given["snapshot_dir"] or given["return_snapshot"]:
        files = snapshot_files(collected.results, people(), as_root=collected.facts.collected_as_root)
        if given["return_snapshot"]:
            result["snapshot"] = files
        if given["snapshot_dir"]:
            result["changed"] = True
            if not module.check_mode:
                write_snapshot(given["snapshot_dir"], files)
    return result


def main() -> None:
    """Read the parameters, collect, return."""
    module = AnsibleModule(
        argument_spec={
            "subset": {"type": "list", "elements": "str", "default": ["base"]},
            "timeout": {"type": "float", "default": DEFAULT_TIMEOUT},
            "root": {"type": "str", "default": "/var/lib/metalserve"},
            "from_snapshot": {"type": "str"},
            "snapshot_dir": {"type": "str"},
            "return_snapshot": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except (SnapshotError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
