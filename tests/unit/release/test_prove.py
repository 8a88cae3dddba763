# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The step that proves a node: each replica passes its gate, and the gateways' locks are renewed between two of them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.release import lock, state
from tests.unit.lab.test_standin import Engine
from tests.unit.release.test_role import LOCAL, ansible_playbook

RELEASE = "a" * 64
RUN = "redeploy-1"


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    running = [Engine("--served-model-name", "tiny", "--max-model-len", "1024") for _ in range(2)]
    yield [engine.wait_ready() for engine in running]
    for engine in running:
        engine.close()


def prove(folder: Path, engines: list[Engine]) -> tuple[subprocess.CompletedProcess[str], lock.Holder | None]:
    """Run the role's own step on a node with a replica for each engine; return it with the gateway's lock afterwards."""
    for number, engine in enumerate(engines):
        replica = state.Replica(str(folder / "node"), f"short-{number}")
        os.makedirs(replica.release(RELEASE))
        document = {
            "pool": "short",
            "address": "127.0.0.1",
            "port": engine.port,
            "served_name": "tiny",
            "health": {"metrics": "/metrics", "metrics_port": engine.port},
            "content": {"engine": {"kind": "vllm"}},
            "plan": {"settings": {"max_model_len": 1024}, "memory": {"kv_cache_tokens": 131072}},
        }
        Path(replica.release(RELEASE), state.RELEASE_FILE).write_text(json.dumps(document))
        state.activate(replica, RELEASE, keep_previous=False)
    for place in ("node", "g1"):
        lock.write(str(folder / place / lock.NAME), lock.Holder(RUN, "ada@desk", heartbeat=time.time() - 100))
    # Evaluated for each gateway of a loop.
    variables = {**LOCAL, "release_root": f"{folder}/{{{{ item | default('node') }}}}"}
    hosts: dict[str, Any] = {"engines": {"hosts": {"node": {}}}, "gateways": {"hosts": {"g1": {}}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": variables, "children": hosts}}))
    tasks = {"import_role": {"name": "metal.serve.release", "tasks_from": "steps/prove"}}
    (folder / "play.yml").write_text(yaml.safe_dump([{"hosts": "engines", "gather_facts": False, "tasks": [tasks]}]))
    extra = {
        "metalserve_engine_api_key": "",
        "metalserve_pools": {},
        "release_run": RUN,
        "release_gate_requests": 8,
        "release_gate_policy": {"answer_s": 60.0},
        "__release_failed": False,
        "__release_plans": [],
        "__release_step": {"step": "prove", "replicas": [f"short-{n}" for n in range(len(engines))], "releases": {}},
    }
    done = ansible_playbook(folder / "hosts.yml", "-e", json.dumps(extra), str(folder / "play.yml"))
    return done, lock.read(str(folder / "g1" / lock.NAME))


def test_every_replica_is_proven_and_the_locks_live(tmp_path: Path, engines: list[Engine]) -> None:
    began = time.time()
    done, held = prove(tmp_path, engines)
    assert done.returncode == 0, done.stdout
    for number in range(2):
        replica = state.Replica(str(tmp_path / "node"), f"short-{number}")
        measured = json.loads(Path(replica.release(RELEASE), state.GATE).read_text())
        assert (measured["requests"], measured["failed"]) == (8, 0)
    assert held is not None
    assert held.heartbeat >= began
    assert held.phase == "gate"


def test_a_replica_that_does_not_pass_is_named(tmp_path: Path, engines: list[Engine]) -> None:
    engines[1].fault("garbage")
    done, _held = prove(tmp_path, engines)
    assert done.returncode == 2
    assert "the gate is shut: short-1: golden prompt" in " ".join(done.stdout.split()), done.stdout
    assert not Path(state.Replica(str(tmp_path / "node"), "short-0").release(RELEASE), state.GATE).exists()
