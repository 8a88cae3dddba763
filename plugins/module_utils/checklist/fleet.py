# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Runs playbooks/audit.yml through ansible-runner, shows how far it is and ends with the audit's own exit code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, TextIO

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import EXIT_FAIL

JUDGE, REPORT = "Read and judge", "Report"
"""Names of the tasks of playbooks/audit.yml that are watched."""


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    inventory: str
    limit: Optional[str] = None
    tags: Optional[str] = None
    check: bool = False
    extra: tuple[str, ...] = ()
    vault_password_file: Optional[str] = None
    reports: Optional[str] = None
    strict: bool = False
    json: bool = False

    @classmethod
    def of(cls, given: argparse.Namespace) -> Request:
        """Return the request that the parsed command line makes."""
        return cls(
            given.inventory,
            given.limit,
            given.tags,
            given.check,
            tuple("@" + os.path.abspath(one[1:]) if one.startswith("@") else one for one in given.extra_vars),
            given.vault_password_file and os.path.abspath(given.vault_password_file),
            given.reports,
            given.strict,
            given.json,
        )

    def command_line(self) -> list[str]:
        """Return the options for ansible-playbook."""
        words: list[str] = ["--check"] if self.check else []
        for option, value in (
            ("--limit", self.limit),
            ("--tags", self.tags),
            ("--vault-password-file", self.vault_password_file),
        ):
            words += [option, value] if value is not None else []
        if self.reports is not None:
            words += ["-e", json.dumps({"audit_dir": os.path.abspath(self.reports)})]
        for one in self.extra:
            words += ["-e", one]
        return [*words, "-e", "metalserve_audit_strict=true"] if self.strict else words


@dataclass
class Progress:
    """Follows the run's events: how many hosts are done, where the report is, what went wrong before it."""

    out: TextIO
    done: int = 0
    hosts: int = 0
    result: Optional[Mapping[str, Any]] = None
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def event(self, event: Mapping[str, Any]) -> bool:
        """Take one event of ansible-runner; True keeps it."""
        kind, data = str(event.get("event", "")), event.get("event_data") or {}
        task = str(data.get("task") or "")
        if kind == "runner_on_start" and task == JUDGE:
            self.hosts += 1
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            result = data.get("res") or {}
            if task == JUDGE:
                self.done += 1
                self._show()
            elif task == REPORT and "exit_code" in result:
                self.result = result
            elif kind != "runner_on_ok":
                said = str(result.get("msg") or "a step failed without a word")
                self.problems.append(said.replace("Task failed: ", "", 1))
        elif kind == "verbose":
            self.said += str(event.get("stdout") or "").splitlines()
        return True

    def _show(self) -> None:
        if self.out.isatty():
            seconds = time.monotonic() - self.began
            self.out.write(f"\r\033[K{self.done} of {self.hosts} hosts judged, {seconds:.0f} s")
            self.out.flush()

    def end(self) -> None:
        """Leave the line clean."""
        if self.out.isatty():
            self.out.write("\r\033[K")


def run(root: str, request: Request, out: TextIO, err: TextIO) -> int:
    """Audit the hosts of an inventory, print the table or JSON on ``out`` and return 0, 1 or 2.

    Raises ValueError with a sentence where the inventory or ansible-runner is not there.
    """
    inventory = request.inventory
    if "," not in inventory:
        if not os.path.exists(inventory):
            raise ValueError(f"-i {inventory}: there is no such inventory.")
        inventory = os.path.abspath(inventory)
    runner = _runner(root)
    progress = Progress(err)
    with tempfile.TemporaryDirectory(prefix="metalserve-audit-") as private:
        runner.run(
            private_data_dir=private,
            project_dir=root,
            playbook="playbooks/audit.yml",
            inventory=inventory,
            cmdline=shlex.join(request.command_line()) or None,
            envvars={
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_CONFIG": os.path.join(root, "ansible.cfg"),
                "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}",
            },
            event_handler=progress.event,
            quiet=True,
        )
        progress.end()
        return _end(progress, request, out, err)


def _end(progress: Progress, request: Request, out: TextIO, err: TextIO) -> int:
    """Print the result and return the exit code; a run without a report is a failure that says why."""
    if progress.result is None:
        problems = progress.problems or [
            line.split("ERROR]:", 1)[1].strip() for line in progress.said if "ERROR]:" in line
        ]
        if progress.problems:
            err.write("\n".join(line for line in progress.said if "ERROR]:" not in line).strip() + "\n")
        for problem in dict.fromkeys(problems) or ["the run ended without a report"]:
            err.write(f"audit: {problem}\n")
        return EXIT_FAIL
    files = {os.path.basename(path): path for path in progress.result["files"]}
    with open(files["audit.json" if request.json else "audit.txt"], encoding="utf-8") as stream:
        out.write(stream.read())
    if not request.json:
        out.write(f"Reports: {os.path.relpath(os.path.dirname(files['audit.txt']))}/\n")
    return int(progress.result["exit_code"])


def _runner(root: str) -> Any:
    """Return ansible-runner, from the checkout's .venv where this Python has none. Raises ValueError."""
    try:
        import ansible_runner  # noqa: PLC0415 - the audit of a snapshot runs without it
    except ImportError:
        python = os.path.join(root, ".venv", "bin", "python")
        if os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(os.path.join(root, ".venv")):
            os.execv(python, [python, *sys.argv])
        raise ValueError(
            "-i needs Ansible and ansible-runner: install requirements.lock into .venv (README.md), or audit a snapshot."
        ) from None
    return ansible_runner
