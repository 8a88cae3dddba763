# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""All checks of an inventory: groups and variables in, a list of problems out. No host is asked, nothing is run.

``check`` is the one entry. Each rule is a function over a ``View`` that adds what it finds; a new rule is a new
function in ``RULES``. What values.py has refused, the other rules pass over in silence, so that no fault is told
twice.
"""

from __future__ import annotations

from collections.abc import Callable

from ansible_collections.metal.serve.plugins.module_utils.inventory import (
    rules_groups,
    rules_hosts,
    rules_models,
    rules_nodes,
    rules_plans,
    rules_pools,
    rules_services,
    rules_variables,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    Inventory,
    Problem,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    SITE,
    Exists,
    RoleOptions,
    View,
)

RULES: tuple[Callable[[View], None], ...] = (
    rules_groups.main_groups,
    rules_groups.pool_groups,
    rules_groups.other_empty_groups,
    rules_groups.variable_files,
    rules_variables.known_variables,
    rules_variables.unknown_variables,
    rules_variables.scope,
    rules_variables.required,
    rules_services.api_keys,
    rules_services.registry,
    rules_services.tls,
    rules_services.alerts,
    rules_services.audit_policy,
    rules_hosts.placeholders,
    rules_hosts.names,
    rules_hosts.addresses,
    rules_hosts.firewall,
    rules_hosts.operating_system,
    rules_models.models,
    rules_models.calibrations,
    rules_models.images,
    rules_models.containers,
    rules_pools.pool_settings,
    rules_pools.lengths,
    rules_nodes.spread,
    rules_nodes.gpus,
    rules_nodes.ports,
    rules_plans.plans,
)


def check(
    inventory: Inventory,
    purpose: str = SITE,
    exists: Exists | None = None,
    roles: RoleOptions | None = None,
) -> list[Problem]:
    """Return all problems of an inventory, errors first, each once; an empty list means that it is right.

    ``purpose`` is one of ``PURPOSES``. ``exists`` tells whether a file exists on the controller; without it files are
    not looked for. ``roles`` maps role names to their options (``roles.py``); without it role variables are not
    judged. Never raises for what stands in an inventory.
    """
    view = View(inventory, purpose, exists, roles)
    if not rules_groups.lab_is_missing(view):
        for rule in RULES:
            rule(view)
    return view.problems()
