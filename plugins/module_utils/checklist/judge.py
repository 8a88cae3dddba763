# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Run the checklist over one host's facts."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    FAIL,
    NOT_APPLICABLE,
    REGISTRY,
    SEVERITIES,
    UNKNOWN,
    VERDICTS,
    WARN,
    Check,
    Finding,
    Verdict,
    not_applicable,
    unknown,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import ended_waiver_for, waiver_for
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import DENIED, ERROR, TIMEOUT

EXIT_PASS, EXIT_WARN, EXIT_FAIL = 0, 1, 2


def judge(
    facts: Any,
    policy: Mapping[str, Any],
    host: str,
    areas: Optional[Sequence[str]] = None,
    today: Optional[datetime.date] = None,
    checks: Optional[Iterable[Check]] = None,
) -> list[Verdict]:
    """Return one verdict per check of ``areas`` (default: all): open ones before waived ones, worst first, then by severity.

    ``facts`` is a ``HostFacts``; ``policy`` comes from :func:`policy.merge_policy`. A check that raises is ``unknown``
    with the error as its evidence: a fault in one check must neither end the audit nor look like a pass.
    """
    today = today or datetime.date.today()
    verdicts = []
    for item in checks if checks is not None else REGISTRY.all():
        if areas and item.area not in areas:
            continue
        finding = _find(item, facts, policy)
        problem = finding.verdict in (FAIL, WARN, UNKNOWN)
        waiver = waiver_for(policy, item.id, host, today) if problem else None
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
                ended_waiver=ended_waiver_for(policy, item.id, host, today) if problem and waiver is None else None,
                unread=_failed_readings(facts, finding) if finding.verdict == UNKNOWN else [],
            )
        )
    return sorted(verdicts, key=_worst_first)


def _worst_first(verdict: Verdict) -> tuple[bool, int, int]:
    return (
        verdict.waiver is not None,
        VERDICTS.index(verdict.verdict),
        SEVERITIES.index(verdict.severity),
    )


def _failed_readings(facts: Any, finding: Finding) -> list[str]:
    """Return the readings that an unknown names and that failed: not those that nobody was asked for, or found nothing."""
    said = " ".join(str(part) for part in (finding.current, *finding.evidence))
    failed = [state.name for state in getattr(facts, "probes", {}).values() if state.state in (DENIED, ERROR, TIMEOUT)]
    return sorted(name for name in failed if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", said))


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

    A host could not be judged where no check came to pass, warn or fail, or where a reading failed and a critical check
    is unknown for it: what could not be seen may be what is broken. Waived verdicts do not count.
    """
    still_open = [verdict for verdict in verdicts if verdict.waiver is None]
    words = {verdict.verdict for verdict in still_open}
    judged = any(verdict.verdict not in (UNKNOWN, NOT_APPLICABLE) for verdict in verdicts)
    blind = any(one.verdict == UNKNOWN and one.severity == SEVERITIES[0] and one.unread for one in still_open)
    if not judged or blind or FAIL in words:
        return EXIT_FAIL
    return EXIT_WARN if strict and words & {WARN, UNKNOWN} else EXIT_PASS
