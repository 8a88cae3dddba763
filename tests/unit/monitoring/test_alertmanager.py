# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Receivers that Alertmanager does not take: the reason is told, no secret is, and Prometheus has its rules all the same."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.telemetry.alertmanager import refusal

ROOT = Path(__file__).parents[3]
SECRET = secrets.token_hex(8)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "yaml: unmarshal errors:\n  line 3: field webhok_configs not found",
            "yaml: unmarshal errors: line 3: field webhok",
        ),
        ("yaml: unmarshal errors:\n  line 3: cannot unmarshal !!str `SECRET` into config.BasicAuth", "!!str … into"),
        ('parse "https://u:SECRET@h:port/": invalid port ":port" after host', "parse …: invalid port … after host"),
        ("no global SMTP smarthost set", "no global SMTP smarthost set"),
    ],
)
def test_the_reason_without_the_values(said: str, reason: str) -> None:
    text = said.replace("SECRET", SECRET)
    found = refusal(
        {"msg": "failed to validate", "stdout": f"Checking '/root/x'  FAILED: {text}\n\namtool: error: failed\n"}
    )
    assert found.startswith(reason) or reason in found
    assert SECRET not in found


def test_another_failure_tells_its_own_message() -> None:
    assert refusal({"msg": "chgrp failed: failed to look up group prometheus"}).endswith("look up group prometheus")
    assert refusal({}) == "it gave no reason"


def test_the_task_says_it_though_it_hides_its_result(tmp_path: Path) -> None:
    """The role's own tasks; nothing is written, as amtool refuses."""
    receivers = [{"name": "on-call", "webhok_configs": [{"url": f"https://u:{SECRET}@alerts.example/x"}]}]
    play: dict[str, Any] = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {
            "ansible_python_interpreter": sys.executable,
            "monitoring_alert_receivers": receivers,
            "metalserve_pools": {},
        },
        "tasks": [
            {
                "import_role": {
                    "name": "metal.serve.monitoring",
                    "tasks_from": "alertmanager",
                    "rolespec_validate": False,
                }
            }
        ],
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", str(tmp_path / "play.yml")],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    words = " ".join(done.stdout.split())
    assert "metalserve_alert_receivers" in words
    assert "field webhok_configs not found" in words
    assert SECRET not in done.stdout + done.stderr


def test_rules_are_in_force_before_receivers_may_fail() -> None:
    """A host that failed there would find its rules unchanged in the next run, and never reload."""
    tasks = yaml.safe_load((ROOT / "roles" / "monitoring" / "tasks" / "main.yml").read_text(encoding="utf-8"))
    steps = [str(task.get("ansible.builtin.import_tasks") or task.get("ansible.builtin.meta")) for task in tasks]
    at = steps.index("prometheus.yml")
    assert steps[at : at + 4] == ["prometheus.yml", "flush_handlers", "alertmanager.yml", "flush_handlers"]
    assert "rules.yml" in steps[:at]
