#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action metal.serve.template; all of it runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: template
short_description: ansible.builtin.template, with differences that name the file on the machine
version_added: 0.1.0
description:
  - Does what M(ansible.builtin.template) does and takes the same options. Its difference carries the destination, also
    for a file that does not exist yet, so that a check tells which files a run would create.
author:
  - The Metalserve authors (@metalserve)
options:
  src:
    description: Template on the controller.
    type: path
    required: true
  dest:
    description: File on the machine.
    type: path
    required: true
  owner:
    description: Owner of the file.
    type: str
  group:
    description: Group of the file.
    type: str
  mode:
    description: Permissions of the file.
    type: raw
  validate:
    description: Command that must accept the new file, with C(%s) in its place.
    type: str
attributes:
  check_mode:
    description: Changes nothing.
    support: full
  diff_mode:
    description: Names the destination on both sides.
    support: full
"""

EXAMPLES = r"""
- name: Rotate the log
  metal.serve.template:
    src: logrotate.j2
    dest: /etc/logrotate.d/metalserve-gateway
    mode: "0644"
"""

RETURN = r"""
# As M(ansible.builtin.template).
"""
