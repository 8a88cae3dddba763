# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""/etc/metalserve/agent.json: read, checked, and read again when it changes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

KINDS = ("vllm", "sglang", "triton_vllm")


class ConfigError(ValueError):
    """The file is missing, not JSON, or a value in it is wrong; the message names key, value and what is right."""


@dataclass(frozen=True)
class Replica:
    """One engine of this node and where it answers; its release says the rest."""

    name: str
    pool: str
    kind: str
    address: str
    port: int

    @property
    def labels(self) -> tuple[str, str, str]:
        """Return the label values of the replica's metrics."""
        return (self.pool, self.name, self.kind)


@dataclass(frozen=True)
class Config:
    """The agent's settings. Times are seconds."""

    listen_address: str
    listen_port: int
    accelerator: str
    expected_gpus: int
    probe_interval_s: float
    probe_timeout_s: float
    engines_dir: str
    docker_socket: str
    replicas: tuple[Replica, ...]


def load(path: str) -> Config:
    """Return the settings in the JSON file ``path``. Raises ConfigError with one sentence."""
    try:
        with open(path, encoding="utf-8") as stream:
            raw = json.load(stream)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return parse(raw, path)


def parse(raw: Any, path: str = "agent.json") -> Config:
    """Return ``raw`` (the parsed JSON) as Config. Raises ConfigError, naming key and value."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}; it must be an object")
    listen = _get(raw, "listen", dict, path)
    accelerator = _get(raw, "accelerator", str, path)
    if accelerator not in ("nvidia", "cpu"):
        raise ConfigError(f"{path}: accelerator is {accelerator!r}; it must be nvidia or cpu")
    interval = float(_get(raw, "probe_interval_s", (int, float), path))
    timeout = float(_get(raw, "probe_timeout_s", (int, float), path))
    if not 0 < timeout < interval:
        raise ConfigError(
            f"{path}: probe_timeout_s is {timeout:g} and probe_interval_s {interval:g}; "
            "the timeout must be above 0 and below the interval, or probes pile up"
        )
    replicas = tuple(_replica(one, path) for one in _get(raw, "replicas", list, path))
    return Config(
        listen_address=_get(listen, "address", str, path),
        listen_port=_get(listen, "port", int, path),
        accelerator=accelerator,
        expected_gpus=_get(raw, "expected_gpus", int, path),
        probe_interval_s=interval,
        probe_timeout_s=timeout,
        engines_dir=_get(raw, "engines_dir", str, path),
        docker_socket=_get(raw, "docker_socket", str, path),
        replicas=replicas,
    )


def changed(path: str, seen: tuple[int, int]) -> tuple[int, int] | None:
    """Return the file's identity (mtime_ns, inode) if it is not ``seen``; None if it is, or while there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    now = (status.st_mtime_ns, status.st_ino)
    return None if now == seen else now


def _replica(raw: Any, path: str) -> Replica:
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a replica is {raw!r}; it must be an object")
    kind = _get(raw, "kind", str, path)
    if kind not in KINDS:
        raise ConfigError(f"{path}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    return Replica(
        name=_get(raw, "replica", str, path),
        pool=_get(raw, "pool", str, path),
        kind=kind,
        address=_get(raw, "address", str, path),
        port=_get(raw, "port", int, path),
    )


def _get(raw: dict[str, Any], key: str, kind: Any, path: str) -> Any:
    if key not in raw:
        raise ConfigError(f"{path}: {key} is missing")
    value = raw[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise ConfigError(f"{path}: {key} is {value!r}; it must be of type {wanted}")
    return value
