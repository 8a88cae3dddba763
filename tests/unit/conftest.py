# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What every unit test runs under."""

from __future__ import annotations

import gc

import yaml
from hypothesis import HealthCheck, settings

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# PyYAML's parser in C gives the same values in a tenth of the time.
yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[assignment,misc]


def pytest_collection_finish() -> None:
    """Keep thousands of collected tests out of every later garbage collection."""
    gc.freeze()
