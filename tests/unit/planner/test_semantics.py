# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever is planned, the engine takes it: the rules that engines check at a start, and the options of their versions.

The same plans were checked by the engines themselves, in their images; see docs/engines.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.engines import lint, registry
from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS
from ansible_collections.metal.serve.plugins.module_utils.planner import offline
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError, PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config
from ansible_collections.metal.serve.plugins.module_utils.planner.presets import PRESETS

from ..engines.plans import context, pool_plan, replica_plan
from .helpers import config

VERSIONS = [(kind, version) for kind, there in OPTIONS.items() for version in there]
CARDS = ("NVIDIA H200:143771", "NVIDIA A100-SXM4-80GB:81920", "NVIDIA L40S:46068")


def rendered(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the engine's adapter makes of an offline plan."""
    kind, version, place = plan["engine"]["kind"], plan["engine"]["version"], plan["placement"]
    replica = replica_plan(engine=kind, engine_version=version, settings=plan["settings"], memory=plan["memory"])
    sizes = {"tensor": place["tensor_parallel"], "pipeline": place["pipeline_parallel"], "data": place["data_parallel"]}
    spec = registry.adapter(kind).spec(context(replica, pool_plan(parallel=sizes)))
    return {option.name: option.value for option in spec.options}


def check(plan: dict[str, Any], model: dict[str, Any]) -> None:
    """Assert what engines check when they start."""
    chosen, shape = plan["settings"], parse_config(model)
    assert 0 < chosen["gpu_memory_utilization"] <= 1
    assert 1 <= chosen["max_num_seqs"] <= chosen["max_num_batched_tokens"]
    assert chosen["max_model_len"] >= 1
    assert not shape.context_limit or chosen["max_model_len"] <= shape.context_limit
    assert shape.heads % plan["placement"]["tensor_parallel"] == 0
    assert plan["memory"]["max_concurrency"] >= 1
    assert lint.lint(plan["engine"]["kind"], plan["engine"]["version"], rendered(plan)) == []


def planned(request: offline.Request) -> tuple[dict[str, Any], PlanError | None]:
    """Return the plan, or why there is none."""
    try:
        return offline.plan(request), None
    except PlanError as error:
        return {}, error


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["qwen2-7b", "llama-3-8b", "deepseek-v2-lite"]),
    card=st.sampled_from(CARDS),
    count=st.sampled_from([1, 2, 4, 8]),
    engine=st.sampled_from(VERSIONS),
    qps=st.none() | st.floats(0.1, 500),
    prompt=st.integers(1, 60000),
    fixed=st.fixed_dictionaries(
        {},
        optional={
            "max_model_len": st.integers(1, 200000),
            "max_num_seqs": st.integers(1, 4096),
            "max_num_batched_tokens": st.integers(1, 65536),
            "gpu_memory_utilization": st.floats(0.05, 1.0),
            "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
        },
    ),
)
def test_what_is_planned_passes_and_what_is_refused_names_the_variable(
    model: str, card: str, count: int, engine: tuple[str, str], qps: float | None, prompt: int, fixed: dict[str, Any]
) -> None:
    content = config(model)
    load = {} if qps is None else {"qps": qps, "prompt_tokens": prompt, "output_tokens": 128}
    request = offline.Request(
        config=content, gpu=f"{card}:{count}", engine=engine[0], version=engine[1], fixed=fixed, workload=load
    )
    plan, problem = planned(request)
    if problem is not None:
        named = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "tensor_parallel")
        assert any(name in problem.message for name in named), problem.message
        ways = problem.ways_out if isinstance(problem, DoesNotFitError) else []
        assert all(any(letter.isdigit() for letter in way) for way in ways), ways
        return
    check(plan, content)
    assert all(plan["settings"][name] == value for name, value in fixed.items())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_pass(name: str) -> None:
    preset = PRESETS[name]
    request = offline.Request(
        config=preset.config,
        gpu=preset.gpu,
        engine=preset.engine,
        version=preset.version,
        fixed=preset.settings,
        workload=preset.workload,
        slo=preset.slo,
    )
    check(offline.plan(request), dict(preset.config))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_setting_of_a_preset_has_a_reason(name: str) -> None:
    preset = PRESETS[name]
    request = offline.Request(
        config=preset.config, gpu=preset.gpu, engine=preset.engine, version=preset.version, workload=preset.workload
    )
    plan = offline.plan(request)
    for setting in plan["settings"]:
        assert plan["reasons"][f"settings.{setting}"], setting
