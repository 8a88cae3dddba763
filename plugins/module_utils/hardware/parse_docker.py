# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the Docker API's answers, daemon.json, CDI specs and systemd's device drop-ins of containers.

Values that look secret never get into the facts: the name of the variable or option stays, its value becomes ``***``.
"""

from __future__ import annotations

import re
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    CdiDeviceNode,
    CdiSpec,
    Container,
    Docker,
    Mount,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.masking import (
    HIDDEN,
    looks_secret_name,
    mask_arguments,
    mask_secrets,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.yaml_subset import load


def parse_version(text: str) -> Docker:
    """Read ``GET /version``."""
    answer, _error = values.json_object(text)
    docker = Docker()
    if isinstance(values.get(answer, "Server"), dict):
        answer = values.get(answer, "Server")  # what `docker version --format json` prints
    docker.version = values.as_str(values.get(answer, "Version"))
    docker.api_version = values.as_str(values.get(answer, "ApiVersion"))
    docker.min_api_version = values.as_str(values.get(answer, "MinAPIVersion"))
    return docker


TOO_OLD = re.compile(r"client version (\d+\.\d+) is too old\. Minimum supported API version is (\d+\.\d+)")
"""What a daemon answers to a client that it refuses; `docker version` prints it in place of the server's part."""


def parse_client(text: str) -> Docker:
    """Read ``docker version``, plain or as JSON: client and, where it answered, server."""
    docker = Docker()
    answer, _error = values.json_object(text)
    if answer is not None:
        docker.client_version = values.as_str(values.get(answer, "Client", "Version"))
        docker.client_api_version = values.as_str(values.get(answer, "Client", "ApiVersion"))
        docker.version = values.as_str(values.get(answer, "Server", "Version"))
        docker.api_version = values.as_str(values.get(answer, "Server", "ApiVersion"))
        docker.min_api_version = values.as_str(values.get(answer, "Server", "MinAPIVersion"))
        return docker
    side = ""
    for line in text.splitlines():
        if line.startswith(("Client", "Server")):
            side = line[:6]
        match = re.match(r"\A\s*(API version|Version|Minimum API version|MinAPIVersion):\s+(\S+)(?:\s+\((.*)\))?", line)
        if match is None or not side:
            continue
        kind, value, note = match.groups()
        if side == "Client":
            if kind == "Version" and docker.client_version is None:
                docker.client_version = value
            elif kind == "API version" and docker.client_api_version is None:
                docker.client_api_version = value
        elif kind == "Version" and docker.version is None:
            docker.version = value
        elif kind == "API version" and docker.api_version is None:
            docker.api_version = value
            lowest = re.search(r"minimum version (\d+\.\d+)", note or "")
            docker.min_api_version = lowest.group(1) if lowest else None
        elif kind.lower().startswith("min"):
            docker.min_api_version = value
    refused = TOO_OLD.search(text)
    if refused is not None:
        docker.client_api_version = docker.client_api_version or refused.group(1)
        docker.min_api_version = docker.min_api_version or refused.group(2)
    return docker


def read_info(docker: Docker, text: str) -> None:
    """Add what ``GET /info`` says."""
    info, _error = values.json_object(text)
    if info is None:
        return
    docker.storage_driver = values.as_str(info.get("Driver"))
    docker.cgroup_driver = values.as_str(info.get("CgroupDriver"))
    docker.cgroup_version = values.as_str(info.get("CgroupVersion"))
    docker.live_restore = values.as_bool(info.get("LiveRestoreEnabled"))
    docker.swap_limit = values.as_bool(info.get("SwapLimit"))
    docker.memory_limit = values.as_bool(info.get("MemoryLimit"))
    docker.default_runtime = values.as_str(info.get("DefaultRuntime"))
    runtimes = info.get("Runtimes")
    docker.runtimes = sorted(str(name) for name in runtimes) if isinstance(runtimes, dict) else []
    docker.logging_driver = values.as_str(info.get("LoggingDriver"))
    docker.root_dir = values.as_str(info.get("DockerRootDir"))
    docker.init_binary = values.as_str(info.get("InitBinary"))
    docker.warnings = values.as_strings(info.get("Warnings"))
    folders = info.get("CDISpecDirs")
    docker.cdi_spec_dirs = values.as_strings(folders) if isinstance(folders, list) else None


def parse_containers(text: str) -> Optional[list[Container]]:
    """Read ``GET /containers/<id>/json`` or what ``docker inspect`` prints for several; None where it is neither."""
    answer, _error = values.json_value(text)
    found = [_container(one) for one in (answer if isinstance(answer, list) else [answer])]
    known = [one for one in found if one is not None]
    return known if known and len(known) == len(found) else None


def _container(answer: Any) -> Optional[Container]:
    if not isinstance(answer, dict) or not isinstance(answer.get("Id"), str):
        return None
    get, as_str, as_int, as_bool = values.get, values.as_str, values.as_int, values.as_bool
    config, host, state = answer.get("Config"), answer.get("HostConfig"), answer.get("State")
    environment, hidden = _environment(get(config, "Env"))
    command, secret_options = mask_arguments(values.as_strings(get(config, "Cmd")))
    entrypoint, more = mask_arguments(_words(get(config, "Entrypoint")))
    if not command and not entrypoint:
        # What an image brings stands in Path and Args alone where its configuration was not filled in.
        command, secret_options = mask_arguments([*_words(answer.get("Path")), *values.as_strings(answer.get("Args"))])
    device_ids, device_count = _device_requests(get(host, "DeviceRequests"))
    log_options = get(host, "LogConfig", "Config")
    return Container(
        id=answer["Id"],
        name=(as_str(answer.get("Name")) or "").lstrip("/") or None,
        image=as_str(get(config, "Image")),
        image_id=as_str(answer.get("Image")),
        state=as_str(get(state, "Status")),
        exit_code=as_int(get(state, "ExitCode")),
        oom_killed=as_bool(get(state, "OOMKilled")),
        started_at=as_str(get(state, "StartedAt")),
        finished_at=as_str(get(state, "FinishedAt")),
        restart_count=as_int(answer.get("RestartCount")),
        pid=as_int(get(state, "Pid")),
        health=as_str(get(state, "Health", "Status")),
        labels=values.as_table(get(config, "Labels")),
        entrypoint=entrypoint,
        command=command,
        environment=environment,
        secrets_in_environment=hidden,
        secrets_in_arguments=secret_options + more,
        network_mode=as_str(get(host, "NetworkMode")),
        ports=_ports(get(host, "PortBindings")),
        memory_bytes=as_int(get(host, "Memory")),
        memory_swap_bytes=as_int(get(host, "MemorySwap")),
        cpuset_cpus=as_str(get(host, "CpusetCpus")),
        cpuset_mems=as_str(get(host, "CpusetMems")),
        shm_bytes=as_int(get(host, "ShmSize")),
        ipc_mode=as_str(get(host, "IpcMode")),
        pid_mode=as_str(get(host, "PidMode")),
        init=as_bool(get(host, "Init")),
        privileged=as_bool(get(host, "Privileged")),
        read_only=as_bool(get(host, "ReadonlyRootfs")),
        stop_signal=as_str(get(config, "StopSignal")),
        stop_timeout_s=as_int(get(config, "StopTimeout")),
        restart_policy=as_str(get(host, "RestartPolicy", "Name")),
        log_driver=as_str(get(host, "LogConfig", "Type")),
        log_options=values.as_table(log_options) if isinstance(log_options, dict) else None,
        runtime=as_str(get(host, "Runtime")),
        ulimits=_ulimits(get(host, "Ulimits")),
        device_ids=device_ids,
        device_count=device_count,
        devices=_devices(get(host, "Devices")),
        mounts=_mounts(answer.get("Mounts")),
        capabilities_added=values.as_strings(get(host, "CapAdd")),
        security_options=values.as_strings(get(host, "SecurityOpt")),
    )


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else values.as_strings(value)


def _environment(value: Any) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    hidden: list[str] = []
    for line in values.as_strings(value):
        name, _sign, content = line.partition("=")
        masked = HIDDEN if looks_secret_name(name) and content else mask_secrets(content)
        found[name] = masked
        if masked != content or (content and looks_secret_name(name)):
            hidden.append(name)
    return found, hidden


def _device_requests(value: Any) -> tuple[list[str], Optional[int]]:
    ids: list[str] = []
    count: Optional[int] = None
    for request in value if isinstance(value, list) else []:
        if not isinstance(request, dict):
            continue
        ids += values.as_strings(request.get("DeviceIDs"))
        number = values.as_int(request.get("Count"))
        if number:
            count = number
    return ids, count


def _ports(value: Any) -> list[str]:
    found = []
    for inner, bindings in sorted(value.items()) if isinstance(value, dict) else []:
        for binding in bindings if isinstance(bindings, list) else []:
            address = values.as_str(values.get(binding, "HostIp")) or "0.0.0.0"
            found.append(f"{address}:{values.as_str(values.get(binding, 'HostPort')) or ''}->{inner}")
    return found


def _ulimits(value: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in value if isinstance(value, list) else []:
        name, soft, hard = (values.get(one, key) for key in ("Name", "Soft", "Hard"))
        if isinstance(name, str) and values.as_int(soft) is not None and values.as_int(hard) is not None:
            found[name] = [int(soft), int(hard)]
    return found


def _devices(value: Any) -> list[str]:
    paths = [values.as_str(values.get(one, "PathOnHost")) for one in (value if isinstance(value, list) else [])]
    return [path for path in paths if path is not None]


def _mounts(value: Any) -> list[Mount]:
    found = []
    for one in value if isinstance(value, list) else []:
        source = values.as_str(values.get(one, "Name")) or values.as_str(values.get(one, "Source")) or ""
        destination = values.as_str(values.get(one, "Destination")) or ""
        found.append(Mount(source, destination, values.as_bool(values.get(one, "RW"))))
    return found


def image_digests(text: str) -> dict[str, Optional[list[str]]]:
    """Read ``GET /images/<id>/json`` or ``docker image inspect``: image id -> digests that registries know it by."""
    answer, _error = values.json_value(text)
    found: dict[str, Optional[list[str]]] = {}
    for one in answer if isinstance(answer, list) else [answer]:
        name, digests = values.as_str(values.get(one, "Id")), values.get(one, "RepoDigests")
        if name is not None:
            found[name] = values.as_strings(digests) if isinstance(digests, list) else None
    return found


def parse_device_allow(texts: dict[str, str]) -> dict[str, list[str]]:
    """Read ``docker-<id>.scope.d/50-DeviceAllow.conf`` drop-ins: container id -> allowed devices with their rights."""
    found: dict[str, list[str]] = {}
    for path, text in texts.items():
        match = re.search(r"/docker-([0-9A-Za-z_-]{1,80})\.scope\.d/", path)
        if match:
            lines = [line.partition("=")[2].strip() for line in text.splitlines() if line.startswith("DeviceAllow=")]
            found[match.group(1)] = [line for line in lines if line]
    return found


def parse_cdi(path: str, text: str) -> CdiSpec:
    """Read a CDI spec, JSON or YAML."""
    value, error = values.json_value(text)
    if error is not None:
        value, error = load(text)
    spec = CdiSpec(path=path)
    if not isinstance(value, dict):
        spec.error = error or "not a mapping"
        return spec
    spec.kind = values.as_str(value.get("kind"))
    version = value.get("cdiVersion")
    spec.version = str(version) if isinstance(version, (str, float, int)) else None
    edits = [value.get("containerEdits")]
    devices = value.get("devices")
    for device in devices if isinstance(devices, list) else []:
        name = values.get(device, "name")
        if isinstance(name, (str, int)):
            spec.devices.append(str(name))
        edits.append(values.get(device, "containerEdits"))
    seen: set[str] = set()
    for edit in edits:
        nodes = values.get(edit, "deviceNodes")
        for node in nodes if isinstance(nodes, list) else []:
            where = values.as_str(values.get(node, "path"))
            if where and where not in seen:
                seen.add(where)
                spec.device_nodes.append(
                    CdiDeviceNode(
                        where, values.as_int(values.get(node, "major")), values.as_int(values.get(node, "minor"))
                    )
                )
    return spec
