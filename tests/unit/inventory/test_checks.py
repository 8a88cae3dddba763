# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Each rule alone: one thing broken, exactly that problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.inventory import knobs, report
from ansible_collections.metal.serve.plugins.module_utils.inventory.checks import check
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    Inventory,
    Problem,
    Unresolved,
    VariableFile,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.roles import options_of
from ansible_collections.metal.serve.plugins.module_utils.inventory.rules_models import judge_image
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import pool_plans
from tests.unit.inventory.small import DIGEST, Small

Break = Callable[[Small], Any]


def put(place: str, value: Any, also: Break | None = None) -> Break:
    """Return a change: the value at ``a/b/c`` of the inventory-wide variables (lists are counted), and another one."""

    def change(small: Small) -> None:
        if also is not None:
            also(small)
        *way, last = place.split("/")
        inside: Any = small.wide
        for part in way:
            inside = inside[int(part) if isinstance(inside, list) else part]
        inside[int(last) if isinstance(inside, list) else last] = value

    return change


def own(host: str, name: str, value: Any) -> Break:
    """Return a change: a variable of one host."""
    return lambda small: small.hosts[host].update({name: value})


P = "metalserve_pools/short"
KEY = {"name": "finance", "key": "5f2c9e1b7a3d4f60a1"}
ONE: list[tuple[Break, str, str, str]] = [
    # types, never coerced
    (put(f"{P}/tensor_parallel", True), "metalserve_pools.short.tensor_parallel", "truth value", "whole number"),
    (put(f"{P}/tensor_parallel", None), "metalserve_pools.short.tensor_parallel", "no value", "remove the line"),
    (put(f"{P}/engine_version", 0.26), "metalserve_pools.short.engine_version", "to YAML", "quotes"),
    (put(f"{P}/longest_stream_s", "5m"), "metalserve_pools.short.longest_stream_s", "text", "a number"),
    (put(f"{P}/longest_stream_s", float("nan")), "metalserve_pools.short.longest_stream_s", "decimal", "a number"),
    (put(f"{P}/workload", [50]), "metalserve_pools.short.workload", "a list", "mapping"),
    (put(f"{P}/workload", {"qps": "50"}), "metalserve_pools.short.workload.qps", "text", "write 50 without quotes"),
    (
        put(f"{P}/workload", {"prompt_tokens": {"mean": 0}}),
        "metalserve_pools.short.workload.prompt_tokens.mean",
        "small",
        "1",
    ),
    (put(f"{P}/port", 80), "metalserve_pools.short.port", "too small", "1024"),
    (put(f"{P}/container", {"memory": 0}), "metalserve_pools.short.container.memory", "0 bytes", "88G"),
    (put(f"{P}/container", {"memory": True}), "metalserve_pools.short.container.memory", "truth value", "88G"),
    (put("metalserve_tls", {"names": "llm.example.com"}), "metalserve_tls.names", "not a list", "[llm.example.com]"),
    (put("metalserve_pools", None), "metalserve_pools", "no value", "a mapping"),
    (put("metalserve_api_keys", {"finance": "x"}), "metalserve_api_keys", "a mapping", "[{name: finance"),
    (put(f"{P}/max_model_len", 10**12), "metalserve_pools.short.max_model_len", "too large", "16777216"),
    (put(f"{P}/served_name", 'a "b"'), "metalserve_pools.short.served_name", "is not letters", "write letters"),
    (
        put("metalserve_models/chat/revision", date(2026, 1, 1)),
        "metalserve_models.chat.revision",
        "a date to",
        "quotes",
    ),
    (put("metalserve_models/chat/revision", 12345678), "metalserve_models.chat.revision", "to YAML", "quotes"),
    (
        put("metalserve_models/chat/source", {"type": "huggingface", "repository": "a/b"}),
        "metalserve_models.chat.source.commit",
        "604d5664",
        "40 hexadecimal digits",
    ),
    (put("metalserve_models/chat/revision", "a.partial"), "metalserve_models.chat.revision", "ends like", "another"),
    (put("metalserve_root", "data"), "metalserve_root", "absolute path", "absolute path"),
    (own("node-a", "metalserve_expected_gpus", "8"), "metalserve_expected_gpus", "text", "write 8 without quotes"),
    (own("node-a", "metalserve_accelerator", "cuda"), "metalserve_accelerator", "allowed", "nvidia or cpu"),
    # names
    (put("metalserve-pools", {}), "metalserve-pools", "not a variable", "did you mean metalserve_pools?"),
    (put("metal_serve_models", {}), "metal_serve_models", "not a variable", "did you mean metalserve_models?"),
    (put("metalserver_registry", {}), "metalserver_registry", "not a variable", "did you mean metalserve_registry?"),
    (put("metalserve_replicas_per_node", 8), "metalserve_replicas_per_node", "not a variable", ".replicas_per_node"),
    (put("metalserve_zzz", 1), "metalserve_zzz", "not a variable", "docs/variables.md"),
    (put("metalserve_batch_delay", 20), "metalserve_batch_delay", "no LLM engine waits", "remove it"),
    (put("vllm_swap_space", 4), "vllm_swap_space", "gone since 0.18", "kv_offloading_size"),
    (
        put(f"{P}/tensor_parallel_size", 2),
        "metalserve_pools.short.tensor_parallel_size",
        "not known",
        "tensor_parallel?",
    ),
    (put(f"{P}/max_num_seqs", 2), "metalserve_pools.short.max_num_seqs", "not known", "settings.max_num_seqs"),
    (
        put(f"{P}/max_tokens_per_batch", 2),
        "metalserve_pools.short.max_tokens_per_batch",
        "no engine",
        "max_num_batched",
    ),
    (put("metalserve_registry", {"adress": "a:1"}), "metalserve_registry.adress", "not known", "did you mean address?"),
    # scope
    (own("node-a", "metalserve_root", "/data"), "metalserve_root", "not seen by", "group_vars/all.yml"),
    # secrets
    (put("metalserve_api_keys", []), "metalserve_api_keys", "empty", "openssl rand"),
    (put("metalserve_api_keys/0/key", "short-key"), "metalserve_api_keys[0].key", "too short", "openssl rand"),
    (put("metalserve_api_keys/0/key", "1111111111111111111"), "metalserve_api_keys[0].key", "example", "openssl"),
    (put("metalserve_api_keys/0/key", "0c7d1e9f4b2a836517"), "metalserve_api_keys[0].key", "same key as", "other keys"),
    (put("metalserve_api_keys/0", {"name": "finance"}), "metalserve_api_keys[0]", "neither key nor", "exactly one"),
    (put("metalserve_api_keys/0", {"name": "a", "sha256": "abc"}), "metalserve_api_keys[0].sha256", "64", "64 hex"),
    (put("metalserve_api_keys/0", {"name": "a", "sha256": "0" * 64}), "metalserve_api_keys", "last play", "verify_api"),
    (put("metalserve_api_keys/0/key", '5f2c9e1b7a3d4f"60a1'), "metalserve_api_keys[0].key", "header", "openssl"),
    (put("metalserve_api_keys/0/vip", "true"), "metalserve_api_keys[0].vip", "text", "write true"),
    (put("metalserve_engine_api_key", "Bearer 0c7d1e9f4b2a836517"), "metalserve_engine_api_key", "header", "openssl"),
    (
        put("metalserve_engine_api_key", "0c7d1e9f4b2a83651f\n"),
        "metalserve_engine_api_key",
        "a line break",
        "printf %s",
    ),
    (put("metalserve_engine_api_key", 1234567890123456789), "metalserve_engine_api_key", "a number to YAML", "quotes"),
    # registry, TLS, alerts
    (put("metalserve_registry", {"address": "http://a:5000"}), "metalserve_registry.address", "host", "host:port"),
    (
        put("metalserve_registry", {"address": "a:5000", "username": "u"}),
        "metalserve_registry.password",
        "missing",
        "both",
    ),
    (
        put("metalserve_tls", {"certificate": "/c.pem", "private_key": "/k.pem", "names": ["*.example.com"]}),
        "metalserve_tls.names",
        "without *",
        "llm.example.com",
    ),
    (
        put("metalserve_tls", {"certificate": "a.pem", "private_key": "/k.pem"}),
        "metalserve_tls.certificate",
        "absolute",
        "/",
    ),
    (
        put("metalserve_alert_receivers/0/slak_configs", []),
        "metalserve_alert_receivers[0].slak_configs",
        "not known",
        "slack",
    ),
    (
        put("metalserve_alert_routes", [{"receiver": "onkall"}]),
        "metalserve_alert_routes[0].receiver",
        "not the name",
        "oncall",
    ),
    # addresses, systems
    (own("node-a", "metalserve_address", "192.0.2.11:22"), "metalserve_address", "not an address", "10.0.0.11"),
    (own("node-a", "metalserve_address", "192.0.2.300"), "metalserve_address", "four numbers", "10.0.0.11"),
    (own("node-a", "metalserve_address", "127.0.0.1"), "metalserve_address", "this machine itself", "private address"),
    (own("node-a", "metalserve_address", "fd00::11"), "metalserve_address", "IPv4 alone", "10.0.0.11"),
    (own("node-a", "metalserve_address", "0.0.0.0"), "metalserve_address", "one host", "private address"),
    (own("node-a", "ansible_host", "localhost"), "ansible_host", "is no number", "metalserve_address"),
    (own("node-a", "ansible_host", "https://192.0.2.11/"), "ansible_host", "no scheme", "metalserve_address"),
    (own("gate-a", "ansible_host", "gate-a.example.com"), "ansible_host", "look no name up", "metalserve_address"),
    (lambda small: small.hosts["gate-a"].clear(), "metalserve_address", "host's name is no number", "10.0.0.11"),
    (
        own("node-a", "ansible_host", Unresolved("{{ ip }}", "is undefined", "define it")),
        "ansible_host",
        "undef",
        "def",
    ),
    (put("engine_firewall_addresses", ["10.0.0.0/33"]), "engine_firewall_addresses[0]", "no network", "10.0.0.0/24"),
    (own("node-a", "ansible_distribution", "Rocky"), "ansible_distribution", "audited, but not set up", "Debian 12"),
    (own("node-a", "ansible_os_family", "Suse"), "ansible_os_family", "not a supported", "Debian 12"),
    # models, images, containers
    (put(f"{P}/image", "vllm/vllm-openai"), "metalserve_pools.short.image", "means :latest", "@sha256:"),
    (put(f"{P}/image", "https://x/vllm@" + DIGEST), "metalserve_pools.short.image", "not the name", "without a scheme"),
    (put(f"{P}/container", {"memory_swap": "90G"}), "metalserve_pools.short.container.memory", "missing", "give both"),
    (put(f"{P}/container", {"memory": 88}), "metalserve_pools.short.container.memory", "only 88 B", "its unit"),
    (put(f"{P}/container", {"memory": "1G", "shm": "2G"}), "metalserve_pools.short.container.shm", "more than", "less"),
    (put(f"{P}/env", {"HF_TOKEN": "abc"}), "metalserve_pools.short.env.HF_TOKEN", "looks like a secret", "take it out"),
    (
        put(f"{P}/env", {"CUDA_VISIBLE_DEVICES": "0"}),
        "metalserve_pools.short.env.CUDA_VISIBLE_DEVICES",
        "not yours",
        "remove",
    ),
    (put(f"{P}/env", {"OMP_NUM_THREADS": 4}), "metalserve_pools.short.env.OMP_NUM_THREADS", "to YAML", "quotes"),
    (
        put(f"{P}/env", {"VLLM_ATTENTION_BACKEND": "X"}),
        "metalserve_pools.short.env.VLLM_ATTENTION_BACKEND",
        "does not read",
        "settings",
    ),
    # settings
    (
        put(f"{P}/settings", {"max-num-seqs": 8}),
        "metalserve_pools.short.settings.max-num-seqs",
        "not written",
        "max_num_seqs",
    ),
    (
        put(f"{P}/settings", {"max_num_seq": 8}),
        "metalserve_pools.short.settings.max_num_seq",
        "not an option",
        "max_num_seqs?",
    ),
    (
        put(f"{P}/settings", {"enforce_eager": "true"}),
        "metalserve_pools.short.settings.enforce_eager",
        "text",
        "write true",
    ),
    (
        put(f"{P}/settings", {"tensor_parallel_size": 2}),
        "metalserve_pools.short.settings.tensor_parallel_size",
        "own",
        "tensor",
    ),
    (put(f"{P}/settings", {"api_key": "x"}), "metalserve_pools.short.settings.api_key", "not yours", "remove it"),
    (
        put(f"{P}/settings", {"max_num_seqs": 512, "max_num_batched_tokens": 256}),
        "metalserve_pools.short.settings.max_num_batched_tokens",
        "below max_num_seqs",
        "at least 512",
    ),
    (
        put(f"{P}/settings", {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 4096}),
        "metalserve_pools.short.settings.max_num_batched_tokens",
        "needs chunked prefill",
        "at least 4096",
    ),
    # nodes
    (put(f"{P}/tensor_parallel", 16), "metalserve_pools.short", "needs 16 GPUs", "lower tensor_parallel"),
    (put(f"{P}/port", 9095), "metalserve_pools.short.port", "9100 belongs to the node exporter", "another port"),
    (put(f"{P}/port", 70000), "metalserve_pools.short.port", "too large", "65535"),
    (put(f"{P}/port", 65530), "metalserve_pools.short.port", "65535 is the last", "lower port"),
    (
        own("node-a", "metalserve_accelerator", "cpu"),
        "metalserve_expected_gpus",
        "contradicts",
        "metalserve_accelerator",
    ),
    # what only the plans find
    (put("gateway_drained", ["node-a"]), "gateway_drained[0]", "no replica", "such as node-a/short-0"),
    (put(f"{P}/workload", {"qps": 5, "lengths": "abc"}), "metalserve_pools", "workload.lengths", ""),
    (
        put("gateway_mode", "plain", put("metalserve_api_keys", [KEY, {"name": "a", "sha256": "0" * 64}])),
        "metalserve_pools",
        "cannot use sha256",
        "give key",
    ),
    (own("node-a", "metalserve_expected_gpus", 0), "metalserve_expected_gpus", "no GPU", "metalserve_accelerator: cpu"),
]


def errors(problems: list[Problem]) -> list[Problem]:
    """Return the problems that stop a run."""
    return [problem for problem in problems if problem.severity == "error"]


def test_right() -> None:
    """The small inventory is right, so that what follows can only come from the one change."""
    assert Small().problems() == []


@pytest.mark.parametrize(
    ("change", "variable", "problem", "right"), ONE, ids=[f"{n}-{one[1]}" for n, one in enumerate(ONE)]
)
def test_one_thing(change: Break, variable: str, problem: str, right: str) -> None:
    """One thing broken gives one error, with its name, what is wrong and what would be right."""
    small = Small()
    change(small)
    found = [entry for entry in errors(small.problems()) if entry.variable == variable]
    assert len(found) == 1, small.problems()
    assert problem in found[0].problem
    assert right in found[0].right


WARNED: list[tuple[Break, str]] = [
    (put("metalserve_alert_receivers", []), "metalserve_alert_receivers"),
    (put("metalserve_alert_receivers/0", {"name": "oncall"}), "metalserve_alert_receivers[0]"),
    (
        put("metalserve_models/other", {"revision": "1", "source": {"type": "shared", "path": "/x"}}),
        "metalserve_models.other",
    ),
    (put("metalserve_models/chat/revision", "latest"), "metalserve_models.chat.revision"),
    (put(f"{P}/replicas_per_node", 6), "metalserve_expected_gpus"),
    (put(f"{P}/image", f"lmsysorg/sglang@{DIGEST}"), "metalserve_pools.short.image"),
    (put("metalserve_allow_outage", True), "metalserve_allow_outage"),
    (own("node-a", "metalserve_address", "8.8.8.8"), "metalserve_address"),
    (lambda small: small.groups.update({"spare": []}), "group spare"),
    (lambda small: small.groups["short"].remove("node-b"), "group engines"),
]


@pytest.mark.parametrize(("change", "variable"), WARNED)
def test_warning(change: Break, variable: str) -> None:
    """What is only doubtful is told, and stops nothing."""
    small = Small()
    change(small)
    assert [(entry.variable, entry.severity) for entry in small.problems()] == [(variable, "warning")]


def test_host_names() -> None:
    """A host's name becomes a file's name, a label and a word in nginx's configuration."""
    small = Small()
    for name in ("node a", "../node", 'node";', "knoten-ä"):
        small.hosts[name] = small.hosts["node-a"] | {"ansible_host": "192.0.2.99"}
        small.groups["gateways"].append(name)
    assert [entry.variable for entry in errors(small.problems())] == [
        "host ../node",
        "host knoten-ä",
        "host node a",
        'host node";',
    ]


def test_all_at_once() -> None:
    """All problems come in one list, each once, and errors come first."""
    small = Small()
    for change, _variable, _problem, _right in ONE[:8]:
        change(small)
    small.wide["metalserve_alert_receivers"] = []
    found = small.problems()
    assert len({(entry.variable, entry.problem) for entry in found}) == len(found)
    assert [entry.severity for entry in found] == sorted(entry.severity for entry in found)


def test_shared_node() -> None:
    """Two pools on a node: the sum of their GPUs and their ports counts; both must say how many replicas."""
    small = Small()
    small.pool["replicas_per_node"] = 4
    small.add_pool("long", ["node-a", "node-b"], tensor_parallel=2, replicas_per_node=2, max_model_len=131072)
    assert small.problems() == []
    small.wide["metalserve_pools"]["long"]["replicas_per_node"] = 3
    (found,) = small.problems()
    assert "short 4 x 1 + long 3 x 2 = 10" in found.problem
    assert found.where == "group engines"
    del small.wide["metalserve_pools"]["long"]["replicas_per_node"]
    (found,) = small.problems()
    assert found.variable == "metalserve_pools.long.replicas_per_node"
    assert "who gets how many GPUs" in found.problem


def test_ports_of_pools_on_different_nodes_may_be_the_same() -> None:
    """Only pools on one node can get into each other's way."""
    small = Small()
    small.groups["short"] = ["node-a"]
    small.add_pool("long", ["node-b"], port=8100, max_model_len=131072)
    assert small.problems() == []
    small.groups["long"] = ["node-a", "node-b"]
    small.pool["replicas_per_node"] = 4
    small.wide["metalserve_pools"]["long"]["replicas_per_node"] = 4
    (found,) = errors(small.problems())
    assert found.variable == "metalserve_pools.long.port"
    assert "8104 on" in found.right
    assert "host node-a" in found.where


def test_replica_over_nodes() -> None:
    """A replica over two nodes takes half of its GPUs on each."""
    small = Small()
    small.pool.update(tensor_parallel=8, pipeline_parallel=2, nodes_per_replica=2, replicas_per_node=1)
    assert small.problems() == []
    small.pool["nodes_per_replica"] = 3
    assert {entry.variable for entry in errors(small.problems())} == {"metalserve_pools.short.nodes_per_replica"}


def test_pool_references() -> None:
    """Served name and claims between pools."""
    small = Small()
    small.groups["short"] = ["node-a"]
    small.add_pool("long", ["node-b"])
    (found,) = small.problems()
    assert (found.variable, found.severity) == ("metalserve_pools.long", "warning")
    assert "claims the same requests as the pool short" in found.problem
    small.wide["metalserve_models"]["other"] = small.wide["metalserve_models"]["chat"]
    small.wide["metalserve_pools"]["long"].update(model="other", served_name="chat", max_model_len=65536)
    (found,) = errors(small.problems())
    assert "same name as another model" in found.problem


def test_group_names() -> None:
    """Groups and pools that miss each other by a letter are brought together."""
    small = Small()
    small.groups["shorts"] = small.groups.pop("short")
    small.children["engines"] = ["shorts"]
    assert {entry.right for entry in errors(small.problems())} == {
        "did you mean the group shorts?",
        "did you mean the pool short?",
    }


@pytest.mark.parametrize("name", ["Long", "long pool", "2nd", True, 7, "engines", "node-a", "a" * 33])
def test_pool_names(name: Any) -> None:
    """A pool's name is a group's, a unit's and a file's name too."""
    small = Small()
    small.wide["metalserve_pools"][name] = dict(small.pool)
    small.groups[name] = ["node-b"]
    small.children["engines"].append(name)
    places = (f"metalserve_pools.{name}", f"metalserve_pools[{name}]")
    assert any(entry.variable in places and "name" in entry.problem for entry in small.problems())


def test_group_of_pools() -> None:
    """A group that only bundles pools is no pool itself."""
    small = Small()
    small.groups["rack-1"] = ["node-a", "node-b"]
    small.children = {"engines": ["rack-1"], "rack-1": ["short"]}
    assert small.problems() == []


def test_files() -> None:
    """Files on the controller are looked for only where somebody can look."""
    small = Small()
    small.wide["metalserve_tls"] = {"certificate": "/nowhere/c.pem", "private_key": "/nowhere/k.pem", "names": ["a.b"]}
    small.wide["metalserve_models"]["chat"]["source"] = {"type": "local", "path": "/nowhere/model"}
    assert small.problems() == []
    assert {entry.variable for entry in small.problems(exists=lambda path: False)} == {
        "metalserve_tls.certificate",
        "metalserve_tls.private_key",
        "metalserve_models.chat.source.path",
    }


def test_a_lab_that_is_not_built() -> None:
    """One sentence and its remedy, not all that follows from it."""
    small = Small()
    small.wide.update(lab_dir="/nowhere/.lab", metalserve_pools={})
    (found,) = small.problems(exists=lambda path: False)
    assert found.variable == "lab_dir"
    assert found.right.startswith("build it with scripts/demo")
    assert "metalserve_pools" in {entry.variable for entry in small.problems(exists=lambda path: True)}


def test_role_variables() -> None:
    """A role's variables are judged by its argument_specs; a foreign name with its prefix is only doubtful."""
    spec = {"main": {"options": {"gateway_port": {"type": "int"}, "gateway_hsts": {"type": "bool"}, "other": {}}}}
    roles = {"gateway": options_of("gateway", {"argument_specs": spec})}
    small = Small()
    small.wide.update(gateway_port="443", gateway_hsst=True, gateway_building=7)
    found = {entry.variable: entry for entry in small.problems(roles=roles)}
    assert found["gateway_port"].right == "write 443 without quotes"
    assert found["gateway_hsst"].right == "did you mean gateway_hsts?"
    assert found["gateway_building"].severity == "warning"
    assert len(found) == 3


def test_open_parts_are_searched() -> None:
    """Where the schema does not look inside, an undefined template and a placeholder are still found."""
    small = Small()
    gap = Unresolved("{{ vault_hook }}", "refers to what is not there: 'vault_hook' is undefined", "define it")
    small.wide["metalserve_alert_receivers"][0]["webhook_configs"] = [{"url": gap}, {"url": "https://CHANGE_ME/"}]
    small.wide["metalserve_registry"] = {"address": "a:1", "username": "u", "password": "CHANGE_ME"}
    assert {entry.variable for entry in small.problems()} == {
        "metalserve_alert_receivers[0].webhook_configs[0].url",
        "metalserve_alert_receivers[0].webhook_configs[1].url",
        "metalserve_registry.password",
    }


def test_variable_files() -> None:
    """A file that no group or host reads is told; Ansible says nothing about it."""
    small = Small()
    files = [
        VariableFile("group_vars", "all", "group_vars/all.yml"),
        VariableFile("group_vars", "engine", "group_vars/engine.yml"),
        VariableFile("host_vars", "node-a", "host_vars/node-a.yml"),
        VariableFile("host_vars", "node-c", "host_vars/node-c.yml"),
        VariableFile("groups_vars", "", "groups_vars"),
    ]
    found = check(replace(small.inventory(), files=files))
    assert [(entry.variable, entry.right, entry.severity) for entry in found] == [
        ("group_vars/engine.yml", "did you mean engines?", "warning"),
        ("groups_vars", "did you mean group_vars?", "warning"),
        ("host_vars/node-c.yml", "did you mean node-b?", "warning"),
    ]


def test_versions_decide() -> None:
    """An option that this engine version does have is let through."""
    small = Small()
    small.pool["settings"] = {"max_num_queued_reqs": 100}
    assert "came with 0.29" in small.problems()[0].problem
    small.pool["engine_version"] = "0.32.0"
    assert small.problems() == []


def test_unresolved_values() -> None:
    """What could not be resolved is told once, where it stands, and disturbs no other rule."""
    gap = Unresolved("{{ digest }}", "refers to what is not there: 'digest' is undefined", "define it")
    small = Small()
    small.pool["image"] = gap
    small.wide["metalserve_api_keys"][0]["key"] = gap
    small.hosts["node-a"]["metalserve_expected_gpus"] = gap
    assert {entry.variable for entry in small.problems()} == {
        "metalserve_pools.short.image",
        "metalserve_api_keys[0].key",
        "metalserve_expected_gpus",
    }


@pytest.mark.parametrize(
    ("image", "good"),
    [
        (f"vllm@{DIGEST}", True),
        (f"10.0.0.5:5000/a/vllm@{DIGEST}", True),
        (f"10.0.0.5:5000/a/vllm:v0.26.0@{DIGEST}", True),
        ("10.0.0.5:5000/a/vllm", False),
        ("vllm:latest", False),
        ("vllm:v0.26.0", False),
        (f"vllm@{DIGEST[:-1]}", False),
        (f"vllm@{DIGEST.upper()}", False),
        ("vllm@sha256:…", False),
        (f"vllm @{DIGEST}", False),
    ],
)
def test_judge_image(image: str, good: bool) -> None:
    """Only a whole digest will do; a port in the registry's name is no tag."""
    assert (judge_image(image) is None) == good


@pytest.mark.parametrize("name", sorted(knobs.KNOBS))
def test_every_circulating_name_has_an_answer(name: str) -> None:
    """Each of them gets its answer in the settings of a pool that has no such option."""
    small = Small()
    knob = knobs.KNOBS[name]
    small.pool["engine_version"] = "0.26.0"
    small.pool["settings"] = {name: 1}
    (found,) = errors(small.problems())
    assert found.variable == f"metalserve_pools.short.settings.{name}"
    assert found.problem == knob.why
    assert found.right.startswith(knob.instead)


WORDS = ["short", "model", "type", "settings", "name", "key"]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["8", "CHANGE_ME"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=6), inner, max_size=4)
        | st.dictionaries(st.integers() | st.booleans(), inner, max_size=2)
    ),
    max_leaves=12,
)
PLACES = [
    "metalserve_pools",
    "metalserve_models",
    "metalserve_api_keys",
    "metalserve_engine_api_key",
    "metalserve_registry",
    "metalserve_tls",
    "metalserve_alert_receivers",
    "metalserve_alert_routes",
    "metalserve_root",
    "metalserve_address",
    "metalserve_expected_gpus",
    "metalserve_accelerator",
    "metalserve_os_family",
    "metalserve_allow_outage",
    "ansible_host",
    *(
        f"{P}/{key}"
        for key in (
            "workload",
            "container",
            "settings",
            "env",
            "image",
            "port",
            "replicas_per_node",
            "model",
            "engine",
            "engine_version",
            "tensor_parallel",
            "served_name",
            "slo",
        )
    ),
    "metalserve_models/chat/source",
    "metalserve_models/chat/revision",
]


@settings(max_examples=150)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_nothing_raises(place: str, value: Any) -> None:
    """Whatever stands at a place, the checks answer with a list, and the report can be written."""
    small = Small()
    put(place, value)(small)
    found = small.problems(exists=lambda path: False)
    text = report.render(found)
    assert all(entry.variable and entry.problem and entry.right for entry in found), found
    assert text.startswith("What validate found:")


@settings(max_examples=50)
@given(
    groups=st.dictionaries(
        st.sampled_from(["engines", "gateways", "monitors", "short", "all", "x"]),
        st.lists(st.sampled_from(["node-a", "node-b", "gate-a"]), unique=True),
    ),
    children=st.dictionaries(
        st.sampled_from(["engines", "short", "x"]), st.lists(st.sampled_from(["short", "x", "y"]), unique=True)
    ),
)
def test_no_shape_raises(groups: dict[str, list[str]], children: dict[str, list[str]]) -> None:
    """Whatever the groups look like, the checks answer with a list."""
    small = Small()
    small.groups, small.children = groups, {name: [c for c in below if c != name] for name, below in children.items()}
    small.children.pop("x", None)
    small.problems()


def test_empty() -> None:
    """Nothing at all is one problem: no hosts."""
    assert [entry.problem for entry in check(Inventory.of({}, {}, {}))] == ["has no hosts"]


def test_report_width() -> None:
    """The report fits 100 columns, but for commands, which must not be broken."""
    small = Small()
    for change, _variable, _problem, _right in ONE:
        try:
            change(small)
        except (LookupError, TypeError, AttributeError):  # an earlier change took the place away
            continue
    text = report.render(small.problems())
    wide = [line for line in text.splitlines() if len(line) > report.WIDTH]
    assert all("docker pull" in line or "openssl" in line for line in wide), wide


def test_what_is_right_can_be_planned() -> None:
    """The planner takes what validate lets through: the same keys, the same meaning."""
    small = Small()
    small.pool.update(
        replicas_per_node=4, port=8300, served_name="chat-short", longest_stream_s=60.5, queue=10, slo={"p99_s": 1.5},
        workload={"qps": 50, "prompt_tokens": 350, "output_tokens": {"mean": 128, "p95": 512}, "priorities": True},
        minimums={"prefill_tokens_per_s": 4000}, container={"memory": "88G", "memory_swap": "90G", "ipc_mode": "host"},
        settings={"max_num_seqs": 256, "kv_cache_dtype": "fp8"},
    )  # fmt: skip
    small.add_pool("long", ["node-a", "node-b"], tensor_parallel=2, replicas_per_node=2, max_model_len=131072)
    assert small.problems() == []
    hostvars = {host: {**small.wide, **own} for host, own in small.hosts.items()}
    plans = pool_plans(small.wide["metalserve_pools"], small.groups, hostvars)
    assert [(plan.pool, len(plan.replicas), plan.replicas[0].port) for plan in plans] == [
        ("short", 8, 8300),
        ("long", 4, 8200),
    ]
