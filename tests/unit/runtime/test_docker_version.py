# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""How a container gets its GPUs, for each Docker: the golden arguments."""

from __future__ import annotations

import pytest

from ansible_collections.metal.serve.plugins.module_utils.runtime import docker_version as dv

ONE = "GPU-00000000-0000-0000-0000-000000000001"
TWO = "GPU-00000000-0000-0000-0000-000000000002"
NAMES = [f"nvidia.com/gpu={ONE}", f"nvidia.com/gpu={TWO}"]
CDI = {
    "device_requests": [{"driver": "cdi", "count": 0, "device_ids": NAMES}],
    "env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NVIDIA_VISIBLE_DEVICES": "void"},
}
RUNTIME = {
    "runtime": "nvidia",
    "env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NVIDIA_VISIBLE_DEVICES": ",".join(NAMES)},
}
DAEMON_RUNTIME = {"runtimes": {"nvidia": {"args": [], "path": "/usr/bin/nvidia-container-runtime"}}}
DAEMON_FEATURE = {"features": {"cdi": True}}

BANDS = [
    ("20.10.24+dfsg1", RUNTIME, DAEMON_RUNTIME),
    ("24.0.9", RUNTIME, DAEMON_RUNTIME),
    ("25.0.0", CDI, DAEMON_FEATURE),
    ("26.1.5+dfsg1", CDI, DAEMON_FEATURE),
    ("28.1.1", CDI, DAEMON_FEATURE),
    ("28.2.0", CDI, {}),
    ("28.2.2", CDI, {}),
    ("5:29.0.0-1~ubuntu.24.04~noble", CDI, {}),
]


@pytest.mark.parametrize(("version", "container", "daemon"), BANDS)
def test_the_arguments_of_each_band(version: str, container: dict[str, object], daemon: dict[str, object]) -> None:
    assert dv.container_gpu_arguments(version, [ONE, TWO]) == container
    assert dv.daemon_gpu_settings(version) == daemon


@pytest.mark.parametrize("version", [band[0] for band in BANDS])
def test_a_cpu_container_gets_none(version: str) -> None:
    assert dv.container_gpu_arguments(version, []) == {}


@pytest.mark.parametrize("uuid", ["0", "all", "GPU-1", ONE + "0", "gpu-" + ONE[4:], ONE + "\n"])
def test_only_uuids_are_names(uuid: str) -> None:
    with pytest.raises(ValueError, match="not a GPU UUID"):
        dv.container_gpu_arguments("28.2.2", [uuid])


def test_a_gpu_is_named_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        dv.container_gpu_arguments("28.2.2", [ONE, ONE])


@pytest.mark.parametrize("version", ["", "latest", "20", "x.y.z", "28.2.2garbage\n1"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="not a Docker version"):
        dv.cdi_method(version)
