#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which does all the work on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: validate_inventory
short_description: Check an inventory before any host is touched
version_added: "0.1.0"
description:
  - Checks groups, hosts and every C(metalserve_*) and role variable of the whole inventory, whatever C(--limit) says.
  - All problems are reported at once, each with its place, its value and what would be right. Warnings do not fail.
  - It runs once, on the controller. No connection is made, whatever the connection settings of the hosts are.
options:
  purpose:
    description:
      - What the run that follows will do.
      - With V(audit), what only a set-up needs (client keys, a gateway) is a warning, and hosts of the RHEL family are
        let through.
    type: str
    choices: [site, plan, redeploy, audit]
    default: site
attributes:
  check_mode:
    description: It changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: It changes nothing, so there is nothing to show.
    support: none
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Check the inventory
  metal.serve.validate_inventory:

- name: Check what an audit needs
  metal.serve.validate_inventory:
    purpose: audit
"""

RETURN = r"""
msg:
  description: The outcome in one sentence.
  returned: always
  type: str
  sample: The inventory is right.
hosts:
  description: Number of hosts in the inventory.
  returned: success
  type: int
  sample: 5
warnings_found:
  description: What is doubtful, but does not stop the run.
  returned: success
  type: list
  elements: dict
  contains:
    where:
      description: File and line, or hosts and groups.
      type: str
    variable:
      description: Name of the variable or group.
      type: str
    value:
      description: Its value; secrets are not shown.
      type: str
    problem:
      description: What is doubtful.
      type: str
    right:
      description: What would be right.
      type: str
    severity:
      description: V(warning).
      type: str
"""
