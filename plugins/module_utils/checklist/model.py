# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What a check is and what it answers.

A check is a pure function ``(facts, policy) -> Finding`` with a name, a reason and a remedy. The registry holds all of
them; :mod:`judge` runs them over one host. Adding a check is one decorated function in ``checks/`` and one fixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Optional

PASS, WARN, FAIL, UNKNOWN, NOT_APPLICABLE = "pass", "warn", "fail", "unknown", "not_applicable"
VERDICTS = (FAIL, UNKNOWN, WARN, PASS, NOT_APPLICABLE)  # worst first
SEVERITIES = ("critical", "major", "minor")
ROLES = ("engine", "gateway", "monitor")


@dataclass(frozen=True)
class Finding:
    """What a check saw: the verdict, what is there, what should be, and the lines that prove it."""

    verdict: str
    current: Any = None
    desired: Any = None
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.verdict!r} is no verdict; one of {', '.join(VERDICTS)}")


def passed(current: Any = None, desired: Any = None, *evidence: str) -> Finding:
    """Seen, and as it should be."""
    return Finding(PASS, current, desired, evidence)


def warned(current: Any = None, desired: Any = None, *evidence: str) -> Finding:
    """Serves now, may not tomorrow."""
    return Finding(WARN, current, desired, evidence)


def failed(current: Any = None, desired: Any = None, *evidence: str) -> Finding:
    """Not fit to serve, or wrong in a way that will cost an outage."""
    return Finding(FAIL, current, desired, evidence)


def unknown(why: str, desired: Any = None, *evidence: str) -> Finding:
    """Could not be judged; ``why`` says which probe or field is missing. Never a pass in disguise."""
    return Finding(UNKNOWN, why, desired, evidence)


def not_applicable(why: str) -> Finding:
    """Does not concern this host; ``why`` says what was seen that makes it so."""
    return Finding(NOT_APPLICABLE, why)


CheckFunction = Callable[[Any, Mapping[str, Any]], Finding]


@dataclass(frozen=True)
class Check:
    """One item of the checklist. ``id`` is ``area.name`` and stable; ``tags`` are ``site.yml --tags`` that mend it."""

    id: str
    title: str
    severity: str
    applies_to: tuple[str, ...]
    why: str
    remedy: str
    source: str
    function: CheckFunction = field(compare=False, repr=False)
    tags: tuple[str, ...] = ()

    @property
    def area(self) -> str:
        """The part of the id before the dot; ``--tags`` of the audit select by it."""
        return self.id.split(".", 1)[0]


@dataclass(frozen=True)
class Verdict:
    """A finding with everything a reader needs; the keys of the JSON report (``schemas/verdicts.json``)."""

    id: str
    title: str
    severity: str
    verdict: str
    current: Any
    desired: Any
    evidence: list[str]
    why: str
    remedy: str
    tags: list[str]
    source: str
    waiver: Optional[dict[str, str]] = None
    """{reason, until} of the waiver that covers it today."""
    ended_waiver: Optional[dict[str, str]] = None
    """The same of one that covered it and has ended: it counts again."""
    unread: list[str] = field(default_factory=list)
    """Readings that this unknown rests on and that failed (denied, timeout, error); [] where nobody looked."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


class Registry:
    """All checks by id, in the order in which they were declared."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def check(
        self,
        id: str,
        *,
        title: str,
        severity: str,
        why: str,
        remedy: str,
        source: str,
        applies_to: tuple[str, ...] = ROLES,
        tags: tuple[str, ...] = (),
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Declare the decorated function as the check ``id``.

        Raises ValueError for a second check of that id and for a severity or role that does not exist.
        """
        if id in self._checks:
            raise ValueError(f"check {id} is declared twice")
        if severity not in SEVERITIES:
            raise ValueError(f"check {id}: {severity!r} is no severity; one of {', '.join(SEVERITIES)}")
        if not set(applies_to) <= set(ROLES):
            raise ValueError(f"check {id}: applies_to {applies_to!r}; only {', '.join(ROLES)}")

        def declare(function: CheckFunction) -> CheckFunction:
            self._checks[id] = Check(id, title, severity, applies_to, why, remedy, source, function, tags)
            return function

        return declare

    def all(self) -> tuple[Check, ...]:
        """Return every check in the order of declaration."""
        return tuple(self._checks.values())

    def areas(self) -> tuple[str, ...]:
        """Return the areas, each once, in order."""
        return tuple(dict.fromkeys(check.area for check in self._checks.values()))


REGISTRY = Registry()
check = REGISTRY.check
