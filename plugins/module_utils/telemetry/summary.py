# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What runs on a node, in a few lines: for the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def node_lines(
    host: str,
    replicas: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    pools: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return one line per replica of a node: what runs, on what, which release, where, and how it answered.

    ``replicas`` comes from module verify_node, ``measured`` and ``pools`` from verify_serving (empty without it).
    """
    direct = {one["replica"]: one for one in measured if one["host"] == host}
    through = {one["pool"]: one for one in pools}
    lines = []
    for replica in replicas:
        asked = direct.get(replica["replica"], {})
        parts = [
            f"{replica['replica']}: {replica['engine']} {replica['version']}".rstrip(),
            f"{replica['model']} {replica['revision']}".rstrip(),
            f"on {replica['devices']}",
            f"release {replica['release'][:12] or 'none'}",
            f"unit {replica['unit']}",
        ]
        if asked:
            parts.append(f"at {asked['address']}")
            parts.append(asked["error"] or f"answered in {asked['seconds']:.2f} s")
            pool = through.get(asked["pool"], {})
            if "ttft_ms" in pool:
                parts.append(
                    f"pool {asked['pool']} first token {pool['ttft_ms']['direct']:.0f} ms direct, "
                    f"{pool['ttft_ms']['gateway']:.0f} ms through the gateway, "
                    f"{pool['itl_ms']['direct']:.1f} and {pool['itl_ms']['gateway']:.1f} ms a token"
                )
        if "allreduce" in replica:
            shown = replica["allreduce"]
            parts.append(
                f"all-reduce {shown['verdict']} over {shown['transport'] or 'no named transport'} ({shown['reason']})"
            )
        lines.append(", ".join(parts))
    return lines or ["no replica is installed here"]


def gateway_lines(pools: Sequence[Mapping[str, Any]], warnings: Sequence[str]) -> list[str]:
    """Return one line per pool with its answer and the judgement of its streams, then the warnings."""
    lines = []
    for pool in pools:
        if pool.get("error"):
            lines.append(f"{pool['pool']}: {pool['error']}")
            continue
        answered = f"{pool['pool']}: answered in {pool['seconds']:.2f} s ({pool['text'].strip()!r})"
        lines.append(f"{answered}; {pool['verdict']}: {pool['reason']}" if pool.get("reason") else answered)
    told = [str(pool["reason"]) for pool in pools if pool.get("reason")]
    return lines + [f"note: {warning}" for warning in warnings if not any(reason in warning for reason in told)]


def device_names(listing: str) -> dict[str, str]:
    """Return GPU name by UUID from the output of ``nvidia-smi -L``."""
    names: dict[str, str] = {}
    for line in listing.splitlines():
        head, _mark, tail = line.partition("(UUID: ")
        if tail and ":" in head:
            names[tail.rstrip(") ")] = f"{head.split(':', 1)[0].strip()} {head.split(':', 1)[1].strip()}"
    return names


def devices_of(gpus: Sequence[str], names: Mapping[str, str], cpu: str) -> str:
    """Return the devices of a replica for people: GPU numbers with names, UUIDs where unknown, else the processor."""
    if not gpus:
        return cpu or "CPU"
    known = [names.get(uuid, uuid) for uuid in gpus]
    return " + ".join(known)
