# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What this machine allows a node container to be, from texts that the kernel, Docker and apt print."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

CAP_SYS_RESOURCE = 24
"""Bit number of the capability, from linux/capability.h."""


def has_capability(proc_status: str, bit: int = CAP_SYS_RESOURCE) -> bool:
    """Return whether the bounding set in the text of ``/proc/1/status`` holds capability number ``bit``.

    The bounding set of process 1 is the most that any container of this machine can be given.
    Raises ValueError when the text has no CapBnd line.
    """
    match = re.search(r"^CapBnd:\s*([0-9a-fA-F]+)\s*$", proc_status, re.MULTILINE)
    if match is None:
        raise ValueError("/proc/1/status has no line CapBnd, so what containers may do here is unknown")
    return bool(int(match.group(1), 16) >> bit & 1)


def node_options(sys_resource: bool, cgroup_version: str) -> dict[str, Any]:
    """Return the docker_container options under which systemd and a nested Docker run on this machine.

    ``cgroup_version`` is Docker's own word for it ("1" or "2"). With every capability a node is a privileged container.
    Without CAP_SYS_RESOURCE a privileged container cannot start ("unable to apply caps"), so it gets all the others.
    On cgroup v2 a privileged node has its own cgroup namespace; otherwise it shares the host's tree, which it must be
    able to write.
    """
    own_namespace = sys_resource and cgroup_version == "2"
    return {
        "privileged": sys_resource,
        "capabilities": [] if sys_resource else ["all"],
        "cap_drop": [] if sys_resource else ["SYS_RESOURCE"],
        "security_opts": [] if sys_resource else ["seccomp=unconfined", "apparmor=unconfined"],
        "cgroupns_mode": "private" if own_namespace else "host",
        "volumes": [] if own_namespace else ["/sys/fs/cgroup:/sys/fs/cgroup:rw"],
    }


def overlapping_routes(subnet: str, ip_json_routes: str, own_device: str = "") -> list[str]:
    """Return the routes of ``ip -json route`` that overlap ``subnet``, as "<destination> dev <device>".

    The default route is not counted, nor are routes of ``own_device``, the lab's own bridge.
    Raises ValueError when ``subnet`` is not an IPv4 network.
    """
    try:
        wanted = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise ValueError(
            f"lab_network_prefix: {subnet} is not a network of 256 addresses; write three numbers such as 172.30.77"
        ) from error
    found = []
    for route in json.loads(ip_json_routes or "[]"):
        destination = str(route.get("dst", "default"))
        if destination == "default" or route.get("dev") == own_device:
            continue
        try:
            network = ipaddress.ip_network(destination, strict=False)
        except ValueError:
            continue
        if isinstance(network, ipaddress.IPv4Network) and network.overlaps(wanted):
            found.append(f"{destination} dev {route.get('dev', '?')}")
    return found


def apt_sources(index_targets: str, codename: str) -> str:
    """Return a sources.list of the distribution's own suites from apt's list of index targets.

    ``index_targets`` holds one line ``uri|suite|component|signed-by`` for each source the host uses. Third-party
    repositories (other suites) are left out: a node needs the distribution alone, and their keys are not its business.
    Returns "" when none of the host's sources is of ``codename``.
    """
    own = {codename, f"{codename}-updates", f"{codename}-security", f"{codename}/updates"}
    components: dict[tuple[str, str, str], list[str]] = {}
    for line in index_targets.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 4 or parts[1] not in own:
            continue
        uri, suite, component, key = parts
        key = key if key.startswith("/") else ""
        names = components.setdefault((uri, suite, key), [])
        if component not in names:
            names.append(component)
    official = {"main", "universe", "restricted", "contrib", "non-free", "non-free-firmware", "multiverse"}
    return "".join(
        f"deb {f'[signed-by={key}] ' if key else ''}{uri} {suite} {' '.join(names)}\n"
        for (uri, suite, key), names in components.items()
        if official.intersection(names)
    )


def recipe_key(paths: Sequence[str], root: str, values: Mapping[str, Any] | None = None) -> str:
    """Return the 12 hex digits that name an image or a download by everything it is made from.

    ``paths`` are files and folders below ``root``: their names, contents and executable bits count, not their times.
    ``values`` are the recipe's variables and the names of what it builds upon. Raises OSError for a missing path.
    """
    digest = hashlib.sha256(json.dumps(values or {}, sort_keys=True, ensure_ascii=False).encode("utf-8"))
    for path in paths:
        for name in _files_below(root, path):
            whole = os.path.join(root, name)
            with open(whole, "rb") as stream:
                content = hashlib.sha256(stream.read()).hexdigest()
            digest.update(f"{name} {os.access(whole, os.X_OK)} {content}\n".encode())
    return digest.hexdigest()[:12]


def _files_below(root: str, path: str) -> list[str]:
    """Return ``path`` when it is a file, else the files of that folder in a fixed order, relative to ``root``."""
    if not os.path.isdir(os.path.join(root, path)):
        return [path]
    found = []
    for folder, folders, files in os.walk(os.path.join(root, path)):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [os.path.relpath(os.path.join(folder, name), root) for name in files]
    return sorted(found)


def unfinished_nodes(
    results: Sequence[Mapping[str, Any]], hostvars: Mapping[str, Mapping[str, Any]], known_hosts: str
) -> list[str]:
    """Return the nodes that still need the lab's key in and their host key written down.

    ``results`` are those of the loop that ran the containers. Writing the host key into ``known_hosts`` is a node's last
    step, so a node that is unchanged and known there is finished, also after a run that was cut off.
    """
    known = {line.split()[0] for line in known_hosts.splitlines() if line.strip()}
    return [
        str(result["item"])
        for result in results
        if result.get("changed") or hostvars[result["item"]]["ansible_host"] not in known
    ]


def standin_images(image: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return name -> {image, environment} of the stand-in engine and of each of its variants.

    A variant is the same files with other environment variables, so that a test can deploy a release that, say, crashes
    when it starts. ``image`` is the plain one; a variant's tag ends in its name and the hash of its variables.
    """
    images: dict[str, dict[str, Any]] = {"standin": {"image": image, "environment": []}}
    for name, variables in sorted(variants.items()):
        environment = [f"{key}={value}" for key, value in sorted(variables.items())]
        key = hashlib.sha256("\n".join(environment).encode("utf-8")).hexdigest()[:6]
        images[f"standin_{name}"] = {"image": f"{image}-{name}-{key}", "environment": environment}
    return images


def wheel_platforms(machine: str, glibc: str) -> list[str]:
    """Return pip's platform tags for ``machine`` (as ``uname -m``) with C library ``glibc`` ("2.36"), newest first.

    pip does not infer that a wheel for an older C library fits a newer one when it downloads for another machine.
    Raises ValueError for a version that is not "2.N" with N of at least 17.
    """
    match = re.fullmatch(r"2\.(\d+)", glibc)
    if match is None or int(match.group(1)) < 17:
        raise ValueError(f"glibc {glibc!r} is not a version this lab knows: 2.17 or newer is needed")
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(int(match.group(1)), 16, -1)]
    return [*tags, f"manylinux2014_{machine}", f"linux_{machine}"]
