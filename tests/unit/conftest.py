# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What every unit test runs under."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
