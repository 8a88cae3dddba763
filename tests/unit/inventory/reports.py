# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a report back into its entries, as a person would."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One numbered problem or warning of a report."""

    variable: str
    where: str
    value: str
    problem: str
    right: str
    severity: str


def entries(output: str) -> list[Entry]:
    """Return the entries of the report in what a playbook run printed."""
    found = []
    severity = "error"
    blocks = re.split(r"\n\n+", output[output.find("What validate found:") :])
    for block in blocks:
        if block.startswith("Warnings"):
            severity = "warning"
        match = re.match(r"\d+\. (.+)\n", block)
        if match is None:
            continue
        fields = {}
        for part in re.split(r"\n +(?=(?:where|value|problem|right): )", block)[1:]:
            name, _unused, text = part.partition(":")
            fields[name.strip()] = re.sub(r"\s+", " ", text).strip()
        found.append(
            Entry(
                match.group(1),
                fields.get("where", ""),
                fields.get("value", ""),
                fields.get("problem", ""),
                fields.get("right", ""),
                severity,
            )
        )
    return found
