# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The one error that the planner raises for input it cannot plan for."""

from __future__ import annotations


class PlanError(ValueError):
    """Input that cannot be planned: one sentence that names the variable, the value and what would be right.

    ``ways_out`` lists the shortest changes that would make it work, each with its number; it may be empty.
    """

    def __init__(self, message: str, ways_out: list[str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.ways_out = list(ways_out or [])

    def __str__(self) -> str:
        if not self.ways_out:
            return self.message
        return self.message + " Ways out: " + "; ".join(self.ways_out) + "."


class DoesNotFitError(PlanError):
    """Well-formed input that no engine could serve on this hardware; everything else is wrong input."""
