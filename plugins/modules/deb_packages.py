#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Install Debian packages without python3-apt on the machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: deb_packages
short_description: Install Debian packages, also in check mode on a machine without python3-apt
version_added: 0.1.0
description:
  - Installs what is missing with apt-get and never upgrades, downgrades, removes or changes what is installed. It
    needs only what a minimal Debian has, so that check mode works on a machine that nothing was ever installed on
    (M(ansible.builtin.apt) needs python3-apt there).
  - Package lists are refreshed only where something is missing and they are older than O(cache_valid_time).
options:
  name:
    description: Packages, each C(name) or C(name=version); a version may end in C(*).
    type: list
    elements: str
    required: true
  cache_valid_time:
    description: Seconds for which downloaded package lists count as fresh.
    type: int
    default: 3600
  allow_change_held:
    description: Whether a held package may be changed to the version that is asked for.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Says which packages would be installed, without the packages that they depend on.
  diff_mode:
    support: full
    description: Shows the packages before and after.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Install Docker from the distribution
  metal.serve.deb_packages:
    name: [docker.io]
"""

RETURN = r"""
installed:
  description: What was missing and is installed now.
  returned: always
  type: list
  elements: str
"""

import glob
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.runtime import packages

# Never ask, and never replace a configuration file that somebody changed.
APT = [
    "apt-get",
    "-y",
    "-o",
    "Dpkg::Options::=--force-confdef",
    "-o",
    "Dpkg::Options::=--force-confold",
    "-o",
    "DPkg::Lock::Timeout=300",
]
LISTS = "/var/lib/apt/lists"


def _lists_age() -> float:
    times = [os.path.getmtime(path) for path in glob.glob(os.path.join(LISTS, "*Packages*"))]
    stamp = "/var/lib/apt/periodic/update-success-stamp"
    if os.path.exists(stamp) and times:
        times.append(os.path.getmtime(stamp))
    # apt keeps the server's time on the lists; the folder's own time says when apt last wrote there.
    if times:
        times.append(os.path.getmtime(LISTS))
    return time.time() - max(times) if times else float("inf")


def main() -> None:
    """Compare with dpkg's database and install what is missing."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "list", "elements": "str", "required": True},
            "cache_valid_time": {"type": "int", "default": 3600},
            "allow_change_held": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    _rc, listing, _err = module.run_command(["dpkg-query", "-W", "-f", packages.DPKG_FORMAT], check_rc=True)
    try:
        todo = packages.missing(module.params["name"], packages.parse_dpkg(listing))
    except ValueError as error:
        module.fail_json(msg=f"name: {error}")
        return
    if todo and not module.check_mode:
        environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        if _lists_age() > module.params["cache_valid_time"]:
            rc, _out, err = module.run_command([*APT, "update"], environ_update=environment)
            if rc != 0:
                module.fail_json(msg=f"apt-get update failed: {err.strip()}")
        held = ["--allow-change-held-packages"] if module.params["allow_change_held"] else []
        command = [*APT, *held, "install", "--no-install-recommends", "--no-remove", *todo]
        rc, out, err = module.run_command(command, environ_update=environment)
        if rc != 0:
            module.fail_json(msg=f"apt-get install {' '.join(todo)} failed: {err.strip()}", stdout=out)
    module.exit_json(
        changed=bool(todo),
        installed=todo,
        diff={
            "before_header": "packages",
            "after_header": "packages",
            "before": "",
            "after": "".join(f"{name}\n" for name in todo),
        },
    )


if __name__ == "__main__":
    main()
