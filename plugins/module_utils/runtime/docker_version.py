# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Docker's version, and what follows from it: how a container is given its GPUs.

CDI by Docker version: before 25 the NVIDIA runtime in cdi mode, from 25 to 28.1 Docker's own CDI behind
``features.cdi``, from 28.2 on it is enabled by itself. (Docker Engine release notes 25.0 and 28.2;
https://docs.docker.com/reference/cli/dockerd/#configure-cdi-devices.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

CDI_KIND = "nvidia.com/gpu"
NVIDIA_RUNTIME_PATH = "/usr/bin/nvidia-container-runtime"

_VERSION = re.compile(r"\A(?:\d+:)?v?(\d+)\.(\d+)(?:\.(\d+))?(?:[^0-9].*)?\Z")
_UUID = re.compile(r"\A(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")


def parse_version(text: str) -> tuple[int, int, int]:
    """Return (major, minor, patch) of ``text``, as ``docker version`` (``20.10.24+dfsg1``) or dpkg
    (``5:28.2.2-1~debian.12``) writes it. Raises ValueError for anything else."""
    match = _VERSION.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Docker version; one looks like 28.2.2 or 20.10.24+dfsg1")
    return int(match.group(1)), int(match.group(2)), int(match.group(3) or 0)


def cdi_method(docker_version: str) -> str:
    """Return how this Docker hands out CDI devices: ``runtime``, ``feature`` or ``native``. Raises ValueError."""
    version = parse_version(docker_version)
    if version < (25, 0, 0):
        return "runtime"
    if version < (28, 2, 0):
        return "feature"
    return "native"


def daemon_gpu_settings(docker_version: str) -> dict[str, Any]:
    """Return the part of daemon.json that lets containers of this Docker use GPUs. Raises ValueError."""
    method = cdi_method(docker_version)
    if method == "runtime":
        return {"runtimes": {"nvidia": {"args": [], "path": NVIDIA_RUNTIME_PATH}}}
    if method == "feature":
        return {"features": {"cdi": True}}
    return {}


def container_gpu_arguments(docker_version: str, uuids: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``community.docker.docker_container`` that give a container these GPUs and no others.

    ``uuids`` are GPU (or MIG) UUIDs as ``nvidia-smi -L`` prints them; an empty list means a CPU container and returns
    no argument. CUDA then numbers the GPUs by bus, not by speed. ``count`` is written out as 0,
    as Docker reports it, so that the comparison on the next run finds no difference. Raises ValueError.
    """
    method = cdi_method(docker_version)
    if not uuids:
        return {}
    for uuid in uuids:
        if _UUID.match(uuid) is None:
            raise ValueError(
                f"{uuid!r} is not a GPU UUID; nvidia-smi -L prints them, as GPU- and 32 hexadecimal digits"
            )
    if len(set(uuids)) != len(uuids):
        raise ValueError(f"the GPU list {list(uuids)} names one GPU twice")
    names = [f"{CDI_KIND}={uuid}" for uuid in uuids]
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if method == "runtime":
        # The runtime reads the names from this variable and injects the CDI devices itself.
        return {"runtime": "nvidia", "env": {**environment, "NVIDIA_VISIBLE_DEVICES": ",".join(names)}}
    # An image built for the old runtime sets NVIDIA_VISIBLE_DEVICES=all; `void` keeps a default runtime from
    # acting on it.
    return {
        "device_requests": [{"driver": "cdi", "count": 0, "device_ids": names}],
        "env": {**environment, "NVIDIA_VISIBLE_DEVICES": "void"},
    }
