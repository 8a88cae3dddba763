# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An action whose module may lose its host: that is a failure like others, which the play can answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

RECONNECT_S = 15.0
"""Seconds in which a lost connection may come back before the step counts as failed."""

PAUSE_S = 2.0


class ReachedAction(ActionBase):
    """Run the module of the task's own name; where the host is lost, ask again for a while, then fail.

    Ansible takes an unreachable host out of the run on the spot: nobody would put it back into rotation. The modules
    that use this may be asked twice: each of their states is one to be in, not a thing to do.
    """

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the module's result, or ``failed`` with ``lost`` where the host does not answer."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        result.update(self.ask(dict(self._task.args), task_vars))
        return result

    def host(self, task_vars: Mapping[str, Any] | None) -> str:
        """Return the inventory name of the host that the module runs on."""
        return str(self._task.delegate_to or (task_vars or {}).get("inventory_hostname", "the host"))

    def ask(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, name: str = "") -> dict[str, Any]:
        """Run the module once, as often as it takes to reach the host."""
        ends = time.monotonic() + RECONNECT_S
        while True:
            try:
                found: dict[str, Any] = self._execute_module(
                    module_name=name or self._task.action, module_args=arguments, task_vars=task_vars
                )
                return found
            except AnsibleConnectionFailure as error:
                if time.monotonic() >= ends:
                    words = " ".join(str(error).split())[:300]
                    return {
                        "failed": True,
                        "lost": True,
                        "changed": False,
                        "msg": f"{self.host(task_vars)} does not answer over SSH: {words}",
                    }
            time.sleep(PAUSE_S)
