# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""One engine of the node: does it serve, how long did its start take, what runs, does its memory keep to the plan."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Callable

from ansible_collections.metal.serve.plugins.module_utils.telemetry.engine_log import is_ready_line, parse_start_up

from .config import Config, Replica
from .docker_api import Docker, DockerError, parse_time
from .readings import Errors, Reading

SOURCE = "replica"
# How to ask an engine before its release says it (key health). vLLM's live answer stays 200 in a drain, its list of
# models survives a dead engine core: both are asked.
PROBE_PATHS = {
    "vllm": ("/health", "/v1/models"),
    "sglang": ("/health", "/v1/models"),
    "triton_vllm": ("/v2/health/ready",),
}
START_UP_BOUND_S = 3600.0  # an engine that is not ready after an hour is not starting
Memory = Callable[[], dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class _StartUp:
    """What was read of one container's start; ``complete``: the log said that it serves, it is not read again."""

    readings: tuple[Reading, ...] = ()
    complete: bool = False


class ReplicaSource:
    """Reads one replica. ``memory`` gives used and total bytes by GPU UUID (none on a CPU node)."""

    def __init__(self, config: Config, replica: Replica, errors: Errors, memory: Memory | None) -> None:
        self._config = config
        self._replica = replica
        self._errors = errors
        self._memory = memory
        self._docker = Docker(config.docker_socket)
        self._current = os.path.join(config.engines_dir, replica.name, "current")
        self._start_ups: dict[tuple[str, float], _StartUp] = {}

    def read(self) -> list[Reading]:
        """Return the readings of one round."""
        release = self._release()
        return [*self._probe(release), *self._container(), *self._plan(release), *self._memory_against_plan(release)]

    def _fail(self, reason: str) -> None:
        self._errors.add(SOURCE, reason)

    # Readiness -------------------------------------------------------------------------------------------------------

    def _probe(self, release: dict[str, Any]) -> list[Reading]:
        started = time.monotonic()
        deadline = started + self._config.probe_timeout_s
        health = release.get("health") or {}
        known = [str(health[name]) for name in ("live", "models") if health.get(name)]
        ready = all(self._answers(path, deadline) for path in known or PROBE_PATHS[self._replica.kind])
        found = [Reading("metalserve_replica_ready", self._replica.labels, 1 if ready else 0)]
        if ready:
            took = time.monotonic() - started
            found.append(Reading("metalserve_replica_probe_duration_seconds", self._replica.labels, took))
        return found

    def _answers(self, path: str, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            self._fail("probe_timeout")
            return False
        connection = http.client.HTTPConnection(self._replica.address, self._replica.port, timeout=left)
        try:
            connection.request("GET", path, headers=self._headers())
            answer = connection.getresponse()
            body = answer.read(1024 * 1024)
        except (OSError, http.client.HTTPException) as error:
            self._fail("probe_timeout" if isinstance(error, socket.timeout) else "probe_refused")
            return False
        finally:
            connection.close()
        if answer.status != 200:
            self._fail("probe_unauthorized" if answer.status in (401, 403) else "probe_status")
            return False
        return not path.endswith("/v1/models") or self._lists_a_model(body)

    def _lists_a_model(self, body: bytes) -> bool:
        try:
            return len(json.loads(body)["data"]) > 0
        except (ValueError, KeyError, TypeError):
            self._fail("probe_answer")
            return False

    def _headers(self) -> dict[str, str]:
        try:
            with open(os.path.join(self._current, "api-key"), encoding="utf-8") as stream:
                key = stream.read().strip()
        except FileNotFoundError:
            return {}  # an engine without a key, or nothing deployed yet
        except OSError:
            self._fail("api_key")
            return {}
        return {"Authorization": f"Bearer {key}"} if key else {}

    # Container and its log -------------------------------------------------------------------------------------------

    def _container(self) -> list[Reading]:
        labels = self._replica.labels
        try:
            names = self._docker.containers(f"metalserve-{self._replica.name}-")
            running = [one for one in names if one.get("State") == "running"]
            found = [Reading("metalserve_replica_container_running", labels, 1 if running else 0)]
            if not running:
                return found
            container = str(running[0]["Id"])
            started = parse_time(str(self._docker.inspect(container)["State"]["StartedAt"]))
            if started is None:
                return found
            found.append(Reading("metalserve_replica_start_timestamp_seconds", labels, started))
            found.extend(self._start_up(container, started))
        except (DockerError, KeyError, TypeError):
            self._fail("docker")
            return []
        return found

    def _start_up(self, container: str, started: float) -> tuple[Reading, ...]:
        key = (container, started)
        known = self._start_ups.get(key)
        if known is None or not known.complete:
            known = self._read_start_up(container, started)
            self._start_ups = {key: known}
        return known.readings

    def _read_start_up(self, container: str, started: float) -> _StartUp:
        labels = self._replica.labels
        lines: list[str] = []
        ready_at: float | None = None
        # Docker's `since` has whole seconds here: start one early and leave out what an earlier start of it wrote.
        for moment, line in self._docker.log_lines(container, started - 1, started + START_UP_BOUND_S):
            if moment < started:
                continue
            lines.append(line)
            if is_ready_line(line):
                ready_at = moment
                break
        facts = parse_start_up(lines)
        found = [
            Reading(name, labels, value)
            for name, value in (
                ("metalserve_replica_model_load_seconds", facts.model_load_s),
                ("metalserve_replica_weights_bytes", facts.weights_bytes),
                ("metalserve_replica_engine_init_seconds", facts.engine_init_s),
                ("metalserve_replica_start_to_ready_seconds", None if ready_at is None else ready_at - started),
            )
            if value is not None
        ]
        # After the bound nothing new can come from the start of the log: a rotated log stays unknown, cheaply.
        return _StartUp(tuple(found), complete=facts.ready or time.time() > started + START_UP_BOUND_S)

    # Plan and release ------------------------------------------------------------------------------------------------

    def _release(self) -> dict[str, Any]:
        try:
            with open(os.path.join(self._current, "release.json"), encoding="utf-8") as stream:
                release = json.load(stream)
        except FileNotFoundError:
            return {}  # nothing was deployed yet
        except (OSError, ValueError):
            self._fail("release")
            return {}
        if not isinstance(release, dict):
            self._fail("release")
            return {}
        return release

    def _plan(self, release: dict[str, Any]) -> list[Reading]:
        if not release:
            return []
        labels = self._replica.labels
        plan = release.get("plan") or {}
        words = tuple(
            str(value or "")
            for value in (
                release.get("release"),
                plan.get("image"),
                plan.get("engine_version"),
                plan.get("model"),
                plan.get("revision"),
            )
        )
        found = [Reading("metalserve_replica_release_info", (*labels, *words), 1)]
        settings = plan.get("settings") or {}
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = settings.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.append(Reading(f"metalserve_replica_{name}", labels, value))
        return found

    def _memory_against_plan(self, release: dict[str, Any]) -> list[Reading]:
        plan = release.get("plan") or {}
        gpus = plan.get("gpus") or []
        if not gpus or self._memory is None:
            return []
        labels = self._replica.labels
        found: list[Reading] = []
        per_gpu = (plan.get("memory") or {}).get("planned_gpu_bytes")
        planned = per_gpu * len(gpus) if isinstance(per_gpu, (int, float)) and per_gpu > 0 else None
        if planned is None:
            self._fail("no_planned_memory")
        else:
            found.append(Reading("metalserve_replica_gpu_memory_planned_bytes", labels, planned))
        devices = self._memory()
        if any(uuid not in devices for uuid in gpus):
            self._fail("gpu_memory_unknown")  # a sum without one GPU would look like free memory
            return found
        used = sum(devices[uuid][0] for uuid in gpus)
        total = sum(devices[uuid][1] for uuid in gpus)
        found.append(Reading("metalserve_replica_gpu_memory_used_bytes", labels, used))
        found.append(Reading("metalserve_replica_gpu_memory_total_bytes", labels, total))
        if planned is not None:
            found.append(Reading("metalserve_gpu_memory_unplanned_ratio", labels, (used - planned) / planned))
        return found
