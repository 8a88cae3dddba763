# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Renders the monitoring templates with Ansible, from the roles' own defaults: once per inventory and test run."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "templates" / "monitoring"
FOLDER = Path(__file__).parent / "rendering"
EXTRA: dict[str, dict[str, Any]] = {
    "gpu": {
        "node_agent_dcgm_image": "registry.test:5000/dcgm-exporter@sha256:" + "0" * 64,
        "metalserve_audit_publish": True,
        "monitoring_watchdog_receiver": "on-call",
    },
    "cpu": {},
}


@functools.cache
def rendered(inventory: str) -> dict[str, Any]:
    """Return the rendered files by name, and the scrape targets, of ``rendering/<inventory>.yml``."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        extra = json.dumps({"out": out, **EXTRA[inventory]})
        subprocess.run(
            [
                os.path.join(os.path.dirname(sys.executable), "ansible-playbook"),
                "-i",
                str(FOLDER / f"{inventory}.yml"),
                str(FOLDER / "playbook.yml"),
                "-e",
                extra,
            ],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_LOCALHOST_WARNING": "false"},
        )
        with open(out, encoding="utf-8") as stream:
            files: dict[str, Any] = json.load(stream)
    return files
