#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action of the same name; all of it runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: audit_report
short_description: Make one report of the hosts' audits, and say whether they are fit to serve
version_added: 0.1.0
description:
  - Takes what M(metal.serve.host_audit) returned for every host of the play, the unreachable ones included, prints the table
    and writes C(audit.txt), C(audit.json), C(junit.xml) and C(audit.html) on the controller.
  - Compares with the hosts' previous audits, which C(baseline.json) beside them keeps.
  - Fails where the exit code of the audit is 2, that is where something fails or a host could not be judged.
  - Runs once, whatever the number of hosts. It connects to none, and does the same in check mode.
options:
  variable:
    description: Name of the variable in which each host's result was registered.
    type: str
    required: true
  dest:
    description: Folder of the reports on the controller.
    type: path
    required: true
  started:
    description: When the audit began, UTC, as 2027-01-31T03:00:00Z.
    type: str
    required: true
  areas:
    description: Areas that were judged; all where it is empty.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Does the same; no host is touched.
  diff_mode:
    support: none
    description: The difference to the previous audit is in the report itself.
seealso:
  - module: metal.serve.host_audit
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Report
  metal.serve.audit_report:
    variable: __audit_result
    dest: "{{ playbook_dir }}/../reports/audit"
    started: "{{ __audit_started }}"
"""

RETURN = r"""
exit_code:
  description: 0 nothing to mend, 1 warnings where they count (C(metalserve_audit_strict)), 2 a failure or a host not judged.
  returned: always
  type: int
files:
  description: The reports that were written.
  returned: always
  type: list
  elements: str
"""
# This is a virtual module that is entirely implemented as an action plugin and runs on the controller.
