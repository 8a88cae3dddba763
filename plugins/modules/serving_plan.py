#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plan the engines of one node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: serving_plan
short_description: Plan the engines of one node from its hardware and the models' own files
version_added: "0.1.0"
description:
  - Computes one replica plan for each engine that the pool plans put on this node.
  - Reads C(config.json) of each model in the model store of the node, and the node's hardware unless O(facts) is given.
  - Changes nothing, so it does the same in check mode.
options:
  pools:
    description: The value of C(metalserve_pools).
    type: dict
    required: true
  pool_plans:
    description: The pool plans, as the filter P(metal.serve.pool_plans#filter) returns them.
    type: list
    elements: dict
    required: true
  node:
    description: Inventory name of this node.
    type: str
    required: true
  accelerator:
    description: What the engines of this node compute on.
    type: str
    choices: [nvidia, cpu]
    default: nvidia
  models:
    description: The value of C(metalserve_models); gives each model's revision.
    type: dict
    default: {}
  facts:
    description: Hardware facts as M(metal.serve.host_facts) returns them. Without them they are collected on the spot.
    type: dict
  model_root:
    description: The model store of the node.
    type: path
    default: /var/lib/metalserve/models
  model_configs:
    description:
      - Content of C(config.json) by model name, used where the model is not on the node yet.
    type: dict
    default: {}
  calibrations:
    description:
      - Constants of the memory model by pool, as C(scripts/plan --calibrate) wrote them;
        the filter P(metal.serve.pool_calibrations#filter) reads the files that the pools name.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Computes the same plan in check mode.
    support: full
  diff_mode:
    description: There is nothing to compare, since nothing is changed.
    support: none
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Plan the engines of this node
  metal.serve.serving_plan:
    pools: "{{ metalserve_pools }}"
    pool_plans: "{{ metalserve_pools | metal.serve.pool_plans(groups, hostvars) }}"
    models: "{{ metalserve_models }}"
    node: "{{ inventory_hostname }}"
    accelerator: "{{ metalserve_accelerator | default('nvidia') }}"
  register: __engine_plan
"""

RETURN = r"""
replica_plans:
  description: One plan for each replica of this node; empty when the node runs none.
  returned: success
  type: list
  elements: dict
notes:
  description: What an operator should know about the plan; each is a warning of the task too.
  returned: success
  type: list
  elements: str
unknown:
  description: Models whose C(config.json) is not there yet, so that their replicas are not planned (check mode only).
  returned: success
  type: list
  elements: str
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import choose
from ansible_collections.metal.serve.plugins.module_utils.planner.documents import read_json
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import parse_node
from ansible_collections.metal.serve.plugins.module_utils.planner.replica import replica_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.weights import parse_index


def stored(root: str, model: str, revision: str, name: str) -> Any:
    """Return a JSON file of a model in the store, None where it is not there. Raises PlanError when it is no JSON."""
    path = os.path.join(root, model, revision, name)
    try:
        return read_json(path, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PlanError as error:
        raise PlanError(f"{error.message} Put the model there again.") from None


def runs_on(plan: dict[str, Any], node: str) -> bool:
    """Return whether a pool has an engine on this node, as a replica's head or as a further node of it."""
    members = [member["host"] for group in (plan.get("node_groups") or {}).values() for member in group]
    return node in members or any(replica["host"] == node for replica in plan.get("replicas", []))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "pools": {"type": "dict", "required": True},
            "pool_plans": {"type": "list", "elements": "dict", "required": True},
            "node": {"type": "str", "required": True},
            "accelerator": {"type": "str", "choices": ["nvidia", "cpu"], "default": "nvidia"},
            "models": {"type": "dict", "default": {}},
            "facts": {"type": "dict"},
            "model_root": {"type": "path", "default": "/var/lib/metalserve/models"},
            "model_configs": {"type": "dict", "default": {}},
            "calibrations": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        plans = [plan for plan in p["pool_plans"] if runs_on(plan, p["node"])]
        revisions: dict[str, str] = {}
        configs: dict[str, Any] = {}
        indexes: dict[str, int] = {}
        unknown: list[str] = []
        for plan in plans:
            model = str(plan["model"])
            revisions[model] = str((p["models"].get(model) or {}).get("revision", ""))
            config = stored(p["model_root"], model, revisions[model], "config.json")
            index = stored(p["model_root"], model, revisions[model], "model.safetensors.index.json")
            if index is not None:
                indexes[model] = parse_index(index)
            if config is None:
                config = p["model_configs"].get(model)
            if config is None:
                unknown.append(model)
            else:
                configs[model] = config
        if unknown and not module.check_mode:
            raise PlanError(
                f"config.json of {', '.join(sorted(set(unknown)))} is not below {p['model_root']}; put the model on "
                "the node first (ansible-playbook site.yml --tags models)."
            )
        facts = p["facts"] or collect(probes=choose(["base"])).facts.to_dict()
        planned = replica_plans(
            p["pools"],
            p["pool_plans"],
            p["node"],
            p["accelerator"],
            parse_node(facts),
            configs,
            revisions,
            indexes,
            p["calibrations"],
        )
    except PlanError as error:
        module.fail_json(msg=str(error), ways_out=error.ways_out)
    for model in sorted(set(unknown)):
        module.warn(f"config.json of {model} is not on this node yet, so its replicas cannot be planned now")
    notes = [f"{plan.replica}: {note}" for plan in planned for note in plan.warnings]
    for note in notes:
        module.warn(note)
    module.exit_json(
        changed=False,
        replica_plans=[plan.to_dict() for plan in planned],
        notes=notes,
        unknown=sorted(set(unknown)),
    )


if __name__ == "__main__":
    main()
