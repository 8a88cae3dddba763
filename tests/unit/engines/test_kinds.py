# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What says something about each engine kind says it about all of them: a new kind fails here until it is known everywhere."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml

from ansible_collections.metal.serve.plugins.module_utils.engines.registry import ADAPTERS
from ansible_collections.metal.serve.plugins.module_utils.gateway import plan as gateway
from ansible_collections.metal.serve.plugins.module_utils.inventory import schema
from ansible_collections.metal.serve.plugins.module_utils.planner import pools, times
from ansible_collections.metal.serve.plugins.module_utils.telemetry import aggregate
from metalserve_agent import config, replicas

ROOT = Path(__file__).parents[3]
PLAN = json.loads((ROOT / "schemas" / "plan.json").read_text(encoding="utf-8"))
MONITORING = yaml.safe_load((ROOT / "roles" / "monitoring" / "vars" / "main.yml").read_text(encoding="utf-8"))
GENERAL_RULES = {"metalserve", "inventory", "watch", "engines", "gateway", "audit", "gpu", "dcgm"}

KNOWN: dict[str, Collection[str]] = {
    "inventory/schema.py ENGINES": schema.ENGINES,
    "planner/pools.py ENGINES": pools.ENGINES,
    "planner/times.py ENGINE_KEEPALIVE_S": times.ENGINE_KEEPALIVE_S,
    "planner/times.py GATEWAY_KEEPALIVE_S": times.GATEWAY_KEEPALIVE_S,
    "gateway/plan.py PROBES": gateway.PROBES,
    "telemetry/aggregate.py KINDS": aggregate.KINDS,
    "metalserve_agent/config.py KINDS": config.KINDS,
    "metalserve_agent/replicas.py PROBE_PATHS": replicas.PROBE_PATHS,
    "roles/monitoring/vars __monitoring_must_have_kind": MONITORING["__monitoring_must_have_kind"],
    "templates/monitoring/rules/<kind>.yml.j2": {
        path.name.partition(".")[0] for path in (ROOT / "templates" / "monitoring" / "rules").glob("*.j2")
    }
    - GENERAL_RULES,
    **{
        f"schemas/plan.json {name}": part["properties"]["engine"]["enum"]
        for name, part in PLAN["$defs"].items()
        if "enum" in part.get("properties", {}).get("engine", {})
    },
}


@pytest.mark.parametrize("place", KNOWN)
def test_every_kind_is_known_everywhere(place: str) -> None:
    assert set(KNOWN[place]) == set(ADAPTERS), place


def test_the_schema_of_plans_was_found() -> None:
    assert sum(place.startswith("schemas/plan.json") for place in KNOWN) == 2
