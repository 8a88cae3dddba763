# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Builders shared by the checklist's tests."""

from __future__ import annotations

from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Finding, Registry, Verdict


def verdict(id: str, word: str, **changed: Any) -> Verdict:
    """Return a verdict with plain texts; ``changed`` sets single fields."""
    fields: dict[str, Any] = {
        "title": f"title of {id}",
        "severity": "major",
        "current": "seen",
        "desired": "wanted",
        "evidence": ["a line"],
        "why": "a reason",
        "remedy": f"mend {id}",
        "tags": ["host"],
        "source": "a source",
    }
    return Verdict(id=id, verdict=word, **{**fields, **changed})


def registry(**findings: Finding | Exception) -> Registry:
    """Return a registry with one check per keyword (``area__name``) that answers or raises what is given."""
    made = Registry()
    for name, answer in findings.items():

        def function(facts: Any, policy: Any, answer: Finding | Exception = answer) -> Finding:
            if isinstance(answer, Exception):
                raise answer
            return answer

        made.check(
            name.replace("__", "."),
            title=name,
            severity="major",
            why="w",
            remedy="r",
            source="s",
            applies_to=("engine",),
        )(function)
    return made
