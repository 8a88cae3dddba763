#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""How high resource limits can be set on this machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: limit_facts
short_description: Say how high resource limits can be set on this machine
version_added: 0.1.0
description:
  - Bounds the limits that are wished for by what the machine allows, read from C(/proc/1/limits), the capabilities
    of the first process and C(fs.nr_open). A limit above that makes PAM refuse logins and Docker refuse containers.
  - Says which PAM services do not run pam_limits and so ignore C(/etc/security/limits.d).
  - Changes nothing.
options:
  nofile:
    description: Open files that are wished for.
    type: int
    required: true
  memlock:
    description: Locked memory in bytes that is wished for, or C(unlimited).
    type: str
    default: unlimited
  pam_services:
    description: PAM services that must apply limits.
    type: list
    elements: str
    default: []
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
- name: See how high limits can be set
  metal.serve.limit_facts:
    nofile: 1048576
    pam_services: [sshd, login]
  register: __limits
"""

RETURN = r"""
nofile:
  description: Open files as they can be set here.
  returned: always
  type: int
memlock:
  description: Locked memory in bytes as it can be set here; -1 means unlimited.
  returned: always
  type: int
manager_nofile:
  description: Open files that the running service manager gives a service by default; 0 where it does not say.
  returned: always
  type: int
manager_memlock:
  description: Locked memory in bytes that it gives by default; -1 means unlimited, 0 that it does not say.
  returned: always
  type: int
shortfalls:
  description: Sentences about limits that stay below the checklist's minimum.
  returned: always
  type: list
  elements: str
without_pam_limits:
  description: Services of O(pam_services) whose sessions ignore limits.d.
  returned: always
  type: list
  elements: str
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.runtime import limits


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def _manager(module: AnsibleModule) -> dict[str, int]:
    names = {"DefaultLimitNOFILESoft": "manager_nofile", "DefaultLimitMEMLOCKSoft": "manager_memlock"}
    found = dict.fromkeys(names.values(), 0)
    program = module.get_bin_path("systemctl")
    if program is None:
        return found
    _rc, out, _err = module.run_command([program, "show", "--property=" + ",".join(names)])
    for line in out.splitlines():
        name, _sign, value = line.partition("=")
        if name in names:
            found[names[name]] = limits.parse_limit(value)
    return found


def main() -> None:
    """Read three files of the first process and compute."""
    module = AnsibleModule(
        argument_spec={
            "nofile": {"type": "int", "required": True},
            "memlock": {"type": "str", "default": "unlimited"},
            "pam_services": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        text = _read("/proc/1/limits")
        room = limits.Room(
            hard_nofile=limits.parse_proc_limits(text, "nofile")[1],
            hard_memlock=limits.parse_proc_limits(text, "memlock")[1],
            may_raise=limits.has_sys_resource(_read("/proc/1/status")),
            nr_open=int(_read("/proc/sys/fs/nr_open") or limits.NOFILE_CEILING),
        )
        nofile = module.params["nofile"]
        possible = limits.possible(nofile, limits.parse_limit(module.params["memlock"]), room)
        manager = _manager(module)
    except ValueError as error:
        module.fail_json(msg=str(error))
        return
    services = {name: _read(os.path.join("/etc/pam.d", name)) for name in module.params["pam_services"]}
    services = {name: text for name, text in services.items() if text}
    common = ("common-session", "common-session-noninteractive", "common-account", "common-auth")
    services.update({name: _read(os.path.join("/etc/pam.d", name)) for name in common})
    module.exit_json(
        changed=False,
        shortfalls=limits.shortfalls(nofile, possible, room),
        without_pam_limits=limits.services_without_pam_limits(services),
        **possible,
        **manager,
    )


if __name__ == "__main__":
    main()
