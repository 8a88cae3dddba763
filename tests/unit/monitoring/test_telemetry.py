# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Aggregation over engines (case I16), start-up logs, scrapes, targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.telemetry.aggregate import EngineLoad, engine_load
from ansible_collections.metal.serve.plugins.module_utils.telemetry.engine_log import StartUp, parse_start_up
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import ScrapeError, parse_scrape
from ansible_collections.metal.serve.plugins.module_utils.telemetry.targets import (
    agent_settings,
    expected,
    scrape_targets,
)

from . import render, scrapes

LOGS = render.ROOT / "tests" / "fixtures" / "engine-logs"
TWO_ENGINES = """
vllm:num_requests_running{engine="0",model_name="m"} 2
vllm:num_requests_running{engine="1",model_name="m"} 3
vllm:num_requests_waiting{engine="0",model_name="m"} 0
vllm:num_requests_waiting{engine="1",model_name="m"} 7
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.40
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.90
"""


def test_i16_requests_are_summed_and_shares_are_not() -> None:
    load = engine_load([parse_scrape(TWO_ENGINES)], "vllm")
    assert load == EngineLoad(running=5, waiting=7, kv_usage=0.90, series=2)


def test_i16_over_several_processes() -> None:
    first, second = (
        parse_scrape(f"sglang:num_running_reqs {running}\nsglang:token_usage {usage}\nsglang:num_queue_reqs 0\n")
        for running, usage in ((2, 0.4), (3, 0.9))
    )
    assert engine_load([first, second], "sglang") == EngineLoad(5, 0, 0.9, 2)


def test_what_no_engine_says_is_unknown_and_not_zero() -> None:
    assert engine_load([parse_scrape("")], "vllm") == EngineLoad(None, None, None, 0)
    load = engine_load([scrapes.triton()], "triton_vllm")
    assert (load.running, load.kv_usage) == (None, None)
    assert load.waiting is not None
    assert engine_load([parse_scrape("vllm:kv_cache_usage_perc NaN")], "vllm").kv_usage is None


def test_the_recorded_rules_aggregate_in_the_same_way() -> None:
    for expression in scrapes.expressions("gpu"):
        if expression.startswith("sum by"):
            assert "kv_cache_usage_perc" not in expression
            assert "token_usage" not in expression


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="engine kind 'tgi' is unknown"):
        engine_load([], "tgi")


# Start-up logs


@pytest.mark.parametrize(
    ("name", "load", "init"), [("run1", 3.601533, 139.56), ("run2", 3.437498, 36.99)], ids=["cold", "warm"]
)
def test_start_up_of_vllm_on_an_h200(name: str, load: float, init: float) -> None:
    text = (LOGS / f"vllm-0.26.0-h200-{name}.log").read_text(encoding="utf-8")
    assert parse_start_up(text.splitlines()) == StartUp(load, int(14.32 * 1024**3), init, True)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["Model loading took 14.32 GiB memory and 3.5 seconds"], StartUp(3.5, int(14.32 * 1024**3))),
        (
            [
                "(Worker_TP0) Model loading took 7.1 GiB and 3.0 seconds",
                "(Worker_TP1) Model loading took 7.2 GiB and 9.5 seconds",
            ],
            StartUp(9.5, int(7.2 * 1024**3)),
        ),
        (
            [
                "(Worker pid=42) INFO 11-30 16:56:27 [default_loader.py:501] Loading weights took 1.33 seconds",
                "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 2.36 s",
            ],
            StartUp(1.33, None, 2.36),
        ),
        (
            ["Load weight end. elapsed=3.21 s, type=Llama, avail mem=60.00 GB, mem usage=14.3 GB."],
            StartUp(3.21, int(14.3 * 1024**3)),
        ),
        (["The server is fired up and ready to roll!"], StartUp(ready=True)),
        (["Started HTTPService at 10.0.0.11:8100"], StartUp(ready=True)),
        (["Model loading took long", "torch.compile took 27.03 s in total"], StartUp()),
        ([], StartUp()),
    ],
)
def test_start_up_lines(lines: list[str], found: StartUp) -> None:
    assert parse_start_up(lines) == found


@given(st.lists(st.text(max_size=200), max_size=5))
def test_no_log_makes_the_reader_raise(lines: list[str]) -> None:
    assert isinstance(parse_start_up(lines), StartUp)


# Scrapes


def test_the_text_format_with_its_corners() -> None:
    scrape = parse_scrape('# HELP x y\n#no space\n\n x{a="1,\\"}\\n\\\\",b="",} +Inf 123\r\ny 1e3\nz{} NaN\n')
    assert [(one.name, dict(one.labels)) for one in scrape.samples] == [
        ("x", {"a": '1,"}\n\\', "b": ""}),
        ("y", {}),
        ("z", {}),
    ]
    assert scrape.samples[1].value == 1000


@pytest.mark.parametrize(
    "line", ["x", "x{a=1} 1", 'x{a="1} 1', "x{a} 1", 'x{a="1" b="2"} 1', "x one", "x 1 2 3", "1x 1", "x 1_000", "{} 1"]
)
def test_what_prometheus_refuses_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ScrapeError, match="line 2"):
        parse_scrape(f"ok 1\n{line}\n")


def test_a_whole_real_scrape() -> None:
    scrape = parse_scrape(Path(scrapes.FIXTURES / "vllm-0.32.0-cpu.prom").read_text(encoding="utf-8"))
    assert len(scrape.samples) == 472
    assert scrape.types["vllm:kv_cache_usage_perc"] == "gauge"


# Targets

GROUPS = {"engines": ["b", "a"], "gateways": ["g"], "monitors": ["g"], "short": ["b", "a"]}
HOSTS: dict[str, dict[str, Any]] = {
    "a": {"metalserve_address": "10.0.0.1", "metalserve_expected_gpus": 8},
    "b": {"ansible_host": "10.0.0.2"},
    "g": {},
}
PLANS: list[dict[str, Any]] = [
    {
        "pool": "short",
        "engine": "vllm",
        "parallel": {"tensor": 2},
        "times": {"probe_interval_s": 10, "probe_timeout_s": 3},
        "replicas": [
            {"replica": "short-0", "host": "b", "address": "10.0.0.2", "port": 8100},
            {"replica": "short-0", "host": "a", "address": "10.0.0.1", "port": 8100},
            {"replica": "short-1", "host": "a", "address": "10.0.0.1", "port": 8101},
        ],
    }
]


def test_targets_are_the_inventorys_in_a_fixed_order() -> None:
    found = scrape_targets(PLANS, GROUPS, HOSTS, dcgm=True)
    assert [one["targets"][0] for one in found["node"]] == ["10.0.0.1:9100", "10.0.0.2:9100", "g:9100"]
    assert [one["targets"][0] for one in found["engines"]] == ["10.0.0.1:8100", "10.0.0.1:8101", "10.0.0.2:8100"]
    assert found["engines"][0]["labels"] == {"node": "a", "pool": "short", "replica": "short-0", "kind": "vllm"}
    assert [one["targets"][0] for one in found["nginx"]] == ["g:9113"]
    assert [one["targets"][0] for one in found["gateway_log"]] == ["g:3903"]
    assert [one["targets"][0] for one in found["agents"]] == ["10.0.0.1:9600", "10.0.0.2:9600"]
    assert [one["targets"][0] for one in found["dcgm"]] == ["10.0.0.1:9400", "10.0.0.2:9400"]
    assert scrape_targets(PLANS, GROUPS, HOSTS, dcgm=False)["dcgm"] == []


def test_what_is_expected() -> None:
    found = expected(PLANS, GROUPS, HOSTS, dcgm=False)
    assert found["targets"] == {"node": 3, "agents": 2, "nginx": 1, "gateway_log": 1, "engines": 3}
    assert found["replicas"] == [{"pool": "short", "kind": "vllm", "count": 3}]
    assert found["gpus"] == {"a": 8, "b": 2}  # b says no number: one replica of two GPUs
    assert found["kinds"] == ["vllm"]
    cpu = {name: {**host, "metalserve_accelerator": "cpu"} for name, host in HOSTS.items()}
    assert expected(PLANS, GROUPS, cpu, dcgm=True)["gpus"] == {}
    assert "dcgm" not in expected(PLANS, GROUPS, cpu, dcgm=True)["targets"]


def test_the_agents_settings_are_those_of_its_node_and_keep_the_probes_in_order() -> None:
    found = agent_settings(
        PLANS,
        "a",
        HOSTS["a"],
        address="10.0.0.1",
        port=9600,
        engines_dir="/e",
        docker_socket="/s",
    )
    assert [one["replica"] for one in found["replicas"]] == ["short-0", "short-1"]
    assert found["expected_gpus"] == 8
    assert (found["probe_interval_s"], found["probe_timeout_s"]) == (10, 3)
    assert found["accelerator"] == "nvidia"
