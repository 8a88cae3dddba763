# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What engine_facts says of containers and keys, from what Docker and the file system say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible_collections.metal.serve.plugins.modules.engine_facts import containers_of, open_keys


def test_the_restart_policy_is_the_containers_own() -> None:
    described: dict[str, Any] = {
        "1": {"HostConfig": {"RestartPolicy": {"Name": "always"}}},
        "2": {"HostConfig": {"RestartPolicy": {"Name": ""}}},
        "3": None,
    }
    listing = [{"Id": name, "Names": [f"/metalserve-{name}"], "State": "running"} for name in described]
    found = {one["name"]: one["restart_policy"] for one in containers_of(listing, described.get)}
    assert found == {"metalserve-1": "always", "metalserve-2": "no", "metalserve-3": "no"}


def test_keys_that_others_may_read_are_named(tmp_path: Path) -> None:
    for name, mode in (("a", 0o400), ("b", 0o444), ("c", 0o420)):
        folder = tmp_path / "engines" / name / "releases" / "1"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("", encoding="utf-8")
        (folder / "api-key").write_text("k", encoding="utf-8")
        (folder / "api-key").chmod(mode)
    assert open_keys(str(tmp_path)) == [f"{tmp_path}/engines/{name}/releases/1/api-key" for name in ("b", "c")]
    assert open_keys("") == []
