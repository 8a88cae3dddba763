# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Run the checklist over one host's facts."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    FAIL,
    NOT_APPLICABLE,
    REGISTRY,
    UNKNOWN,
    VERDICTS,
    WARN,
    Check,
    Finding,
    Verdict,
    not_applicable,
    unknown,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import waiver_for

EXIT_PASS, EXIT_WARN, EXIT_FAIL = 0, 1, 2


def judge(
    facts: Any,
    policy: Mapping[str, Any],
    host: str,
    areas: Optional[Sequence[str]] = None,
    today: Optional[datetime.date] = None,
    checks: Optional[Iterable[Check]] = None,
) -> list[Verdict]:
    """Return one verdict per check of ``areas`` (default: all), worst first, then in the order of the checklist.

    ``facts`` is a ``HostFacts``; ``policy`` comes from :func:`policy.merge_policy`. A check that raises is ``unknown``
    with the error as its evidence: a fault in one check must neither end the audit nor look like a pass.
    """
    today = today or datetime.date.today()
    verdicts = []
    for item in checks if checks is not None else REGISTRY.all():
        if areas and item.area not in areas:
            continue
        finding = _find(item, facts, policy)
        waiver = waiver_for(policy, item.id, host, today) if finding.verdict in (FAIL, WARN, UNKNOWN) else None
        verdicts.append(
            Verdict(
                id=item.id,
                title=item.title,
                severity=item.severity,
                verdict=finding.verdict,
                current=finding.current,
                desired=finding.desired,
                evidence=list(finding.evidence),
                why=item.why,
                remedy=item.remedy,
                tags=list(item.tags),
                source=item.source,
                waiver=waiver,
            )
        )
    return sorted(verdicts, key=lambda verdict: (verdict.waiver is not None, VERDICTS.index(verdict.verdict)))


def _find(item: Check, facts: Any, policy: Mapping[str, Any]) -> Finding:
    roles = policy["expected"]["roles"]
    if roles and not set(item.applies_to) & set(roles):
        return not_applicable(f"for {', '.join(item.applies_to)}; this host is {', '.join(roles)}")
    try:
        return item.function(facts, policy)
    except Exception as error:  # the audit must go on, whatever one check met
        return unknown(f"the check itself failed: {type(error).__name__}: {error}")


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return how many verdicts of each kind there are, waived ones under ``waived`` only."""
    counts = dict.fromkeys((*VERDICTS, "waived"), 0)
    for verdict in verdicts:
        counts["waived" if verdict.waiver else verdict.verdict] += 1
    return counts


def exit_code(verdicts: Sequence[Verdict], strict: bool = False) -> int:
    """Return 2 for a failure or a host that could not be judged, 1 for open warnings where ``strict``, else 0.

    A host could not be judged where no check that concerns it came to pass, warn or fail.
    """
    open_verdicts = [verdict.verdict for verdict in verdicts if verdict.waiver is None]
    judged = [verdict for verdict in verdicts if verdict.verdict not in (UNKNOWN, NOT_APPLICABLE)]
    if not judged or FAIL in open_verdicts:
        return EXIT_FAIL
    if strict and (WARN in open_verdicts or UNKNOWN in open_verdicts):
        return EXIT_WARN
    return EXIT_PASS
