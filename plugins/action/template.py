# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""ansible.builtin.template, with differences that name the file on the machine."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action.template import ActionModule as TemplateAction


class ActionModule(TemplateAction):
    """The built-in action names a temporary file of the controller in its difference, and a new file not at all.

    A check is to tell which files a run would create, so the difference here carries the destination on both sides.
    """

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the built-in action and correct the headers of its difference."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        dest = str(self._task.args.get("dest", ""))
        diffs = result.get("diff")
        for diff in diffs if isinstance(diffs, list) else [diffs]:
            # Without the texts it is the difference of owner or mode, which has a path of its own.
            if isinstance(diff, dict) and isinstance(diff.get("after"), str):
                diff.update(before_header=dest if diff.get("before") else "/dev/null", after_header=dest)
        return result
