#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action of the same name; all of it runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: agent_bundle
short_description: Build a program for nodes as one file and copy it there
version_added: 0.1.0
description:
  - Packs a program into a zipapp and copies it where the node's file differs. The same content gives the same bytes,
    whenever and wherever it is built.
  - Nothing is installed on the node, which needs Python 3.9 or newer.
options:
  program:
    description:
      - V(agent) is the node agent, with prometheus_client and pynvml of the controller's environment.
      - V(audit) is the scheduled audit.
    type: str
    choices: [agent, audit]
    default: agent
  src:
    description: Folder of the agent's source on the controller; with O(program=agent).
    type: path
  dest:
    description: The file on the node; its folder must exist.
    type: path
    required: true
attributes:
  check_mode:
    support: full
    description: Says whether the file would change.
  diff_mode:
    support: full
    description: Names the file with the new version and its sha256.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Put the agent on the node
  metal.serve.agent_bundle:
    src: "{{ role_path }}/files/metalserve_agent"
    dest: /opt/metalserve/metalserve-agent.pyz

- name: Put the scheduled audit on the node
  metal.serve.agent_bundle:
    program: audit
    dest: /opt/metalserve/metalserve-audit.pyz
"""

RETURN = r"""
version:
  description: Hash over the content, as metalserve_agent_info shows it.
  returned: always
  type: str
sha256:
  description: sha256 of the file.
  returned: always
  type: str
dest:
  description: The file on the node.
  returned: always
  type: str
"""
# This is a virtual module that is entirely implemented as an action plugin and runs on the controller.
