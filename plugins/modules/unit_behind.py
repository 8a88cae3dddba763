#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Which systemd units still run with the settings of before."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: unit_behind
short_description: Say which systemd units still run with the settings of before
version_added: 0.1.0
description:
  - Compares the time of files with the last start or reload of the units that read them. A run that was interrupted between
    the two is completed by the next one, which would otherwise find every file as it should be.
  - Changes nothing.
options:
  units:
    description:
      - Unit names, each with the files that it reads at its start or reload.
      - Files and units that are not there do not count.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
    description: Nothing is changed in either mode.
  diff_mode:
    support: none
    description: Nothing is changed.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: See what runs with older rules than it has
  metal.serve.unit_behind:
    units:
      prometheus.service: [/etc/prometheus/prometheus.yml]
  register: __behind
"""

RETURN = r"""
behind:
  description: Running units with a file that is newer than their last start or reload.
  returned: always
  type: list
  elements: str
outdated:
  description: Units whose unit file, or an addition to it, systemd has not read yet.
  returned: always
  type: list
  elements: str
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.runtime import units


def newest(paths: list[str]) -> float:
    """Return when the newest of these files was written; 0 where there is none."""
    times = [0.0]
    for path in paths:
        try:
            times.append(os.stat(path).st_mtime)
        except OSError:
            continue
    return max(times)


def main() -> None:
    """Ask systemd and compare."""
    module = AnsibleModule(argument_spec={"units": {"type": "dict", "required": True}}, supports_check_mode=True)
    wanted: dict[str, list[str]] = module.params["units"]
    program = module.get_bin_path("systemctl")
    # In a check of a machine that is no more than planned there may be no systemd to ask.
    if program is None or not wanted:
        module.exit_json(changed=False, behind=[], outdated=[])
    names = sorted(wanted)
    code, out, err = module.run_command([program, "show", "--property=" + ",".join(units.PROPERTIES), *names])
    now, monotonic = time.time(), time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        shown = units.parse_show(out, names)
    except ValueError as error:
        module.fail_json(msg=f"{error}: {err.strip() or f'exit code {code}'}")
        return
    written = {name: newest([str(path) for path in wanted[name]]) for name in names}
    module.exit_json(changed=False, behind=units.behind(shown, written, now, monotonic), outdated=units.outdated(shown))


if __name__ == "__main__":
    main()
