# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The module, the filters, the preview of an inventory, and that every reason's link leads somewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.filter import plans as filters
from ansible_collections.metal.serve.plugins.module_utils.planner import constants
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import HOST_VARIABLES, pool_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.preview import fleet, preview
from ansible_collections.metal.serve.plugins.modules import serving_plan

from .helpers import FIXTURES, HOSTVARS, ROOT, config, facts, pool

GROUPS = {"short": ["node-a"], "lab": ["node-c"]}
MODELS = {"m": {"revision": "r1", "source": {"type": "local", "path": "/nonexistent"}}}
STAND_IN = str(ROOT / "inventory" / "snapshots" / "stand-in-8xa100")


class Ended(Exception):
    """A module's answer."""


def call(monkeypatch: pytest.MonkeyPatch, /, *, check: bool = False, **arguments: Any) -> dict[str, Any]:
    """Run the module and return its answer; ``failed`` is in it where it failed."""
    answer: dict[str, Any] = {}

    def end(_self: basic.AnsibleModule, **values: Any) -> None:
        answer.update(values)
        raise Ended

    def fail(_self: basic.AnsibleModule, msg: str, **values: Any) -> None:
        answer.update(values, msg=msg, failed=True)
        raise Ended

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", end)
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", fail)
    with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(Ended):
        serving_plan.main()
    return answer


def plans(pools: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan.to_dict() for plan in pool_plans(pools, GROUPS, HOSTVARS)]


def store(folder: Path, model: str = "llama-3-8b") -> Path:
    (folder / "m" / "r1").mkdir(parents=True)
    (folder / "m" / "r1" / "config.json").write_text(json.dumps(config(model)), encoding="utf-8")
    return folder


def test_the_module_plans_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pools = {"short": pool()}
    given: dict[str, Any] = {
        "pools": pools,
        "pool_plans": plans(pools),
        "node": "node-a",
        "models": MODELS,
        "facts": facts(),
    }
    answer = call(monkeypatch, model_root=str(store(tmp_path)), **given)
    assert answer["changed"] is False
    assert [plan["replica"] for plan in answer["replica_plans"]] == [f"short-{index}" for index in range(8)]
    assert answer["replica_plans"][0]["revision"] == "r1"
    assert answer["unknown"] == []


def test_a_first_check_run_has_no_model_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pools = {"short": pool()}
    given: dict[str, Any] = {
        "pools": pools,
        "pool_plans": plans(pools),
        "node": "node-a",
        "models": MODELS,
        "facts": facts(),
    }
    given["model_root"] = str(tmp_path)
    checked = call(monkeypatch, check=True, **given)
    assert (checked["replica_plans"], checked["unknown"]) == ([], ["m"])
    passed = call(monkeypatch, check=True, model_configs={"m": config("llama-3-8b")}, **given)
    assert len(passed["replica_plans"]) == 8
    real = call(monkeypatch, **given)
    assert real["failed"]
    assert "config.json of m" in real["msg"]


def test_the_module_refuses_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pools = {"short": pool(max_model_len=8192)}
    given: dict[str, Any] = {"pools": pools, "pool_plans": plans(pools), "node": "node-a", "models": MODELS}
    given["facts"] = facts(name="NVIDIA A10G", mib=23028)
    answer = call(monkeypatch, model_root=str(store(tmp_path, "qwen2.5-32b")), **given)
    assert answer["failed"]
    assert "metalserve_pools.short." in answer["msg"]
    assert answer["ways_out"]
    (tmp_path / "m" / "r1" / "config.json").write_text("{", encoding="utf-8")
    assert "is no JSON" in call(monkeypatch, model_root=str(tmp_path), **given)["msg"]


def test_a_node_without_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pools = {"short": pool()}
    answer = call(
        monkeypatch, pools=pools, pool_plans=plans(pools), node="gateway", model_root=str(tmp_path), facts=facts()
    )
    assert answer["replica_plans"] == []


def test_the_filter_reads_only_what_it_needs() -> None:
    class Values(dict[str, Any]):
        """Fails for any variable that a plan must not depend on."""

        def __getitem__(self, key: str) -> Any:
            assert key in HOST_VARIABLES, key
            return super().__getitem__(key)

    hostvars = {name: Values(values, secret="x") for name, values in HOSTVARS.items()}
    found = filters.pool_plans({"short": pool()}, GROUPS, hostvars)
    assert found[0]["replicas"][0]["address"] == "10.0.0.11"
    assert len(filters.replicas_of(found, "node-a")) == 8
    assert "Pool short" in filters.pool_text(found[0])
    with pytest.raises(AnsibleFilterError, match="engine is 'x'"):
        filters.pool_plans({"short": pool(engine="x")}, GROUPS, hostvars)


def test_a_preview_stands_in_for_what_is_not_known(tmp_path: Path) -> None:
    pools = {"short": pool(), "lab": pool(container={"memory": "5G"}, max_model_len=2048)}
    values = {"node-a": HOSTVARS["node-a"], "node-c": HOSTVARS["node-c"]}
    planned = filters.pool_plans(pools, GROUPS, values)
    shown = filters.node_previews(planned, pools, MODELS, ["node-a"], values, str(tmp_path), STAND_IN)
    assert shown["problems"] == []
    assert "8 x NVIDIA A100-SXM4-80GB stand in" in " ".join(shown["text"].split())
    assert "DeepSeek-V2-Lite stands in" in shown["text"]
    assert "8 replicas of pool short, port 8100..8107, on 1 GPU(s) each" in shown["text"]
    assert "short-7" in shown["text"]
    lab = filters.node_previews(planned, pools, MODELS, ["node-c"], values, str(tmp_path), STAND_IN)
    assert "VLLM_CPU_KVCACHE_SPACE" in lab["text"]
    assert preview(pools, planned, MODELS, "gateway", "nvidia", None, str(tmp_path)).hardware == "no engine runs there"


def test_nodes_that_are_alike_are_shown_once(tmp_path: Path) -> None:
    pools = {"short": pool()}
    hosts = ["node-a", "node-b", "node-d"]
    values = {
        name: {"metalserve_expected_gpus": 8, "metalserve_address": f"10.0.0.{n}"} for n, name in enumerate(hosts)
    }
    values["node-d"]["metalserve_expected_gpus"] = 4
    planned = filters.pool_plans(pools, {"short": hosts}, values)
    text = filters.node_previews(planned, pools, MODELS, hosts, values, str(tmp_path), STAND_IN)["text"]
    assert [line for line in text.splitlines() if line.startswith("Node ")] == [
        "Node node-a; the same on node-b: 8 x NVIDIA A100-SXM4-80GB of 81,920 MiB, 1,008 GiB of memory",
        "Node node-d: 4 x NVIDIA A100-SXM4-80GB of 81,920 MiB, 1,008 GiB of memory",
    ]


@pytest.mark.parametrize("gpus", [9, 16])
def test_more_gpus_than_stand_in_are_not_invented(gpus: int, tmp_path: Path) -> None:
    pools = {"short": pool()}
    shown = preview(pools, plans(pools), MODELS, "node-a", "nvidia", gpus, str(tmp_path), STAND_IN)
    assert f"has 8 GPUs, not {gpus}; ansible-playbook playbooks/snapshot.yml records the real one" in shown.problem
    nothing = preview(pools, plans(pools), MODELS, "node-a", "nvidia", gpus, str(tmp_path), str(tmp_path / "none"))
    assert "has 0 GPUs" in nothing.problem


def test_a_preview_says_what_does_not_fit(tmp_path: Path) -> None:
    pools = {"short": pool(max_model_len=10**6)}
    planned = plans(pools)
    shown = preview(pools, planned, MODELS, "node-a", "nvidia", 8, str(tmp_path), STAND_IN)
    assert "max_position_embeddings" in shown.problem
    other = dataclasses.replace(shown, host="node-b")
    text, problems = fleet([shown, other])
    assert problems == [f"node-a, node-b: {shown.problem}"]
    assert "Node node-a; the same on node-b: its plan does not fit" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"x": 1}}, "settings.x is not an option of vLLM 0.26.0"),
        ({"settings": {"max_num_queued_reqs": 5}}, "use the pool's queue"),
        ({"settings": {"scheduling_policy": "lifo"}}, "write one of fcfs, priority"),
        ({"settings": {"quantization": "awq"}}, "no quantization_config"),
        ({"container": "8"}, "container is '8'; it must be a mapping"),
        ({"container": {"memory": "1G"}}, "set metalserve_pools.short.container.memory to 6G"),
    ],
)
def test_a_preview_refuses_what_the_engine_lacks(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    pools = {"short": pool(**changes)}
    assert words in preview(pools, plans(pools), MODELS, "node-a", "nvidia", 8, str(tmp_path), STAND_IN).problem


def test_odd_inventories_are_one_sentence(tmp_path: Path) -> None:
    odd_pools: list[Any] = [None, [], "x", 5, {}, {"short": None}, {"short": 5}]
    odd_gpus: list[Any] = ["8", 0, 1.5, True, [], 1000]
    odd_models: list[Any] = [None, [], "x", {"m": []}, {"m": {"source": 5}}]
    for odd in odd_pools:
        with pytest.raises(AnsibleFilterError, match="metalserve_pools"):
            filters.pool_plans(odd, GROUPS, HOSTVARS)
    for name in ("engine_version", "image", "served_name"):
        with pytest.raises(AnsibleFilterError, match=f"short.{name} is 5; it must be .* in quotes"):
            filters.pool_plans({"short": pool(**{name: 5})}, GROUPS, HOSTVARS)
    pools = {"short": pool()}
    for gpus in odd_gpus:
        shown = preview(pools, plans(pools), MODELS, "node-a", "nvidia", gpus, str(tmp_path), STAND_IN)
        assert "metalserve_expected_gpus of node-a is" in shown.problem
    for models in odd_models:
        shown = preview(pools, plans(pools), models, "node-a", "nvidia", 8, str(tmp_path), STAND_IN)
        assert "metalserve_models" in shown.problem or models is None


def test_a_preview_reads_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "node-a").mkdir()
    pools = {"short": pool()}
    shown = preview(pools, plans(pools), MODELS, "node-a", "nvidia", 8, str(tmp_path), STAND_IN)
    assert "has 0 GPU(s)" in shown.problem  # an empty snapshot knows of no GPU: said, not guessed


def test_the_example_inventory_is_planned_as_the_page_shows(tmp_path: Path) -> None:
    folder = ROOT / "inventory" / "example"
    text = (folder / "group_vars" / "all" / "metalserve.yml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    engines = yaml.safe_load((folder / "hosts.yml").read_text(encoding="utf-8"))["all"]["children"]["engines"]
    groups = {name: list(group["hosts"]) for name, group in engines["children"].items()}
    hostvars = {host: {**engines["vars"], "ansible_host": "CHANGE_ME"} for hosts in groups.values() for host in hosts}
    pools, models = values["metalserve_pools"], values["metalserve_models"]
    found = filters.pool_plans(pools, groups, hostvars)
    shown = filters.node_previews(found, pools, models, list(hostvars), hostvars, str(tmp_path), STAND_IN)
    assert shown["problems"] == []
    assert shown["text"].count("Node ") == 2
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    block = page.split("<!-- playbooks/plan.yml -i inventory/example -->\n```text\n")[1].split("\n```\n")[0]
    whole = filters.pool_text(found[0]) + "\n" + shown["text"]
    for line in block.splitlines():
        assert line == "…" or line.rstrip() in [row.rstrip() for row in whole.splitlines()], line


def test_every_link_into_the_documentation_leads_somewhere() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    anchors = {line[3:].strip() for line in text.splitlines() if line.startswith("## ")}
    used = set()
    for path in (ROOT / "plugins").rglob("*.py"):
        used |= set(re.findall(r"(?:planning\.md|\{DOC\})#([a-z0-9-]+)", path.read_text(encoding="utf-8")))
    assert len(used) > 20
    assert used <= anchors
    assert anchors - used <= {"memory", "error", "a-plan"} | used


def test_a_pool_s_calibration_reaches_its_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = constants.ENGINES[constants.FALLBACK].to_dict()
    path = tmp_path / "h200.json"
    path.write_text(json.dumps({**base, "activation_mib": base["activation_mib"] + 1024}), encoding="utf-8")
    pools = {"short": pool(calibration=str(path))}
    values = filters.pool_calibrations(pools)
    shown = preview(pools, plans(pools), MODELS, "node-a", "nvidia", 8, str(tmp_path), STAND_IN)
    plain = preview({"short": pool()}, plans({"short": pool()}), MODELS, "node-a", "nvidia", 8, str(tmp_path), STAND_IN)
    calibrated, guessed = shown.plans[0]["memory"], plain.plans[0]["memory"]
    assert calibrated["activation_gib"] == pytest.approx(guessed["activation_gib"] + 1, abs=0.01)
    assert calibrated["kv_cache_tokens"] < guessed["kv_cache_tokens"]
    assert "calibration" in shown.plans[0]["reasons"]["memory.weights_gib"]
    assert values["short"]["version"] == base["version"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("[]", "metalserve_pools.short.calibration holds no JSON object"),
        ('{"version": "0.26.0", "nonsense": 1}', "metalserve_pools.short.calibration: nonsense is no constant"),
        ("{", "is no JSON"),
    ],
)
def test_a_wrong_calibration_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "h200.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    pools = {"short": pool(calibration=str(path))}
    assert words in preview(pools, plans(pools), MODELS, "node-a", "nvidia", 8, str(tmp_path), STAND_IN).problem


def test_the_rate_follows_from_the_load() -> None:
    assert plans({"short": pool(workload={"qps": 50})})[0]["admission"]["requests_per_s"] == 100
    assert plans({"short": pool(workload={})})[0]["admission"]["requests_per_s"] == 0


def test_a_preview_plans_from_a_recorded_machine(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "hardware" / "h200-x2.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "h200-x2").rename(tmp_path / "node-a")
    pools = {"short": pool(replicas_per_node=2)}
    shown = preview(pools, plans(pools), MODELS, "node-a", "nvidia", 2, str(tmp_path))
    assert shown.problem == ""
    assert not any("no snapshot" in note for note in shown.assumed)
    assert len({plan["gpus"][0] for plan in shown.plans if plan["pool"] == "short"}) == 2
    assert shown.plans[0]["memory"]["gpu_total_gib"] == pytest.approx(139.8, abs=0.1)
