# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""playbooks/audit.yml and scripts/audit -i as they are run, on this machine and one that does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

from ansible_collections.metal.serve.plugins.filter.audit import audit_areas, audit_policy
from ansible_collections.metal.serve.plugins.module_utils.checklist.expectations import expected_of

ROOT = Path(__file__).resolve().parents[3]


HERE = f"ansible_connection: local\nansible_become: false\nansible_python_interpreter: {sys.executable}\n"
UNREACHABLE = "ansible_host: 127.0.0.1\nmetalserve_address: 192.0.2.10\nansible_port: 1\nansible_timeout: 2\n"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an inventory: this machine as an engine node, and a gateway behind a closed port."""
    folder = tmp_path_factory.mktemp("inventory")
    text = (ROOT / "tests/fixtures/inventories/good/cpu.yml").read_text(encoding="utf-8")
    path = folder / "hosts.yml"
    path.write_text(text, encoding="utf-8")
    host_vars = folder / "host_vars"
    host_vars.mkdir()
    groups = yaml.safe_load(text)["all"]["children"]
    for host in (*groups["engines"]["children"]["short"]["hosts"], *groups["gateways"]["hosts"]):
        gateway = host in groups["gateways"]["hosts"]
        (host_vars / f"{host}.yml").write_text(UNREACHABLE if gateway else HERE, encoding="utf-8")
    return path


def run(*arguments: str | Path) -> Done:
    """Run a command of the checkout to its end."""
    environment = {
        **os.environ,
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_PIPELINING": "1",  # as over SSH: one process for a module
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [str(one) for one in arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_all_reports_are_written_and_a_host_that_does_not_answer_is_a_failure(inventory: Path, tmp_path: Path) -> None:
    done = run(
        sys.executable, "scripts/audit", "-i", inventory, "--tags", "numa,cgroup", "--reports", tmp_path, "--json"
    )
    assert done.code == 2, done.err
    report = json.loads(done.out)
    jsonschema.validate(report, json.loads((ROOT / "schemas/verdicts.json").read_text(encoding="utf-8")))
    first, *others = report["hosts"]
    assert "unreachable" in first["error"]
    assert first["exit_code"] == 2
    assert others
    assert {item["id"].split(".")[0] for host in others for item in host["verdicts"]} == {"numa", "cgroup"}
    assert report["areas"] == ["cgroup", "numa"]
    table = (tmp_path / "audit.txt").read_text(encoding="utf-8")
    assert table.startswith(f"{first['host']}: NOT JUDGED")
    assert max(map(len, table.splitlines())) <= 100
    suites = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert {one.get("name") for one in suites} == {host["host"] for host in report["hosts"]}
    assert "<!doctype html>" in (tmp_path / "audit.html").read_text(encoding="utf-8")


def test_the_playbook_alone_in_check_mode_with_a_limit(inventory: Path, tmp_path: Path) -> None:
    book: list[str | Path] = [
        "ansible-playbook",
        "playbooks/audit.yml",
        "-i",
        inventory,
        "--check",
        "--limit",
        "engines",
    ]
    done = run(*book, "--tags", "cgroup", "-e", f"audit_dir={tmp_path}")
    report = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert [host["error"] for host in report["hosts"]] == [""] * len(report["hosts"])
    assert (done.code != 0) == (report["exit_code"] == 2), done.out
    assert "Exit code" in done.out
    assert "changed=0" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--limit", "no-such-host"), "leaves us with no hosts to target"),
        (("--tags", "gpuu"), "There is no area 'gpuu' of checks; did you mean gpu?"),
    ],
)
def test_no_host_and_no_such_area_are_failures(inventory: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(sys.executable, "scripts/audit", "-i", inventory, *arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


GROUPS = {"engines": ["a", "b"], "gateways": ["g"], "monitors": ["g"]}
PLANS: list[dict[str, Any]] = [
    {
        "pool": "short",
        "image": "registry/vllm@sha256:1",
        "parallel": {"tensor": 2},
        "body_limit_bytes": 2 << 20,
        "times": {"engine_keepalive_s": 180, "longest_silent_prefill_s": 3},
        "replicas": [
            {"replica": "short-0", "host": "a", "port": 8100},
            {"replica": "short-1", "host": "a", "port": 8101},
            {"replica": "short-0", "host": "b", "port": 8100},
        ],
    }
]


def test_what_the_inventory_says_is_expected() -> None:
    variables: dict[str, dict[str, Any]] = {
        "b": {"metalserve_accelerator": "cpu"},
        "a": {"metalserve_expected_gpus": 8},
        "g": {"metalserve_address": "10.0.0.1", "ansible_host": "192.0.2.1"},
    }
    pools = {"short": {"container": {"memory": "88G"}, "settings": {"gpu_memory_utilization": 0.9}}}
    found = expected_of("a", GROUPS, variables, pools, PLANS)
    image = {"image": "registry/vllm@sha256:1", "container": {"memory_bytes": 88 * 1024**3}}
    assert found == {
        "roles": ["engine"],
        "gateways": ["10.0.0.1"],
        "monitors": ["10.0.0.1"],
        "accelerator": "nvidia",
        "gpus": 8,
        "engine_ports": [8100, 8101],
        "tensor_parallel": 2,
        "releases": {"short-0": image, "short-1": image},
        "gpu_memory_utilization": 0.9,
    }
    gateway = expected_of("g", GROUPS, variables, pools, PLANS)
    assert gateway["roles"] == ["gateway", "monitor"]
    assert "accelerator" not in gateway
    variables["a"]["metalserve_accelerator"] = "cpu"
    assert expected_of("g", GROUPS, variables, pools, PLANS)["accelerator"] == "cpu"
    assert gateway["body_limit_bytes"] == 2 << 20
    assert (gateway["engine_keepalive_s"], gateway["longest_silent_prefill_s"]) == (180, 3)


def test_what_the_policy_expects_wins_and_a_wrong_one_is_named_with_its_host() -> None:
    hostvars: dict[str, Any] = {"a": {}, "b": {}, "g": {}}
    policy = audit_policy({"expected": {"gpus": 7}}, "a", GROUPS, hostvars, {}, PLANS)
    assert policy["expected"]["gpus"] == 7
    assert policy["expected"]["tensor_parallel"] == 2
    with pytest.raises(Exception, match="metalserve_audit_policy of a: bar1: no such policy key"):
        audit_policy({"bar1": 1}, "a", GROUPS, hostvars, {}, PLANS)


def test_tags_and_skipped_tags() -> None:
    assert audit_areas(["all"]) == []
    assert audit_areas(["gpu", "always"]) == ["gpu"]
    assert "gpu" not in audit_areas(["all"], ["gpu"])
    with pytest.raises(Exception, match="leave no check"):
        audit_areas(["gpu"], ["gpu"])
