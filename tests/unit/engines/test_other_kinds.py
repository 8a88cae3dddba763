# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang and Triton: the same plan in their words, and what they lack is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.engines import registry, sglang
from ansible_collections.metal.serve.plugins.module_utils.engines.base import EngineError, Spec

from .plans import context, pool_plan, replica_plan

TEMPLATES = Path(__file__).parents[3] / "templates" / "engine"
GIB = 1024**3


def spec(kind: str, pool: dict[str, Any] | None = None, **changes: Any) -> Spec:
    version = "0.5.23" if kind == "sglang" else "0.26.0"
    plan = replica_plan(engine=kind, engine_version=version, **changes)
    return registry.adapter(kind).spec(context(plan, pool))


def options(found: Spec) -> dict[str, Any]:
    return {option.name: option.value for option in found.options}


def render(found: Spec, name: str) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["to_json"] = json.dumps
    template = next(item.template for item in found.files if item.name == name)
    return environment.from_string((TEMPLATES / template).read_text()).render(engine=found.to_dict())


def test_sglang_configuration_is_the_plan_in_its_words() -> None:
    assert yaml.safe_load(render(spec("sglang"), "config.yaml")) == {
        "model-path": "/model",
        "served-model-name": "m-public",
        "host": "10.0.0.11",
        "port": 8100,
        "enable-metrics": True,
        "context-length": 32768,
        "max-running-requests": 256,
        "chunked-prefill-size": 6144,
    }


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"kv_cache_dtype": "fp8"}, {"kv-cache-dtype": "fp8_e4m3"}),
        ({"scheduling_policy": "priority"}, {"enable-priority-scheduling": True}),
        ({"scheduling_policy": "fcfs"}, {}),
        ({"enable_prefix_caching": False}, {"disable-radix-cache": True}),
        ({"enable_prefix_caching": True}, {}),
        ({"enable_chunked_prefill": False}, {"chunked-prefill-size": -1}),
        ({"enforce_eager": True}, {"disable-decode-cuda-graph": True, "disable-prefill-cuda-graph": True}),
        ({"max_num_queued_reqs": 100}, {"max-queued-requests": 100}),
        ({"schedule_policy": "lpm"}, {"schedule-policy": "lpm"}),
        ({"mem_fraction_static": 0.7, "gpu_memory_utilization": 0.9}, {"mem-fraction-static": 0.7}),
    ],
)
def test_sglang_translations(setting: dict[str, Any], expected: dict[str, Any]) -> None:
    base = options(spec("sglang", settings={}))
    assert {k: v for k, v in options(spec("sglang", settings=setting)).items() if k not in base} == expected


def test_sglang_static_part_leaves_room_for_activations() -> None:
    memory = {"planned_gpu_bytes": int(0.9 * 80 * GIB), "overhead_gib": 4.0}
    found = options(spec("sglang", settings={"gpu_memory_utilization": 0.9}, memory=memory))
    assert found["mem-fraction-static"] == pytest.approx(0.9 - 4 / 80, abs=0.001)
    assert sglang.static_fraction(0.9, {}) < 0.9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("radix_threshold", "every shared prefix is reused"),
        ("swap_space", "enable_hierarchical_cache"),
        ("shutdown_timeout", "waits without a bound"),
        ("max_num_seq", r"not known for SGLang \(nearest: max_num_seqs\)"),
    ],
)
def test_sglang_says_what_it_lacks(name: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        spec("sglang", settings={name: 1})


def test_sglang_parallelism_and_timeouts() -> None:
    found = spec("sglang", pool_plan(parallel={"tensor": 2, "pipeline": 1, "data": 1}))
    assert options(found)["tp-size"] == 2
    assert found.environment["SGLANG_TIMEOUT_KEEP_ALIVE"] == "180"
    assert found.drain.tells_health


def test_triton_repository_has_one_model_with_vllm_arguments() -> None:
    found = spec("triton_vllm")
    arguments = json.loads(render(found, "model_repository/m-public/1/model.json"))
    assert arguments == {
        "model": "/model",
        "disable_log_stats": False,
        "max_model_len": 32768,
        "max_num_batched_tokens": 6144,
        "max_num_seqs": 256,
    }
    text = render(found, "model_repository/m-public/config.pbtxt")
    assert 'backend: "vllm"' in text
    assert "KIND_MODEL" in text
    assert "REPORT_CUSTOM_METRICS" in text


def test_triton_mounts_the_repository_as_a_folder() -> None:
    mounts = {mount.target: mount.source for mount in spec("triton_vllm").mounts}
    assert mounts["/etc/metalserve/model_repository"] == "{release}/model_repository"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"shutdown_timeout": 3}, "does not run in Triton"),
        ({"max_tokens_per_batch": 3}, "use max_num_batched_tokens"),
        ({"max_num_queued_reqs": 3}, "does not have it"),
    ],
)
def test_triton_settings_are_checked_as_vllms(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        spec("triton_vllm", settings=setting)


def test_triton_name_must_be_a_folder() -> None:
    with pytest.raises(EngineError, match="served_name 'org/m'"):
        spec("triton_vllm", pool_plan(served_name="org/m"))


@pytest.mark.parametrize("kind", sorted(registry.ADAPTERS))
def test_every_kind_is_whole(kind: str) -> None:
    found = spec(kind)
    assert found.kind == kind
    assert all((TEMPLATES / item.template).is_file() for item in found.files)
    assert all(option.why for option in found.options)
    assert found.log.fatal
    assert found.health.completion.startswith("/")
    json.dumps(found.to_dict())
