#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action ``host_snapshot``, which runs on the controller (plugins/action/host_snapshot.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_snapshot
short_description: Keep a masked snapshot of a host on the controller
version_added: "0.1.0"
description:
  - Reads the host as M(metal.serve.host_facts) does and writes all that was read into a folder on the controller.
  - Serial numbers, addresses, names and secrets are masked on the host, before anything leaves it.
  - docs/snapshots.md describes the folder. An older snapshot there is replaced, a folder with something else refused.
options:
  dest:
    description: Folder on the controller.
    type: path
    required: true
  subset:
    description: Groups of facts to read, as in M(metal.serve.host_facts).
    type: list
    elements: str
    default: [all]
  timeout:
    description: Seconds that the whole reading may take, more than 0 and at most 600.
    type: float
    default: 60.0
  root:
    description: Folder on the host below which this bundle keeps models and engines.
    type: str
    default: /var/lib/metalserve
author:
  - The Metalserve authors (@metalserve)
attributes:
  check_mode:
    description: Reads the host, writes nothing.
    support: full
  diff_mode:
    description: A snapshot is always new, so no difference is shown.
    support: none
seealso:
  - module: metal.serve.host_facts
"""

EXAMPLES = r"""
- name: Keep a snapshot for a bug report
  metal.serve.host_snapshot:
    dest: reports/snapshots/{{ inventory_hostname }}
"""

RETURN = r"""
dest:
  description: The folder.
  returned: always
  type: str
  sample: /home/user/metalserve/reports/snapshots/node-a
files:
  description: Number of files in it.
  returned: always
  type: int
  sample: 142
states:
  description: Probes by state, those that were read left out.
  returned: always
  type: dict
  sample: {"absent": ["rpm"], "timeout": ["nvidia_smi"]}
"""
