# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What site.yml may do with a replica. It starts engines; it never stops one that serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.release.content import compare
from ansible_collections.metal.serve.plugins.module_utils.release.state import Found

UNCHANGED, START, CREATE, REPLACE, REDEPLOY = "unchanged", "start", "create", "replace", "redeploy"


@dataclass(frozen=True)
class Decision:
    """``unchanged``: it runs what is planned. ``start``: it should run, and does not. ``create``: there is no
    release, or one that
    is not running. ``replace``: the release there never served, so nothing is interrupted. ``redeploy``: another
    one serves."""

    action: str
    differences: list[dict[str, Any]]


def decide(
    current: Found | None, desired_release: str, desired: Mapping[str, Any], running: bool, answers: bool
) -> Decision:
    """Return what to do. ``running``: its container runs; ``answers``: it answers as an engine now."""
    if current is None:
        return Decision(CREATE, [])
    if current.release == desired_release:
        return Decision(UNCHANGED if running else START, [])
    differences = compare(current.document["content"], desired)
    if running and (current.served or answers):
        return Decision(REDEPLOY, differences)
    if running or not current.served:
        return Decision(REPLACE, differences)
    return Decision(CREATE, differences)


def moved(current: Found | None, address: str, port: int) -> str:
    """Return ``10.0.0.11:8100 -> 10.0.0.11:8200`` where the release that is there answers elsewhere, else nothing.

    Gateways and monitors follow the inventory, not what runs: they would look for the replica where it is not yet.
    """
    if current is None:
        return ""
    there, planned = (f"{current.document['address']}:{current.document['port']}", f"{address}:{port}")
    return "" if there == planned else f"{there} -> {planned}"
