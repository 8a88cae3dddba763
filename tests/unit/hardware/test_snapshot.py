# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: made by hand or by the collector, whole, partial or full of nonsense."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware.build import build_facts
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import LiveSource, collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import Item, ProbeResult, summarise
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import BASE, GROUPS, PROBES, choose
from ansible_collections.metal.serve.plugins.module_utils.hardware.snapshot import (
    SnapshotError,
    read_snapshot,
    snapshot_files,
    write_snapshot,
)

from .helpers import REPOSITORY, SMI, facts_of, h200, write

BALANCING = "files/proc/sys/kernel/numa_balancing"


def known(facts: HostFacts) -> dict[str, Any]:
    """Return every fact that is neither None nor empty, by dotted name."""
    found: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{name}.{key}")
        elif value not in (None, [], "", False):
            found[name] = value

    plain = facts.to_dict()
    for key in ("probes", "schema_version", "source"):
        plain.pop(key)
    walk(plain, "")
    return found


def test_an_empty_folder_gives_no_facts(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "s", {})
    assert known(facts) == {}
    assert {probe.state for probe in facts.probes.values()} == {"not_collected"}
    assert len(facts.probes) == len(PROBES)
    assert facts.gpus is None
    assert HostFacts().probe("numa_balancing").state == "not_collected"
    with pytest.raises(KeyError, match="there is no probe 'numa_balance'"):
        facts.probe("numa_balance")


def test_without_an_index_what_is_there_was_read(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "s", {BALANCING: "1\n", SMI: h200()})
    assert facts.numa.balancing == 1
    assert facts.gpus is not None
    assert facts.gpus[0].name == "NVIDIA H200"
    assert facts.driver.cuda_version == "13.0"
    assert facts.probe("numa_balancing").state == "ok"
    assert facts.probe("nvidia_version").state == "not_collected"


@pytest.mark.parametrize("state", ["absent", "denied", "timeout", "error", "not_collected"])
@pytest.mark.parametrize("form", ["word", "object", "path"])
def test_states_of_the_index(tmp_path: Path, state: str, form: str) -> None:
    entry: Any = state if form == "word" else {"state": state, "error": "why"}
    section, key = ("files", BALANCING) if form == "path" else ("probes", "numa_balancing")
    facts = facts_of(tmp_path / "s", {}, {section: {key: entry}})
    assert facts.probe("numa_balancing").state == state
    assert facts.numa.balancing is None


@pytest.mark.parametrize("state", ["denied", "timeout", "error"])
def test_a_reading_that_went_wrong_feeds_no_fact(tmp_path: Path, state: str) -> None:
    facts = facts_of(tmp_path / "s", {BALANCING: "0\n"}, {"probes": {"numa_balancing": state}})
    assert facts.probe("numa_balancing").state == state
    assert facts.numa.balancing is None


@pytest.mark.parametrize(
    ("files", "index"),
    [
        ({}, {"probes": {"numa_balancing": "ok"}}),
        ({BALANCING: "0"}, {"probes": {"numa_balancing": "absent"}}),
        ({BALANCING: "0"}, {"files": {BALANCING: "absent"}}),
        ({}, {"probes": {"numa_balancing": "fine"}}),
        ({}, {"probes": {"numa_balancing": {"state": 3}}}),
        ({}, {"probes": {"numa_balancing": None}}),
    ],
)
def test_contradictions_are_errors(tmp_path: Path, files: dict[str, str], index: dict[str, Any]) -> None:
    facts = facts_of(tmp_path / "s", files, index)
    assert facts.probe("numa_balancing").state == "error"
    assert facts.probe("numa_balancing").error
    assert facts.numa.balancing is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"ok"', "\x00"])
def test_an_index_that_is_none_spoils_everything(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "s", {BALANCING: "0"})
    (folder / "index.json").write_text(text, encoding="utf-8")
    facts = collect(str(folder)).facts
    assert {probe.state for probe in facts.probes.values()} == {"error"}
    assert facts.numa.balancing is None


@pytest.mark.parametrize("index", [{}, {"probes": []}, {"probes": None, "files": 3}, {"probes": {"unheard_of": "ok"}}])
def test_an_index_that_says_nothing(tmp_path: Path, index: dict[str, Any]) -> None:
    assert facts_of(tmp_path / "s", {BALANCING: "0"}, index).numa.balancing == 0


def test_one_bad_file_of_several_shows(tmp_path: Path) -> None:
    node = "files/sys/devices/system/node/node"
    index = {"files": {f"{node}1/cpulist": "denied"}}
    facts = facts_of(tmp_path / "s", {f"{node}0/cpulist": "0-3\n"}, index)
    assert facts.probe("numa_nodes").state == "denied"
    # The node that could not be read is there all the same.
    assert [(one.id, one.cpu_list) for one in facts.numa.nodes or []] == [(0, "0-3"), (1, None)]
    lone = facts_of(tmp_path / "t", {}, {"files": {f"{node}0/cpulist": "denied"}})
    assert lone.numa.nodes is None  # whether it is the only one is not known


def test_links_are_names_and_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "outside"
    secret.write_text("2\n", encoding="utf-8")
    base = "files/var/lib/metalserve/engines/short-0"
    release = json.dumps({"content": {"options": {"port": 8100}}})
    folder = write(tmp_path / "s", {f"{base}/releases/abc/release.json": release, "files/proc/sys/kernel/x": ""})
    (folder / BALANCING).symlink_to(secret)
    (folder / base / "current").symlink_to("releases/abc")
    facts = collect(str(folder)).facts
    assert facts.numa.balancing is None
    assert facts.probe("numa_balancing").state == "error"
    (engine,) = facts.metalserve.engines or []
    assert (engine.replica, engine.current, engine.port) == ("short-0", "abc", 8100)


def test_a_link_that_is_called_like_a_good_value_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", {"files/proc/sys/net/core/x": ""})
    (folder / "files/proc/sys/net/core/somaxconn").symlink_to("65535")
    assert "net.core.somaxconn" not in collect(str(folder)).facts.sysctl


def test_what_is_no_file_or_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible_collections.metal.serve.plugins.module_utils.hardware import snapshot  # noqa: PLC0415

    monkeypatch.setattr(snapshot, "MAX_FILE", 50)
    folder = write(tmp_path / "s", {"files/proc/meminfo": "MemTotal: 5 kB\n" * 10, "files/proc/uptime": "1.0 2.0\n"})
    os.mkfifo(folder / "files/proc/cmdline")
    (folder / "files/var/log/apt").mkdir(parents=True)
    (folder / "files/var/log/apt/history.log.1.gz").write_bytes(b"not gzip")
    facts = collect(str(folder)).facts
    for name in ("meminfo", "cmdline", "apt_history"):
        assert facts.probe(name).state == "error", name
    assert facts.memory.total_kib is None
    assert facts.host.uptime_s == 1.0


def test_a_packed_history_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", {"files/var/log/apt/history.log": ""})
    text = "Start-Date: 2021-05-01  06:12:01\nCommandline: apt\nUpgrade: libnvidia-common-460:amd64 (1, 2)\n"
    (folder / "files/var/log/apt/history.log.1.gz").write_bytes(gzip.compress(text.encode()))
    events = collect(str(folder)).facts.packages.events or []
    assert [event.package for event in events] == ["libnvidia-common-460"]


@pytest.mark.parametrize("what", ["missing", "file"])
def test_no_folder(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("x", encoding="utf-8")
    with pytest.raises(SnapshotError, match="is no folder"):
        collect(str(path))


SECRETS = {
    "uuid": "6f1c2a3b-1111-2222-3333-444455556666",
    "serial": "1654321098765",
    "host": "athena-gpu7",
    "user": "mmustermann",
    "address": "93.184.216.34",
    "private": "192.168.77.20",
    "mac": "a0:36:9f:11:22:33",
    "key": "geheim-0123456789",
    "domain": "llm.bank-xyz.com",
}


def results() -> dict[str, ProbeResult]:
    """Return what a machine with many secrets would have given."""
    s = SECRETS
    smi = h200().replace("00000000-0000-0000-0000-000000000000", s["uuid"]).replace("0000000000000", s["serial"])
    inspect = {
        "Id": "ab" * 32,
        "Name": "/metalserve-short-0-abc",
        "Config": {
            "Env": [f"VLLM_API_KEY={s['key']}"],
            "Cmd": ["--api-key", s["key"], "--host", s["private"]],
            "Labels": {"node": s["host"]},
        },
        "HostConfig": {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu=GPU-{s['uuid']}"]}]},
        "NetworkSettings": {"MacAddress": s["mac"], "IPAddress": s["private"]},
    }
    nginx = (
        f'map $http_authorization $k {{ \n "Bearer {s["key"]}" finance;\n}}\nserver {{ server_name {s["domain"]};\n'
        f"listen {s['private']}:443; allow {s['address']};\n"
        f"ssl_certificate /etc/letsencrypt/live/{s['domain']}/fullchain.pem; }}\n"
    )
    raw = {
        "uname": [Item("commands/uname_-a.txt", "ok", f"Linux {s['host']} 6.1.0 #1 SMP x86_64\n")],
        "nvidia_smi": [Item(SMI, "ok", smi)],
        "docker_containers": [
            Item("docker/containers.json", "ok", "[]"),
            Item(f"docker/containers/{'ab' * 32}.json", "ok", json.dumps(inspect)),
        ],
        "nginx": [Item("commands/nginx_-T.txt", "ok", nginx)],
        "certificates": [
            Item(
                f"certificates/etc/letsencrypt/live/{s['domain']}/fullchain.pem.txt",
                "ok",
                f"subject=CN = {s['domain']}\n",
            )
        ],
        "cmdline": [Item("files/proc/cmdline", "ok", f"root=UUID={s['uuid']} ip={s['private']}\n")],
        "apt_history": [
            Item(
                "files/var/log/apt/history.log",
                "ok",
                "Start-Date: 2026-01-01  00:00:00\nCommandline: apt install nvidia-driver-580\n"
                f"Requested-By: {s['user']} (1000)\nInstall: nvidia-driver-580:amd64 (580.1-0)\n",
            )
        ],
        "kernel_log": [
            Item(
                "commands/journalctl_-k_-b.txt",
                "ok",
                f"2026-01-01T00:00:00 {s['host']} kernel: NVRM: Xid (PCI:0000:00:06): 31, pid=1\n",
            )
        ],
        "numa_balancing": [Item(BALANCING, "absent")],
        "disks": [Item("disks/root.txt", "timeout", "", f"df: /srv/{s['host']}: no answer in 2 s")],
        "engines": [
            Item(
                "files/var/lib/metalserve/engines/short-0/releases/abc/config.yaml",
                "ok",
                f"host: {s['private']}\napi-key: {s['key']}\n",
            )
        ],
    }
    return {name: summarise(name, items) for name, items in raw.items()}


def test_a_masked_snapshot_gives_nothing_away(tmp_path: Path) -> None:
    files = snapshot_files(results(), (SECRETS["user"],))
    for path, text in files.items():
        for name, secret in SECRETS.items():
            assert secret.lower() not in (path + text).lower(), f"{name} in {path}"
    write_snapshot(str(tmp_path / "s"), files)
    facts = collect(str(tmp_path / "s")).facts
    gpu = (facts.gpus or [])[0]
    container = (facts.docker.containers or [])[0]
    assert gpu.uuid == "GPU-00000000-0000-0000-0000-000000000001"
    assert container.device_ids == [f"nvidia.com/gpu={gpu.uuid}"]
    assert container.secrets_in_environment == ["VLLM_API_KEY"]
    assert container.secrets_in_arguments == ["--api-key"]
    assert facts.host.hostname == "host-1"
    assert [xid.code for xid in facts.kernel_log.xids or []] == [31]
    (certificate,) = facts.certificates or []
    named = [one.args[0] for one in facts.nginx.config or [] for one in one.find("ssl_certificate")]
    assert named == [certificate.path]
    assert facts.probe("numa_balancing").state == "absent"
    assert facts.probe("disks").state == "timeout"
    assert facts.masked is True


def without_source(facts: HostFacts) -> dict[str, Any]:
    """Return the facts without what must differ."""
    return dataclasses.asdict(
        dataclasses.replace(facts, source="", collected_at=None, collected_as_root=None, masked=None)
    )


def test_round_trip_of_results(tmp_path: Path) -> None:
    before = build_facts(results(), "live")
    write_snapshot(str(tmp_path / "s"), snapshot_files(results(), masked=False))
    after = collect(str(tmp_path / "s")).facts
    for name in results():
        assert after.probe(name).state == before.probe(name).state, name
    first, second = without_source(before), without_source(after)
    first.pop("probes")
    second.pop("probes")
    assert first == second


def test_round_trip_of_this_machine(tmp_path: Path) -> None:
    quick = [probe for probe in PROBES if probe.group in (*BASE, "packages", "time", "disk", "security")]
    live = collect(LiveSource(LiveHost()), quick, 30.0)
    write_snapshot(str(tmp_path / "s"), snapshot_files(live.results, masked=False))
    again = collect(str(tmp_path / "s"))
    assert without_source(again.facts) == without_source(live.facts)
    index = json.loads((tmp_path / "s" / "index.json").read_text(encoding="utf-8"))
    schema = json.loads((REPOSITORY / "schemas" / "snapshot.json").read_text(encoding="utf-8"))
    jsonschema.validate(index, schema)
    assert set(index["probes"]) == {probe.name for probe in PROBES}


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(SnapshotError, match="is no snapshot"):
        write_snapshot(str(other), {"index.json": "{}"})
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    write_snapshot(str(tmp_path / "s"), {"index.json": "{}", "files/a": "1"})
    write_snapshot(str(tmp_path / "s"), {"index.json": "{}", "files/b": "2"})
    assert not (tmp_path / "s" / "files" / "a").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "s"]


def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    evil = {
        "docker_containers": summarise("docker_containers", [Item("docker/containers/../../../../evil", "ok", "x")])
    }
    write_snapshot(str(tmp_path / "deep" / "s"), snapshot_files(evil, masked=False))
    write_snapshot(str(tmp_path / "deep" / "t"), {"../../evil": "x", "index.json": "{}"})
    assert not list(tmp_path.glob("evil*"))


def test_an_unwritable_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(SnapshotError, match="cannot be written"):
        write_snapshot(str(tmp_path / "file" / "s"), {"index.json": "{}"})


# Every probe, nonsense ----------------------------------------------------------------------------------------------


def sample_path(pattern: str) -> str:
    """Return a path that a pattern owns."""
    for star, path in (
        ("[0-9]*", "1"),
        ("docker-*.scope", "docker-abc.scope"),
        ("engines/*", "engines/a/releases/b/release.json"),
        ("stat/models/*", "stat/models/m/r.txt"),
        ("models/*", "models/m/r.manifest.json"),
        ("*", "x"),
    ):
        pattern = pattern.replace(star, path)
    return pattern


PATHS = [(probe.name, sample_path(pattern)) for probe in PROBES for pattern in probe.paths]
WORDS = [
    *":={}[]\"-;0", "-1", "9" * 21, "<gpu>", "</gpu>", "<nvidia_smi_log>", "</nvidia_smi_log>", "Id=", "null",
    "DeviceAllow=", "LISTEN", "include", "map", "N/A", "nan", "1e999", "\x00", "\ufffd", "\u2028", "GPU0", "\t",
    "groups:", "Node",
    "MemTotal:", "Upgrade:", "(1,2)", "[hold]", "Max", "Link", "# configuration file /a:",
]  # fmt: skip
SOUP = st.one_of(
    st.text(max_size=120),
    st.lists(st.one_of(st.sampled_from(WORDS), st.just("\n"), st.just(" ")), max_size=40).map("".join),
)


@given(st.lists(SOUP, min_size=4, max_size=4), st.integers(0, 3))
@settings(max_examples=25)
def test_soup_in_every_probe_at_once_never_raises(soups: list[str], turn: int) -> None:
    items: dict[str, list[Item]] = {}
    for number, (name, path) in enumerate(PATHS):
        items.setdefault(name, []).append(Item(path, "ok", soups[(number + turn) % 4]))
    raw = {name: summarise(name, found) for name, found in items.items()}
    facts = build_facts(raw, "live")
    assert not [problem for problem in facts.problems if "could not be understood" in problem]
    json.dumps(facts.to_dict())


@given(st.lists(st.binary(max_size=200), min_size=3, max_size=3), st.booleans())
@settings(max_examples=5)
def test_bytes_in_every_file_never_raise(soups: list[bytes], broken_index: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (_probe, path) in enumerate(PATHS):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(soups[number % 3])
        if broken_index:
            (folder / "index.json").write_bytes(soups[0])
        collected = collect(name)
        json.dumps(collected.facts.to_dict())
        snapshot_files(collected.results, ("someone",))


def test_every_path_belongs_to_a_probe() -> None:
    for _name, path in PATHS:
        assert [probe.name for probe in PROBES if probe.owns(path)], path


def test_a_fault_in_one_builder_costs_its_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible_collections.metal.serve.plugins.module_utils.hardware import build  # noqa: PLC0415

    def broken(_raw: Any, _facts: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(build, "BUILDERS", (("kernel", broken), *build.BUILDERS[2:]))
    facts = facts_of(tmp_path / "s", {BALANCING: "1"})
    assert facts.numa.balancing == 1
    assert facts.problems == ["kernel: could not be understood (KeyError: 'oops')"]


def test_huge_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible_collections.metal.serve.plugins.module_utils.hardware import snapshot  # noqa: PLC0415

    monkeypatch.setattr(snapshot, "MAX_FILES", 3)
    folder = write(tmp_path / "s", {f"files/{number}": "x" for number in range(5)})
    with pytest.raises(SnapshotError, match="more than a snapshot can"):
        read_snapshot(str(folder))


def test_subsets() -> None:
    assert {probe.group for probe in choose(["base"])} == set(BASE)
    assert {probe.group for probe in choose(["all"])} == set(GROUPS) - {"deep"}
    assert [probe.name for probe in choose(["deep"])] == ["model_hashes"]
    assert [probe.name for probe in choose(["dpkg"])] == ["dpkg"]
    assert choose([]) == ()
    with pytest.raises(ValueError, match="'gpus' is no group"):
        choose(["gpus"])
    names = [probe.name for probe in PROBES]
    assert len(names) == len(set(names))


def test_collect_takes_a_subset_of_a_snapshot(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", {BALANCING: "1", "files/proc/meminfo": "MemTotal: 5 kB\n"})
    facts = collect(str(folder), choose(["numa"])).facts
    assert facts.numa.balancing == 1
    assert facts.memory.total_kib is None
