# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A node that went down and came up serves again with nobody's help."""

from __future__ import annotations

import subprocess

import pytest

from tests.lab.lab import ENGINES, containers_of, wait_until_serving

pytestmark = pytest.mark.lab

NODE = ENGINES[1]


def test_a_replica_comes_back_after_its_node_went_down() -> None:
    before = containers_of(NODE)
    assert any(before.values()), "no engine runs before the test"
    subprocess.run(["docker", "restart", "-t", "60", f"metalserve-lab-{NODE}"], check=True, capture_output=True)
    wait_until_serving(NODE)
    assert containers_of(NODE) == before
