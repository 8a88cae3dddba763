# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM: the configuration is what the version reads, and says why; secrets are nowhere in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.engines import lint, registry
from ansible_collections.metal.serve.plugins.module_utils.engines.base import EngineError, Spec
from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS
from ansible_collections.metal.serve.plugins.module_utils.engines.vllm import QUIRKS
from ansible_collections.metal.serve.plugins.module_utils.runtime.docker_version import container_gpu_arguments

from .plans import DIGEST, GPU, context, pool_plan, replica_plan

TEMPLATES = Path(__file__).parents[3] / "templates" / "engine"


def spec(**changes: Any) -> Spec:
    return registry.adapter("vllm").spec(context(replica_plan(**changes)))


def options(found: Spec) -> dict[str, Any]:
    return {option.name: option.value for option in found.options}


def render(found: Spec, name: str) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["to_json"] = json.dumps
    template = next(item.template for item in found.files if item.name == name)
    return environment.from_string((TEMPLATES / template).read_text()).render(engine=found.to_dict())


def test_configuration_has_the_plan_and_says_why() -> None:
    text = render(spec(), "config.yaml")
    assert yaml.safe_load(text) == {
        "model": "/model",
        "served-model-name": ["m-public"],
        "host": "10.0.0.11",
        "port": 8100,
        "disable-access-log-for-endpoints": "/health,/metrics,/v1/models",
        "max-model-len": 32768,
        "max-num-batched-tokens": 6144,
        "max-num-seqs": 256,
        "shutdown-timeout": 315,
    }
    lines = text.splitlines()
    assert lines[lines.index("max-num-batched-tokens: 6144") - 1] == "# qps 50 is in tier 30..80"
    settings = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert all(lines[number - 1].startswith("# ") for number in settings), "a line without a reason"


@pytest.mark.parametrize("value", [{"a": [1, {"b": None}]}, "a: b # c", True, False, 0.92, ["x", "y z"], "0.1"])
def test_any_value_survives_the_template(value: Any) -> None:
    plan = {**replica_plan()["settings"], "compilation_config": value}
    assert yaml.safe_load(render(spec(settings=plan), "config.yaml"))["compilation-config"] == value


def test_no_secret_in_configuration_environment_or_command() -> None:
    found = spec()
    assert "api-key" not in options(found)
    assert "VLLM_API_KEY" not in found.environment
    assert found.secrets == ("api-key",)
    assert "VLLM_API_KEY=$(cat /etc/metalserve/api-key)" in render(found, "start.sh")


def test_idle_time_and_caches_come_from_the_environment() -> None:
    environment = spec().environment
    assert environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "180"
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["VLLM_CACHE_ROOT"].startswith("/cache/")


def test_environment_is_the_same_on_every_node() -> None:
    one = spec(host="node-a", address="10.0.0.11", port=8100, replica="short-0")
    two = spec(host="node-b", address="10.0.0.12", port=8107, replica="short-7")
    assert one.environment == two.environment


def test_cpu_environment_and_pool_environment_are_added() -> None:
    found = registry.adapter("vllm").spec(
        context(replica_plan(environment={"VLLM_CPU_KVCACHE_SPACE": "1"}), pool_env={"NCCL_P2P_DISABLE": "1"})
    )
    assert found.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert found.environment["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("version", "name", "words"),
    [
        ("0.26.0", "max_num_queued_reqs", r"0\.26\.0 does not have it \(exists from 0\.29 on\); use the gateway"),
        ("0.29.0", "max_num_partial_prefills", r"was removed after 0\.26.*separate pools"),
        ("0.26.0", "swap_space", "was removed after 0.17.*kv_offloading_size"),
        ("0.26.0", "max_tokens_per_batch", "no such option; use max_num_batched_tokens"),
        ("0.26.0", "batch_delay", "no delay to set"),
        ("0.26.0", "port", "derived from the inventory"),
        ("0.26.0", "api_key", "derived from the inventory"),
        ("0.26.0", "max-num-seqs", "with underscores"),
        ("0.26.0", "Max_Num_Seqs", "small letters"),
        ("latest", "max_num_seqs", "is not a version"),
        ("0.26.0", "max_num_seq", r"0\.26\.0 has no such option \(nearest: max_num_seqs\)"),
        ("0.26.0", "nonsense_of_ours", r"0\.26\.0 has no such option"),
        ("0.27.1", "max_num_batched", r"nearest: max_num_batched_tokens"),
        ("0.27.1", "max_num_seqz", r"nearest: max_num_seqs"),
    ],
)
def test_settings_that_the_version_lacks(version: str, name: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        spec(engine_version=version, settings={name: 1})


def test_new_options_of_a_version_without_a_catalogue_are_left_to_the_engine() -> None:
    assert "quantum_entanglement" in {
        name.replace("-", "_") for name in options(spec(engine_version="9.9.0", settings={"quantum_entanglement": 1}))
    }


@pytest.mark.parametrize("version", sorted(OPTIONS["vllm"]))
def test_catalogue_agrees_with_what_is_known_of_versions(version: str) -> None:
    names = set(lint.known("vllm", version))
    found = tuple(int(part) for part in version.split("."))
    for name, quirk in QUIRKS.items():
        there = not ((quirk.since and found[:2] < quirk.since) or (quirk.until and found[:2] > quirk.until))
        assert (name in names) == there, name
    assert {"model", "host", "port", "served_model_name", "api_key"} <= names


@pytest.mark.parametrize(("version", "there"), [("0.29.0", True), ("0.32.0", True), ("1.0.0", True)])
def test_queue_limits_where_they_exist(version: str, there: bool) -> None:
    found = spec(engine_version=version, settings={"max_num_queued_reqs": 100})
    assert ("max-num-queued-reqs" in options(found)) is there


def test_shutdown_timeout_only_where_it_exists() -> None:
    old = spec(engine_version="0.17.1")
    assert "shutdown-timeout" not in options(old)
    assert not old.drain.graceful
    assert spec().drain.shutdown_s == 315


def test_parallelism_from_the_pool_and_settings_win() -> None:
    pool = pool_plan(parallel={"tensor": 2, "pipeline": 1, "data": 1, "nodes": 1})
    found = registry.adapter("vllm").spec(context(replica_plan(), pool))
    assert options(found)["tensor-parallel-size"] == 2
    assert "pipeline-parallel-size" not in options(found)
    settings = {"tensor_parallel_size": 4}
    assert (
        options(registry.adapter("vllm").spec(context(replica_plan(settings=settings), pool)))["tensor-parallel-size"]
        == 4
    )


def test_replica_over_several_nodes() -> None:
    group = {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.11",
        "master_port": 28100,
        "headless": True,
        "hosts": ["a", "b"],
    }
    found = spec(multi_node=group)
    expected = {"nnodes": 2, "node-rank": 1, "master-addr": "10.0.0.11", "master-port": 28100, "headless": True}
    assert {key: options(found)[key] for key in expected} == expected
    assert found.headless
    head = spec(multi_node={**group, "node_rank": 0, "headless": False})
    assert options(head)["node-rank"] == 0
    assert "headless" not in options(head)
    assert not head.headless


# -- the container ------------------------------------------------------------------------------------------------


def test_container_has_the_limits_of_the_plan() -> None:
    container = spec().container
    assert container["memory"] == str(88 * 1024**3)
    assert container["memory_swap"] == str(90 * 1024**3)
    assert container["cpuset_cpus"] == "0-15"
    assert container["cpuset_mems"] == "0"
    assert container["stop_timeout"] == 330
    assert container["init"] is True
    assert container["restart_policy"] == "no"
    assert container["cap_drop"] == ["ALL"]
    assert container["network_mode"] == "host"
    assert container["log_options"] == {"max-size": "100m", "max-file": "5"}
    assert "nofile:1048576:1048576" in container["ulimits"]
    assert "memlock:-1:-1" in container["ulimits"]


def test_what_the_node_cannot_do_is_left_out() -> None:
    found = registry.adapter("vllm").spec(context(swap_limit=False, nofile_limit=20000))
    assert "memory_swap" not in found.container
    assert "nofile:20000:20000" in found.container["ulimits"]


def test_cpu_replica_is_not_pinned_and_has_no_gpu() -> None:
    container = spec(gpus=[], cpuset_cpus="", cpuset_mems="").container
    assert not {"cpuset_cpus", "cpuset_mems", "runtime", "device_requests"} & set(container)
    assert not any(limit.startswith("memlock") for limit in container["ulimits"])


def test_host_ipc_has_no_shm_of_its_own() -> None:
    limits = {**replica_plan()["container"], "ipc_mode": "host"}
    assert "shm_size" not in spec(container=limits).container


@pytest.mark.parametrize(
    ("docker", "key"), [("20.10.24", "runtime"), ("27.0.0", "device_requests"), ("29.1.0", "device_requests")]
)
def test_gpus_are_handed_over_as_this_docker_can(docker: str, key: str) -> None:
    arguments = container_gpu_arguments(docker, [GPU.format(0)])
    found = registry.adapter("vllm").spec(context(gpu_arguments=arguments))
    assert found.container[key] == arguments[key]
    assert found.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_mounts_are_read_only_but_for_the_cache_of_the_image() -> None:
    found = spec()
    writable = [mount for mount in found.mounts if not mount.read_only]
    assert [(mount.source, mount.target) for mount in writable] == [
        (f"/var/lib/metalserve/cache/{DIGEST[:12]}", "/cache")
    ]
    assert ("/var/lib/metalserve/models/m/r1", "/model") in [(mount.source, mount.target) for mount in found.mounts]


@pytest.mark.parametrize("image", ["vllm:latest", "vllm", "vllm@sha256:12"])
def test_image_must_have_a_digest(image: str) -> None:
    with pytest.raises(EngineError, match="has no digest"):
        spec(image=image)


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(EngineError, match="vllm"):
        registry.adapter("tgi")


def test_start_may_take_longer_with_more_weights() -> None:
    assert spec().start_timeout_s < spec(memory={"weights_gib": 140}).start_timeout_s
    assert registry.adapter("vllm").spec(context(start_timeout_s=7)).start_timeout_s == 7
