# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Renders the monitoring templates with Ansible, from the roles' own defaults: once per inventory.

An Ansible run takes seconds, so its result is kept in .cache/, by a hash over everything that it depends on.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "templates" / "monitoring"
FOLDER = Path(__file__).parent / "rendering"
CACHE = ROOT / ".cache" / "test-monitoring"
INPUTS = (
    FOLDER,
    TEMPLATES,
    *(ROOT / "roles" / role / part for role in ("node_agent", "monitoring") for part in ("defaults", "vars")),
    ROOT / "plugins" / "filter",
    *(ROOT / "plugins" / "module_utils" / part for part in ("common", "planner", "runtime", "telemetry")),
    ROOT / "ansible.cfg",
    Path(__file__),
)
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
    CACHE.mkdir(parents=True, exist_ok=True)
    out = CACHE / f"{inventory}-{_fingerprint()}.json"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one test run share the result
        if not out.exists():
            for old in CACHE.glob(f"{inventory}-*.json"):
                old.unlink()
            _run(inventory, out)
    files: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return files


def _run(inventory: str, out: Path) -> None:
    ansible = os.path.join(os.path.dirname(sys.executable), "ansible-playbook")
    extra = json.dumps({"out": str(out), **EXTRA[inventory]})
    result = subprocess.run(
        [ansible, "-i", str(FOLDER / f"{inventory}.yml"), str(FOLDER / "playbook.yml"), "-e", extra],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )
    assert result.returncode == 0, result.stdout + result.stderr


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256(version("ansible-core").encode())
    for top in INPUTS:
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        for path in files:
            if "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
