# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The last rule: what planner and gateway would refuse later is told here, where no host has been touched yet."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.module_utils.gateway.plan import GatewayError, client_keys, gateway_plan
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import View
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import HOST_VARIABLES, pool_plans


def plans(view: View) -> None:
    """Where every rule before is content, the pools can be planned, the gateway takes plans and keys, what is drained exists."""
    if view.has_errors() or not view.pools or not view.inventory.group("engines"):
        return
    hosts = {
        host: {name: view.inventory.get(host, name) for name in HOST_VARIABLES if name in known}
        for host, known in view.inventory.variables.items()
    }
    gateways = view.inventory.group("gateways")
    plain = any(view.inventory.get(host, "gateway_mode") == "plain" for host in gateways)
    try:
        made = pool_plans(view.wide("metalserve_pools"), view.inventory.groups, hosts)
        gateway_plan([plan.to_dict() for plan in made], max(1, len(gateways)))
        client_keys(view.wide("metalserve_api_keys"), hashed=not plain)
    except (PlanError, GatewayError) as error:
        problem, _unused, right = str(error).rstrip(".").partition("; ")
        view.add("metalserve_pools", "", problem, right or "correct it", severity=view.lenient())
        return
    replicas = [f"{replica.host}/{replica.replica}" for plan in made for replica in plan.replicas]
    for setting in view.settings.get("gateway_drained", []):
        given = setting.variable.value
        for index, name in enumerate(given if isinstance(given, (list, tuple)) else ()):
            if name not in replicas:
                right = f"write host/replica, such as {replicas[0]}"
                view.add_at(setting, (index,), "is no replica, so nothing is drained", right)
