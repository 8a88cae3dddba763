# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The command and the judgement of an all-reduce in the engine's image."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.telemetry import allreduce

INSPECT: dict[str, Any] = {
    "Name": "/metalserve-long-0-0123456789ab",
    "Config": {
        "Image": "10.0.0.5:5000/vllm-openai@sha256:" + "0" * 64,
        "Env": [
            "NCCL_P2P_DISABLE=1",
            "NCCL_DEBUG=WARN",
            "VLLM_API_KEY=secret",
            "PATH=/bin",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        ],
    },
    "HostConfig": {
        "IpcMode": "host",
        "ShmSize": 67108864,
        "CpusetCpus": "0-15",
        "CpusetMems": "0",
        "Runtime": "runc",
        "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b"]}],
    },
}
LOG = """
node-a:90:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node-a:91:91 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM
RESULT {"right": true, "ms": 0.42, "bus_gb_per_s": 159.8}
"""


def changed(**host: Any) -> dict[str, Any]:
    inspect = copy.deepcopy(INSPECT)
    inspect["HostConfig"].update(host)
    return inspect


def test_the_command_takes_image_devices_and_settings_from_the_engine() -> None:
    argv = allreduce.command(INSPECT, 2, 60, "metalserve-allreduce-long-0")
    text = " ".join(argv)
    assert argv[:3] == ["docker", "run", "--rm"]
    assert "--device nvidia.com/gpu=GPU-a --device nvidia.com/gpu=GPU-b" in text
    assert "--ipc host" in text
    assert "--cpuset-cpus 0-15 --cpuset-mems 0" in text
    assert "--env NCCL_P2P_DISABLE=1" in text
    assert "--env NCCL_DEBUG=INFO" in text
    assert "--env WORLD_SIZE=2" in text
    assert argv[argv.index("--entrypoint") + 2] == INSPECT["Config"]["Image"]
    assert "secret" not in text
    assert "NCCL_DEBUG=WARN" not in text


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (
            {"DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": ["GPU-a", "GPU-b"], "Capabilities": [["gpu"]]}]},
            ["--gpus", '"device=GPU-a,GPU-b"'],
        ),
        ({"DeviceRequests": [{"Driver": "", "Count": -1}]}, ["--gpus", "all"]),
        ({"DeviceRequests": None, "Runtime": "nvidia"}, ["--runtime", "nvidia"]),
        (
            {"DeviceRequests": None, "Devices": [{"PathOnHost": "nvidia.com/gpu=GPU-a"}, {"PathOnHost": "/dev/fuse"}]},
            ["--device", "nvidia.com/gpu=GPU-a"],
        ),
    ],
)
def test_gpus_of_every_docker_generation(host: dict[str, Any], expected: list[str]) -> None:
    assert allreduce.device_arguments(changed(**host)) == expected


def test_shared_memory_where_ipc_is_private() -> None:
    text = " ".join(allreduce.command(changed(IpcMode="private"), 2, 60, "x"))
    assert "--shm-size 67108864" in text
    assert "--ipc" not in text


def test_what_cannot_be_run_is_said() -> None:
    with pytest.raises(ValueError, match=r"metalserve-long-0.* has no GPU"):
        allreduce.command(changed(DeviceRequests=[]), 2, 60, "x")
    with pytest.raises(ValueError, match="names no image"):
        allreduce.command({"HostConfig": {}}, 2, 60, "x")


@pytest.mark.parametrize(
    ("code", "log", "verdict", "transport", "words"),
    [
        (0, LOG, "pass", "P2P/CUMEM", "0.42 ms"),
        (0, LOG.replace("P2P/CUMEM", "SHM/direct/direct"), "pass", "SHM/direct", "159.8 GB/s"),
        (0, LOG.replace("P2P/CUMEM", "NET/Socket/0"), "warn", "NET/Socket", "NCCL uses TCP"),
        (0, LOG.replace("true", "false"), "fail", "P2P/CUMEM", "wrong sum"),
        (0, 'RESULT {"hung": true}\n', "fail", "", "cannot talk"),
        (1, "Traceback\nRuntimeError: no NCCL\n", "fail", "", "code 1: RuntimeError: no NCCL"),
        (124, "", "fail", "", "code 124: no output"),
        (0, 'RESULT {"skipped": "GPU 0 has 300 MiB free"}\n', "unknown", "", "1536 MiB are needed"),
        (0, "nothing", "fail", "", "code 0: nothing"),
        (0, "x NCCL INFO NVLS comm 0x1 headRank 0\n" + LOG, "pass", "NVLS, P2P/CUMEM", "0.42"),
    ],
)
def test_outcomes(code: int, log: str, verdict: str, transport: str, words: str) -> None:
    found = allreduce.outcome(code, log)
    assert (found.verdict, found.transport) == (verdict, transport)
    assert words in found.reason


def test_the_script_compiles_and_needs_only_torch() -> None:
    compile(allreduce.SCRIPT, "script", "exec")
    assert json.dumps(allreduce.SCRIPT)
