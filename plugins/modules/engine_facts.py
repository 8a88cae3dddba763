#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_facts
short_description: Say what the engines of a node run in
version_added: 0.1.0
description:
  - Reads the Docker daemon's socket and C(/proc). Needs no Python package on the node and no running Docker.
options:
  root:
    description: Folder of everything Metalserve keeps on a host, for C(open_keys); empty looks at none.
    type: path
    default: ""
attributes:
  check_mode:
    description: Nothing is changed in either mode.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: See what the engines run in
  metal.serve.engine_facts:
    root: /var/lib/metalserve
  register: __engine_facts
"""

RETURN = r"""
docker:
  description: Whether Docker answers, else why not, its version, and whether the kernel can limit swap.
  returned: always
  type: dict
nofile_limit:
  description: The most open files that Docker here may give a container; 0 where it may give any number.
  returned: always
  type: int
containers:
  description: Containers of engines, each with name, running, replica, release, state, image (its id) and restart_policy.
  returned: always
  type: list
  elements: dict
open_keys:
  description: Key files of releases that others than their owner may read.
  returned: always
  type: list
  elements: path
nftables:
  description: Why this kernel or system cannot filter with nftables; empty where it can or nft is not installed yet.
  returned: always
  type: str
firewall_loaded:
  description: Whether the table C(inet metalserve) is loaded.
  returned: always
  type: bool
"""

import contextlib
import glob
import json
import os
import time
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.runtime import limits

FILTER = "%7B%22label%22%3A%5B%22metalserve.replica%22%5D%7D"


DOCKER_S = 60.0
"""A daemon that starts ten containers, or a node that swaps, takes its time; who decides by its answer can wait."""


class NotSaid(Exception):
    """A daemon that is there did not answer what was asked: nothing may be concluded from that."""


def docker_json(host: LiveHost, request: str) -> Any:
    """Return what the daemon answers, None where it says that there is no such thing. Raises NotSaid."""
    item = host.docker(request, at="docker", timeout=DOCKER_S)
    if item.state == "ok":
        return json.loads(item.text)
    if item.state == "absent":
        return None
    raise NotSaid(item.error)


def version_of(host: LiveHost) -> tuple[dict[str, Any], str]:
    """Return what the daemon says of its version and why it says nothing; both are empty where there is no Docker.

    Raises NotSaid where a daemon listens and does not answer in time, or not to this user.
    """
    item = host.docker("/version", at="docker", timeout=DOCKER_S)
    if item.state in ("timeout", "denied"):
        raise NotSaid(item.error)
    return (json.loads(item.text), "") if item.state == "ok" else ({}, item.error)


def nofile_limit(host: LiveHost) -> int:
    """Return the hard limit of the daemon where it may not raise one, else 0."""
    pid = host.file("/run/docker.pid").text.strip()
    base = f"/proc/{pid}" if pid.isdigit() else "/proc/self"
    if limits.has_sys_resource(host.file(f"{base}/status").text):
        return 0
    try:
        return limits.parse_proc_limits(host.file(f"{base}/limits").text, "nofile")[1]
    except ValueError:
        return 0


def containers_of(listing: Any, described: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Return the containers of engines from ``GET /containers/json``; ``described`` gives ``/containers/<id>/json`` of one."""
    found = []
    for item in listing if isinstance(listing, list) else []:
        labels = item.get("Labels") or {}
        policy = ((described(str(item.get("Id"))) or {}).get("HostConfig") or {}).get("RestartPolicy") or {}
        found.append(
            {
                "name": (item.get("Names") or ["/"])[0].lstrip("/"),
                "running": item.get("State") in ("running", "restarting", "paused"),
                "state": str(item.get("State", "")),
                "replica": labels.get("metalserve.replica", ""),
                "release": labels.get("metalserve.release", ""),
                "image": str(item.get("ImageID") or ""),
                "restart_policy": str(policy.get("Name") or "no"),
            }
        )
    return sorted(found, key=lambda entry: str(entry["name"]))


def open_keys(root: str) -> list[str]:
    """Return the keys below ``root`` that are not their owner's alone. A file that goes away meanwhile is none."""
    found = []
    for path in sorted(glob.glob(os.path.join(root, "engines", "*", "releases", "*", "*key*"))) if root else []:
        with contextlib.suppress(OSError):
            found += [path] if os.lstat(path).st_mode & 0o077 else []
    return found


def nftables(host: LiveHost) -> tuple[str, bool]:
    """Return why nft cannot work here (``""``: it can, or it is not installed), and whether our table is loaded."""
    program = host.which("nft")
    if program is None:
        return "", False
    item = host.command([program, "list", "tables"], both=True)
    if item.state == "ok":
        return "", "table inet metalserve" in item.text.splitlines()
    words = (item.text or item.error).strip().splitlines()
    return words[0] if words else "nft fails", False


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec={"root": {"type": "path", "default": ""}}, supports_check_mode=True)
    host = LiveHost(deadline=time.monotonic() + 3 * DOCKER_S)
    info, listing, described = None, [], {}
    try:
        version, silence = version_of(host)
        if version:
            info = docker_json(host, "/info")
            listing = docker_json(host, f"/containers/json?all=1&filters={FILTER}")
            described = {one["Id"]: docker_json(host, f"/containers/{one['Id']}/json") for one in listing or []}
    except NotSaid as error:
        module.fail_json(msg=f"Docker on this node did not say what it runs: {error}. See `systemctl status docker`.")
    fault, loaded = nftables(host)
    module.exit_json(
        changed=False,
        docker={
            "running": bool(version),
            "error": silence,
            "version": str(version.get("Version", "")),
            "swap_limit": bool(info.get("SwapLimit", True)) if isinstance(info, dict) else True,
            "root": str(info.get("DockerRootDir", "")) if isinstance(info, dict) else "",
        },
        nofile_limit=nofile_limit(host),
        containers=containers_of(listing, described.get),
        open_keys=open_keys(module.params["root"]),
        nftables=fault,
        firewall_loaded=loaded,
    )


if __name__ == "__main__":
    main()
