#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""ansible-lint as it is, but for its syntax checks: one ansible-playbook reads every playbook and role at once.

ansible-lint starts a program for each of them, which is half of its time. Where the one run finds a fault, ansible-lint's
own runs follow, for their messages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from ansiblelint.__main__ import main
from ansiblelint.file_utils import Lintable
from ansiblelint.runner import Runner

one_by_one = Runner._run_syntax_check_phase


def at_once(runner: Runner, matches: list[Any]) -> list[Lintable]:
    """Return the playbooks and roles that were checked; a fault goes into ``matches``."""
    files = runner._collect_syntax_check_files()
    roles = [str(file.path.resolve()) for file in files if file.kind == "role"]
    tasks = [{"ansible.builtin.import_role": {"name": role}} for role in roles]
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as play:
        json.dump([{"name": "Import every role", "hosts": "localhost", "tasks": tasks}], play)
        play.flush()
        playbooks = [str(file.path) for file in files if file.kind == "playbook"]
        checked = subprocess.run(
            ["ansible-playbook", "--syntax-check", *playbooks, play.name], capture_output=True, check=False
        )
    return files if checked.returncode == 0 else one_by_one(runner, matches)


Runner._run_syntax_check_phase = at_once
sys.exit(main(["ansible-lint", *sys.argv[1:]]))
