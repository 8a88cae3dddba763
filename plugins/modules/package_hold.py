#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Hold a family of installed packages as one set."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: package_hold
short_description: Hold a family of installed Debian packages as one set
version_added: 0.1.0
description:
  - Sets dpkg's selection of every installed package that matches O(patterns) to hold, in one step, so that no half
    of a driver is upgraded. Packages that are not installed are left alone.
  - Says which of them unattended-upgrades would still touch, by what C(apt-config dump) reports, so by what is
    effective.
options:
  patterns:
    description: Regular expressions; a package belongs to the set if its whole name matches one.
    type: list
    elements: str
    required: true
  assume_blacklist:
    description: Entries of C(Unattended-Upgrade::Package-Blacklist) that count as there in check mode, because a
      task before this one writes them.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Says which packages would be held.
  diff_mode:
    support: full
    description: Shows the selections before and after.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Hold the driver
  metal.serve.package_hold:
    patterns: ["nvidia-.*", "libnvidia-.*"]
"""

RETURN = r"""
held:
  description: Every package of the set, held now.
  returned: always
  type: list
  elements: str
unprotected:
  description: Packages of the set that no effective entry of the blacklist covers.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.runtime import packages


def main() -> None:
    """Read dpkg's database, hold what is not held, compare with apt's effective configuration."""
    module = AnsibleModule(
        argument_spec={
            "patterns": {"type": "list", "elements": "str", "required": True},
            "assume_blacklist": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    _rc, listing, _err = module.run_command(["dpkg-query", "-W", "-f", packages.DPKG_FORMAT], check_rc=True)
    try:
        family = packages.matching(packages.parse_dpkg(listing), module.params["patterns"])
    except ValueError as error:
        module.fail_json(msg=f"patterns: {error}")
        return
    to_hold = [package for package in family if package.wanted != "hold"]
    if to_hold and not module.check_mode:
        lines = "".join(f"{package.name}:{package.architecture} hold\n" for package in to_hold)
        module.run_command(["dpkg", "--set-selections"], data=lines, check_rc=True)

    _rc, dump, _err = module.run_command(["apt-config", "dump", packages.BLACKLIST_KEY], check_rc=True)
    blacklist = packages.parse_apt_list(dump, packages.BLACKLIST_KEY)
    if module.check_mode:
        blacklist += module.params["assume_blacklist"]
    names = sorted({package.name for package in family})
    module.exit_json(
        changed=bool(to_hold),
        held=names,
        unprotected=packages.unprotected(names, blacklist),
        diff={
            "before_header": "dpkg selections",
            "after_header": "dpkg selections",
            "before": "".join(f"{package.name} {package.wanted}\n" for package in to_hold),
            "after": "".join(f"{package.name} hold\n" for package in to_hold),
        },
    )


if __name__ == "__main__":
    main()
