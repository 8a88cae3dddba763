# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The audit of one host, as the module, the command line and the timer run it: read once, judge, say what came of it."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from ansible_collections.metal.serve.plugins.module_utils.checklist import checks
from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import REGISTRY, Verdict
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import merge_policy
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import (
    DEFAULT_TIMEOUT,
    Collected,
    LiveSource,
    collect,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES

DEEP_TIMEOUT = 3600.0
__all__ = ["REGISTRY", "Audited", "areas_of", "audit", "checks", "policy_of"]


@dataclass(frozen=True)
class Audited:
    """A host that was judged, with what it was judged by."""

    host: str
    verdicts: list[Verdict]
    collected: Collected
    seconds: float


def policy_of(override: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole policy. Raises PolicyError with a sentence for each thing that is wrong in ``override``."""
    return merge_policy(override, {check.id for check in REGISTRY.all()})


def areas_of(words: Iterable[str]) -> tuple[str, ...]:
    """Return the areas that ``words`` (tags) ask for; () for all of them.

    Raises ValueError for a word that is no area: a misspelt one must not look like a clean result.
    """
    known = REGISTRY.areas()
    wanted = [word for word in words if word not in ("all", "always", "tagged")]
    for word in wanted:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"There is no area {word!r} of checks; {hint}")
    return tuple(area for area in known if area in wanted)


def audit(
    source: Union[LiveSource, str, None],
    policy: Mapping[str, Any],
    host: str = "",
    areas: Iterable[str] = (),
    timeout: float = DEFAULT_TIMEOUT,
) -> Audited:
    """Read ``source`` (None: this machine, or a snapshot's folder) once and judge it. Changes nothing.

    ``host`` is its name in reports and waivers; empty: what it calls itself. ``timeout`` bounds the reading, in seconds
    (an hour where the policy asks for ``model_deep``).
    Raises SnapshotError where a folder is none.
    """
    began = time.monotonic()
    if policy["model_deep"]:
        timeout = max(timeout, DEEP_TIMEOUT)
    collected = collect(source, PROBES if policy["model_deep"] else None, timeout)
    name = host or collected.facts.host.hostname or "unnamed"
    verdicts = judge(collected.facts, policy, name, tuple(areas))
    return Audited(name, verdicts, collected, round(time.monotonic() - began, 3))
