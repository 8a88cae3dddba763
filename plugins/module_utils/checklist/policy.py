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
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Callable, Optional, Union

from ansible_collections.metal.serve.plugins.module_utils.checklist.shapes import fits, told

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
        "metalserve_rotation_.*",
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
        "body_limit_bytes": None,  # of the longest prompts, from the pools' plans
        "releases": {},  # replica -> {image, container: {...}}, where the controller knows them
    },
    "waivers": [],  # {id, hosts, reason, until: YYYY-MM-DD}
}


SAYS = {
    "driver_minimum": "oldest NVIDIA driver that passes",
    "bar1_minimum_mib": "smallest BAR1 window that passes, MiB",
    "numa_balancing": "wanted value of kernel.numa_balancing",
    "nofile_minimum": "fewest open files that a session, a service and a daemon must be allowed",
    "nofile_maximum": "most open files: far above, programs that close every descriptor hang for seconds",
    "container_memory": "memory limit of engine containers, such as 88G; empty: as the running release plans it",
    "container_memory_swap": "limit of memory and swap together, such as 90G; empty: as the running release plans it",
    "somaxconn_minimum": "shortest backlog of listening sockets that passes",
    "nvidia_smi_seconds_maximum": "longest answer of nvidia-smi that passes, seconds",
    "tls_days_minimum": "days that a certificate must still be valid",
    "disk_free_gib_minimum": "space that must be free for images and models, GiB",
    "clock_offset_seconds_maximum": "largest offset of the clock, seconds",
    "gpu_memory_margin_mib": "free GPU memory that should be left above what an engine takes, MiB",
    "engine_start_seconds_maximum": "for how long an engine that does not answer is starting, seconds; then it failed",
    "model_deep": "whether the content of every model file is hashed and compared: minutes, not seconds",
    "alerts": "alerts that must be loaded: what, on one of which metrics, above at most what, for at most how many seconds",
    "metrics_with_the_first_event": "patterns of metrics that come with their first event: not there is no fault",
    "expected": "what the host is meant to be; playbooks/audit.yml fills it from the inventory, keys given here win",
    "expected.roles": "engine, gateway, monitor; []: judge what is seen",
    "expected.accelerator": "nvidia or cpu; empty: as seen",
    "expected.gpus": "number of GPUs",
    "expected.gpu_name": "part of the GPUs' name, such as H100; empty: any, but all alike",
    "expected.gpu_memory_mib": "memory of each GPU, MiB",
    "expected.mig": "whether MIG is on",
    "expected.tensor_parallel": "GPUs that one replica spreads over",
    "expected.peer_to_peer": "whether GPUs need each other over PCIe; null: where tensor_parallel > 1 and there is no NVLink",
    "expected.rdma": "whether RDMA is used; null: as seen",
    "expected.image_cuda": "CUDA version inside the engine image, such as 13.0",
    "expected.gpu_memory_utilization": "share of each GPU's memory that an engine takes",
    "expected.gateways": "addresses of the gateways, which may reach engine ports",
    "expected.monitors": "addresses of the monitors, which may reach engine ports",
    "expected.engine_ports": "ports of the engines on this host",
    "expected.engine_keepalive_s": "seconds after which engines close idle connections, the least of the pools",
    "expected.longest_silent_prefill_s": "seconds that an engine may be silent before its first token, the most of the pools",
    "expected.body_limit_bytes": "bytes of the longest request, the most of the pools",
    "expected.releases": "replica -> {image, container}, as the inventory plans it",
    "waivers": "findings that are known and accepted, each with a reason and a last day",
}
"""What each key is, for schemas/policy.json."""


Place = tuple[Union[str, int], ...]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a policy: where, what, and what would be right."""

    place: Place
    what: str
    right: str

    def __str__(self) -> str:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.place).lstrip(".")
        return f"{where}: {self.what}; {self.right}"


class PolicyError(ValueError):
    """The policy is wrong; the message names each key, the value and what would be right."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


def merge_policy(override: Optional[Mapping[str, Any]], checks: Collection[str] = ()) -> dict[str, Any]:
    """Return the default policy with ``override`` laid over it, one level deep in ``expected``.

    ``checks`` are the ids that a waiver may name; where there are none, any will do. Raises PolicyError that lists every
    fault: unknown keys and checks (with the nearest known one), wrong types, waivers without reason or a date.
    """
    policy = copy.deepcopy(DEFAULT_POLICY)
    if not override:
        return policy
    faults = [*_lay_over(policy, override, ()), *_waiver_faults(policy["waivers"], checks)]
    if policy["nofile_minimum"] > policy["nofile_maximum"]:
        low, high = policy["nofile_minimum"], policy["nofile_maximum"]
        faults.append(
            Fault(("nofile_minimum",), f"{low} is more than nofile_maximum ({high})", "raise the other one too")
        )
    if faults:
        raise PolicyError(faults)
    return policy


def waiver_for(policy: Mapping[str, Any], check_id: str, host: str, today: datetime.date) -> Optional[dict[str, str]]:
    """Return {reason, until} of the waiver that covers ``check_id`` on ``host`` today, or None."""
    return _waiver(policy, check_id, host, lambda until: today <= until)


def ended_waiver_for(
    policy: Mapping[str, Any], check_id: str, host: str, today: datetime.date
) -> Optional[dict[str, str]]:
    """Return {reason, until} of a waiver that covered ``check_id`` on ``host`` and has ended, or None."""
    return _waiver(policy, check_id, host, lambda until: until < today)


def _waiver(
    policy: Mapping[str, Any], check_id: str, host: str, holds: Callable[[datetime.date], bool]
) -> Optional[dict[str, str]]:
    for waiver in policy["waivers"]:
        hosts = waiver.get("hosts") or []
        if waiver["id"] != check_id or (hosts and not any(fnmatchcase(host, one) for one in hosts)):
            continue
        if holds(datetime.date.fromisoformat(str(waiver["until"]))):
            return {"reason": str(waiver["reason"]), "until": str(waiver["until"])}
    return None


def _lay_over(policy: dict[str, Any], override: Mapping[str, Any], place: Place) -> Iterator[Fault]:
    for key, value in override.items():
        here = (*place, str(key))
        if key not in policy:
            near = difflib.get_close_matches(str(key), list(policy), n=1)
            name = ".".join(str(part) for part in (*place, *near))
            yield Fault(
                here, "no such policy key", f"did you mean {name}?" if near else f"known: {', '.join(sorted(policy))}"
            )
        elif key == "expected" and isinstance(value, Mapping):
            yield from _lay_over(policy["expected"], value, here)
        else:
            shape, right = told(".".join(str(part) for part in here), policy[key])
            if fits(value, shape):
                policy[key] = value
            else:
                yield Fault(here, f"{value!r} is not {right}", f"write {right}")


WAIVER_KEYS = ("id", "hosts", "reason", "until")


def _waiver_faults(waivers: list[Any], checks: Collection[str]) -> Iterator[Fault]:
    for index, waiver in enumerate(waivers):
        place: Place = ("waivers", index)
        if not isinstance(waiver, Mapping):
            yield Fault(place, f"{waiver!r} is not a mapping", "write id, reason and until")
            continue
        for key in waiver:
            if key not in WAIVER_KEYS:
                yield Fault((*place, str(key)), "no such key", f"a waiver has {', '.join(WAIVER_KEYS)}")
        for key in ("id", "reason"):
            if not isinstance(waiver.get(key), str) or not waiver[key].strip():
                yield Fault((*place, key), "missing", "a waiver says what it waives and why")
        if checks and isinstance(waiver.get("id"), str) and waiver["id"].strip() and waiver["id"] not in checks:
            near = difflib.get_close_matches(waiver["id"], list(checks), n=1)
            hint = f"did you mean {near[0]}?" if near else "scripts/audit --list names all of them"
            yield Fault((*place, "id"), f"there is no check {waiver['id']!r}", hint)
        hosts = waiver.get("hosts", [])
        if not isinstance(hosts, list) or not all(isinstance(one, str) for one in hosts):
            yield Fault(
                (*place, "hosts"), f"{hosts!r} is not a list of host names", "write such a list, or leave it out"
            )
        if not _is_date(waiver.get("until")):
            yield Fault(
                (*place, "until"), f"{waiver.get('until')!r} is not a date such as 2027-01-31", "write the last day"
            )


def _is_date(value: Any) -> bool:
    """Tell whether ``value`` is a day as YYYY-MM-DD (YAML may have made a date of it already)."""
    text = str(value)
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True
