#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Module metal.serve.verify_serving: see DOCUMENTATION."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: verify_serving
short_description: Show that every pool answers through the gateway and that tokens come one by one
version_added: 0.1.0
description:
  - Runs on a gateway. Asks each pool for one completion through the gateway, each replica for one directly, and
    compares streams through the gateway with direct ones.
  - Fails when a completion fails or a stream is buffered. Reads only; takes seconds where engines are healthy.
author:
  - The Metalserve authors (@metalserve)
options:
  gateway:
    description: Address of the gateway, such as C(https://127.0.0.1:443).
    type: str
    required: true
  server_name:
    description: Name that the gateway's certificate must carry.
    type: str
    default: localhost
  ca_file:
    description: Certificate, or its authority, that the gateway must show.
    type: path
    default: ""
  api_key:
    description: Key of a client.
    type: str
    required: true
  engine_api_key:
    description: Key that engines ask for; empty where they ask for none.
    type: str
    default: ""
  pools:
    description:
      - Pools as C(pool), C(served_name), C(engine) and C(replicas), a list of C(replica), C(host), C(address), C(port).
    type: list
    elements: dict
    required: true
  required_hosts:
    description:
      - Hosts whose replicas must answer. A pool or replica on other hosts is asked too, but only reported.
    type: list
    elements: str
    required: true
  prompt:
    description: What is asked.
    type: str
    default: "One, two, three, four, five, six,"
  max_tokens:
    description: Longest answer in tokens.
    type: int
    default: 24
  rounds:
    description: Streams of each kind per pool; the median counts.
    type: int
    default: 3
  timeout:
    description: Seconds without a byte after which a request counts as failed.
    type: int
    default: 60
attributes:
  check_mode:
    description: Reads only, so it does the same, but reports problems without failing.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Ask every pool
  metal.serve.verify_serving:
    gateway: https://127.0.0.1:443
    ca_file: /etc/metalserve/tls/ca.crt
    api_key: "{{ vault_finance_key }}"
    pools: "{{ metalserve_pools | metal.serve.pool_plans(groups, hostvars) }}"
    required_hosts: "{{ ansible_play_hosts_all }}"
"""

RETURN = r"""
pools:
  description: Per pool what came through the gateway and the judgement of its streams.
  type: list
  elements: dict
  returned: always
replicas:
  description: Per replica what it answered directly.
  type: list
  elements: dict
  returned: always
problems:
  description: What failed; empty where all is well.
  type: list
  elements: str
  returned: always
warnings_found:
  description: What is slow or could not be judged, and what failed on hosts that are not required.
  type: list
  elements: str
  returned: always
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.telemetry import completions, streaming

PARALLEL = 8
IGNORES_END = ("vllm", "sglang")
"""Engines that can be told to go on after the end of the text, so that there are enough tokens to time."""


def direct_target(replica: dict[str, Any], token: str) -> completions.Target:
    """Return where a replica listens."""
    address = str(replica["address"])
    host = f"[{address}]" if ":" in address else address
    return completions.Target(url=f"http://{host}:{replica['port']}", token=token)


def ask_replica(params: dict[str, Any], pool: dict[str, Any], replica: dict[str, Any]) -> dict[str, Any]:
    """Return what one replica answers directly."""
    found: dict[str, Any] = {
        "pool": pool["pool"],
        "replica": replica["replica"],
        "host": replica["host"],
        "address": f"{replica['address']}:{replica['port']}",
        "error": "",
    }
    body = completions.body_of(pool["served_name"], params["prompt"], params["max_tokens"], False, {})
    try:
        answer = completions.complete(direct_target(replica, params["engine_api_key"] or ""), body, params["timeout"])
        found.update(text=answer.text[:80], tokens=answer.tokens, seconds=round(answer.seconds, 3))
    except completions.CompletionError as error:
        found["error"] = str(error)
    return found


def ask_pool(params: dict[str, Any], pool: dict[str, Any], live: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a pool answers through the gateway, and how its streams compare with ``live`` replicas' own."""
    gateway = completions.Target(
        url=params["gateway"],
        token=params["api_key"],
        ca_file=params["ca_file"],
        server_name=params["server_name"],
        headers=(("X-Metalserve-Pool", str(pool["pool"])),),
    )
    found: dict[str, Any] = {"pool": pool["pool"], "error": "", "verdict": "unknown", "reason": ""}
    body = completions.body_of(pool["served_name"], params["prompt"], params["max_tokens"], False, {})
    try:
        answer = completions.complete(gateway, body, params["timeout"])
        found.update(text=answer.text[:80], tokens=answer.tokens, seconds=round(answer.seconds, 3))
        if not live:
            found["reason"] = f"No replica of {pool['pool']} answers directly, so streams cannot be compared."
            return found
        extra = {"ignore_eos": True} if pool.get("engine") in IGNORES_END else {}
        body = completions.body_of(pool["served_name"], params["prompt"], params["max_tokens"], True, extra)
        direct, through = [], []
        # In turn, so that a change of load meets both.
        for number in range(params["rounds"]):
            replica = direct_target(live[number % len(live)], params["engine_api_key"] or "")
            direct.append(completions.stream(replica, body, params["timeout"]))
            through.append(completions.stream(gateway, body, params["timeout"]))
        one, other = streaming.combine(direct), streaming.combine(through)
        judgement = streaming.judge(one, other)
        found.update(
            verdict=judgement.verdict,
            reason=judgement.reason,
            ttft_ms={"direct": round(one.ttft_ms, 1), "gateway": round(other.ttft_ms, 1)},
            itl_ms={"direct": round(one.itl_ms, 2), "gateway": round(other.itl_ms, 2)},
        )
    except completions.CompletionError as error:
        found["error"] = str(error)
    return found


def sort_out(
    pools: list[dict[str, Any]], replicas: list[dict[str, Any]], required: set[str]
) -> tuple[list[str], list[str]]:
    """Return problems and warnings: what failed on ``required`` hosts, and what is only worth knowing."""
    problems: list[str] = []
    warnings: list[str] = []
    for replica in replicas:
        if replica["error"]:
            text = f"{replica['host']} {replica['replica']}: {replica['error']}"
            (problems if replica["host"] in required else warnings).append(text)
    for pool in pools:
        here = any(replica["host"] in required for replica in replicas if replica["pool"] == pool["pool"])
        if pool["error"]:
            (problems if here else warnings).append(f"pool {pool['pool']} through the gateway: {pool['error']}")
        elif pool["verdict"] == "buffered":
            problems.append(f"pool {pool['pool']}: {pool['reason']}")
        elif pool["verdict"] != "ok":
            warnings.append(f"pool {pool['pool']}: {pool['reason']}")
    return problems, warnings


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "gateway": {"type": "str", "required": True},
            "server_name": {"type": "str", "default": "localhost"},
            "ca_file": {"type": "path", "default": ""},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "engine_api_key": {"type": "str", "default": "", "no_log": True},
            "pools": {"type": "list", "elements": "dict", "required": True},
            "required_hosts": {"type": "list", "elements": "str", "required": True},
            "prompt": {"type": "str", "default": "One, two, three, four, five, six,"},
            "max_tokens": {"type": "int", "default": 24, "no_log": False},
            "rounds": {"type": "int", "default": 3},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    params = module.params
    pairs = [(pool, replica) for pool in params["pools"] for replica in pool["replicas"]]
    with ThreadPoolExecutor(PARALLEL) as workers:
        replicas = list(workers.map(lambda pair: ask_replica(params, *pair), pairs))
    pools = []
    for pool in params["pools"]:
        live = [
            replica
            for (of, replica), found in zip(pairs, replicas)
            if of["pool"] == pool["pool"] and not found["error"]
        ]
        pools.append(ask_pool(params, pool, live))
    problems, warnings = sort_out(pools, replicas, set(params["required_hosts"]))
    result = {"changed": False, "pools": pools, "replicas": replicas, "warnings_found": warnings, "problems": problems}
    # A check may look at machines where nothing runs yet.
    if problems and not module.check_mode:
        module.fail_json(msg="It does not serve as it should: " + "; ".join(problems), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
