# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Problems as a person reads them: numbered, with the place, the value and what would be right."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ansible_collections.metal.serve.plugins.module_utils.inventory.model import ERROR, Problem

WIDTH = 100


def count(number: int, noun: str) -> str:
    """Return ``1 problem``, ``2 problems``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary(problems: Sequence[Problem]) -> str:
    """Return the outcome in one sentence."""
    errors = sum(problem.severity == ERROR for problem in problems)
    warnings = len(problems) - errors
    warnings_text = count(warnings, "warning")
    more = f" and {warnings_text}" if warnings else ""
    if errors:
        return f"The inventory has {count(errors, 'problem')}{more}, listed above. No host was touched."
    return f"The inventory is right{f', with {warnings_text}' if warnings else ''}."


def render(problems: Sequence[Problem], width: int = WIDTH) -> str:
    """Return the whole report, at most ``width`` columns wide; names are never broken, commands not even wrapped."""
    lines = ["What validate found:"]
    for title, severity in (("", ERROR), ("Warnings, which do not stop the run:", "warning")):
        chosen = [problem for problem in problems if problem.severity == severity]
        if chosen and title:
            lines += ["", title]
        for number, problem in enumerate(chosen, 1):
            lines += ["", *_entry(number, problem, width)]
    return "\n".join(lines)


def _entry(number: int, problem: Problem, width: int) -> list[str]:
    """Return the lines of one problem."""
    mark = f"{number}. "
    lines = [f"{mark}{problem.variable}"]
    for name, text in (
        ("where", problem.where),
        ("value", problem.value),
        ("problem", problem.problem),
        ("right", problem.right),
    ):
        if text:
            first = " " * len(mark) + f"{name + ':':<9}"
            words, *commands = text.split("\n")
            lines += textwrap.wrap(
                words,
                width,
                initial_indent=first,
                subsequent_indent=" " * len(first),
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += [" " * len(first) + command for command in commands]
    return lines
