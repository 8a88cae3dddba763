#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Module metal.serve.verify_targets: see DOCUMENTATION."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: verify_targets
short_description: Wait until every scrape target of a Prometheus is up
version_added: 0.1.0
description:
  - Reads C(/api/v1/targets) until all active targets are up, at most I(wait) seconds. Fails with what is not.
  - No target at all is a failure too.
author:
  - The Metalserve authors (@metalserve)
options:
  url:
    description: Address of Prometheus.
    type: str
    required: true
  required_nodes:
    description:
      - Values of the label C(node) whose targets must be up. Targets of other nodes are only reported; targets without
        that label must be up.
    type: list
    elements: str
    required: true
  expected:
    description: How many targets there must be at least.
    type: int
    default: 1
  wait:
    description: Seconds to wait for all of them.
    type: int
    default: 60
attributes:
  check_mode:
    description: Reads once, and neither waits nor fails.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: See that everything is measured
  metal.serve.verify_targets:
    url: http://10.0.0.5:9090
    required_nodes: "{{ ansible_play_hosts_all }}"
"""

RETURN = r"""
up:
  description: Targets that are up.
  type: int
  returned: always
total:
  description: Active targets.
  type: int
  returned: always
down:
  description: Targets that are not up, with Prometheus' own reason.
  type: list
  elements: str
  returned: always
down_elsewhere:
  description: The same on nodes that are not required.
  type: list
  elements: str
  returned: always
"""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.telemetry.scraped import TargetState, target_state


def read(url: str) -> tuple[Any, str]:
    """Return the answer of the targets API, or why there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/api/v1/targets?state=active", timeout=5) as answer:
            return json.loads(answer.read()), ""
    except (OSError, urllib.error.URLError, ValueError) as error:
        return None, str(error)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "required_nodes": {"type": "list", "elements": "str", "required": True},
            "expected": {"type": "int", "default": 1},
            "wait": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    params = module.params
    # A check may look at machines where nothing runs yet: it neither waits nor fails.
    deadline = time.monotonic() + (0 if module.check_mode else params["wait"])
    while True:
        answer, error = read(params["url"])
        state = TargetState(0, 0, [], []) if answer is None else target_state(answer, set(params["required_nodes"]))
        complete = answer is not None and not state.down and state.total >= params["expected"]
        if complete or time.monotonic() >= deadline:
            break
        time.sleep(2)
    result = {
        "changed": False,
        "up": state.up,
        "total": state.total,
        "down": state.down,
        "down_elsewhere": state.elsewhere,
    }
    if module.check_mode:
        module.exit_json(**result)
    if answer is None:
        module.fail_json(msg=f"Prometheus at {params['url']} does not answer: {error}.", **result)
    if state.down:
        module.fail_json(
            msg=f"After {params['wait']} s {len(state.down)} of {state.total} targets are not up: "
            + "; ".join(state.down),
            **result,
        )
    if state.total < params["expected"]:
        module.fail_json(
            msg=f"Prometheus at {params['url']} knows {state.total} targets; {params['expected']} were expected.",
            **result,
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
