# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the role engine. Thin: the work is in module_utils/engines and module_utils/release."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.engines.base import Context, EngineError
from ansible_collections.metal.serve.plugins.module_utils.engines.registry import adapter
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import host_address
from ansible_collections.metal.serve.plugins.module_utils.runtime.docker_version import container_gpu_arguments

FALLBACK_DOCKER = "28.2.0"
"""Docker's version where none runs yet (a check before the first run); it only decides how GPUs are handed over."""


def plans_of_host(pool_plans: Sequence[Mapping[str, Any]], host: str) -> list[dict[str, Any]]:
    """Return the pool plans that put a replica, or a part of one, on ``host``, with those replicas alone.

    A fleet has thousands of replicas; a node is sent its own.
    """
    found = []
    for plan in pool_plans:
        groups = {
            name: members
            for name, members in (plan.get("node_groups") or {}).items()
            if any(member["host"] == host for member in members)
        }
        replicas = [
            item for item in plan["replicas"] if item["host"] == host or f"{item['host']}/{item['replica']}" in groups
        ]
        if replicas:
            found.append({**plan, "replicas": replicas, "node_groups": groups})
    return found


def engine_specs(
    replica_plans: Sequence[Mapping[str, Any]],
    pool_plans: Sequence[Mapping[str, Any]],
    pools: Mapping[str, Any],
    facts: Mapping[str, Any],
    root: str,
    options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the Spec of each planned replica as a dict; ``facts`` is what metal.serve.engine_facts returned.

    ``options`` may have user, log_size, log_files and start_timeout_s.
    """
    by_pool = {plan["pool"]: plan for plan in pool_plans}
    found = []
    for plan in replica_plans:
        try:
            docker = str(facts["docker"]["version"]) or FALLBACK_DOCKER
            context = Context(
                replica=plan,
                pool=by_pool[plan["pool"]],
                root=root,
                model_path=f"{root}/models/{plan['model']}/{plan['revision']}",
                pool_env=pools[plan["pool"]].get("env", {}),
                gpu_arguments=container_gpu_arguments(docker, plan.get("gpus", [])),
                swap_limit=bool(facts["docker"]["swap_limit"]),
                nofile_limit=int(facts["nofile_limit"]),
                **dict(options or {}),
            )
            found.append(adapter(str(plan["engine"])).spec(context).to_dict())
        except (EngineError, ValueError) as error:
            raise AnsibleFilterError(f"{plan['replica']}: {error}") from None
    return found


def engine_files(specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry per file that must be rendered: the replica's spec, the file's name, its template."""
    return [
        {"replica": spec["replica"], "spec": spec, "name": item["name"], "template": item["template"]}
        for spec in specs
        for item in spec["files"]
    ]


def engine_replicas(
    specs: Sequence[Mapping[str, Any]],
    replica_plans: Sequence[Mapping[str, Any]],
    rendered: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Return what metal.serve.engine_release takes: spec, plan and rendered files of each replica."""
    plans = {plan["replica"]: plan for plan in replica_plans}
    return [
        {
            "spec": spec,
            "plan": plans[spec["replica"]],
            "files": {item["name"]: rendered[spec["replica"]][item["name"]] for item in spec["files"]},
        }
        for spec in specs
    ]


def model_revisions(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the revision of each model and nothing else: a source may hold a token, and module arguments are
    logged.
    """
    return {name: {"revision": str(model["revision"])} for name, model in models.items()}


def model_values(models: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return one value of each model that the role model_store reported, leaving out empty ones."""
    return {name: model[key] for name, model in models.items() if model.get(key)}


def group_addresses(
    names: Sequence[str], groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Any]
) -> dict[str, str]:
    """Return the private address of each host of the groups ``names``, whether or not it is part of this run."""
    hosts = {host for name in names for host in groups.get(name, [])}
    return {host: host_address(host, hostvars[host]) for host in sorted(hosts)}


def engine_firewall(
    pool_plans: Sequence[Mapping[str, Any]],
    host: str,
    addresses: Mapping[str, str],
    extra_ports: Sequence[int],
    extra_addresses: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Return ``ports`` to guard on ``host`` and ``ipv4`` and ``ipv6`` addresses to let in.

    ``addresses`` maps the name of each gateway and monitor to its private address, which must be a number: a name
    would be looked up when the table is loaded, and at boot there may be nobody to ask.
    """
    ports = {int(port) for port in extra_ports}
    for plan in pool_plans:
        ports.update(int(item["port"]) for item in plan["replicas"] if item["host"] == host)
    found: dict[str, list[Any]] = {"ports": sorted(ports), "ipv4": [], "ipv6": []}
    named = [(f"metalserve_address of {name}", value) for name, value in sorted(addresses.items())]
    for origin, value in [*named, *(("engine_firewall_addresses", value) for value in extra_addresses)]:
        try:
            network = ipaddress.ip_network(str(value), strict=False)
        except ValueError:
            raise AnsibleFilterError(
                f"{origin} is {value!r}; the engines' firewall needs an IP address there, such as 10.0.0.2"
            ) from None
        text = str(network.network_address) if network.num_addresses == 1 else str(network)
        key = f"ipv{network.version}"
        if text not in found[key]:
            found[key].append(text)
    return found


class FilterModule:
    """Offer the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "engine_specs": engine_specs,
            "engine_files": engine_files,
            "engine_replicas": engine_replicas,
            "group_addresses": group_addresses,
            "model_revisions": model_revisions,
            "plans_of_host": plans_of_host,
            "model_values": model_values,
            "engine_firewall": engine_firewall,
        }
