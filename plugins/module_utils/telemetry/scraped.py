# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What Prometheus says about its targets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TargetState:
    """Numbers of targets that are up and in all; sentences for those down on required nodes and elsewhere."""

    up: int
    total: int
    down: list[str]
    elsewhere: list[str]


def target_state(answer: Any, required_nodes: Collection[str]) -> TargetState:
    """Return the state of the active targets in an answer of ``/api/v1/targets``.

    A target whose label ``node`` is not in ``required_nodes`` counts as elsewhere; one without the label is required.
    An answer of another shape counts as no target.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    targets = data.get("activeTargets") if isinstance(data, dict) else None
    up = 0
    down: list[str] = []
    elsewhere: list[str] = []
    listed = [target for target in targets or [] if isinstance(target, dict)]
    for target in listed:
        if target.get("health") == "up":
            up += 1
            continue
        labels = target.get("labels") or {}
        node = labels.get("node")
        reason = target.get("lastError") or f"health {target.get('health', 'unknown')}"
        text = f"{labels.get('job', target.get('scrapePool', '?'))} {target.get('scrapeUrl', '?')}: {reason}"
        (down if node is None or node in required_nodes else elsewhere).append(text)
    return TargetState(up, len(listed), down, elsewhere)
