#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Module metal.serve.nginx_probe: see DOCUMENTATION."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nginx_probe
short_description: Say which nginx this machine has, or would get, and whether a Lua module belongs to it
version_added: 0.1.0
description:
  - Read only. Where nginx is not installed yet, the version is the one that the package manager would install, so that
    templates can be rendered for it in check mode too.
author:
  - The Metalserve authors (@metalserve)
options:
  nginx:
    description: The program to ask.
    type: path
    default: /usr/sbin/nginx
  package:
    description: Package to ask the package manager for where the program is missing.
    type: str
    default: nginx-light
  files:
    description: Files whose presence is to be told.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    description: Only reads.
    support: full
  diff_mode:
    description: Only reads.
    support: none
"""

EXAMPLES = r"""
- name: Look at nginx
  metal.serve.nginx_probe:
  register: __gateway_nginx
"""

RETURN = r"""
installed:
  description: Whether the program is there.
  type: bool
  returned: always
version:
  description: Version of nginx, such as 1.22.1.
  type: str
  returned: always
lua_fits:
  description:
    - Whether this distribution has a Lua module for nginx and a lua-resty-core that belong together.
  type: bool
  returned: always
cryptography:
  description: Whether Python on this machine can import cryptography, which certificates need.
  type: bool
  returned: always
present:
  description: Which of I(files) exist.
  type: list
  elements: str
  returned: always
"""

import importlib.util
import os
import re

from ansible.module_utils.basic import AnsibleModule

FALLBACK_VERSION = "1.18.0"
"""The oldest nginx of a managed system (Ubuntu 22.04); where nothing can be asked, its subset is the safe one."""

LUA_SINCE = {"debian": 12, "ubuntu": 24}
"""First major version of a distribution whose nginx, Lua module and lua-resty-core were built for each other. Ubuntu
22.04 has lua-resty-core in no matching version."""


def lua_fits(os_release: str) -> bool:
    """Return whether the distribution of an ``/etc/os-release`` text has a Lua module that the gateway can use."""
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    first = LUA_SINCE.get(fields.get("ID", ""))
    number = re.match(r"\d+", fields.get("VERSION_ID", ""))
    return first is not None and number is not None and int(number.group()) >= first


def read_text(path: str) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def parse_version(text: str) -> str:
    """Return the first ``N.N.N`` in the output of ``nginx -v`` or ``apt-cache policy``; empty where there is none."""
    match = re.search(r"(?:nginx/|Candidate: (?:\d+:)?)(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else ""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "nginx": {"type": "path", "default": "/usr/sbin/nginx"},
            "package": {"type": "str", "default": "nginx-light"},
            "files": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    installed = os.access(module.params["nginx"], os.X_OK)
    command = [module.params["nginx"], "-v"] if installed else ["apt-cache", "policy", module.params["package"]]
    _code, out, err = module.run_command(command, environ_update={"LC_ALL": "C"})
    module.exit_json(
        changed=False,
        installed=installed,
        version=parse_version(out + err) or FALLBACK_VERSION,
        lua_fits=lua_fits(read_text("/etc/os-release")),
        cryptography=importlib.util.find_spec("cryptography") is not None,
        present=[path for path in module.params["files"] if os.path.exists(path)],
    )


if __name__ == "__main__":
    main()
