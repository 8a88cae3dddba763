# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the lab concludes from this machine's own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.lab import host

FULL = "Name:\tsystemd\nCapEff:\t000001ffffffffff\nCapBnd:\t000001ffffffffff\n"
NO_SYS_RESOURCE = "Name:\tinit\nCapEff:\t000001fffeffffff\nCapBnd:\t000001fffeffffff\n"


def test_capability_is_read_from_the_bounding_set() -> None:
    assert host.has_capability(FULL)
    assert not host.has_capability(NO_SYS_RESOURCE)
    with pytest.raises(ValueError, match="CapBnd"):
        host.has_capability("Name:\tx\n")


@given(st.integers(min_value=0, max_value=2**41 - 1), st.integers(min_value=0, max_value=40))
def test_capability_bit_is_the_bit_of_the_mask(mask: int, bit: int) -> None:
    assert host.has_capability(f"CapBnd:\t{mask:016x}\n", bit) == bool(mask & (1 << bit))


def test_node_is_privileged_only_where_that_can_start() -> None:
    metal = host.node_options(sys_resource=True, cgroup_version="2")
    assert metal["privileged"]
    assert metal["cgroupns_mode"] == "private"
    assert metal["volumes"] == []
    confined = host.node_options(sys_resource=False, cgroup_version="2")
    assert not confined["privileged"]
    assert confined["cap_drop"] == ["SYS_RESOURCE"]
    assert confined["volumes"] == ["/sys/fs/cgroup:/sys/fs/cgroup:rw"]
    old = host.node_options(sys_resource=True, cgroup_version="1")
    assert old["privileged"]
    assert old["cgroupns_mode"] == "host"


def test_overlapping_route_is_named_and_the_own_bridge_is_not() -> None:
    routes = json.dumps(
        [
            {"dst": "default", "dev": "eth0"},
            {"dst": "172.16.0.0/12", "dev": "tun0"},
            {"dst": "172.30.77.0/24", "dev": "br-abc"},
            {"dst": "10.0.0.0/8", "dev": "eth1"},
            {"dst": "172.30.77.9", "dev": "eth2"},
        ]
    )
    assert host.overlapping_routes("172.30.77.0/24", routes, "br-abc") == [
        "172.16.0.0/12 dev tun0",
        "172.30.77.9 dev eth2",
    ]
    assert host.overlapping_routes("192.168.9.0/24", routes, "") == []
    with pytest.raises(ValueError, match=r"lab_network_prefix: 172\.30\.300"):
        host.overlapping_routes("172.30.300.0/24", routes)


def test_sources_keep_the_distribution_and_drop_the_rest() -> None:
    listed = "\n".join(
        [
            "http://mirror.example/debian/|bookworm|main|",
            "http://mirror.example/debian/|bookworm|contrib|",
            "http://mirror.example/debian/|bookworm|main|",
            "http://mirror.example/debian-security/|bookworm-security|main|/etc/apt/keyrings/own.gpg",
            "https://apt.example.org/|bookworm-pgdg|main|",
            "https://docker.example.org/|bookworm|stable|",
            "not a line",
        ]
    )
    assert host.apt_sources(listed, "bookworm") == (
        "deb http://mirror.example/debian/ bookworm main contrib\n"
        "deb [signed-by=/etc/apt/keyrings/own.gpg] http://mirror.example/debian-security/ bookworm-security main\n"
    )
    assert host.apt_sources(listed, "trixie") == ""


def test_placeholder_of_an_old_apt_is_no_key() -> None:
    assert host.apt_sources("http://d/|bookworm|main|$(SIGNED_BY)", "bookworm") == "deb http://d/ bookworm main\n"


def test_recipe_key_follows_content_mode_and_values(tmp_path: Path) -> None:
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "run").write_text("one")
    first = host.recipe_key(["recipe"], str(tmp_path), {"a": 1})
    assert host.recipe_key(["recipe"], str(tmp_path), {"a": 1}) == first
    assert host.recipe_key(["recipe"], str(tmp_path), {"a": 2}) != first
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("noise")
    assert host.recipe_key(["recipe"], str(tmp_path), {"a": 1}) == first
    (folder / "run").chmod(0o755)
    assert host.recipe_key(["recipe"], str(tmp_path), {"a": 1}) != first
    (folder / "run").chmod(0o644)
    (folder / "run").write_text("two")
    assert host.recipe_key(["recipe"], str(tmp_path), {"a": 1}) != first
    with pytest.raises(OSError, match="absent"):
        host.recipe_key(["absent"], str(tmp_path))


def test_platform_tags_go_from_the_newest_library_down() -> None:
    tags = host.wheel_platforms("x86_64", "2.36")
    assert tags[0] == "manylinux_2_36_x86_64"
    assert "manylinux_2_17_x86_64" in tags
    assert "manylinux2014_x86_64" in tags
    for wrong in ("2.16", "3", "two"):
        with pytest.raises(ValueError, match="glibc"):
            host.wheel_platforms("x86_64", wrong)


def test_variant_of_the_stand_in_is_named_by_its_variables() -> None:
    images = host.standin_images("lab/standin:0123", {"crash": {"METALSERVE_STANDIN_FAULT": "crash"}})
    assert images["standin"] == {"image": "lab/standin:0123", "environment": []}
    crash = images["standin_crash"]
    assert crash["environment"] == ["METALSERVE_STANDIN_FAULT=crash"]
    other = host.standin_images("lab/standin:0123", {"crash": {"METALSERVE_STANDIN_FAULT": "oom"}})["standin_crash"]
    assert crash["image"].startswith("lab/standin:0123-crash-")
    assert crash["image"] != other["image"]


def test_node_is_finished_when_unchanged_and_known() -> None:
    results = [
        {"item": "a", "changed": False},
        {"item": "b", "changed": True},
        {"item": "c", "changed": False},
    ]
    hostvars = {name: {"ansible_host": f"172.30.77.1{index}"} for index, name in enumerate("abc")}
    known = "172.30.77.10 ssh-ed25519 AAAA\n\n172.30.77.11 ssh-ed25519 BBBB\n"
    assert host.unfinished_nodes(results, hostvars, known) == ["b", "c"]
    assert host.unfinished_nodes(results, hostvars, "") == ["a", "b", "c"]
