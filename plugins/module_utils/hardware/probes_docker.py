# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Probes of the container runtime."""

from __future__ import annotations

from urllib.parse import quote

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ABSENT,
    OK,
    Item,
    Probe,
    command_path,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_host import file_probe, files_probe, stat_item

MAX_CONTAINERS = 200
DROP_INS = "/run/systemd/transient/docker-*.scope.d/50-DeviceAllow.conf"


def _version(host: LiveHost) -> list[Item]:
    return [host.docker("/version", "docker/version.json", 10.0)]


def _info(host: LiveHost) -> list[Item]:
    return [host.docker("/info", "docker/info.json", 10.0)]


def _client(host: LiveHost) -> list[Item]:
    argv = ["docker", "version", "--format", "{{json .}}"]
    found = host.command(argv, 10.0, (0, 1), at=command_path(["docker", "version"]), missing=ABSENT)
    return [found]


def _socket(host: LiveHost) -> list[Item]:
    return [stat_item(host, "stat/docker.sock.txt", ["/run/docker.sock"])]


def _containers(host: LiveHost) -> list[Item]:
    """List all containers, then describe each, and each image once."""
    listing = host.docker("/containers/json?all=1", "docker/containers.json", 10.0)
    items = [listing]
    answer, error = values.json_value(listing.text) if listing.state == OK else (None, None)
    if error is not None:
        return [Item(listing.path, "error", listing.text, f"docker /containers/json: {error}")]
    images: set[str] = set()
    for one in (answer if isinstance(answer, list) else [])[:MAX_CONTAINERS]:
        number, image = values.get(one, "Id"), values.get(one, "ImageID")
        if not isinstance(number, str):
            continue
        found = host.docker(f"/containers/{quote(number)}/json", f"docker/containers/{number[:64]}.json")
        if found.state != ABSENT:  # a container that ended meanwhile is no fault
            items.append(found)
        if isinstance(image, str) and image not in images:
            images.add(image)
            name = image.replace(":", "_")[:80]
            described = host.docker(f"/images/{quote(image)}/json", f"docker/images/{name}.json")
            if described.state != ABSENT:
                items.append(described)
    return items


DOCKER_PROBES: tuple[Probe, ...] = (
    Probe("docker_version", "docker", ("docker/version.json",), _version, 11.0, says="daemon and its API versions"),
    Probe("docker_info", "docker", ("docker/info.json",), _info, 11.0, says="how the daemon is set up"),
    Probe(
        "docker_client",
        "docker_client",
        (command_path(["docker", "version"]),),
        _client,
        11.0,
        says="the docker command",
    ),
    file_probe("docker_daemon_json", "docker", "/etc/docker/daemon.json", "configuration of the daemon"),
    files_probe(
        "docker_client_environment",
        "docker_client",
        ("/etc/environment", "/etc/profile.d/*.sh"),
        "DOCKER_API_VERSION for all users",
    ),
    Probe("docker_socket", "docker", ("stat/docker.sock.txt",), _socket, says="mode and owner of docker.sock"),
    Probe(
        "docker_containers",
        "docker",
        ("docker/containers.json", "docker/containers/*.json", "docker/images/*.json"),
        _containers,
        30.0,
        says="containers and their images",
    ),
    files_probe("docker_device_allow", "docker", (DROP_INS,), "device rules of running containers"),
    files_probe(
        "cdi_specs",
        "cdi",
        ("/etc/cdi/*.yaml", "/etc/cdi/*.json", "/var/run/cdi/*.yaml", "/var/run/cdi/*.json"),
        "CDI specs",
    ),
)
