# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What maintain.yml does while a node's engines are stopped, and in which order."""

from __future__ import annotations

from pathlib import Path

import yaml

TASKS = yaml.safe_load(
    (Path(__file__).parents[3] / "roles" / "release" / "tasks" / "maintenance.yml").read_text(encoding="utf-8")
)


def test_the_host_roles_judge_what_the_commands_left_and_the_boot_comes_last() -> None:
    """A driver that a command brings is held as a set, and the boot that it wants is seen, in the same run."""
    modules = [next(key for key in task if key.startswith("ansible.builtin.")) for task in TASKS]
    assert modules == [
        "ansible.builtin.command",
        "ansible.builtin.include_role",
        "ansible.builtin.include_role",
        "ansible.builtin.reboot",
    ]
    roles = [task["ansible.builtin.include_role"]["name"] for task in TASKS[1:3]]
    assert roles == ["metal.serve.gpu_host", "metal.serve.container_runtime"]
