# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a real engine: a release that crashes or is killed for memory is taken back, and nobody notices."""

from __future__ import annotations

import json

import pytest

from tests.lab.redeploy import lab
from tests.lab.redeploy_real import real

# A cache that is larger than the container may be: the worker sees that when it has loaded the model, and ends.
CRASH = {"test_env": {"VLLM_CPU_KVCACHE_SPACE": "8"}}
# Room for so many adapters that the limit has none for them: nothing looks, so the kernel kills the worker.
OOM = {"test_memory": "3g", "test_settings": {"enable_lora": True, "max_loras": 16, "max_lora_rank": 512}}


@pytest.mark.parametrize(
    ("release", "words"),
    [(CRASH, "is less than requested memory for kv"), (OOM, "the kernel killed it for memory")],
    ids=["crash", "oom"],
)
def test_a_bad_release_is_taken_back(release: dict[str, object], words: str) -> None:
    untouched = lab.started("engine2")
    with lab.unnoticed(real.load()):
        run = lab.playbook("redeploy", "-e", json.dumps(release), *lab.QUICK, timeout_s=900)
    assert run.code != 0
    assert words in run.output, run.end
    assert "engine1 serves again with what served before" in run.output, run.end
    assert lab.started("engine2") == untouched
    print(next(line for line in run.output.splitlines() if words in line).strip()[:300])
