# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""daemon.json: what others wrote survives, what we wrote is remembered, what is broken is refused (case I10)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.runtime import daemon_json as dj

OPERATORS = {
    "data-root": "/mnt/docker",
    "live-restore": True,
    "log-opts": {"max-size": "100m"},
    "exec-opts": ["native.cgroupdriver=systemd"],
}
RUNTIME = {"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime", "args": []}}}


def twice(existing: dict[str, Any], **wanted: Any) -> tuple[dj.Merge, dj.Merge]:
    first = dj.merge(existing, **wanted)
    wanted["records"] = first.records
    return first, dj.merge(first.content, **wanted)


def test_an_operators_file_survives_as_a_superset_and_the_second_run_is_the_same() -> None:
    first, second = twice(
        OPERATORS, settings={"live-restore": True, **RUNTIME}, defaults=dj.log_defaults(OPERATORS, "50m", 3)
    )
    for key in ("data-root", "live-restore", "exec-opts"):
        assert first.content[key] == OPERATORS[key]
    assert first.content["log-opts"] == {"max-size": "100m", "max-file": "3"}
    assert first.content["runtimes"] == RUNTIME["runtimes"]
    assert first.kept == (("log-opts", "max-size"),)
    assert second.changed == ()
    assert second.records == first.records
    assert dj.render(second.content) == dj.render(first.content)


def test_operators_keys_keep_their_place() -> None:
    merged = dj.merge(OPERATORS, {"a-first": 1})
    assert list(merged.content) == [*OPERATORS, "a-first"]


@pytest.mark.parametrize("value", [3, True, 2.5])
def test_log_options_become_strings_also_those_of_others(value: Any) -> None:
    merged = dj.merge({"log-opts": {"max-file": value}}, {"log-opts": {"compress": True}})
    assert merged.content["log-opts"] == {"max-file": {3: "3", True: "true", 2.5: "2.5"}[value], "compress": "true"}
    assert ("log-opts", "max-file") in merged.changed


def test_rotation_is_filled_in_only_for_a_driver_that_knows_it() -> None:
    assert dj.log_defaults({}, "100m", 3) == {
        "log-driver": "json-file",
        "log-opts": {"max-size": "100m", "max-file": "3"},
    }
    assert dj.log_defaults({"log-driver": "local"}, "100m", 3)["log-driver"] == "local"
    assert dj.log_defaults({"log-driver": "journald"}, "100m", 3) == {}


def test_a_default_that_we_wrote_follows_its_variable() -> None:
    first = dj.merge({}, {}, {"log-opts": {"max-size": "100m"}})
    second = dj.merge(first.content, {}, {"log-opts": {"max-size": "200m"}}, first.records)
    assert second.content == {"log-opts": {"max-size": "200m"}}


def test_a_setting_wins_and_gives_back_what_stood_there() -> None:
    first = dj.merge({"live-restore": False, "debug": True}, {"live-restore": True})
    assert first.content == {"live-restore": True, "debug": True}
    undone = dj.merge(first.content, {}, records=first.records)
    assert undone.content == {"live-restore": False, "debug": True}
    assert undone.records == ()


def test_what_we_wrote_goes_when_it_is_no_longer_wanted_with_the_objects_it_needed() -> None:
    first = dj.merge({"data-root": "/mnt"}, RUNTIME)
    assert dj.merge(first.content, {}, records=first.records).content == {"data-root": "/mnt"}


def test_a_null_in_the_settings_drops_a_default() -> None:
    assert dj.merge({}, {"log-driver": None}, {"log-driver": "local", "debug": True}).content == {"debug": True}


def test_what_somebody_changed_meanwhile_stays() -> None:
    first = dj.merge({}, {"shutdown-timeout": 30})
    assert dj.merge({"shutdown-timeout": 99}, {}, records=first.records).content == {"shutdown-timeout": 99}


def test_a_value_that_was_there_already_is_not_ours_to_remove() -> None:
    first = dj.merge({"live-restore": True}, {"live-restore": True})
    assert first.records == ()
    assert dj.merge(first.content, {}, records=first.records).content == {"live-restore": True}


def test_lists_are_united_and_only_our_elements_go() -> None:
    existing = {"insecure-registries": ["old:5000"]}
    first, second = twice(existing, settings={"insecure-registries": ["old:5000", "new:5000"]})
    assert first.content == {"insecure-registries": ["old:5000", "new:5000"]}
    assert second.changed == ()
    assert dj.merge(first.content, {}, records=first.records).content == existing
    moved = dj.merge(first.content, {"insecure-registries": ["third:5000"]}, records=first.records)
    assert moved.content == {"insecure-registries": ["old:5000", "third:5000"]}


def test_a_list_that_only_we_filled_disappears() -> None:
    first = dj.merge({}, {"insecure-registries": ["new:5000"]})
    assert dj.merge(first.content, {}, records=first.records).content == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,}', "line 1, column"),
        ('{\n  "a": 1\n  "b": 2\n}', "line 3, column 3"),
        ('{"a": 1} // comment', "Extra data"),
        ("[]", "a JSON list"),
        ('"text"', "a JSON str"),
        ("null", "NoneType"),
        ('{"a": NaN}', "NaN"),
        ('{"debug": true, "debug": false}', "'debug' twice"),
        ('{"log-opts": {"x": "1", "x": "2"}}', "'x' twice"),
        ('{"a": "\x01"}', "control character"),
        ("{", "line 1, column 2"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_file_is_refused_with_path_and_position(text: str, words: str) -> None:
    with pytest.raises(dj.DaemonJsonError, match=r"^/etc/docker/daemon\.json") as caught:
        dj.parse(text, "/etc/docker/daemon.json")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n", "{}"])
def test_an_empty_file_is_an_empty_object(text: str) -> None:
    assert dj.parse(text, "x") == {}


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        ({}, {}, "none"),
        ({}, {"live-restore": True}, "reload"),
        ({"shutdown-timeout": 15}, {"shutdown-timeout": 400}, "reload"),
        ({}, {"insecure-registries": ["a"]}, "reload"),
        ({}, {"default-ulimits": {"nofile": {}}}, "restart"),
        ({}, {"log-opts": {"max-size": "1m"}}, "restart"),
        ({}, {"features": {"cdi": True}}, "restart"),
        ({}, {"runtimes": {"nvidia": {}}}, "restart"),
        ({}, {"live-restore": True, "data-root": "/x"}, "restart"),
        # Left out of the file, dockerd keeps the old value on a reload.
        ({"live-restore": True}, {}, "restart"),
        ({"max-concurrent-downloads": 9}, {}, "reload"),
    ],
)
def test_what_dockerd_must_do(before: dict[str, Any], after: dict[str, Any], action: str) -> None:
    changed = [(key,) for key in {*before, *after} if before.get(key) != after.get(key)]
    assert dj.daemon_action(changed, after) == action


def test_flags_that_the_file_would_repeat_are_found() -> None:
    command = [
        "/usr/sbin/dockerd",
        "-H",
        "fd://",
        "--log-driver=journald",
        "--insecure-registry",
        "a:5000",
        "--live-restore",
    ]
    content = {"hosts": [], "log-driver": "json-file", "insecure-registries": [], "live-restore": True, "debug": True}
    assert dj.flag_conflicts(command, content) == ["hosts", "log-driver", "insecure-registries", "live-restore"]
    assert dj.flag_conflicts(["/usr/sbin/dockerd", "-H", "fd://"], {"live-restore": True}) == []


def test_records_survive_the_state_file() -> None:
    merged = dj.merge({"debug": False}, {"debug": True, "registry/odd~name": {"a": [1]}, "live-restore": True})
    stored = json.loads(json.dumps(dj.records_to_json(merged.records)))
    assert dj.records_from_json(stored, "state") == merged.records


@pytest.mark.parametrize("value", [None, 3, [3], ["x"], [{"value": 1}], [{"path": 1, "value": 1}]])
def test_a_broken_state_is_refused(value: Any) -> None:
    with pytest.raises(dj.DaemonJsonError, match="state"):
        dj.records_from_json(value, "state")


SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "b"])
LISTS = st.lists(st.sampled_from(["x", "y", "z"]), max_size=3, unique=True)
NAMES = st.sampled_from(["debug", "log-opts", "labels", "runtimes", "x"])
TREES = st.dictionaries(
    NAMES, st.recursive(SCALARS | LISTS, lambda inner: st.dictionaries(NAMES, inner, max_size=3)), max_size=4
)


@settings(max_examples=150)
@given(existing=TREES, wanted=TREES, filled=TREES)
def test_merging_again_changes_nothing(
    existing: dict[str, Any], wanted: dict[str, Any], filled: dict[str, Any]
) -> None:
    first, second = twice(existing, settings=wanted, defaults=filled)
    assert second.changed == ()
    assert second.records == first.records
    assert dj.render(second.content) == dj.render(first.content)


@settings(max_examples=150)
@given(existing=TREES, wanted=TREES)
def test_what_is_wished_for_is_there(existing: dict[str, Any], wanted: dict[str, Any]) -> None:
    merged = dj.merge(existing, wanted)
    for path, value in leaves(dj.quote_log_options(wanted)):
        if value is None:
            continue
        there: Any = merged.content
        for key in path:
            there = there[key]
        if isinstance(value, list) and isinstance(there, list):
            assert set(value) <= set(there)
        else:
            assert there == value


def leaves(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found += leaves(value, (*prefix, key))
        else:
            found.append(((*prefix, key), value))
    return found
