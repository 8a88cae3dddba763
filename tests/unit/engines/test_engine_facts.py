# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What engine_facts says of containers and keys, from what Docker and the file system say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import Item
from ansible_collections.metal.serve.plugins.modules.engine_facts import (
    NotSaid,
    containers_of,
    docker_json,
    open_keys,
    version_of,
)


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


class Docker(LiveHost):
    """A host whose Docker gives one answer to everything."""

    answer = Item("docker")

    def docker(self, request: str, at: str, timeout: float = 5.0) -> Item:
        """Give the answer."""
        return self.answer


@pytest.mark.parametrize("state", ["timeout", "denied"])
def test_a_daemon_that_says_nothing_is_not_a_node_without_docker(state: str) -> None:
    host = Docker()
    host.answer = Item("docker", state, "", "no whole answer in 60 s")
    with pytest.raises(NotSaid, match="60 s"):
        version_of(host)


@pytest.mark.parametrize("state", ["timeout", "denied", "error"])
def test_a_list_that_was_not_given_is_not_an_empty_one(state: str) -> None:
    host = Docker()
    host.answer = Item("docker", state, "", "why")
    with pytest.raises(NotSaid, match="why"):
        docker_json(host, "/containers/json")


def test_no_docker_and_a_stopped_one_do_not_run() -> None:
    host = Docker()
    for state in ("absent", "error"):
        host.answer = Item("docker", state, "", "it does not run")
        assert version_of(host) == ({}, "it does not run")
    host.answer = Item("docker", "absent")
    assert docker_json(host, "/containers/gone/json") is None
    host.answer = Item("docker", "ok", '{"Version": "20.10.24"}')
    assert version_of(host) == ({"Version": "20.10.24"}, "")
