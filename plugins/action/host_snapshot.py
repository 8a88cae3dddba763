# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a host with ``host_facts`` and writes its masked snapshot into a folder on the controller."""

from __future__ import annotations

import os
from typing import Any, Optional

from ansible.plugins.action import ActionBase

from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import SnapshotError, write_snapshot


class ActionModule(ActionBase):
    """The action; its options are documented in plugins/modules/host_snapshot.py."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = False

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Run the reading on the host, then write here."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _checked, given = self.validate_argument_spec(
            argument_spec={
                "dest": {"type": "path", "required": True},
                "subset": {"type": "list", "elements": "str", "default": ["all"]},
                "timeout": {"type": "float", "default": 60.0},
                "root": {"type": "str", "default": "/var/lib/metalserve"},
            }
        )
        read = self._execute_module(
            module_name="metal.serve.host_facts",
            module_args={
                "subset": given["subset"],
                "timeout": given["timeout"],
                "root": given["root"],
                "return_snapshot": True,
            },
            task_vars=task_vars,
        )
        if read.get("failed") or "snapshot" not in read:
            result.update({"failed": True, "msg": str(read.get("msg", "the host was not read")), "changed": False})
            return result
        dest = os.path.abspath(given["dest"])
        states: dict[str, list[str]] = {}
        for name, probe in sorted(read["host_facts"]["probes"].items()):
            if probe["state"] != "ok":
                states.setdefault(probe["state"], []).append(name)
        result.update({"changed": True, "dest": dest, "files": len(read["snapshot"]), "states": states})
        if not self._task.check_mode:
            try:
                write_snapshot(dest, read["snapshot"])
            except SnapshotError as error:
                result.update({"failed": True, "changed": False, "msg": str(error)})
        return result
