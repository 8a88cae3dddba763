# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What every engine kind must say about itself, in one small interface.

An adapter turns plans into a ``Spec``: the files that are rendered, the container, how to see that it serves, how
it stops, what it calls its metrics. Nothing here runs anything: the role, the gate of a redeploy and the agent
act on the Spec.
"""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CONFIG_DIR = "/etc/metalserve"
MODEL_DIR = "/model"
CACHE_DIR = "/cache"
RELEASE = "{release}"
"""Stands for the release's folder in a mount's source: its name is the hash over all of this."""

_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})\Z")
_VERSION = re.compile(r"\A[vV]?(\d+)\.(\d+)(?:\.(\d+))?")


class EngineError(ValueError):
    """A plan that this engine cannot run; the text names the variable, the value and what would be right."""


@dataclass(frozen=True)
class Context:
    """What an adapter is given: the two plans and what the node is like.

    ``root`` is the folder of everything on the node, ``model_path`` the sealed folder of the model. ``pool_env``
    are the variables that the pool's description adds. ``gpu_arguments`` is what container_gpu_arguments
    returned. ``swap_limit``: the kernel can limit swap. ``nofile_limit``: the most open files that Docker there
    may give (0: any). ``user``: user and group of the engine's process.
    """

    replica: Mapping[str, Any]
    pool: Mapping[str, Any]
    root: str
    model_path: str
    pool_env: Mapping[str, str] = field(default_factory=dict)
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)
    swap_limit: bool = True
    nofile_limit: int = 0
    user: str = "0:0"
    log_size: str = "100m"
    log_files: int = 5
    start_timeout_s: int = 0

    @property
    def settings(self) -> Mapping[str, Any]:
        """The planned settings, in the neutral vocabulary (vLLM's names with underscores)."""
        settings: Mapping[str, Any] = self.replica["settings"]
        return settings

    @property
    def times(self) -> Mapping[str, float]:
        """The chain of times, seconds."""
        times: Mapping[str, float] = self.replica["times"]
        return times

    def parallel(self, which: str) -> int:
        """Return ``tensor``, ``pipeline`` or ``data`` parallelism; the plan's settings win over the pool's."""
        size = self.settings.get(f"{which}_parallel_size")
        return int(size if size is not None else self.pool.get("parallel", {}).get(which, 1))


@dataclass(frozen=True)
class Option:
    """One line of an engine's configuration: its name in that engine, its value, and why it has it."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class File:
    """A file of the release: its name there, its template below templates/engine/, its mode in octal digits."""

    name: str
    template: str
    mode: str = "0444"


@dataclass(frozen=True)
class Mount:
    """A bind mount; ``source`` may begin with ``{release}``."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Health:
    """How to ask the engine. ``live`` answers 200 while it lives; ``models`` lists what it serves; ``completion`` with
    ``body`` (POST, JSON) gives a real answer whose text lies at ``answer`` (keys and indexes, outermost first)."""

    live: str
    models: str
    completion: str
    body: Mapping[str, Any]
    answer: tuple[Any, ...]
    metrics: str
    metrics_port: int


@dataclass(frozen=True)
class Drain:
    """How the engine ends: ``graceful`` finishes what is in flight within ``shutdown_s`` seconds of ``signal``;
    ``tells_health`` whether its health answer shows that it is ending."""

    signal: str
    shutdown_s: float
    graceful: bool
    tells_health: bool


@dataclass(frozen=True)
class Log:
    """What the engine's log says while it starts. ``fatal``: patterns after which it will never serve, though its
    container may stay up. ``stages``: (pattern, words) in the order of a start; the last that matched is where it
    is. ``core``: pattern of
    the title of the process that does the work, ``""`` where there is no separate one."""

    fatal: tuple[str, ...]
    stages: tuple[tuple[str, str], ...]
    core: str


@dataclass(frozen=True)
class Metrics:
    """Names on the wire; ``""`` where the engine has none."""

    running: str
    waiting: str
    kv_usage: str
    progress: str
    rejected: str


@dataclass(frozen=True)
class Spec:
    """Everything that follows from the plans for one replica.

    ``headless``: its part of a replica over several nodes that answers no requests itself.
    """

    kind: str
    version: str
    replica: str
    pool: str
    image: str
    model: str
    revision: str
    model_path: str
    served_name: str
    address: str
    port: int
    gpus: tuple[str, ...]
    files: tuple[File, ...]
    secrets: tuple[str, ...]
    options: tuple[Option, ...]
    environment: Mapping[str, str]
    command: tuple[str, ...]
    mounts: tuple[Mount, ...]
    container: Mapping[str, Any]
    unit: Mapping[str, Any]
    health: Health
    drain: Drain
    log: Log
    metrics: Metrics
    start_timeout_s: int
    cache_dir: str
    headless: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the Spec as plain JSON values."""
        return asdict(self)


class Adapter(ABC):
    """One engine kind. A new kind is a subclass, a folder of templates and a line in the registry."""

    kind: str

    @abstractmethod
    def options(self, context: Context) -> list[Option]:
        """Return the configuration. Raises EngineError for a setting that this engine or version does not have."""

    @abstractmethod
    def files(self, context: Context) -> tuple[File, ...]:
        """Return the files that the release needs beside release.json."""

    @abstractmethod
    def environment(self, context: Context) -> dict[str, str]:
        """Return the environment that this kind needs. No secrets and nothing that differs between nodes."""

    @abstractmethod
    def command(self, context: Context) -> tuple[str, ...]:
        """Return the whole command line, program first."""

    @abstractmethod
    def health(self, context: Context) -> Health:
        """Return how to ask it."""

    @abstractmethod
    def drain(self, context: Context) -> Drain:
        """Return how it ends."""

    @abstractmethod
    def log(self) -> Log:
        """Return what its log says."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Return what it calls its metrics."""

    def spec(self, context: Context) -> Spec:
        """Return the whole Spec of one replica. Raises EngineError."""
        replica = context.replica
        image = str(replica["image"])
        digest = image_digest(image)
        cache = f"{context.root}/cache/{digest[:12]}"
        environment = {
            **common_environment(),
            **self.environment(context),
            **{str(key): str(value) for key, value in replica.get("environment", {}).items()},
            **{str(key): str(value) for key, value in context.pool_env.items()},
            **{str(key): str(value) for key, value in context.gpu_arguments.get("env", {}).items()},
        }
        mounts = (
            *self.release_mounts(context),
            Mount(context.model_path, MODEL_DIR),
            Mount(cache, CACHE_DIR, read_only=False),
        )
        return Spec(
            kind=self.kind,
            version=str(replica["engine_version"]),
            replica=str(replica["replica"]),
            pool=str(replica["pool"]),
            image=image,
            model=str(replica["model"]),
            revision=str(replica["revision"]),
            model_path=context.model_path,
            served_name=str(context.pool["served_name"]),
            address=str(replica["address"]),
            port=int(replica["port"]),
            gpus=tuple(replica.get("gpus", ())),
            files=self.files(context),
            secrets=self.secrets(),
            options=tuple(self.options(context)),
            environment=environment,
            command=self.command(context),
            mounts=mounts,
            container=container_arguments(context, str(replica["replica"])),
            unit={"stop_s": round(context.times["unit_stop_s"])},
            health=self.health(context),
            drain=self.drain(context),
            log=self.log(),
            metrics=self.metrics(),
            start_timeout_s=context.start_timeout_s or start_timeout(replica),
            cache_dir=cache,
            headless=bool((replica.get("multi_node") or {}).get("headless", False)),
        )

    def secrets(self) -> tuple[str, ...]:
        """Return the names of the secret files in the release that the engine reads."""
        return ("api-key",)

    def release_mounts(self, context: Context) -> tuple[Mount, ...]:
        """Return how the release's files get into the container."""
        names = [*(item.name for item in self.files(context)), *self.secrets()]
        return tuple(Mount(f"{RELEASE}/{name}", f"{CONFIG_DIR}/{name}") for name in names)


def completion_body(model: str) -> dict[str, Any]:
    """Return a small, deterministic completion request for an OpenAI server."""
    return {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def image_digest(image: str) -> str:
    """Return the 64 hexadecimal digits of an image given by digest. Raises EngineError for a tag."""
    match = _DIGEST.search(image)
    if match is None:
        raise EngineError(f"image {image!r} has no digest; write name@sha256:<64 hexadecimal digits>")
    return match.group(1)


def version_of(text: str) -> tuple[int, int, int]:
    """Return (major, minor, patch) of an engine version. Raises EngineError."""
    match = _VERSION.match(str(text))
    if match is None:
        raise EngineError(f'engine_version {text!r} is not a version; write what the image holds, such as "0.26.0"')
    return int(match.group(1)), int(match.group(2)), int(match.group(3) or 0)


def common_environment() -> dict[str, str]:
    """Return what every engine gets: no call home, and every cache on the volume that outlives the container."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "HOME": f"{CACHE_DIR}/home",
        "XDG_CACHE_HOME": CACHE_DIR,
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_DIR}/inductor",
        "TRITON_CACHE_DIR": f"{CACHE_DIR}/triton",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }


def start_timeout(replica: Mapping[str, Any]) -> int:
    """Return the seconds a start may take before it counts as failed: 1.5 x a cold start, bounded below.

    A cold start of 14 GiB of weights took 222 s on an H200 (of it 130 s compilation and autotuning); reading
    weights from a cold disk is taken as 0.25 GiB/s.
    """
    weights = float(replica.get("memory", {}).get("weights_gib", 0.0))
    return int(600 + 1.5 * weights / 0.25)


def container_arguments(context: Context, name: str) -> dict[str, Any]:
    """Return the container's limits and flags, named as community.docker.docker_container names them."""
    replica = context.replica
    limits = replica["container"]
    nofile = int(limits["nofile"])
    if context.nofile_limit:
        nofile = min(nofile, context.nofile_limit)
    arguments: dict[str, Any] = {
        "memory": str(int(limits["memory_bytes"])),
        "ipc_mode": str(limits["ipc_mode"]),
        "ulimits": [f"nofile:{nofile}:{nofile}"],
        "stop_timeout": round(context.times["container_stop_s"]),
        "user": context.user,
        "network_mode": "host",
        "init": True,
        # The unit restarts it, not Docker: a previous release must never come back by itself.
        "restart_policy": "no",
        "cap_drop": ["ALL"],
        "security_opts": ["no-new-privileges:true"],
        "log_driver": "json-file",
        "log_options": {"max-size": context.log_size, "max-file": str(context.log_files)},
        "labels": {
            "metalserve.replica": name,
            "metalserve.pool": str(replica["pool"]),
            "metalserve.port": str(replica["port"]),
            "metalserve.kind": str(replica["engine"]),
        },
    }
    if context.swap_limit:
        arguments["memory_swap"] = str(int(limits["memory_swap_bytes"]))
    if limits["ipc_mode"] != "host":
        arguments["shm_size"] = str(int(limits["shm_bytes"]))
    if replica.get("cpuset_cpus"):
        arguments["cpuset_cpus"] = str(replica["cpuset_cpus"])
        arguments["cpuset_mems"] = str(replica.get("cpuset_mems", ""))
    if replica.get("gpus"):
        # NCCL and GPUDirect pin memory; Docker's 8 MiB would silently turn them to TCP.
        arguments["ulimits"].append("memlock:-1:-1")
    for key in ("runtime", "device_requests"):
        if key in context.gpu_arguments:
            arguments[key] = context.gpu_arguments[key]
    return arguments


def reason(context: Context, key: str, otherwise: str) -> str:
    """Return the plan's reason for a setting, or ``otherwise``; on one line, as it becomes a comment."""
    reasons: Mapping[str, str] = context.replica.get("reasons", {})
    pool_reasons: Mapping[str, str] = context.pool.get("reasons", {})
    for name in (f"settings.{key}", key):
        for source in (reasons, pool_reasons):
            if name in source:
                return " ".join(str(source[name]).split())
    return otherwise


def nearest(name: str, known: Sequence[str]) -> str:
    """Return `` (nearest: x)`` for a misspelt name, or ``""``."""
    found = difflib.get_close_matches(name, known, 1, 0.6)
    return f" (nearest: {found[0]})" if found else ""
