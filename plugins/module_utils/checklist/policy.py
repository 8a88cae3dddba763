# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The audit's policy: thresholds, what this host is expected to be, and waivers with a reason and an end.

Policy is data. The defaults are the deployment checklist of the service's requirements; a file or inventory variable
overrides single keys. ``schemas/policy.json`` is its JSON Schema.
"""

from __future__ import annotations

import copy
import datetime
import difflib
from collections.abc import Mapping
from typing import Any, Optional

DEFAULT_POLICY: dict[str, Any] = {
    # Thresholds of the deployment checklist.
    "driver_minimum": "525.85.12",
    "bar1_minimum_mib": 256,
    "numa_balancing": 0,
    "nofile_minimum": 100000,
    "nofile_maximum": 1048576,  # far above it, programs that close every descriptor hang for seconds
    "container_memory": "",  # for instance 88G; empty: as the running release plans it
    "container_memory_swap": "",
    # Thresholds of our own, each explained at its check.
    "somaxconn_minimum": 4096,
    "nvidia_smi_seconds_maximum": 10.0,
    "tls_days_minimum": 21,
    "disk_free_gib_minimum": 20,
    "clock_offset_seconds_maximum": 1.0,
    "gpu_memory_margin_mib": 512,
    "engine_start_seconds_maximum": 900,  # a replica that does not answer is starting for so long, then it failed
    "model_deep": False,  # compare SHA-256 of every model file; the collector must be asked for the group deep
    "alerts": [
        {
            "what": "gpu_util > 90 % for 5 minutes",
            "metrics": ["metalserve_gpu_utilization_ratio", "DCGM_FI_DEV_GPU_UTIL"],
            "above": 0.90,
            "for_s": 300,
            "gpu": True,
        },
        {
            "what": "memory_fragmentation > 35 % (memory beyond the plan)",
            "metrics": ["metalserve_gpu_memory_unplanned_ratio"],
            "above": 0.35,
            "gpu": True,
        },
        {
            "what": "GPU memory > 90 %",
            "metrics": ["metalserve_replica_gpu_memory_used_bytes", "DCGM_FI_DEV_FB_USED"],
            "above": 0.90,
            "gpu": True,
        },
        {
            "what": "rejected_requests > 1 %",
            "metrics": ["metalserve_gateway_rejected_total", "vllm:admission_rejections_total"],
            "above": 0.01,
        },
        {"what": "request errors > 1 %", "metrics": ["metalserve_gateway_errors_total"], "above": 0.01},
        {"what": "P99 above the pool's bound", "metrics": ["metalserve:pool_request_seconds:p99"]},
        {"what": "model load > 120 s", "metrics": ["metalserve_replica_model_load_seconds"], "above": 120},
    ],
    # Series that begin with their first event: not there is no fault of a rule on them.
    "metrics_with_the_first_event": [
        "metalserve_check",
        "metalserve_audit_.*",
        "metalserve_gateway_.*",
        "metalserve_gpu_xid_.*",
        "metalserve_agent_errors_total",
        "metalserve_replica_(model_load|start_to_ready|engine_init)_seconds",
    ],
    # What this host is meant to be; the audit fills it from the inventory.
    "expected": {
        "roles": [],  # engine, gateway, monitor; empty: judge what is seen
        "accelerator": "",  # nvidia | cpu; empty: as seen
        "gpus": None,
        "gpu_name": "",
        "gpu_memory_mib": None,
        "mig": None,
        "tensor_parallel": 1,
        "peer_to_peer": None,  # None: needed where tensor_parallel > 1 and there is no NVLink
        "rdma": None,  # None: as seen
        "image_cuda": "",  # CUDA version inside the engine image, for instance 13.0
        "gpu_memory_utilization": None,
        "gateways": [],  # addresses that may reach engine ports
        "monitors": [],
        "engine_ports": [],
        "engine_keepalive_s": None,  # after which engines close idle connections, from the pools' times
        "longest_silent_prefill_s": None,
        "releases": {},  # replica -> {image, container: {...}}, where the controller knows them
    },
    "waivers": [],  # {id, hosts, reason, until: YYYY-MM-DD}
}


class PolicyError(ValueError):
    """The policy is wrong; the message names the key, the value and what would be right."""


def merge_policy(override: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the default policy with ``override`` laid over it, one level deep in ``expected``.

    Raises PolicyError that lists every problem: unknown keys (with the nearest known one), wrong types, waivers
    without id, reason or a date.
    """
    policy = copy.deepcopy(DEFAULT_POLICY)
    if not override:
        return policy
    problems: list[str] = []
    _lay_over(policy, override, "", problems)
    problems.extend(_waiver_problems(policy["waivers"]))
    if problems:
        raise PolicyError("; ".join(problems))
    return policy


def waiver_for(policy: Mapping[str, Any], check_id: str, host: str, today: datetime.date) -> Optional[dict[str, str]]:
    """Return the waiver that covers ``check_id`` on ``host`` today, or None; one past its ``until`` day is none."""
    for waiver in policy["waivers"]:
        if waiver["id"] != check_id or today > datetime.date.fromisoformat(str(waiver["until"])):
            continue
        hosts = waiver.get("hosts") or []
        if not hosts or host in hosts:
            return {"reason": str(waiver["reason"]), "until": str(waiver["until"])}
    return None


def _lay_over(policy: dict[str, Any], override: Mapping[str, Any], prefix: str, problems: list[str]) -> None:
    for key, value in override.items():
        name = f"{prefix}{key}"
        if key not in policy:
            near = difflib.get_close_matches(str(key), list(policy), n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(sorted(policy))}"
            problems.append(f"{name}: no such policy key{hint}")
        elif key == "expected" and isinstance(value, Mapping):
            _lay_over(policy["expected"], value, "expected.", problems)
        else:
            wanted = _wanted_type(policy[key], value)
            if wanted:
                problems.append(f"{name}: {value!r} is not {wanted}")
            else:
                policy[key] = value


def _wanted_type(default: Any, value: Any) -> str:
    """Return what ``value`` should have been, judged by the default's type; empty where it is right."""
    if default is None:
        return ""
    for kind, wanted in (((int, float), "a number"), (str, "a text"), (list, "a list"), (dict, "a mapping")):
        if isinstance(default, kind):
            right = isinstance(value, kind) and not isinstance(value, bool)
            return "" if right else wanted
    return ""


def _waiver_problems(waivers: list[Any]) -> list[str]:
    problems = []
    for index, waiver in enumerate(waivers):
        if not isinstance(waiver, Mapping):
            problems.append(f"waivers[{index}]: {waiver!r} is not a mapping with id, reason and until")
            continue
        for key in ("id", "reason"):
            if not str(waiver.get(key) or "").strip():
                problems.append(f"waivers[{index}].{key}: missing; a waiver says what it waives and why")
        try:
            datetime.date.fromisoformat(str(waiver.get("until")))
        except ValueError:
            problems.append(f"waivers[{index}].until: {waiver.get('until')!r} is not a date such as 2027-01-31")
    return problems
