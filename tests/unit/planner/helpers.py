# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes, facts and inventories that the planner's tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import Node, parse_node
from ansible_collections.metal.serve.plugins.module_utils.planner.memory import MemoryInput
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape, parse_config

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
MODELS = FIXTURES / "models"
H200 = "NVIDIA H200"
H200_MIB = 143771
IMAGE = "10.0.0.5:5000/engine@sha256:" + "0" * 64


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json of tests/fixtures/models with changes."""
    value: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    value.update(changes)
    return value


def shape(name: str, **changes: Any) -> ModelShape:
    """Return the shape of a fixture."""
    return parse_config(config(name, **changes))


def on_h200(**values: Any) -> MemoryInput:
    """Return the memory model's input for one H200."""
    return MemoryInput(gpu_name=H200, total_mib=H200_MIB, **values)


def facts(
    gpus: int = 8, name: str = H200, mib: int = H200_MIB, links: str = "NV18", numa: int = 2, gib: int = 2048
) -> dict[str, Any]:
    """Return facts of a node in the dict form of HostFacts."""
    names = [f"GPU{index}" for index in range(gpus)]
    return {
        "gpus": [
            {
                "uuid": f"GPU-{index}",
                "name": name,
                "memory_total_mib": mib,
                "numa_node": index * numa // gpus,
                "local_cpus": "",
            }
            for index in range(gpus)
        ],
        "memory": {"total_kib": gib * 1024**2},
        "numa": {"nodes": [{"id": index, "cpu_list": f"{index * 32}-{index * 32 + 31}"} for index in range(numa)]},
        "topology": {"matrix": {a: {b: "X" if a == b else links for b in names} for a in names}},
    }


def node(**values: Any) -> Node:
    """Return a parsed node."""
    return parse_node(facts(**values))


def pool(**changes: Any) -> dict[str, Any]:
    """Return a pool's description."""
    value: dict[str, Any] = {
        "model": "m",
        "engine": "vllm",
        "engine_version": "0.26.0",
        "image": IMAGE,
        "max_model_len": 4096,
        "workload": {
            "qps": 50,
            "prompt_tokens": {"mean": 350, "p95": 1000},
            "output_tokens": {"mean": 128, "p95": 512},
        },
    }
    value.update(changes)
    return value


HOSTVARS: dict[str, dict[str, Any]] = {
    "node-a": {"metalserve_expected_gpus": 8, "metalserve_address": "10.0.0.11"},
    "node-b": {"metalserve_expected_gpus": 8, "ansible_host": "10.0.0.12"},
    "node-c": {"metalserve_accelerator": "cpu"},
}
