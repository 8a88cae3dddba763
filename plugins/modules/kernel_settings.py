#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Kernel settings (sysctl): which apply here, and put them in force."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kernel_settings
short_description: Choose the kernel settings that apply to a machine and put them in force
version_added: 0.1.0
description:
  - Says which of O(settings) belong into this machine's C(sysctl.d) file. A key that the kernel does not know is
    left out, as is C(kernel.numa_balancing) on a machine with one NUMA node and a floor (for example C(fs.file-max))
    that is exceeded already.
  - With O(apply=true) writes those that differ to C(/proc/sys). Where that is read-only, as in a container, nothing
    is written and RV(not_applied) says so. The file for the next boot is the caller's business.
options:
  settings:
    description: Key and wished value.
    type: dict
    required: true
  apply:
    description: Whether to put the settings in force now.
    type: bool
    default: false
  file_name:
    description: Name of the caller's file in C(/etc/sysctl.d), to tell which other files are read after it.
    type: str
    default: 90-metalserve.conf
attributes:
  check_mode:
    support: full
    description: Says what would be set.
  diff_mode:
    support: full
    description: Shows the running values before and after.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Turn NUMA balancing off where there is more than one node
  metal.serve.kernel_settings:
    settings:
      kernel.numa_balancing: "0"
    apply: true
"""

RETURN = r"""
applicable:
  description: The settings that belong into this machine's file.
  returned: always
  type: dict
different:
  description: Keys whose running value is another one (before this call).
  returned: always
  type: list
  elements: str
not_applied:
  description: Sentences about settings that could not be put in force.
  returned: always
  type: list
  elements: str
overridden:
  description: Key and the file that sets it to another value at boot, after ours.
  returned: always
  type: dict
governors:
  description: CPU frequency governor and the number of policies that have it; empty where there is no frequency scaling.
  returned: always
  type: dict
numa_nodes:
  description: Number of NUMA nodes.
  returned: always
  type: int
"""

import glob
import os
import re

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.runtime import sysctl

FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def _place(key: str) -> str:
    return os.path.join("/proc/sys", *key.split("."))


def _numa_nodes() -> int:
    nodes = [path for path in glob.glob("/sys/devices/system/node/node*") if re.search(r"node\d+\Z", path)]
    return max(1, len(nodes))


def _governors() -> dict[str, int]:
    found: dict[str, int] = {}
    for path in glob.glob("/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"):
        name = _read(path).strip()
        found[name] = found.get(name, 0) + 1
    return found


def _other_files(own: str) -> list[tuple[str, str]]:
    seen: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted(glob.glob(os.path.join(folder, "*.conf"))):
            # A file in an earlier folder replaces those of the same name in the later ones.
            if os.path.basename(path) != own:
                seen.setdefault(os.path.basename(path), path)
    return [(path, _read(path)) for path in seen.values()]


def _apply(settings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    done, refused = {}, []
    for key, value in settings.items():
        try:
            with open(_place(key), "w", encoding="utf-8") as stream:
                stream.write(value)
            done[key] = value
        except OSError as error:
            refused.append(f"{key} stays {sysctl.normal(_read(_place(key)))} until the next boot ({error.strerror})")
    return done, refused


def main() -> None:
    """Compare wished and running values; write where asked and possible."""
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True},
            "apply": {"type": "bool", "default": False},
            "file_name": {"type": "str", "default": "90-metalserve.conf"},
        },
        supports_check_mode=True,
    )
    wanted = {key: sysctl.normal(str(value)) for key, value in module.params["settings"].items()}
    bad = [key for key in wanted if not re.match(r"\A[a-z0-9_]+(\.[A-Za-z0-9_-]+)+\Z", key)]
    if bad:
        module.fail_json(msg=f"{bad[0]!r} is not the name of a kernel setting; one looks like net.core.somaxconn")
    running = {key: sysctl.normal(_read(_place(key))) for key in wanted if os.path.exists(_place(key))}
    nodes = _numa_nodes()
    try:
        chosen = sysctl.applicable(wanted, running, nodes)
    except ValueError:
        module.fail_json(msg=f"a floor among {sorted(sysctl.FLOORS & set(wanted))} is not a whole number: {wanted}")
        return
    different = {key: value for key, value in chosen.items() if running[key] != value}

    done: dict[str, str] = {}
    refused: list[str] = []
    if module.params["apply"] and different:
        if not os.access(_place(next(iter(different))), os.W_OK):
            names = ", ".join(sorted(different))
            refused = [
                f"/proc/sys is read-only here (a container); set at the next boot of a machine that owns it: {names}"
            ]
        elif module.check_mode:
            done = different
        else:
            done, refused = _apply(different)
    module.exit_json(
        changed=bool(done),
        applicable=chosen,
        different=sorted(different),
        not_applied=refused,
        overridden=sysctl.overridden(chosen, module.params["file_name"], _other_files(module.params["file_name"])),
        governors=_governors(),
        numa_nodes=nodes,
        diff={
            "before_header": "running kernel",
            "after_header": "running kernel",
            "before": "".join(f"{key} = {running[key]}\n" for key in sorted(done)),
            "after": "".join(f"{key} = {done[key]}\n" for key in sorted(done)),
        },
    )


if __name__ == "__main__":
    main()
