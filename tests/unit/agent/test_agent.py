# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Replicas, host, configuration, the exporter and the file that the agent is shipped as."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.action.agent_bundle import members
from ansible_collections.metal.serve.plugins.module_utils.telemetry.bundle import bundle
from metalserve_agent import config as configuration
from metalserve_agent.agent import Exporter, Source, families
from metalserve_agent.catalogue import CATALOGUE
from metalserve_agent.docker_api import demultiplex, parse_time
from metalserve_agent.host import HostSource, count_of_list
from metalserve_agent.nvml import normal_bus_id
from metalserve_agent.readings import Errors, Reading
from metalserve_agent.replicas import ReplicaSource
from metalserve_agent.xid import XidWatcher, parse_kmsg

from . import helpers
from .helpers import MIB, frames, h200, served, settings, state

LOG = helpers.FIXTURES / "engine-logs" / "vllm-0.26.0-h200-run1.log"
STARTED = "2026-11-30T14:15:59.5Z"
MODELS = {"/health": (200, b""), "/v1/models": (200, b'{"object":"list","data":[{"id":"m"}]}')}


def replica(port: int, **changes: Any) -> dict[str, Any]:
    return {"replica": "short-0", "pool": "short", "kind": "vllm", "address": "127.0.0.1", "port": port, **changes}


def read(folder: Path, port: int, memory: Any = None, **changes: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the readings of one round by name without the common prefix, and the errors by reason."""
    config = configuration.parse(
        settings(
            replicas=[replica(port)],
            probe_timeout_s=0.5,
            docker_socket=str(folder / "docker.sock"),
            engines_dir=str(folder / "engines"),
            **changes,
        )
    )
    errors = Errors()
    source = ReplicaSource(config, config.replicas[0], errors, memory)
    readings = {one.name.replace("metalserve_replica_", ""): one.value for one in source.read()}
    return readings, {one.labels[1]: one.value for one in errors.readings()}


def docker_answers(log: bytes, running: bool = True) -> dict[str, tuple[int, bytes]]:
    container = {"Id": "abc", "Names": ["/metalserve-short-0-1234"], "State": "running" if running else "exited"}
    return {
        "/containers/json": (200, json.dumps([container]).encode()),
        "/containers/abc/json": (200, json.dumps({"State": {"StartedAt": STARTED}}).encode()),
        "/containers/abc/logs": (200, log),
    }


def stamped(lines: list[str]) -> list[str]:
    return [f"2026-11-30T14:{16 + n // 60:02d}:{n % 60:02d}.000000001Z {line}" for n, line in enumerate(lines)]


def write_release(folder: Path, **plan: Any) -> None:
    path = folder / "engines" / "short-0" / "current"
    path.mkdir(parents=True)
    release = {
        "release": "cafe",
        "health": {"live": "/health", "models": "/v1/models"},
        "plan": {
            "image": "vllm@sha256:00",
            "engine_version": "0.26.0",
            "model": "m",
            "revision": "r1",
            "settings": {"max_num_seqs": 256, "max_num_batched_tokens": 6144},
            "gpus": ["GPU-0", "GPU-1"],
            "memory": {"planned_gpu_bytes": 1000},
            **plan,
        },
    }
    (path / "release.json").write_text(json.dumps(release), encoding="utf-8")


# Readiness


def test_a_replica_that_lists_its_model_is_ready(tmp_path: Path) -> None:
    with served(MODELS) as port:
        readings, errors = read(tmp_path, port)
    assert readings["ready"] == 1
    assert readings["probe_duration_seconds"] > 0
    assert set(errors) == {"docker"}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"/health": (503, b"")}, "probe_status"),
        ({"/health": (200, b""), "/v1/models": (401, b"{}")}, "probe_unauthorized"),
        ({"/health": (200, b""), "/v1/models": (200, b"<html>")}, "probe_answer"),
        ({"/health": (200, b""), "/v1/models": (200, b'{"data":null}')}, "probe_answer"),
        ({"/health": (200, b""), "/v1/models": (200, b'{"data":[]}')}, ""),
    ],
)
def test_a_replica_that_does_not_serve_is_not_ready(answers: Any, reason: str, tmp_path: Path) -> None:
    with served(answers) as port:
        readings, errors = read(tmp_path, port)
    assert readings["ready"] == 0
    assert "probe_duration_seconds" not in readings
    assert not reason or errors[reason] == 1


def test_a_refused_and_a_silent_replica(tmp_path: Path) -> None:
    with helpers.served({}) as port:
        pass
    assert read(tmp_path, port)[1]["probe_refused"] == 1
    listener = __import__("socket").create_server(("127.0.0.1", 0))
    started = time.monotonic()
    readings, errors = read(tmp_path, listener.getsockname()[1])
    listener.close()
    assert readings["ready"] == 0
    assert errors["probe_timeout"] == 1
    assert time.monotonic() - started < 2


def test_the_key_of_the_release_is_sent(tmp_path: Path) -> None:
    config = configuration.parse(settings(replicas=[replica(1)], engines_dir=str(tmp_path)))
    source = ReplicaSource(config, config.replicas[0], Errors(), None)
    assert source._headers() == {}
    (tmp_path / "short-0" / "current").mkdir(parents=True)
    (tmp_path / "short-0" / "current" / "api-key").write_text("secret\n", encoding="utf-8")
    assert source._headers() == {"Authorization": "Bearer secret"}


def test_the_release_says_where_to_ask(tmp_path: Path) -> None:
    write_release(tmp_path)
    path = tmp_path / "engines" / "short-0" / "current" / "release.json"
    release = {**json.loads(path.read_text(encoding="utf-8")), "health": {"live": "/alive", "models": "/api/v1/models"}}
    path.write_text(json.dumps(release), encoding="utf-8")
    with served({"/alive": (200, b""), "/api/v1/models": (200, b'{"data":[{"id":"m"}]}')}) as port:
        assert read(tmp_path, port)[0]["ready"] == 1


# Start-up


def test_load_and_start_times_come_from_the_engines_log(tmp_path: Path) -> None:
    log = frames(*stamped(LOG.read_text(encoding="utf-8").splitlines()))
    with served(docker_answers(log), str(tmp_path / "docker.sock")):
        readings, _ = read(tmp_path, 1)
    assert readings["container_running"] == 1
    assert readings["model_load_seconds"] == pytest.approx(3.601533)
    assert readings["weights_bytes"] == int(14.32 * 1024**3)
    assert readings["engine_init_seconds"] == pytest.approx(139.56)
    # Line 111 of the log says that it serves; each line is a second, and the container began half a second before.
    assert readings["start_to_ready_seconds"] == pytest.approx(110.5)


def test_a_log_that_was_rotated_away_gives_no_zero(tmp_path: Path) -> None:
    with served(docker_answers(frames(*stamped(["INFO something"]))), str(tmp_path / "docker.sock")):
        readings, _ = read(tmp_path, 1)
    assert "model_load_seconds" not in readings
    assert "start_to_ready_seconds" not in readings


def test_lines_of_an_earlier_start_of_the_container_do_not_count(tmp_path: Path) -> None:
    early = "2026-11-30T14:15:59.1Z INFO:     Application startup complete."
    with served(docker_answers(frames(early)), str(tmp_path / "docker.sock")):
        assert "start_to_ready_seconds" not in read(tmp_path, 1)[0]


def test_a_stopped_container_and_a_dead_docker(tmp_path: Path) -> None:
    with served(docker_answers(b"", running=False), str(tmp_path / "docker.sock")):
        assert read(tmp_path, 1)[0]["container_running"] == 0
    readings, errors = read(tmp_path, 1)
    assert "container_running" not in readings
    assert errors["docker"] == 1


@given(st.binary(max_size=200))
def test_no_bytes_in_a_log_stream_raise(data: bytes) -> None:
    assert isinstance(demultiplex(data, False), str)
    assert isinstance(demultiplex(data, True), str)


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00Z", "", "yesterday", "2026-11-30T14:16:18.12.3Z"])
def test_what_is_no_time_is_none(text: str) -> None:
    assert parse_time(text) is None


def test_dockers_nanoseconds() -> None:
    assert parse_time("2026-11-30T14:16:18.5Z") == pytest.approx(1796048178.5)


# Plan and memory


def test_memory_against_the_plan_over_all_gpus(tmp_path: Path) -> None:
    write_release(tmp_path)
    readings, _ = read(tmp_path, 1, lambda: {"GPU-0": (1500.0, 2000.0), "GPU-1": (1200.0, 2000.0)})
    assert readings["gpu_memory_planned_bytes"] == 2000
    assert readings["gpu_memory_used_bytes"] == 2700
    assert readings["gpu_memory_total_bytes"] == 4000
    assert readings["metalserve_gpu_memory_unplanned_ratio"] == pytest.approx(0.35)
    assert readings["max_num_seqs"] == 256
    assert readings["release_info"] == 1


def test_one_gpu_that_does_not_answer_makes_the_ratio_unknown(tmp_path: Path) -> None:
    write_release(tmp_path)
    readings, errors = read(tmp_path, 1, lambda: {"GPU-0": (1500.0, 2000.0)})
    assert "metalserve_gpu_memory_unplanned_ratio" not in readings
    assert errors["gpu_memory_unknown"] == 1


@pytest.mark.parametrize("memory", [{}, {"planned_gpu_bytes": 0}, {"planned_gpu_bytes": "1000"}, None])
def test_without_a_plan_there_is_no_ratio(memory: Any, tmp_path: Path) -> None:
    write_release(tmp_path, memory=memory)
    readings, errors = read(tmp_path, 1, lambda: {"GPU-0": (1500.0, 2000.0), "GPU-1": (1.0, 2000.0)})
    assert "metalserve_gpu_memory_unplanned_ratio" not in readings
    assert errors["no_planned_memory"] == 1


def test_a_damaged_release_is_an_error_and_none_is_not(tmp_path: Path) -> None:
    assert "release" not in read(tmp_path, 1)[1]
    write_release(tmp_path)
    (tmp_path / "engines" / "short-0" / "current" / "release.json").write_text("{", encoding="utf-8")
    assert read(tmp_path, 1)[1]["release"] == 1


def test_the_shipped_agent_joins_gpu_and_plan(tmp_path: Path) -> None:
    write_release(tmp_path, gpus=[h200()["uuid"]], memory={"planned_gpu_bytes": 100 * MIB})
    gpu = {**h200(), "memory.used": 140 * MIB}
    engines = str(tmp_path / "engines")
    found = helpers.scrape(tmp_path, state(gpu), agent=helpers.agent_file(), replicas=[replica(1)], engines_dir=engines)
    (ratio,) = found.select("metalserve_gpu_memory_unplanned_ratio", pool="short", replica="short-0", kind="vllm")
    assert ratio.value == pytest.approx(0.4)
    assert found.select("metalserve_replica_release_info", release="cafe", revision="r1")


# Host


def test_numa_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/numa_balancing").write_text("1\n")
    (tmp_path / "sys/devices/system/node/online").write_text("0-1\n")
    found = {one.name: one.value for one in HostSource(Errors(), 8, str(tmp_path)).read()}
    assert found == {"metalserve_expected_gpus": 8, "metalserve_numa_balancing": 1, "metalserve_numa_nodes": 2}


def test_a_kernel_without_numa_gives_no_sample(tmp_path: Path) -> None:
    errors = Errors()
    assert [one.name for one in HostSource(errors, 0, str(tmp_path)).read()] == ["metalserve_expected_gpus"]
    assert not errors.readings()


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-3", 4), ("0,2-3", 3), ("", None), ("x", None), ("0-", None)])
def test_kernel_lists(text: str, count: int | None) -> None:
    assert count_of_list(text) == count


# Xid


def test_xid_lines_of_the_kernel_log() -> None:
    line = "3,1205,123456789,-;NVRM: Xid (PCI:0000:00:06): 79, pid=4242, name=python, GPU has fallen off the bus."
    assert parse_kmsg(line) == ("0000:00:06", 79)
    assert parse_kmsg("3,1206,1,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module") is None


def test_the_kernel_log_is_counted_from_its_beginning_and_followed(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,1,1,-;NVRM: Xid (PCI:0000:00:06): 63, pid=1\n3,2,1,-;usb 1-1: new device\n")
    watcher = XidWatcher(Errors(), lambda: ("0000:00:06", "0000:00:07"), kmsg=str(log))
    thread = threading.Thread(target=watcher.run, daemon=True)
    thread.start()
    with log.open("a") as stream:
        stream.write("3,3,1,-;NVRM: Xid (PCI:0000:00:06): 63, pid=1\n")
    wanted = [
        Reading("metalserve_gpu_xid_source_info", ("kernel_log",), 1),
        Reading("metalserve_gpu_xid_events_total", ("0000:00:06",), 2),
        Reading("metalserve_gpu_xid_events_total", ("0000:00:07",), 0),
        Reading("metalserve_gpu_xid_last", ("0000:00:06",), 63),
    ]
    deadline = time.monotonic() + 5
    while watcher.read() != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    watcher.stop()
    assert watcher.read() == wanted


@pytest.mark.parametrize("bus_id", ["00000000:00:06.0", "0000:00:06", "0000:00:06.0"])
def test_bus_ids_of_driver_and_kernel_meet(bus_id: str) -> None:
    assert normal_bus_id(bus_id) == "0000:00:06"


# The exporter


def test_a_source_that_raises_loses_its_readings_and_is_counted() -> None:
    errors = Errors()

    def broken() -> list[Reading]:
        raise RuntimeError("surprise")

    source = Source("gpu", 10, broken, errors)
    source.collect_once()
    assert [one.name for one in source.snapshot()] == [
        "metalserve_agent_last_collect_timestamp_seconds",
        "metalserve_agent_collect_duration_seconds",
    ]
    assert errors.readings() == [Reading("metalserve_agent_errors_total", ("gpu", "source_failed"), 1)]


def test_readings_that_grew_too_old_are_left_out() -> None:
    source = Source("gpu", 10, lambda: [Reading("metalserve_gpus", (), 8)], Errors())
    source.collect_once()
    assert Reading("metalserve_gpus", (), 8) in source.snapshot()
    source.max_age_s = 0.0
    assert Reading("metalserve_gpus", (), 8) not in source.snapshot()


def test_a_scrape_does_not_wait_for_a_source_that_hangs() -> None:
    release = threading.Event()
    source = Source("gpu", 10, lambda: [Reading("metalserve_gpus", (), float(release.wait(10)))], Errors())
    thread = threading.Thread(target=source.collect_once, daemon=True)
    thread.start()
    exporter = Exporter("1", "nvidia", Errors())
    exporter.use([source])
    started = time.monotonic()
    names = [family.name for family in exporter.collect()]
    release.set()
    assert names == ["metalserve_agent_info"]
    assert time.monotonic() - started < 1


def test_every_catalogued_metric_can_be_exported() -> None:
    readings = [Reading(name, tuple("x" for _ in metric.labels), 1) for name, metric in CATALOGUE.items()]
    assert len(list(families(readings))) == len(CATALOGUE)
    for name, metric in CATALOGUE.items():
        assert name.startswith("metalserve_")
        assert (metric.kind == "counter") == name.endswith("_total")


# Configuration


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accelerator": "tpu"}, "accelerator is 'tpu'; it must be nvidia or cpu"),
        ({"probe_timeout_s": 5}, "probe_timeout_s is 5 and probe_interval_s 5"),
        ({"expected_gpus": "8"}, "expected_gpus is '8'; it must be of type int"),
        ({"expected_gpus": True}, "expected_gpus is True"),
        ({"replicas": [{"replica": "a"}]}, "kind is missing"),
        ({"replicas": ["a"]}, "a replica is 'a'"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(configuration.ConfigError, match=words.replace("(", r"\(")):
        configuration.parse(settings(**change))


def test_unreadable_settings_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(configuration.ConfigError, match="cannot be read"):
        configuration.load(str(tmp_path / "none"))
    (tmp_path / "bad").write_text("{", encoding="utf-8")
    with pytest.raises(configuration.ConfigError, match="is not JSON"):
        configuration.load(str(tmp_path / "bad"))


def test_new_settings_are_taken_over_and_wrong_ones_are_not(tmp_path: Path) -> None:
    from metalserve_agent.__main__ import Agent  # noqa: PLC0415

    path = tmp_path / "agent.json"
    path.write_text(json.dumps(settings(accelerator="cpu")), encoding="utf-8")
    agent = Agent(str(path), "1")
    path.write_text(json.dumps(settings(accelerator="cpu", replicas=[replica(1)])), encoding="utf-8")
    agent.follow_config()
    assert [one.name for one in agent.config.replicas] == ["short-0"]
    path.write_text("{", encoding="utf-8")
    agent.follow_config()
    assert [one.name for one in agent.config.replicas] == ["short-0"]
    for source in agent._replicas:
        source.stop()


# The file


def test_the_same_content_gives_the_same_bytes_and_any_change_another_version() -> None:
    parts = members(str(helpers.SOURCE / "metalserve_agent"))
    first, version = bundle(parts)
    assert bundle(dict(reversed(list(parts.items())))) == (first, version)
    changed, other = bundle({**parts, "metalserve_agent/host.py": b"# changed\n"})
    assert changed != first
    assert other != version


def test_the_file_holds_no_time_and_only_what_it_needs() -> None:
    with zipfile.ZipFile(helpers.agent_file()) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        names = archive.namelist()
    assert "pynvml.py" in names
    assert not [name for name in names if "aiohttp" in name or "twisted" in name or name.endswith(".pyc")]
