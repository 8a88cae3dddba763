# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whole hosts as snapshots, for the checks' tests: what a healthy engine node, gateway and monitor would give.

GPUs, driver and NUMA are recorded ones (two H200); what this bundle leaves on a node is made by its own code.
"""

from __future__ import annotations

import functools
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines.registry import adapter
from ansible_collections.metal.serve.plugins.module_utils.models.manifest import FileEntry, Manifest, to_json
from ansible_collections.metal.serve.plugins.module_utils.release.content import container_name, content, release_hash

from ..engines.plans import context, pool_plan, replica_plan

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMI = "commands/nvidia-smi_-q_-x.txt"
ROOT = "files/var/lib/metalserve"
CONTAINER = "c0ffee" + "0" * 58
GPUS = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2)]
ABSENT = ("docker_client_environment", "chrony", "rpm", "dnf_versionlock", "prometheus", "selinux",
          "prometheus_files", "dashboards", "rdma_devices", "model_hashes", "fabric_manager_log", "nginx", "access_logs",
          "cpu_governors", "engine_progress")  # fmt: skip
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         unlimited            unlimited            bytes
Max open files            1048576              1048576              files
"""
WEIGHTS = {"config.json": 700, "model-00001-of-00002.safetensors": 5_000_000_000, "model-00002-of-00002.safetensors": 9,
           "model.safetensors.index.json": 90}  # fmt: skip


@functools.cache
def _recorded() -> dict[str, str]:
    with tarfile.open(FIXTURES / "hardware" / "h200-x2.tar.gz") as tar:
        found = {}
        for member in tar.getmembers():
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is not None:
                found[member.name.partition("/")[2]] = stream.read().decode()
        return found


@functools.cache
def _release() -> tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return hash, release.json, rendered files and container arguments of a replica over two GPUs."""
    plan = replica_plan(gpus=GPUS, cpuset_cpus="0-31", cpuset_mems="0")
    plan["times"] = {**plan["times"], "wedged_after_s": 14}
    pool = pool_plan(parallel={"tensor": 2, "pipeline": 1, "data": 1, "nodes": 1})
    spec = adapter("vllm").spec(context(plan, pool)).to_dict()
    config = "".join(f"{item['name']}: {json.dumps(item['value'])}\n" for item in spec["options"])
    files = {"config.yaml": f"# why\n{config}", "start.sh": '#!/bin/sh\nexec "$@"\n'}
    values = content(spec, files, "d" * 64, {"api-key": "k"})
    name = release_hash(values)
    document = {
        "replica": "short-0", "release": name, "container_name": container_name("short-0", name), "port": 8100,
        "health": {"live": "/health"}, "metrics": spec["metrics"], "content": values, "plan": plan,
    }  # fmt: skip
    return name, document, files, {**spec["container"], "command": list(spec["command"]), "image": spec["image"]}


def release_name() -> str:
    """Return the hash of the healthy node's release."""
    return _release()[0]


def release_folder() -> str:
    """Return where the release lies in the snapshot."""
    return f"{ROOT}/engines/short-0/releases/{release_name()}"


def inspect(**changed: Any) -> dict[str, Any]:
    """Return docker's description of the healthy node's engine container; ``Config__Cmd=…`` sets single values."""
    name, _document, _files, arguments = _release()
    answer: dict[str, Any] = {
        "Id": CONTAINER,
        "Name": f"/{container_name('short-0', name)}",
        "Image": "sha256:" + "1" * 64,
        "RestartCount": 0,
        "State": {"Status": "running", "Pid": 4242, "StartedAt": "2026-11-30T10:00:00.123456789Z"},
        "Config": {
            "Image": arguments["image"],
            "Entrypoint": arguments["command"][:1],
            "Cmd": arguments["command"][1:],
            "Env": ["CUDA_VERSION=12.9.1", "PATH=/usr/bin"],
            "Labels": {**arguments["labels"], "metalserve.release": name},
            "StopTimeout": arguments["stop_timeout"],
        },
        "HostConfig": {
            "Memory": int(arguments["memory"]),
            "MemorySwap": int(arguments["memory_swap"]),
            "CpusetCpus": arguments["cpuset_cpus"],
            "CpusetMems": "0",
            "ShmSize": int(arguments["shm_size"]),
            "IpcMode": arguments["ipc_mode"],
            "Init": True,
            "Privileged": False,
            "NetworkMode": "host",
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "json-file", "Config": arguments["log_options"]},
            "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in GPUS]}],
        },
    }
    for path, value in changed.items():
        *parents, last = path.split("__")
        place = answer
        for parent in parents:
            place = place[parent]
        place[last] = value
    return answer


def smi(text: str = "") -> str:
    """Return the recorded answer of nvidia-smi with the engine's workers on both GPUs."""
    worker = (
        "<processes><process_info><pid>4242</pid><type>C</type><process_name>VLLM::Worker</process_name>"
        "<used_memory>130000 MiB</used_memory></process_info></processes>"
    )
    recorded = text or _recorded()[SMI]
    return re.sub(r"<processes>.*?</processes>", worker, recorded, flags=re.DOTALL)


def unit(name: str, **fields: str) -> str:
    """Return what ``systemctl show`` prints for one unit."""
    known = {
        "Id": name,
        "LoadState": "loaded",
        "ActiveState": "active",
        "SubState": "running",
        "UnitFileState": "enabled",
    }
    return "".join(f"{key}={value}\n" for key, value in {**known, **fields}.items()) + "\n"


def units(**changed: dict[str, str]) -> str:
    """Return the healthy node's units; ``engine={…}`` changes fields of one."""
    names = {
        "docker": "docker.service", "persistenced": "nvidia-persistenced.service", "timesync": "systemd-timesyncd.service",
        "engine": "metalserve-engine@short-0.service",
    }  # fmt: skip
    base = {"engine": {"TimeoutStopUSec": "5min 45s"}}
    return "".join(unit(name, **{**base.get(key, {}), **changed.get(key, {})}) for key, name in names.items())


def manifest(**changed: int) -> str:
    """Return the manifest of the healthy node's model; ``size=…`` and the like change its first weight file."""
    entries = []
    for number, (path, size) in enumerate(sorted(WEIGHTS.items())):
        more = changed if path.startswith("model-00001") else {}
        values = {
            "size": size,
            "mtime_ns": 10**18 + number,
            "ctime_ns": 2 * 10**18 + number,
            "inode": 70 + number,
            **more,
        }
        entries.append(FileEntry(path, sha256=f"{number:064d}", **values))
    return to_json(Manifest("m", "r1", tuple(entries)))


def listing(**changed: Any) -> str:
    """Return the listing of those files; ``path="line"`` replaces a line, None leaves it out."""
    lines = []
    for number, (path, size) in enumerate(sorted(WEIGHTS.items())):
        line = f"{size} {10**18 + number} {2 * 10**18 + number} {70 + number} {path}"
        lines.append(changed.get(path, line))
    return "".join(f"{line}\n" for line in [*lines, *changed.get("more", [])] if line is not None)


FIREWALL = """table inet metalserve {
	set allowed4 {
		type ipv4_addr
		flags interval
		elements = { 10.0.0.1, 10.0.0.2 }
	}

	set allowed6 {
		type ipv6_addr
		flags interval
	}

	set guarded {
		type inet_service
		elements = { 8100, 9100, 9600 }
	}

	chain input {
		type filter hook input priority filter - 10; policy accept;
		iif "lo" accept
		ip saddr @allowed4 accept
		ip6 saddr @allowed6 accept
		tcp dport @guarded tcp flags syn / fin,syn,rst,ack counter packets 8000 bytes 480000 drop
	}
}
"""


def scrape(running: int = 0, waiting: int = 0, tokens: int = 10) -> str:
    """Return an engine's scrape with so much in flight and so many iterations."""
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        f'vllm:iteration_tokens_total_count{{engine="0"}} {tokens}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.1\n'
    )


def index(masked_as: bool = False, files: Any = None, **states: Any) -> str:
    """Return the healthy node's index; ``probe=state`` changes one, ``collected_at=None`` leaves the time out."""
    found = json.loads(_recorded()["index.json"])
    found["masked"] = masked_as
    found["probes"].update(dict.fromkeys(ABSENT, "absent"))
    found["probes"].update({"gpu_processes": "ok", "clock": "ok"})
    at = states.pop("collected_at", found["collected_at"])
    found["probes"].update(states)
    return json.dumps({**found, "collected_at": at, "files": files or {}})


def engine_node() -> dict[str, str]:
    """Return the snapshot of a healthy engine node with two GPUs and one replica over both."""
    name, document, files, _arguments = _release()
    packages = "".join(
        f"ii  {package} {version} amd64\n"
        for package, version in (
            ("libnvidia-compute-580", "580.159.04-0ubuntu1"), ("nvidia-dkms-580-open", "580.159.04-0ubuntu1"),
            ("nvidia-persistenced", "580.159.04-0ubuntu1"), ("unattended-upgrades", "2.9"), ("docker.io", "26.1"),
        )
    )  # fmt: skip
    short = f"{ROOT}/engines/short-0"
    return {
        **{path: text for path, text in _recorded().items() if path != "index.json"},
        SMI: smi(),
        "processes/4242/comm": "VLLM::Worker\n",
        "processes/4242/cgroup": f"0::/system.slice/docker-{CONTAINER}.scope\n",
        "commands/dpkg_-l.txt": packages,
        "commands/apt-mark_showhold.txt": "libnvidia-compute-580\nnvidia-dkms-580-open\nnvidia-persistenced\n",
        "commands/apt-config_dump.txt": 'APT::Periodic::Unattended-Upgrade "1";\n',
        "files/var/log/apt/history.log": "Start-Date: 2026-01-01  06:00:00\nCommandline: apt install x\nEnd-Date: x\n",
        "files/proc/modules": "nvidia 1 2 - Live 0x0\n",
        "files/etc/modprobe.d/metalserve-nouveau.conf": "blacklist nouveau\n",
        "commands/mokutil_--sb-state.txt": "SecureBoot disabled\n",
        "commands/dmesg.txt": "[    1.0] nvidia: loading out-of-tree module taints kernel.\n",
        "commands/systemctl_show.txt": units(),
        "commands/systemctl_show_defaults.txt": "DefaultLimitNOFILE=1048576\nDefaultLimitMEMLOCK=8388608\n",
        "processes/session/limits": LIMITS,
        "processes/dockerd/limits": LIMITS,
        f"containers/{CONTAINER}/limits": LIMITS,
        f"containers/{CONTAINER}/status": "Cpus_allowed_list:\t0-31\nMems_allowed_list:\t0\n",
        "files/proc/sys/net/core/somaxconn": "4096\n",
        "files/proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "files/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
        "files/sys/fs/cgroup/init.scope/memory.swap.max": "max\n",
        "files/proc/cgroups": "#subsys_name hierarchy num_cgroups enabled\nmemory 0 1 1\n",
        "files/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/vda iommu=pt\n",
        "files/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "docker/version.json": json.dumps({"Version": "28.3.0", "ApiVersion": "1.51", "MinAPIVersion": "1.24"}),
        "commands/docker_version.txt": json.dumps({"Client": {"Version": "28.3.0", "ApiVersion": "1.51"}}),
        "docker/info.json": json.dumps({
            "CgroupDriver": "systemd", "LiveRestoreEnabled": True, "SwapLimit": True, "MemoryLimit": True,
            "Runtimes": {"runc": {}}, "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
        }),
        "docker/containers.json": json.dumps([{"Id": CONTAINER}]),
        "docker/containers/engine.json": json.dumps(inspect()),
        f"files/run/systemd/transient/docker-{CONTAINER}.scope.d/50-DeviceAllow.conf": device_allow(),
        "files/etc/docker/daemon.json": json.dumps(
            {"live-restore": True, "log-opts": {"max-size": "100m", "max-file": "3"}}
        ),
        "stat/docker.sock.txt": "0660 root docker 0 0 socket /run/docker.sock\n",
        "commands/ss_-Hltnp.txt": 'LISTEN 0 4096 10.0.0.11:8100 0.0.0.0:* users:(("python3",pid=4242,fd=3))\n',
        "commands/nft_list_ruleset.txt": FIREWALL,
        "stat/secrets.txt": "0700 root root 0 0 directory /etc/metalserve/secrets\n0400 root root 9 0 file /x/api-key\n",
        "files/etc/cdi/nvidia.yaml": (
            "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n    deviceNodes:\n"
            "    - path: /dev/nvidia-uvm\n      major: 238\n      minor: 0\n"
            "    - path: /dev/nvidia0\n      major: 195\n      minor: 0\n"
        ),
        f"{short}/current": f"releases/{name}\n".rpartition("/")[2],
        f"{short}/releases/{name}/release.json": json.dumps(document),
        **{f"{short}/releases/{name}/{file}": text for file, text in files.items()},
        "health/short-0.txt": "\n",
        "scrapes/short-0.prom": scrape(),
        "scrapes/node.prom": "node_cpu_seconds_total 1\n",
        "scrapes/agent.prom": "metalserve_agent_info 1\n",
        f"{ROOT}/models/m/r1.manifest.json": manifest(),
        f"{ROOT}/models/m/r1/model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        ),
        "stat/models/m/r1.txt": listing(),
        "files/etc/os-release": 'ID=ubuntu\nVERSION_ID="24.04"\n',
        "commands/systemd-detect-virt.txt": "none\n",
        "listings/adjtimex.txt": "state=0\nstatus=8193\nmaxerror_us=1\nesterror_us=1\n",
        **{f"disks/{place}.txt": df(path) for place, path in (("root", "/"), ("var/lib/docker", "/var/lib/docker"))},
        "index.json": index(),
    }  # fmt: skip


def df(path: str, free: int = 500 * 1024**3) -> str:
    """Return what ``df -P -B1`` prints."""
    return f"Filesystem 1-blocks Used Available Capacity Mounted on\n/dev/vda 1000000000000 5 {free} 50% {path}\n"


def device_allow(*without: str) -> str:
    """Return the device drop-in of a GPU container, without the lines that hold one of these words."""
    lines = ["/dev/char/1:3 rwm", "/dev/char/1:9 rwm", "/dev/char/5:0 rwm", "/dev/char/10:200 rwm", "char-136 rwm",
             "/dev/char/195:0 rw", "/dev/char/195:254 rw", "/dev/char/195:255 rw", "/dev/char/238:0 rw"]  # fmt: skip
    kept = [line for line in lines if not any(word in line for word in without)]
    return "[Scope]\nDeviceAllow=\n" + "".join(f"DeviceAllow={line}\n" for line in kept)


def changed(host: Mapping[str, str], **texts: Any) -> dict[str, str]:
    """Return a host with some texts replaced, by path with ``__`` for ``/``; None leaves a file out."""
    made = {**host, **{path.replace("__", "/"): text for path, text in texts.items()}}
    return {path: text for path, text in made.items() if text is not None}
