#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Module metal.serve.verify_node: see DOCUMENTATION."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: verify_node
short_description: Say which replicas a node runs, on what, and whether their GPUs can talk to each other
version_added: 0.1.0
description:
  - Reads the releases below I(root), the state of their units and the names of the devices.
  - For a replica with several GPUs, runs one bounded all-reduce in the engine's image on the engine's GPUs and names
    the transport that NCCL chose.
author:
  - The Metalserve authors (@metalserve)
options:
  root:
    description: Folder with C(engines/<replica>/current).
    type: path
    default: /var/lib/metalserve
  allreduce:
    description: Whether to run the all-reduce.
    type: bool
    default: true
  allreduce_seconds:
    description: Seconds after which an all-reduce counts as hung.
    type: int
    default: 60
attributes:
  check_mode:
    description: Reads; the all-reduce is left out.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Look at this node
  metal.serve.verify_node:
  register: __verify_node
"""

RETURN = r"""
replicas:
  description: Replicas with engine, version, model, revision, release, devices, unit and the outcome of the all-reduce.
  type: list
  elements: dict
  returned: always
"""

import json
import os
import re
import shutil
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.telemetry import allreduce, summary


def cpu_name() -> str:
    """Return the processor's name and the number of processors."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except OSError:
        return "CPU"
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return f"{os.cpu_count()} x {match.group(1).strip()}" if match else "CPU"


def read_release(folder: str) -> tuple[str, dict[str, Any]]:
    """Return the hash and the content of a replica's current release; empty where there is none."""
    try:
        release = os.path.basename(os.readlink(os.path.join(folder, "current")))
        with open(os.path.join(folder, "current", "release.json"), encoding="utf-8") as stream:
            content = json.load(stream).get("content") or {}
        return release, content if isinstance(content, dict) else {}
    except (OSError, ValueError, AttributeError):
        return "", {}


def unit_state(module: AnsibleModule, replica: str) -> str:
    """Return the state that systemd gives the replica's unit."""
    _code, out, _err = module.run_command(["systemctl", "is-active", f"metalserve-engine@{replica}.service"])
    return str(out).strip() or "unknown"


def run_allreduce(module: AnsibleModule, replica: str, release: str, gpus: int) -> dict[str, str]:
    """Return the outcome of the all-reduce on a replica's GPUs."""
    seconds = module.params["allreduce_seconds"]
    engine, name = f"metalserve-{replica}-{release[:12]}", f"metalserve-allreduce-{replica}"
    code, out, err = module.run_command(["docker", "inspect", "--type", "container", engine])
    if code != 0:
        return {"verdict": "unknown", "transport": "", "reason": f"docker inspect {engine}: {err.strip()}"}
    try:
        argv = allreduce.command(json.loads(out)[0], gpus, seconds, name)
    except (ValueError, IndexError) as error:
        return {"verdict": "unknown", "transport": "", "reason": str(error)}
    # Twice bounded: the script ends its ranks, and timeout ends the container if the script itself hangs.
    code, out, err = module.run_command(["timeout", "--kill-after=10", str(seconds + 60), *argv])
    if code in (124, 137):
        module.run_command(["docker", "rm", "--force", name])
    found = allreduce.outcome(code, out + err)
    return {"verdict": found.verdict, "transport": found.transport, "reason": found.reason}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "allreduce": {"type": "bool", "default": True},
            "allreduce_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    base = os.path.join(module.params["root"], "engines")
    names: dict[str, str] = {}
    if shutil.which("nvidia-smi"):
        _code, out, _err = module.run_command(["timeout", "30", "nvidia-smi", "-L"])
        names = summary.device_names(out)
    replicas: list[dict[str, Any]] = []
    failures: list[str] = []
    for replica in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        release, content = read_release(os.path.join(base, replica))
        gpus = [str(gpu) for gpu in content.get("gpus") or []]
        found: dict[str, Any] = {
            "replica": replica,
            "release": release,
            "engine": str((content.get("engine") or {}).get("kind", "unknown engine")),
            "version": str((content.get("engine") or {}).get("version", "")),
            "model": str((content.get("model") or {}).get("name", "unknown model")),
            "revision": str((content.get("model") or {}).get("revision", "")),
            "devices": summary.devices_of(gpus, names, cpu_name()),
            "unit": unit_state(module, replica),
        }
        if len(gpus) > 1 and module.params["allreduce"] and not module.check_mode:
            found["allreduce"] = run_allreduce(module, replica, release, len(gpus))
            if found["allreduce"]["verdict"] == "fail":
                failures.append(f"{replica}: {found['allreduce']['reason']}")
        replicas.append(found)
    if failures:
        module.fail_json(msg="GPUs cannot work together: " + "; ".join(failures), changed=False, replicas=replicas)
    module.exit_json(changed=False, replicas=replicas)


if __name__ == "__main__":
    main()
