# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Runs ansible-playbook again and again without paying for its imports each time: fork_server.py loads it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STAND_INS = ("ssh", "scp", "sftp", "sshpass", "docker", "podman", "kubectl")


@dataclass(frozen=True)
class Outcome:
    """What one run did: exit status, all it printed, wall and CPU seconds, and each connection that it tried."""

    status: int
    output: str
    wall_s: float
    cpu_s: float
    connections: list[str]


class Runner:
    """A loaded ansible-playbook whose ways to a host lead to programs that only write down that they were called."""

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "connections.txt"
        programs = folder / "bin"
        programs.mkdir()
        for name in STAND_INS:
            program = programs / name
            program.write_text(f'#!/bin/sh\necho "$0 $*" >> {self._calls}\nexit 255\n')
            program.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
            "COLUMNS": "200",
        }
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def run(self, *arguments: str | Path) -> Outcome:
        """Run ansible-playbook in the checkout and return what it did."""
        self._calls.write_text("")
        began = time.monotonic()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        connections = self._calls.read_text().splitlines()
        return Outcome(answer["status"], answer["output"], time.monotonic() - began, answer["cpu_s"], connections)

    def close(self) -> None:
        """End the loaded process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)
