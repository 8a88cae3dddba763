# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Every number and name that the gateway's templates need, from the pool plans alone.

The result is a plain dict (``gateway_plan``). No host is asked, so a dead node or ``--limit`` changes no byte of a
gateway. See docs/gateway.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import sha256_text

PASSIVE_MAX_FAILS = 3
"""Failed connects or read timeouts within FAIL_TIMEOUT_S that take a peer out; the brief's max_fails."""

FAIL_TIMEOUT_S = 30
UPSTREAM_KEEPALIVE = (32, 512)
"""Bounds of the idle connections to the engines of one pool that each worker keeps. As many as requests may be in flight:
with fewer, a burst opens and closes a connection for most of its requests, which cost a fifth more processor time."""

MIN_CLIENT_CONNECTIONS = 8192
"""Floor of client connections: the brief's 1,800 streams four times over, so that idle keep-alive clients fit too."""

CONNECTIONS_STEP = 1024
MAX_BODY_IN_MEMORY = 16 * 1024 * 1024
"""Largest request body that is kept in memory; longer ones go to a temporary file, 0600 and removed at once."""

PROBES: dict[str, dict[str, Any]] = {
    "vllm": {
        "health_path": "/health",
        "health_503_is_death": True,
        "metrics_path": "/metrics",
        "progress_metric": "vllm:iteration_tokens_total_count",
        "rejects_as_400": False,
    },
    "sglang": {
        "health_path": "/ping",
        "health_503_is_death": False,
        "metrics_path": "/metrics",
        "progress_metric": "sglang:generation_tokens_total",
        "rejects_as_400": False,
    },
    "triton_vllm": {
        "health_path": "/health/ready",
        "health_503_is_death": False,
        "metrics_path": "/metrics",
        "progress_metric": "vllm:generation_tokens_total",
        "rejects_as_400": True,
    },
}
"""How the Lua gateway asks an engine whether it lives and steps. vLLM's /health is 503 only once its engine is dead;
SGLang's /health generates a token and says 503 under a long prefill, so its /ping is asked, and any answer is life.
Triton tells vLLM's full queue as a 400."""

MIB = 1024 * 1024
SHARED_BYTES_PER_REPLICA = 2048
"""Eight entries of shared memory, 256 bytes each with their bookkeeping; a dictionary that is full forgets the oldest."""

MOST_WORKERS = 64
"""nginx workers for which every replica's count has room."""

POOL_NAME = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
ADDRESS = re.compile(r"\A[A-Za-z0-9.:_-]+\Z")
MODEL_NAME = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._/@:+-]{0,255}\Z")
KEY_NAME = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
TOKEN = re.compile(r"\A[A-Za-z0-9._~+/=-]{8,512}\Z")
"""RFC 6750 b64token: what may follow ``Bearer``. No quote, dollar or space in it: safe in a configuration."""

SHA256 = re.compile(r"\A[0-9a-f]{64}\Z")
DNS_NAME = re.compile(r"\A(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\Z")
IPV4 = re.compile(r"\A\d{1,3}(\.\d{1,3}){3}\Z")


class GatewayError(ValueError):
    """A variable that the gateway cannot be built from: one sentence with name, value and what would be right."""


def at_most(limit: int) -> str:
    """Return a regular expression for the decimal integers 0..``limit`` without leading zeros.

    nginx maps compare text only; this is how a length bound gets into one. Raises GatewayError below 0.
    """
    if limit < 0:
        raise GatewayError(f"a length bound is {limit}; it must be 0 or more")
    text = str(limit)
    parts = ["0"] if len(text) > 1 else []
    parts.extend("[1-9]" + _digits(width - 1) for width in range(1, len(text)))
    for place, digit in enumerate(text):
        low = 1 if place == 0 and len(text) > 1 else 0
        if int(digit) > low:
            high = int(digit) - 1
            span = str(low) if high == low else f"[{low}-{high}]"
            parts.append(text[:place] + span + _digits(len(text) - place - 1))
    parts.append(text)
    return "(?:" + "|".join(parts) + ")"


def host_port(address: str, port: int) -> str:
    """Return ``address:port`` as nginx reads it; IPv6 addresses get brackets. Raises GatewayError for other text."""
    if not ADDRESS.match(address):
        raise GatewayError(
            f"metalserve_address is {address!r}; it must be an IP address or a host name that nginx can resolve."
        )
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def upstream_servers(replicas: Sequence[Mapping[str, Any]], drained: Sequence[str]) -> list[dict[str, Any]]:
    """Return one dict per replica: name, host, ``server`` (address:port), ``max_fails`` and ``down``.

    A peer that is alone gets ``max_fails=0``: ejecting it would only turn slow answers into 502. nginx exempts a lone
    server by itself, but no longer once a second entry is marked down.
    """
    names = [f"{replica['host']}/{replica['replica']}" for replica in replicas]
    places = [host_port(str(replica["address"]), int(replica["port"])) for replica in replicas]
    live = sum(name not in drained for name in names)
    return [
        {
            "id": name,
            "replica": str(replica["replica"]),
            "host": str(replica["host"]),
            # In brackets where it is IPv6: nginx's Lua reads it so only.
            "address": place.rpartition(":")[0],
            "port": int(replica["port"]),
            "server": place,
            "max_fails": PASSIVE_MAX_FAILS if live > 1 else 0,
            "down": name in drained,
        }
        for name, place, replica in zip(names, places, replicas)
    ]


def length_routes(pools: Sequence[Mapping[str, Any]], bytes_per_token: float) -> list[dict[str, Any]]:
    """Return which pool takes a body of how many bytes: the shortest that surely holds it, the longest for the rest.

    Only pools with the first pool's model take part, since a plain nginx does not read ``model`` from the body; the
    others are named with the header X-Metalserve-Pool. Each entry has ``pool``, ``tokens`` and ``bytes`` (inclusive
    upper bounds) and their patterns; the last one is the pool for everything longer.
    """
    first = str(pools[0]["served_name"])
    same = [pool for pool in pools if pool["served_name"] == first]
    routes: list[dict[str, Any]] = []
    for pool in sorted(same, key=lambda pool: int(pool["max_model_len"])):
        tokens = int(pool["max_model_len"])
        if routes and routes[-1]["tokens"] == tokens:
            continue
        limit = int(tokens * bytes_per_token)
        routes.append(
            {
                "pool": str(pool["pool"]),
                "tokens": tokens,
                "bytes": limit,
                "tokens_pattern": at_most(tokens),
                "bytes_pattern": at_most(limit),
            }
        )
    return routes


def gateway_plan(
    pools: Sequence[Mapping[str, Any]],
    gateways: int = 1,
    bytes_per_token: float = 3.0,
    max_client_connections: int = 0,
    drained: Sequence[str] = (),
    heartbeat_s: int = 25,
    limit_rates: bool = False,
) -> dict[str, Any]:
    """Return what the gateway's templates need, from a list of PoolPlans (docs/architecture.md).

    ``gateways`` is how many gateways share the pools' admission limits; ``bytes_per_token`` turns a body length into
    tokens; ``max_client_connections`` 0 means "from the plan"; ``drained`` names replicas as ``host/replica`` that get
    no new requests; a pool that may be silent for longer than ``heartbeat_s`` gives its streams signs of life (0: none does);
    ``limit_rates``: a pool takes no more requests a second than its plan's ``admission.requests_per_s``.
    Raises GatewayError.
    """
    if not pools:
        raise GatewayError("the list of pool plans is empty; describe at least one pool in metalserve_pools.")
    if isinstance(bytes_per_token, bool) or not isinstance(bytes_per_token, (int, float)) or bytes_per_token <= 0:
        raise GatewayError(f"gateway_bytes_per_token is {bytes_per_token!r}; it must be a number above 0, such as 3.0.")
    planned: list[dict[str, Any]] = []
    for pool in pools:
        name = str(pool["pool"])
        if not POOL_NAME.match(name):
            raise GatewayError(
                f"pool name {name!r}: use letters, digits, - and _ (63 at most), starting with a letter."
            )
        if not MODEL_NAME.match(str(pool["served_name"])):
            raise GatewayError(
                f"served_name of pool {name} is {pool['served_name']!r}; use letters, digits and . _ / @ : + -"
            )
        times: Mapping[str, Any] = pool["times"]
        servers = upstream_servers(pool["replicas"], drained)
        admission = _admission(pool["admission"], len(servers), max(1, gateways), limit_rates)
        planned.append(
            {
                "name": name,
                "upstream": f"metalserve_{name}",
                "variable": name.replace("-", "_"),
                "served_name": str(pool["served_name"]),
                "engine": str(pool["engine"]),
                "max_model_len": int(pool["max_model_len"]),
                "servers": servers,
                "keepalive": min(max(UPSTREAM_KEEPALIVE[0], admission["max_in_flight"]), UPSTREAM_KEEPALIVE[1]),
                "keepalive_s": _seconds(times, "gateway_upstream_keepalive_s"),
                "connect_s": _seconds(times, "gateway_connect_s"),
                "send_s": _seconds(times, "gateway_send_s"),
                "read_s": _seconds(times, "gateway_read_s"),
                "body_limit_bytes": int(pool["body_limit_bytes"]),
                "wedged_after_s": _seconds(times, "wedged_after_s"),
                "heartbeat": 0 < heartbeat_s < _seconds(times, "longest_silent_prefill_s"),
                "probe_interval_ms": _milliseconds(times, "probe_interval_s"),
                "probe_timeout_ms": _milliseconds(times, "probe_timeout_s"),
                **PROBES.get(str(pool["engine"]), PROBES["vllm"]),
                **admission,
            }
        )
    variables = [pool["variable"] for pool in planned]
    for name in variables:
        if variables.count(name) > 1:
            raise GatewayError(
                f"two pools would share the nginx variable {name!r}; let their names differ beyond - and _."
            )
    routes = length_routes(pools, float(bytes_per_token))
    body_limit = max(pool["body_limit_bytes"] for pool in planned)
    in_flight = sum(int(pool["max_in_flight"]) for pool in planned)
    replicas = sum(len(pool["servers"]) for pool in planned)
    clients = max(MIN_CLIENT_CONNECTIONS, 4 * in_flight) if max_client_connections == 0 else max_client_connections
    idle = sum(int(pool["keepalive"]) for pool in planned)
    connections = _round_up(clients + in_flight + idle, CONNECTIONS_STEP)
    return {
        "pools": planned,
        "models": _models(planned),
        "default_pool": planned[0]["name"],
        "routes": routes,
        "longest_pool": routes[-1]["pool"],
        "bytes_per_token": float(bytes_per_token),
        "body_limit_bytes": body_limit,
        "body_buffer_bytes": min(body_limit, MAX_BODY_IN_MEMORY),
        "shared_mib": max(4, math.ceil(replicas * SHARED_BYTES_PER_REPLICA / MIB)),
        "workers_mib": max(2, math.ceil(replicas * SHARED_BYTES_PER_REPLICA / MIB * MOST_WORKERS / 8)),
        "fail_timeout_s": FAIL_TIMEOUT_S,
        "client_keepalive_s": max(_seconds(pool["times"], "client_keepalive_s") for pool in pools),
        "probe_interval_ms": min(pool["probe_interval_ms"] for pool in planned),
        "worker_connections": connections,
        # One descriptor a connection, and as much again for body files, logs and sockets that a reload inherits.
        "worker_rlimit_nofile": 2 * connections,
        "worker_shutdown_s": max(
            max(_seconds(pool["times"], "longest_stream_s"), _seconds(pool["times"], "drain_s")) for pool in pools
        ),
    }


def client_keys(entries: Any, hashed: bool) -> list[dict[str, Any]]:
    """Return metalserve_api_keys, checked, as ``{name, pattern}`` or, with ``hashed``, ``{name, sha256, vip}``.

    ``pattern`` is a case-sensitive regular expression for the whole Authorization header (nginx compares plain map
    entries without case, which would weaken a key). Raises GatewayError; no message repeats a key.
    """
    if not isinstance(entries, (list, tuple)) or not entries:
        raise GatewayError(
            "metalserve_api_keys is empty: nobody could use the gateway; give at least one {name, key} from a vault."
        )
    result: list[dict[str, Any]] = []
    seen: set[str] = set()
    for position, entry in enumerate(entries):
        where = f"metalserve_api_keys[{position}]"
        if not isinstance(entry, Mapping) or not KEY_NAME.match(str(entry.get("name", ""))):
            raise GatewayError(f"{where}: give a name of letters, digits, . _ and - and a key.")
        name = str(entry["name"])
        if name in seen:
            raise GatewayError(f"{where}: the name {name} is taken by an entry above; names go into logs and limits.")
        seen.add(name)
        key, digest = str(entry.get("key") or ""), str(entry.get("sha256") or "").lower()
        if bool(key) == bool(digest):
            raise GatewayError(f"{where} ({name}): give either key or sha256, and one of them only.")
        if key and not TOKEN.match(key):
            raise GatewayError(
                f"{where} ({name}): the key must be 8 to 512 letters, digits or ._~+/=- as a Bearer token allows."
            )
        if digest and not SHA256.match(digest):
            raise GatewayError(f"{where} ({name}): sha256 must be 64 hexadecimal digits.")
        if hashed:
            result.append({"name": name, "sha256": digest or sha256_text(key), "vip": bool(entry.get("vip"))})
        elif digest:
            raise GatewayError(
                f"{where} ({name}): gateway_mode plain compares clear keys and cannot use sha256; give key, or set "
                "gateway_mode to lua."
            )
        else:
            result.append({"name": name, "pattern": f"^(?i:bearer) +{re.escape(key)}$"})
    return result


def engine_token(value: Any) -> str:
    """Return metalserve_engine_api_key if it can stand in a header; empty stays empty. Raises GatewayError."""
    text = "" if value is None else str(value)
    if text and not TOKEN.match(text):
        raise GatewayError(
            "metalserve_engine_api_key: use 8 to 512 letters, digits or ._~+/=- as a Bearer token allows."
        )
    return text


def subject_alt_names(names: Sequence[Any]) -> list[str]:
    """Return ``DNS:…`` and ``IP:…`` entries for a certificate, in order, without doubles. Raises GatewayError."""
    result: list[str] = []
    for name in names:
        text = str(name).strip()
        if IPV4.match(text) or ":" in text:
            entry = f"IP:{text}"
        elif DNS_NAME.match(text):
            entry = f"DNS:{text}"
        else:
            raise GatewayError(f"metalserve_tls.names holds {text!r}; it must be a host name or an IP address.")
        if entry not in result:
            result.append(entry)
    if not result:
        raise GatewayError("metalserve_tls.names is empty; give the name that clients use for the gateway.")
    return result


def _digits(count: int) -> str:
    """Return a pattern for ``count`` digits."""
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _admission(admission: Mapping[str, Any], replicas: int, gateways: int, limit_rates: bool = False) -> dict[str, int]:
    """Return a pool's room: the batches of all its replicas and one queue, shared between the gateways; and its rate.

    ``admission`` is a PoolPlan's: ``max_in_flight`` is one replica's max_num_seqs and the queue. A replica that is out
    takes its batch with it, so the Lua gateway computes the room of those that are in from the same numbers.
    """
    queue, most = int(admission["queue"]), int(admission["max_in_flight"])
    seqs = max(1, most - queue)
    return {
        "max_num_seqs": seqs,
        "queue": queue,
        "gateways": gateways,
        "max_in_flight": math.ceil((replicas * seqs + queue) / gateways),
        "replica_max_in_flight": math.ceil(most / gateways),
        "requests_per_s": math.ceil(int(admission.get("requests_per_s", 0)) / gateways) if limit_rates else 0,
    }


def _models(pools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each served model once, with the longest context any of its pools has."""
    models: dict[str, int] = {}
    for pool in pools:
        models[pool["served_name"]] = max(models.get(pool["served_name"], 0), pool["max_model_len"])
    return [{"id": name, "max_model_len": length} for name, length in models.items()]


def _seconds(times: Mapping[str, Any], name: str) -> int:
    """Return a time of the chain in whole seconds, rounded up. Raises GatewayError when it is missing."""
    value = times.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise GatewayError(f"times.{name} of a pool plan is {value!r}; it must be a number of seconds above 0.")
    return math.ceil(value)


def _milliseconds(times: Mapping[str, Any], name: str) -> int:
    """Return a time of the chain in whole milliseconds. Raises GatewayError when it is missing."""
    _seconds(times, name)
    return round(float(times[name]) * 1000)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
