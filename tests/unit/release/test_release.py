# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A release is one hash over what decides an engine's work; what serves is never replaced by site.yml."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.engines import registry
from ansible_collections.metal.serve.plugins.module_utils.release import content, decide, state
from tests.unit.engines.plans import context, replica_plan

FILES = {"config.yaml": "# why\nport: 8100\n", "start.sh": "#!/bin/sh\nexec\n"}
KEYS = {"api-key": "a-secret-key"}


def values(files: dict[str, str] | None = None, digest: str = "d" * 64, **changes: Any) -> dict[str, Any]:
    spec = registry.adapter("vllm").spec(context(replica_plan(**changes))).to_dict()
    return content.content(spec, files or FILES, digest, KEYS)


def test_same_input_same_hash() -> None:
    assert content.release_hash(values()) == content.release_hash(values())


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (values(settings={"max_num_seqs": 16}), "settings.max_num_seqs"),
        (values(image="r.test/vllm@sha256:" + "c" * 64), "image.digest"),
        (values(digest="e" * 64), "model.digest"),
        (values(gpus=["GPU-00000000-0000-0000-0000-000000000001"]), "gpus"),
        (values(container={**replica_plan()["container"], "memory_bytes": 1}), "container.memory"),
        (values(engine_version="0.26.1"), "engine.version"),
        (values(environment={"X": "1"}), "environment.X"),
        (values(times={**replica_plan()["times"], "unit_stop_s": 999}), "unit.stop_s"),
        (values(files={**FILES, "config.yaml": "port: 8100\nnew: 1\n"}), "files.config.yaml"),
    ],
)
def test_every_part_counts_and_is_named(changed: dict[str, Any], name: str) -> None:
    assert content.release_hash(changed) != content.release_hash(values())
    assert name in [item["name"] for item in content.compare(values(), changed)]


def test_reworded_comments_and_a_mirror_are_no_new_release() -> None:
    reworded = values(files={**FILES, "config.yaml": "# other words\n\nport: 8100\n"})
    mirrored = values(image=replica_plan()["image"].replace("registry.test", "mirror.test"))
    for same in (reworded, mirrored):
        assert content.release_hash(same) == content.release_hash(values())
        assert content.compare(values(), same) == []


def test_secret_is_neither_in_the_content_nor_in_the_difference() -> None:
    spec = registry.adapter("vllm").spec(context()).to_dict()
    other = content.content(spec, FILES, "d" * 64, {"api-key": "another-key"})
    assert "a-secret-key" not in str(values())
    found = content.compare(values(), other)
    assert found == [{"name": "secrets.api-key", "current": "(hidden)", "desired": "(hidden)"}]
    assert content.difference_line(found[0]) == "secrets.api-key: changed"
    assert content.fingerprint("k", "short-0") != content.fingerprint("k", "short-1")


def test_difference_reads_like_a_sentence() -> None:
    found = content.compare(values(), values(settings={**replica_plan()["settings"], "max_num_seqs": 16}))
    assert [content.difference_line(item) for item in found] == ["settings.max_num_seqs: 256 -> 16"]
    assert content.difference_line({"name": "a", "current": None, "desired": ["x"]}) == 'a: (not set) -> ["x"]'


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.text() | st.booleans(), max_size=5))
def test_nothing_differs_from_itself(extra: dict[str, Any]) -> None:
    one = {"image": {"digest": "x", "name": "n"}, "settings": extra}
    assert content.compare(one, copy.deepcopy(one)) == []
    other = {**one, "settings": {**extra, "new-key": 1}}
    if extra.get("new-key") != 1:
        assert [item["name"] for item in content.compare(one, other)] == ["settings.new-key"]


# -- decide -------------------------------------------------------------------------------------------------------

NEW = content.release_hash(values(settings={"max_num_seqs": 16}))
OLD = content.release_hash(values())


def found(served: bool, release: str = OLD) -> state.Found:
    return state.Found(release, {"content": values()}, served)


@pytest.mark.parametrize(
    ("current", "running", "answers", "action"),
    [
        (None, False, False, "create"),
        (found(True, NEW), True, True, "unchanged"),
        (found(False, NEW), True, False, "unchanged"),
        (found(True, NEW), False, False, "start"),
        (found(True), True, False, "redeploy"),  # it served before; that it is silent now is not ours to judge
        (found(False), True, True, "redeploy"),  # nobody noted it, but it answers
        (found(False), True, False, "replace"),
        (found(False), False, False, "replace"),
        (found(True), False, False, "create"),
    ],
)
def test_what_serves_is_left_alone(current: state.Found | None, running: bool, answers: bool, action: str) -> None:
    desired = values(settings={"max_num_seqs": 16})
    decision = decide.decide(current, NEW, desired, running, answers)
    assert decision.action == action
    assert bool(decision.differences) == (
        action in ("redeploy", "replace") or (action == "create" and current is not None)
    )


# -- state --------------------------------------------------------------------------------------------------------


@pytest.fixture
def replica(tmp_path: Path) -> state.Replica:
    return state.Replica(str(tmp_path), "short-0")


def put(replica: state.Replica, release: str) -> None:
    files = state.release_files(replica, release, {"content": {}}, {**FILES, **KEYS}, {"api-key": 0o400})
    for path, (text, mode) in files.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).write_text(text)
        os.chmod(path, mode)


def test_current_and_previous_follow_what_served(replica: state.Replica) -> None:
    assert state.read_current(replica) is None
    for release in ("1" * 64, "2" * 64, "3" * 64):
        put(replica, release)
    state.activate(replica, "1" * 64, keep_previous=False)
    assert state.read_link(replica.previous) == ""
    state.activate(replica, "2" * 64, keep_previous=True)
    assert (state.read_link(replica.current), state.read_link(replica.previous)) == ("2" * 64, "1" * 64)
    state.activate(replica, "3" * 64, keep_previous=False)  # "2" never served: there is nothing to go back to in it
    assert (state.read_link(replica.current), state.read_link(replica.previous)) == ("3" * 64, "1" * 64)
    assert state.stale_releases(replica) == ["2" * 64]
    state.remove_release(replica, "2" * 64)
    assert state.stale_releases(replica) == []
    assert state.known_replicas(replica.root) == ["short-0"]


def test_a_replica_that_serves_elsewhere_is_named_with_both_places() -> None:
    found = state.Found("1" * 64, {"address": "10.0.0.11", "port": 8200}, served=True)
    assert decide.moved(None, "10.0.0.11", 8100) == ""
    assert decide.moved(found, "10.0.0.11", 8200) == ""
    assert decide.moved(found, "10.0.0.11", 8100) == "10.0.0.11:8200 -> 10.0.0.11:8100"
    assert decide.moved(found, "10.0.0.12", 8200) == "10.0.0.11:8200 -> 10.0.0.12:8200"


def test_previous_is_never_current(replica: state.Replica) -> None:
    put(replica, "1" * 64)
    state.activate(replica, "1" * 64, keep_previous=True)
    state.activate(replica, "1" * 64, keep_previous=True)
    assert state.read_link(replica.previous) == ""


def test_served_is_noted_once(replica: state.Replica) -> None:
    put(replica, "1" * 64)
    state.activate(replica, "1" * 64, keep_previous=False)
    assert state.mark_served(replica, "1" * 64)
    assert not state.mark_served(replica, "1" * 64)
    current = state.read_current(replica)
    assert current is not None
    assert current.served


def test_release_without_its_document_is_not_there(replica: state.Replica) -> None:
    put(replica, "1" * 64)
    os.unlink(os.path.join(replica.release("1" * 64), "release.json"))
    assert state.read_release(replica, "1" * 64) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"content": 1}'])
def test_damaged_document_is_named(replica: state.Replica, text: str) -> None:
    put(replica, "1" * 64)
    path = Path(replica.release("1" * 64), "release.json")
    path.chmod(0o644)
    path.write_text(text)
    with pytest.raises(state.StateError, match=r"release\.json"):
        state.read_release(replica, "1" * 64)


def test_unit_reads_the_container_of_the_release(replica: state.Replica) -> None:
    text = state.release_env("short-0", "ab" * 32)
    assert text == f"CONTAINER=metalserve-short-0-abababababab\nRELEASE={'ab' * 32}\n"
    assert "TimeoutStopSec=345\n" in state.drop_in_text(345, 600)
    assert list(state.release_files(replica, "1", {}, FILES, {}))[-1].endswith("release.json")
