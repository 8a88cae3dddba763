# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters that turn an audit report into what a person or a program reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ansible_collections.metal.serve.plugins.module_utils.checklist.report import (
    kind_of,
    remedies,
    render_junit,
    render_terminal,
    render_textfile,
    show,
)

TEMPLATES = Path(__file__).parents[2] / "templates" / "report"


def when(moment: str) -> str:
    """Return 2027-01-31T03:00:00Z as a person writes it."""
    return moment.replace("T", " ").replace("Z", " UTC")


def sentence(text: str) -> str:
    """Return ``text`` with a capital at its beginning and a full stop at its end."""
    begun = text[:1].upper() + text[1:]
    return begun if begun.endswith((".", "?", "!")) else begun + "."


def audit_html(report: Mapping[str, Any]) -> str:
    """Return the report as one self-contained HTML page; every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(show=show, when=when, sentence=sentence, remedies=remedies, kind=kind_of)
    return environment.get_template("audit.html.j2").render(report=report) + "\n"


class FilterModule:
    """Audit reports: ``audit_html``, ``audit_junit``, ``audit_terminal``, ``audit_textfile``."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "audit_html": audit_html,
            "audit_junit": render_junit,
            "audit_terminal": render_terminal,
            "audit_textfile": render_textfile,
        }
