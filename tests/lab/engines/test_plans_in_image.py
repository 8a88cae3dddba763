# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of many loads and cards pass the semantic check of a real engine, inside its image.

The image is the lab's own, or METALSERVE_ENGINE_IMAGE with the vLLM of METALSERVE_ENGINE_VERSION. See ``scripts/test triton``.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.engines import image_lint, registry
from ansible_collections.metal.serve.plugins.module_utils.planner import offline
from tests.lab.lab import ROOT
from tests.unit.engines.plans import context, pool_plan, replica_plan

pytestmark = pytest.mark.lab

IMAGE = os.environ.get("METALSERVE_ENGINE_IMAGE", "")
LAB_IMAGES = "metalserve-lab/vllm-cpu"
MODEL = Path(os.environ.get("METALSERVE_ENGINE_MODEL", ROOT / ".cache" / "lab" / "models" / "SmolLM2-135M-Instruct"))
VERSION = os.environ.get("METALSERVE_ENGINE_VERSION", "0.32.0")
CARDS = ("NVIDIA H200:143771:1", "NVIDIA A100-SXM4-80GB:81920:2", "NVIDIA L40S:46068:1")
LOADS = (
    {},
    {"qps": 1, "prompt_tokens": 5000, "output_tokens": 128, "priorities": True},
    {"qps": 60, "prompt_tokens": 350, "output_tokens": 128},
    {"qps": 400, "prompt_tokens": 10, "output_tokens": 512},
)
FIXED = ({}, {"max_model_len": 64}, {"gpu_memory_utilization": 0.3, "max_num_seqs": 700})


def write(folder: Path) -> list[str]:
    """Write a configuration for each combination; returns their names."""
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    names = []
    for number, (card, load, fixed) in enumerate(itertools.product(CARDS, LOADS, FIXED)):
        request = offline.Request(config=config, gpu=card, engine="vllm", version=VERSION, fixed=fixed, workload=load)
        plan = offline.plan(request)
        replica = replica_plan(engine_version=VERSION, settings=plan["settings"], memory=plan["memory"])
        spec = registry.adapter("vllm").spec(context(replica, pool_plan()))
        names.append(f"plan-{number}.yaml")
        # JSON is YAML.
        (folder / names[-1]).write_text(json.dumps({option.name: option.value for option in spec.options}))
    return names


def image() -> str:
    """Return the image to ask: the one that is named, else the newest that a lab built."""
    command = ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", LAB_IMAGES]
    found = IMAGE or subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    assert found, f"no image {LAB_IMAGES}: build the lab, or name one with METALSERVE_ENGINE_IMAGE"
    return found


def test_every_plan_passes_the_engine_s_own_check(tmp_path: Path) -> None:
    names = write(tmp_path)
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--network", "none", "--cpu-shares", "256", "--env", "HOME=/tmp"),
            *("--entrypoint", "python3"),
            *("--volume", f"{image_lint.__file__}:/lint.py:ro", "--volume", f"{tmp_path}:/c:ro"),
            *("--volume", f"{MODEL.resolve()}:/model:ro", image(), "/lint.py", "vllm", "/model"),
            *(f"/c/{name}" for name in names),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    files = json.loads(done.stdout)["files"]
    assert [(one["file"], one["problems"]) for one in files if one["problems"]] == []
    assert all("semantic" in one["checked"] for one in files)
    assert len(files) == len(CARDS) * len(LOADS) * len(FIXED)
