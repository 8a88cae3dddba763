# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Each broken inventory gives one clear report and one failure; the good ones pass. No connection is tried, ever."""

from __future__ import annotations

import pytest

from tests.unit.inventory.fork_playbook import ROOT, Runner
from tests.unit.inventory.reports import entries

FOLDER = ROOT / "tests" / "fixtures" / "inventories"
IMAGE = "192.0.2.5:5000/vllm-openai"

# inventory -> (variable, part of the value, part of what is right), for every problem it must report, and no other.
EXPECTED: dict[str, list[tuple[str, str, str]]] = {
    "audit_policy.yml": [
        ("metalserve_audit_policy.driver_minimun", '"570.86.15"', "did you mean driver_minimum?"),
        ("metalserve_audit_policy.waivers[0].id", '"gpu.cuont"', "did you mean gpu.count?"),
        ("metalserve_audit_policy.waivers[0].until", '"2027-02-31"', "write the last day"),
    ],
    "different_values.yml": [("metalserve_root", "/data", "keep one, in group_vars/all.yml")],
    "empty_main_group.yml": [("group gateways", "", "put at least one host into it")],
    "address_by_name.yml": [
        ("metalserve_address", "", "such as 10.0.0.11, as metalserve_address"),
        ("ansible_host", '"gate-a.example.com"', "such as 10.0.0.11, as metalserve_address"),
    ],
    "five_faults.yml": [
        ("metalserve_adress", '"192.0.2.11"', "did you mean metalserve_address?"),
        ("metalserve_engine_api_key", "(empty)", "openssl rand -hex 32"),
        ("metalserve_pools.short.image", f'"{IMAGE}:v0.26.0"', f"write {IMAGE}@sha256:"),
        ("metalserve_pools.short.replicas_per_node", '"8"', "write 8 without quotes"),
        ("metalserve_pools.short.container.memory_swap", '"80G"', 'write at least "88G"'),
    ],
    "float_for_whole_number.yml": [("metalserve_pools.short.tensor_parallel", "2.0", "write 2")],
    "gpus_not_said.yml": [("metalserve_expected_gpus", "", "write how many GPUs the node has")],
    "group_without_pool.yml": [
        ("group longs", "", "did you mean the pool long?"),
        ("metalserve_pools.long", "", "did you mean the group longs?"),
    ],
    "image_digest_cut.yml": [("metalserve_pools.short.image", f'"{IMAGE}@sha256:', "docker inspect")],
    # Case I24.
    "image_latest.yml": [("metalserve_pools.short.image", f'"{IMAGE}:latest"', f"docker pull {IMAGE}:latest")],
    "image_tag.yml": [("metalserve_pools.short.image", f'"{IMAGE}:v0.26.0"', f"docker pull {IMAGE}:v0.26.0")],
    "host_name.yml": [("host node a/1", "", "letters, digits, dots, dashes and underscores")],
    "missing_main_group.yml": [("group gateways", "", "rename the group gateway to gateways")],
    "nested_typo.yml": [
        ("metalserve_pools.short.tensor_paralel", "1", "did you mean tensor_parallel?"),
        ("metalserve_pools.short.workload.qsp", "50", "did you mean qps?"),
    ],
    "no_hosts.yml": [("inventory", "", "give the path of one that has some")],
    "not_a_size.yml": [("metalserve_pools.short.container.memory", '"88 gigs"', "such as 88G")],
    "not_seen_by_all.yml": [("metalserve_pools", "", "move it to group_vars/all.yml")],
    "pool_outside_engines.yml": [("metalserve_pools.long", "", "make long a child of engines")],
    "pool_without_group.yml": [("metalserve_pools.long", "", "make a group long under engines")],
    "pool_without_node.yml": [("metalserve_pools.long", "", "put a node into the group long")],
    "ports_overlap.yml": [("metalserve_pools.long.port", "8102", "write a port from 8104 on")],
    "quoted_number.yml": [("metalserve_pools.short.replicas_per_node", '"8"', "write 8 without quotes")],
    "removed_name.yml": [
        ("metalserve_gpu_count", "8", "write metalserve_expected_gpus"),
        ("metalserve_engine_image", IMAGE, "write metalserve_pools.<pool>.image"),
    ],
    "role_variable_typo.yml": [
        ("gpu_host_govenor", '"performance"', "did you mean gpu_host_cpu_governor?"),
        ("gpu_host_persistence", '"off"', "write false without quotes"),
    ],
    "same_address.yml": [("metalserve_address", '"192.0.2.11"', "give each node its own private address")],
    "secrets_like_examples.yml": [
        ("metalserve_api_keys[0].key", "(a secret, not shown)", "--stdin-name vault_finance_key"),
        ("metalserve_engine_api_key", "(a secret, not shown)", "--stdin-name vault_engine_key"),
    ],
    "secrets_missing.yml": [
        ("metalserve_api_keys", "", "openssl rand -hex 32 | tr -d '\\n' | ansible-vault encrypt_string"),
        ("metalserve_engine_api_key", "", "openssl rand -hex 32 | tr -d '\\n' | ansible-vault encrypt_string"),
    ],
    "setting_in_the_wrong_place.yml": [
        ("max_num_batched_tokens", "8192", "metalserve_pools.<pool>.settings.max_num_batched_tokens")
    ],
    "setting_out_of_bounds.yml": [
        ("metalserve_pools.short.settings.gpu_memory_utilization", "92", "at most 1"),
        ("metalserve_pools.short.settings.max_num_seqs", '"256"', "write 256 without quotes"),
    ],
    "source_incomplete.yml": [
        ("metalserve_models.chat.source.path", "", "write an absolute path or an http(s) address"),
        ("metalserve_models.other.source.type", '"hugginface"', "did you mean huggingface?"),
    ],
    "swap_below_memory.yml": [("metalserve_pools.short.container.memory_swap", '"2G"', 'write at least "88G"')],
    "template_undefined.yml": [
        ("metalserve_api_keys[0].key", "{{ vault_finance_key }}", "define that variable"),
        ("metalserve_engine_api_key", "{{ vault_engine_key }}", "define that variable"),
    ],
    "tls_half.yml": [
        ("metalserve_tls.names[0]", '"https://llm.example.com"', "without https://"),
        ("metalserve_tls.private_key", "", "give both, or neither"),
    ],
    "too_many_gpus.yml": [("metalserve_pools.long.replicas_per_node", "4", "at most 8")],
    "triton_image_version.yml": [("metalserve_pools.short.engine_version", '"26.07"', "write what python3 -c")],
    "truth_in_quotes.yml": [("metalserve_audit_publish", '"false"', "write false without quotes")],
    "tuning_article_names.yml": [
        ("batch_delay", "20", "prefill_schedule_interval"),
        ("max_tokens_per_batch", "6144", "settings.max_num_batched_tokens"),
        ("connection_max_idle", "180", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
        ("max_pending_connections", "1024", "write queue in the pool"),
        ("max_num_batches", "8", "settings.max_num_seqs"),
    ],
    "tuning_article_settings.yml": [
        ("metalserve_pools.short.settings.batch_delay", "20", "prefill_schedule_interval"),
        ("metalserve_pools.short.settings.max_tokens_per_batch", "6144", "max_num_batched_tokens"),
        ("metalserve_pools.short.settings.swap_space", "16", "kv_offloading_size"),
        ("metalserve_pools.short.settings.preemption_mode", '"recompute"', "scheduling_policy"),
        ("metalserve_pools.short.settings.max_num_queued_reqs", "100", "write queue in the pool"),
    ],
    "unknown_engine.yml": [("metalserve_pools.short.engine", '"triton"', "did you mean triton_vllm?")],
    "unknown_model.yml": [("metalserve_pools.short.model", '"chatt"', "did you mean chat?")],
    "unknown_variable.yml": [
        ("metalserve_pool", "", "did you mean metalserve_pools?"),
        ("metalserve_alert_reciever", "[]", "did you mean metalserve_alert_receivers?"),
    ],
    "unsupported_os.yml": [("metalserve_os_family", '"RedHat"', "Debian 12 or 13, or Ubuntu 22.04 or 24.04")],
    "vault_without_password.yml": [("metalserve_engine_api_key", "(encrypted)", "--ask-vault-pass")],
    "version_without_quotes.yml": [("metalserve_pools.short.engine_version", "0.26", 'such as "0.26.0"')],
    "written_as.ini": [("metalserve_audit_strict", '"false"', "in an .ini inventory: False")],
}


def test_every_broken_inventory_is_expected() -> None:
    """No fixture lies about unused, and there are at least twenty."""
    assert {path.name for path in (FOLDER / "broken").iterdir()} == set(EXPECTED)
    assert len(EXPECTED) >= 20


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_broken(ansible: Runner, name: str) -> None:
    """One report with exactly the expected problems, one failure, no connection, no stack trace."""
    outcome = ansible.run("playbooks/validate.yml", "-i", FOLDER / "broken" / name)
    assert outcome.status == 2, outcome.output
    assert outcome.connections == []
    assert "Traceback" not in outcome.output
    assert outcome.output.count("What validate found:") == 1
    assert outcome.output.count("[ERROR]") == 1
    errors = [entry for entry in entries(outcome.output) if entry.severity == "error"]
    assert {entry.variable for entry in errors} == {variable for variable, _value, _right in EXPECTED[name]}
    for variable, value, right in EXPECTED[name]:
        (entry,) = [entry for entry in errors if entry.variable == variable]
        assert value in entry.value
        assert right in entry.right
        assert entry.problem
        assert name in entry.where or entry.where.startswith(("host ", "hosts ", "group "))


@pytest.mark.parametrize("name", sorted(path.name for path in (FOLDER / "good").iterdir()))
def test_good(ansible: Runner, name: str) -> None:
    """A right inventory passes; what is only doubtful is a warning."""
    outcome = ansible.run("playbooks/validate.yml", "-i", FOLDER / "good" / name)
    assert outcome.status == 0, outcome.output
    assert outcome.connections == []
    warned = {entry.variable for entry in entries(outcome.output)}
    assert warned == ({"metalserve_alert_receivers"} if name == "no_alert_receiver.yml" else set())


def test_secrets_are_not_shown(ansible: Runner) -> None:
    """A refused secret does not stand in the report."""
    outcome = ansible.run("playbooks/validate.yml", "-i", FOLDER / "broken" / "secrets_like_examples.yml")
    assert "changeme" not in outcome.output
    assert "your-engine-key-here" not in outcome.output
