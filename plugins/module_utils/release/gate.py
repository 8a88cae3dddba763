# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What a release must show before it gets traffic. What was measured goes in, a list of findings comes out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

POLICY: dict[str, Any] = {
    # Against the previous release, same load, same node, nothing else on it: factor, and what never counts (seconds).
    "p99_factor": 1.5,
    "p99_slack_s": 0.25,
    "ttft_factor": 1.5,
    "ttft_slack_s": 0.1,
    # Share of the load's requests that may fail.
    "error_ratio": 0.0,
    # Share of the planned KV cache that must be there.
    "kv_capacity_ratio": 0.95,
    # Seconds for one answer to the golden prompt or of the warm-up.
    "answer_s": 60.0,
    # Lines of the log that are errors, and those of them that are not.
    "log_errors": [r"\bERROR\b", r"\bCRITICAL\b", r"^Traceback \(most recent call last\)"],
    "log_ignored": [],
}
"""Thresholds where release_gate_policy says nothing else."""


@dataclass(frozen=True)
class Golden:
    """A prompt and the regular expression that its answer must match."""

    prompt: str
    expect: str
    max_tokens: int = 8


@dataclass(frozen=True)
class Measured:
    """What the gate saw. Times in seconds; None: not measured.

    ``answers``: the text for each golden prompt in order, or why there is none (``problem: ...``). ``requests`` and
    ``failed`` count the load. ``kv_tokens``: tokens that the KV cache holds. ``log``: its lines.
    """

    answers: tuple[str, ...] = ()
    requests: int = 0
    failed: int = 0
    first_failure: str = ""
    ttft_p99_s: float | None = None
    p99_s: float | None = None
    kv_tokens: float | None = None
    log: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what is kept beside the release: the numbers, not the log."""
        return {key: value for key, value in asdict(self).items() if key not in ("log", "answers")}


@dataclass(frozen=True)
class Finding:
    """One judgement: ``good``, and in words what is and what should be."""

    name: str
    good: bool
    current: str
    desired: str


PROBLEM = "problem: "


@dataclass(frozen=True)
class Expected:
    """What is held against the measurement: golden prompts, the previous release's figures, planned tokens, its log."""

    golden: tuple[Golden, ...] = ()
    previous: Mapping[str, Any] = field(default_factory=dict)
    kv_tokens: float | None = None
    log: tuple[str, ...] = ()


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least ``share`` of ``values`` do not exceed, None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def policy(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole policy. Raises ValueError for a name that is none, or a threshold of another type."""
    for name, value in given.items():
        if name not in POLICY:
            raise ValueError(f"release_gate_policy has {name!r}; it may have {', '.join(sorted(POLICY))}")
        wanted = POLICY[name]
        good = (
            isinstance(value, list)
            if isinstance(wanted, list)
            else isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        )
        if not good:
            kind = "a list of regular expressions" if isinstance(wanted, list) else "a number, 0 or more"
            raise ValueError(f"release_gate_policy.{name} is {value!r}; it must be {kind}")
    return {**POLICY, **given}


def judge(measured: Measured, expected: Expected, rules: Mapping[str, Any]) -> list[Finding]:
    """Return every finding, good ones too."""
    return [
        *_golden(measured, expected),
        _errors(measured, rules),
        *_times(measured, expected, rules),
        *_kv(measured, expected, rules),
        _log(measured, expected, rules),
    ]


def failures(findings: Sequence[Finding]) -> list[str]:
    """Return a sentence per finding that is not good."""
    return [f"{item.name}: {item.current}, should be {item.desired}" for item in findings if not item.good]


def _golden(measured: Measured, expected: Expected) -> list[Finding]:
    found = []
    for number, golden in enumerate(expected.golden):
        answer = measured.answers[number] if number < len(measured.answers) else f"{PROBLEM}not asked"
        good = not answer.startswith(PROBLEM) and re.search(golden.expect, answer) is not None
        shown = answer[len(PROBLEM) :] if answer.startswith(PROBLEM) else repr(answer[:80])
        found.append(
            Finding(f"golden prompt {golden.prompt[:40]!r}", good, shown, f"a text that has {golden.expect!r}")
        )
    return found


def _errors(measured: Measured, rules: Mapping[str, Any]) -> Finding:
    ratio = measured.failed / measured.requests if measured.requests else 1.0
    shown = f"{measured.failed} of {measured.requests} requests failed"
    if measured.first_failure:
        shown = f"{shown} ({measured.first_failure})"
    return Finding("errors under load", ratio <= rules["error_ratio"], shown, f"at most {rules['error_ratio']:.1%}")


def _times(measured: Measured, expected: Expected, rules: Mapping[str, Any]) -> list[Finding]:
    found = []
    for key, name in (("ttft", "P99 time to first token"), ("p99", "P99 of the whole answer")):
        field_name = "ttft_p99_s" if key == "ttft" else "p99_s"
        value, before = getattr(measured, field_name), expected.previous.get(field_name)
        if value is None or before is None:
            # Nothing to hold it against: a first release, or one that answers nobody; errors say the latter.
            continue
        limit = max(before * rules[f"{key}_factor"], before + rules[f"{key}_slack_s"])
        found.append(Finding(name, value <= limit, f"{value:.3f} s, before {before:.3f} s", f"at most {limit:.3f} s"))
    return found


def _kv(measured: Measured, expected: Expected, rules: Mapping[str, Any]) -> list[Finding]:
    if expected.kv_tokens is None or measured.kv_tokens is None:
        return []
    limit = expected.kv_tokens * rules["kv_capacity_ratio"]
    good = measured.kv_tokens >= limit
    return [Finding("KV cache", good, f"{measured.kv_tokens:.0f} tokens", f"at least {limit:.0f} as planned")]


def _shape(line: str) -> str:
    """Return a line without what differs from start to start: digits and hexadecimal numbers."""
    return re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+", "#", line).strip()


def _log(measured: Measured, expected: Expected, rules: Mapping[str, Any]) -> Finding:
    errors = [re.compile(pattern) for pattern in rules["log_errors"]]
    ignored = [re.compile(pattern) for pattern in rules["log_ignored"]]
    known = {_shape(line) for line in expected.log}
    new = [
        line.strip()
        for line in measured.log
        if any(pattern.search(line) for pattern in errors)
        and not any(pattern.search(line) for pattern in ignored)
        and _shape(line) not in known
    ]
    shown = f"{len(new)} new error lines, first: {new[0][:200]}" if new else "no new error line"
    return Finding("log", not new, shown, "no error that the previous release did not have too")
