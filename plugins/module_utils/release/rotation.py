# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Who is out of rotation, as a file for the node exporter of the gateway: what an alert is raised on.

The file stays when the controller that took a replica out is gone, so nobody is out of rotation in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAME = "metalserve_rotation.prom"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def textfile(replicas: Sequence[Mapping[str, Any]]) -> str:
    """Return the file from the entries of metal.serve.gateway_rotation: one series per replica that is out."""
    lines = [
        "# HELP metalserve_rotation_out Replicas that this gateway sends no requests, as a playbook or a person wants.",
        "# TYPE metalserve_rotation_out gauge",
    ]
    for item in sorted(replicas, key=lambda one: str(one["replica"])):
        if not item["in"]:
            labels = {"replica": item["replica"], "pool": item["pool"], "run": item["run"], "by": item["by"]}
            text = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
            lines.append(f"metalserve_rotation_out{{{text}}} 1")
    return "\n".join([*lines, ""])
