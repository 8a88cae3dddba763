# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A short all-reduce over the GPUs of one replica, in the image and with the devices of its engine.

An engine whose GPUs cannot talk to each other starts, and then hangs at its first large request; NCCL that found no
fast path falls back to TCP and says so only in its log. Both are found here in seconds. See docs/gateway.md#verify.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MEGABYTES = 64
MIN_FREE_MEGABYTES = 1536
"""Free memory that each GPU needs: a CUDA context and NCCL's buffers, about 1 GiB, and the payload twice."""

PASSED_ON = re.compile(r"\A(NCCL_|NVIDIA_|CUDA_|VLLM_NCCL)")
"""Settings of the engine that decide how its GPUs talk."""

SCRIPT = r"""
import datetime, json, os, subprocess, sys, time
world, seconds, size = int(os.environ["WORLD_SIZE"]), int(os.environ["SECONDS"]), int(os.environ["BYTES"])
if "RANK" not in os.environ:
    source = os.environ["SOURCE"]
    ranks = [subprocess.Popen([sys.executable, "-c", source], env={**os.environ, "RANK": str(n)}) for n in range(world)]
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
        time.sleep(0.2)
    codes = [r.poll() for r in ranks]
    for r in ranks:
        r.kill()
    if 3 in codes:
        sys.exit(0)
    if any(codes):
        sys.exit(1)
    if None in codes:
        print("RESULT " + json.dumps({"hung": True}), flush=True)
    sys.exit(0)
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
free = torch.cuda.mem_get_info()[0] // 2**20
if free < int(os.environ["MIN_FREE"]):
    print("RESULT " + json.dumps({"skipped": "GPU %d has %d MiB free" % (rank, free)}), flush=True)
    sys.exit(3)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=seconds), device_id=torch.device("cuda", rank))
data = torch.full((size // 4,), float(rank + 1), device="cuda")
dist.all_reduce(data)
right = bool((data == world * (world + 1) / 2).all())
torch.cuda.synchronize()
begin = time.monotonic()
for _ in range(10):
    dist.all_reduce(data)
torch.cuda.synchronize()
took = (time.monotonic() - begin) / 10
if rank == 0:
    bus = size * 2 * (world - 1) / world / took / 1e9
    print("RESULT " + json.dumps({"right": right, "ms": took * 1e3, "bus_gb_per_s": bus}), flush=True)
dist.destroy_process_group()
"""
"""What runs in the container: the parent starts one process per GPU and ends them all when the time is over."""


@dataclass(frozen=True)
class Outcome:
    """``verdict`` is pass, warn, fail or unknown; ``transport`` what NCCL says it uses; ``reason`` one sentence."""

    verdict: str
    transport: str
    reason: str


def device_arguments(inspect: Mapping[str, Any]) -> list[str]:
    """Return the ``docker run`` arguments that give a container the same GPUs as the inspected one.

    Knows CDI device names, device requests of the nvidia driver, and the nvidia runtime. Raises ValueError for none.
    """
    host = inspect.get("HostConfig") or {}
    arguments: list[str] = []
    for request in host.get("DeviceRequests") or []:
        ids = [str(name) for name in request.get("DeviceIDs") or []]
        if request.get("Driver") == "cdi":
            for name in ids:
                arguments += ["--device", name]
        else:
            arguments += ["--gpus", f'"device={",".join(ids)}"' if ids else "all"]
    for device in host.get("Devices") or []:
        path = str(device.get("PathOnHost", ""))
        if path.startswith("nvidia.com/gpu="):
            arguments += ["--device", path]
    if host.get("Runtime") == "nvidia":
        arguments += ["--runtime", "nvidia"]
    if not arguments:
        raise ValueError(f"container {inspect.get('Name', '?')} has no GPU that Docker knows of")
    return arguments


def command(inspect: Mapping[str, Any], world: int, seconds: int, name: str) -> list[str]:
    """Return the ``docker run`` command of the all-reduce over ``world`` GPUs, bounded by ``seconds``.

    ``inspect`` is ``docker inspect`` of the engine's container: image, devices, IPC, shared memory and NCCL settings
    are taken from it. Raises ValueError where it holds no image or no GPU.
    """
    config, host = inspect.get("Config") or {}, inspect.get("HostConfig") or {}
    image = str(config.get("Image") or "")
    if not image:
        raise ValueError("the inspected container names no image")
    arguments = ["docker", "run", "--rm", "--name", name, "--network", "host", "--pull", "never", "--init"]
    arguments += ["--ulimit", "memlock=-1", "--log-driver", "none", "--stop-timeout", "5"]
    if str(host.get("IpcMode")) == "host":
        arguments += ["--ipc", "host"]
    elif host.get("ShmSize"):
        arguments += ["--shm-size", str(host["ShmSize"])]
    if host.get("CpusetCpus"):
        arguments += ["--cpuset-cpus", str(host["CpusetCpus"])]
    if host.get("CpusetMems"):
        arguments += ["--cpuset-mems", str(host["CpusetMems"])]
    arguments += device_arguments(inspect)
    for setting in config.get("Env") or []:
        if PASSED_ON.match(setting) and not setting.startswith(("NCCL_DEBUG=", "NCCL_DEBUG_FILE=")):
            arguments += ["--env", setting]
    values = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET,GRAPH,NVLS",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
        "WORLD_SIZE": str(world),
        "SECONDS": str(seconds),
        "BYTES": str(MEGABYTES * 1024 * 1024),
        "MIN_FREE": str(MIN_FREE_MEGABYTES),
        "SOURCE": SCRIPT,
    }
    for key, value in values.items():
        arguments += ["--env", f"{key}={value}"]
    return [*arguments, "--entrypoint", "python3", image, "-c", SCRIPT]


def transports(log: str) -> list[str]:
    """Return the transports that NCCL's log names, each once, slowest last (NVLS, P2P, SHM, NET/IB, NET/Socket)."""
    found = set(re.findall(r"\bvia (P2P(?:/[A-Za-z]+)?|SHM(?:/[A-Za-z]+)?|NET/[A-Za-z]+)", log))
    if re.search(r"NVLS multicast support is available|NVLS comm 0x", log):
        found.add("NVLS")
    order = ["NVLS", "P2P", "SHM", "NET/IB", "NET/Socket"]
    return sorted(found, key=lambda name: (next((i for i, o in enumerate(order) if name.startswith(o)), 9), name))


def outcome(code: int, log: str) -> Outcome:
    """Return what a run showed, from its exit code and its output."""
    named = transports(log)
    transport = ", ".join(named)
    results = [json.loads(line[7:]) for line in log.splitlines() if line.startswith("RESULT {")]
    result: dict[str, Any] = {key: value for one in results for key, value in one.items()}
    if "skipped" in result:
        return Outcome("unknown", transport, f"Not run: {result['skipped']}, {MIN_FREE_MEGABYTES} MiB are needed.")
    if result.get("hung"):
        return Outcome(
            "fail", transport, "The GPUs did not finish an all-reduce in time: they cannot talk to each other."
        )
    if code != 0 or "right" not in result:
        last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "no output")
        return Outcome("fail", transport, f"The all-reduce ended with code {code}: {last[-300:]}")
    if not result["right"]:
        return Outcome("fail", transport, "The all-reduce gave a wrong sum.")
    numbers = f"{result['ms']:.2f} ms for {MEGABYTES} MiB, {result['bus_gb_per_s']:.1f} GB/s"
    if any(name == "NET/Socket" for name in named):
        return Outcome("warn", transport, f"NCCL uses TCP inside one node ({numbers}): look at memlock, IPC and P2P.")
    return Outcome("pass", transport, numbers)
