# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the role verify: what was measured, as lines for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.telemetry import summary


def verify_node_lines(
    replicas: Sequence[Mapping[str, Any]], host: str, gateways: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what runs on a node, with the numbers of the first gateway that measured."""
    measured = next((one for one in gateways if one.get("replicas")), {})
    return summary.node_lines(host, replicas, measured.get("replicas", []), measured.get("pools", []))


def verify_gateway_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what a gateway showed: a line per pool, then what is worth knowing."""
    return summary.gateway_lines(result.get("pools", []), result.get("warnings_found", []))


class FilterModule:
    """The filters ``metal.serve.verify_*``."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"verify_node_lines": verify_node_lines, "verify_gateway_lines": verify_gateway_lines}
