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
    and is named in RV(host_facts.probes).
  - Reads only. A value of V(null) means that it is not known, never that it is not there.
options:
  subset:
    description:
      - Groups of facts to read.
      - V(base) stands for V(cgroup), V(cpu), V(driver), V(gpu), V(kernel), V(limits), V(memory), V(numa), V(os), V(pci)
        and V(sysctl); V(all) for everything. A group's name stands for itself.
      - Facts that were not asked for have probes in the state V(not_collected).
    type: list
    elements: str
    default: [base]
  timeout:
    description: Seconds that the whole reading may take.
    type: float
    default: 25.0
author:
  - The Metalserve authors (@metalserve)
attributes:
  check_mode:
    description: Reads only, so it does the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Read what a plan needs
  metal.serve.host_facts:
  register: __engine_facts

- name: Read everything
  metal.serve.host_facts:
    subset: [all]
  register: __facts
"""

RETURN = r"""
host_facts:
  description: The facts; docs/facts.md and schemas/facts.json describe every field.
  returned: always
  type: dict
  sample: {"schema_version": 1, "gpus": [{"index": 0, "memory_total_mib": 143771}], "numa": {"balancing": 0}}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import DEFAULT_TIMEOUT, read_live
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import choose


def main() -> None:
    """Read the parameters, collect, return."""
    module = AnsibleModule(
        argument_spec={
            "subset": {"type": "list", "elements": "str", "default": ["base"]},
            "timeout": {"type": "float", "default": DEFAULT_TIMEOUT},
        },
        supports_check_mode=True,
    )
    try:
        probes = choose(module.params["subset"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    timeout = module.params["timeout"]
    if not 0 < timeout <= 600:
        module.fail_json(
            msg=f"timeout: {timeout:g} is out of range; seconds between 0 and 600 are right, for example 25"
        )
    facts = read_live(probes, timeout)
    module.exit_json(changed=False, host_facts=facts.to_dict())


if __name__ == "__main__":
    main()
