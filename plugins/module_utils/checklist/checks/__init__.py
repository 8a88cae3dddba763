# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The checks, grouped by area. Importing this package declares all of them in the registry."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks import (
    containers,
    driver,
    engines,
    gateway,
    gpu,
    host,
    limits,
    models,
    monitoring,
    security,
    topology,
)

__all__ = [
    "containers",
    "driver",
    "engines",
    "gateway",
    "gpu",
    "host",
    "limits",
    "models",
    "monitoring",
    "security",
    "topology",
]
