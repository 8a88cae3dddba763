# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Ask the module of the same name until all engines serve, and show how far they are meanwhile."""

from __future__ import annotations

import time
from typing import Any

from ansible.utils.display import Display

from ansible_collections.metal.serve.plugins.plugin_utils.reached import ReachedAction

DISPLAY = Display()
EVERY_S = 15.0
"""Seconds between two lines of progress for an engine that is still doing the same."""


class ActionModule(ReachedAction):
    """Poll with short calls, so that a lost connection costs one of them, and a person sees what is going on."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the last look at each replica; failed with the reasons where one will not serve."""
        super(ReachedAction, self).run(tmp, task_vars)
        arguments = dict(self._task.args)
        timeout = float(arguments.get("timeout", 900))
        patience = float(arguments.get("patience", 0))
        host = str((task_vars or {}).get("inventory_hostname", ""))
        started = time.monotonic()
        shown: dict[str, tuple[str, float]] = {}
        changed = False
        while True:
            result = self.ask(arguments, task_vars, "metal.serve.engine_ready")
            if result.get("failed") or "replicas" not in result:
                return result
            elapsed = time.monotonic() - started
            changed = changed or bool(result.get("changed"))
            waiting = [item for item in result["replicas"] if not item["ready"]]
            failed = [item for item in waiting if item["failed"]]
            if failed or not waiting or elapsed >= timeout:
                break
            self._show(host, waiting, shown, elapsed, timeout)
            if 0 < patience <= elapsed:
                result.update(changed=changed, waiting=[f"{item['replica']}: {item['doing']}" for item in waiting])
                return result
            arguments.update(seen=result["seen"], restarts=result["restarts"])
        result["changed"] = changed
        result["waiting"] = []
        result["elapsed_s"] = round(elapsed, 1)
        if failed:
            result.update(failed=True, msg="\n".join(self._reason(item) for item in failed))
        elif waiting:
            result.update(
                failed=True,
                msg="\n".join(self._late(item, elapsed) for item in waiting),
            )
        return result

    @staticmethod
    def _show(
        host: str, waiting: list[dict[str, Any]], shown: dict[str, tuple[str, float]], elapsed: float, timeout: float
    ) -> None:
        for item in waiting:
            name, doing = str(item["replica"]), str(item["doing"])
            before, at = shown.get(name, ("", -EVERY_S))
            if doing != before or elapsed - at >= EVERY_S:
                DISPLAY.display(f"  {host} {name}: {doing} ({elapsed:.0f} s of at most {timeout:.0f} s)")
                shown[name] = (doing, elapsed)

    @staticmethod
    def _reason(item: dict[str, Any]) -> str:
        return "\n".join([f"{item['replica']} does not serve: {item['failed']}", *_indented(item["log"])])

    @staticmethod
    def _late(item: dict[str, Any], elapsed: float) -> str:
        text = f"{item['replica']} does not serve after {elapsed:.0f} s; last: {item['doing']}"
        return "\n".join([text, *_indented(item["log"])])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
