# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What Prometheus scrapes and what must be there, from the inventory alone.

No host is asked, so a dead one (or --limit) changes nothing.

The same values give the scrape targets, the expected counts that the rules compare with, and the agent's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.pools import host_address

PORTS = {"node": 9100, "agents": 9600, "nginx": 9113, "gateway_log": 3903, "dcgm": 9400}
PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 5.0, 2.0

Host = Mapping[str, Any]


def is_gpu(host: Host) -> bool:
    """Return whether a host is meant to have GPUs (``metalserve_accelerator``, default nvidia)."""
    return bool(host.get("metalserve_accelerator", "nvidia") == "nvidia")


def scrape_targets(
    plans: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
    hosts: Mapping[str, Host],
    dcgm: bool,
) -> dict[str, list[dict[str, Any]]]:
    """Return the targets of each job in Prometheus' file format (``targets``, ``labels``), sorted, JSON-ready.

    ``plans`` are PoolPlans as dicts, ``dcgm`` whether the DCGM exporter runs on GPU nodes. A label ``node`` is the
    inventory name; engines carry pool, replica and kind too.
    """
    engines, gateways = list(groups.get("engines", [])), list(groups.get("gateways", []))
    everyone = sorted({*engines, *gateways, *groups.get("monitors", [])})

    def on(job: str, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"targets": [f"{host_address(name, hosts.get(name, {}))}:{PORTS[job]}"], "labels": {"node": name}}
            for name in sorted(names)
        ]

    return {
        "node": on("node", everyone),
        "agents": on("agents", engines),
        "nginx": on("nginx", gateways),
        "gateway_log": on("gateway_log", gateways),
        "dcgm": on("dcgm", [name for name in engines if dcgm and is_gpu(hosts.get(name, {}))]),
        "engines": sorted(
            (
                {
                    "targets": [f"{replica['address']}:{replica['port']}"],
                    "labels": {
                        "node": replica["host"],
                        "pool": plan["pool"],
                        "replica": replica["replica"],
                        "kind": plan["engine"],
                    },
                }
                for plan in plans
                for replica in plan["replicas"]
            ),
            key=lambda one: (one["labels"]["node"], one["labels"]["replica"]),
        ),
    }


def target_file(targets: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return all ``targets`` as one file for Prometheus; each has its job as a label, so one scrape job reads it."""
    return [
        {"targets": list(one["targets"]), "labels": {**one["labels"], "job": job}}
        for job in sorted(targets)
        for one in targets[job]
    ]


def expected(
    plans: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
    hosts: Mapping[str, Host],
    dcgm: bool,
) -> dict[str, Any]:
    """Return what the inventory promises: targets by job, replicas by pool, GPUs by node.

    GPU nodes without ``metalserve_expected_gpus`` are counted by what their replicas take, as far as that is known.
    """
    targets = scrape_targets(plans, groups, hosts, dcgm)
    gpus: dict[str, int] = {}
    for name in sorted(groups.get("engines", [])):
        host = hosts.get(name, {})
        if not is_gpu(host):
            continue
        count = host.get("metalserve_expected_gpus")
        if count is None:
            count = sum(
                max(1, int(plan.get("parallel", {}).get("tensor", 1)))
                for plan in plans
                for replica in plan["replicas"]
                if replica["host"] == name
            )
        gpus[name] = int(count)
    return {
        "targets": {job: len(found) for job, found in targets.items() if found},
        "replicas": [{"pool": plan["pool"], "kind": plan["engine"], "count": len(plan["replicas"])} for plan in plans],
        "gpus": gpus,
        "kinds": sorted({str(plan["engine"]) for plan in plans}),
    }


def agent_settings(
    plans: Sequence[Mapping[str, Any]],
    name: str,
    host: Host,
    *,
    address: str,
    port: int,
    engines_dir: str,
    docker_socket: str,
) -> dict[str, Any]:
    """Return the agent's settings of one node (agent.json): where it listens and the replicas that it looks after.

    Probe times are the longest of the node's pools, so that one loop serves all; their order is the plan's invariant.
    """
    mine = [(plan, replica) for plan in plans for replica in plan["replicas"] if replica["host"] == name]
    times = [plan.get("times", {}) for plan, _replica in mine]
    expected_gpus = int(host.get("metalserve_expected_gpus") or 0) if is_gpu(host) else 0
    return {
        "listen": {"address": address, "port": port},
        "accelerator": "nvidia" if is_gpu(host) else "cpu",
        "expected_gpus": expected_gpus,
        "probe_interval_s": max([float(one.get("probe_interval_s", PROBE_INTERVAL_S)) for one in times], default=5.0),
        "probe_timeout_s": max([float(one.get("probe_timeout_s", PROBE_TIMEOUT_S)) for one in times], default=2.0),
        "engines_dir": engines_dir,
        "docker_socket": docker_socket,
        "replicas": [
            {
                "replica": replica["replica"],
                "pool": plan["pool"],
                "kind": plan["engine"],
                "address": replica["address"],
                "port": replica["port"],
            }
            for plan, replica in mine
        ],
    }
