# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the inventory's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.inventory.fork_playbook import Runner


@pytest.fixture(scope="package")
def ansible(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a loaded ansible-playbook that cannot reach any host and tells when it tries."""
    runner = Runner(tmp_path_factory.mktemp("ansible"))
    yield runner
    runner.close()
