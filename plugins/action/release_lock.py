# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Says to the module of the same name who asks, and whether a holder's process on this machine is gone."""

from __future__ import annotations

import getpass
import os
import platform
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.release import lock
from ansible_collections.metal.serve.plugins.plugin_utils.reached import ReachedAction


def text_of(path: str) -> str:
    """Return a small file's text, ``""`` where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def started_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where there is none."""
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


def me(run: str) -> lock.Holder:
    """Return this run: ansible-playbook is the parent of the process that executes a task."""
    pid = os.getppid()
    return lock.Holder(
        run=run,
        by=f"{getpass.getuser()}@{platform.node()}",
        machine=text_of("/etc/machine-id") or platform.node(),
        boot=text_of("/proc/sys/kernel/random/boot_id"),
        pid=pid,
        pid_started=started_of(pid),
    )


class ActionModule(ReachedAction):
    """Ask for the lock; where it is refused and its holder's process is gone from this machine, take it over."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the module's result; failed with the holder's name where the lock is not to be had."""
        arguments = dict(self._task.args)
        mine = me(str(arguments.get("run", "")))
        self._task.args.update(
            by=mine.by, machine=mine.machine, boot=mine.boot, pid=mine.pid, pid_started=mine.pid_started
        )
        result = super().run(tmp, task_vars)
        holder = result.get("holder") or {}
        if result.get("verdict") == lock.REFUSE:
            pid = int(holder.get("pid", 0))
            if lock.gone(lock.Holder(**holder), mine, {pid: started_of(pid)}):
                self._task.args.update(replaces=holder["run"])
                result = super().run(tmp, task_vars)
        if result.get("verdict") == lock.REFUSE and not result.get("failed"):
            result["failed"] = True
            result["msg"] = lock.refusal(lock.Holder(**result["holder"]), self.host(task_vars))
        return result
