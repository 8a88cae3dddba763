#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What a role must know before it touches Docker."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: docker_facts
short_description: Say which Docker a machine has and what runs in it
version_added: 0.1.0
description:
  - Reads the program, the daemon's socket and C(/proc), and needs no Python package on the machine, so it answers
    before Docker or C(requests) are installed.
  - Changes nothing.
options:
  package:
    description: Package whose candidate's version is told where no Docker is installed, so that check mode can plan.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Nothing is changed in either mode.
  diff_mode:
    support: none
    description: Nothing is changed.
author:
  - The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: See whether Docker is there
  metal.serve.docker_facts:
  register: __docker
"""

RETURN = r"""
installed:
  description: Whether a dockerd program is there.
  returned: always
  type: bool
client:
  description: Whether the C(docker) command is there; some distributions have it in a package of its own.
  returned: always
  type: bool
running:
  description: Whether the daemon answers on its socket.
  returned: always
  type: bool
version:
  description: The daemon's version, else the program's, else that of the candidate of O(package), else empty.
  returned: always
  type: str
min_api_version:
  description: Oldest API version that the daemon speaks, or empty.
  returned: always
  type: str
can_validate:
  description: Whether C(dockerd --validate) exists (from 23.0 on).
  returned: always
  type: bool
serving:
  description: Names of our running containers (C(metalserve-*)).
  returned: always
  type: list
  elements: str
apparmor:
  description: Whether the kernel confines containers with AppArmor, so that Docker needs apparmor_parser.
  returned: always
  type: bool
nofile:
  description: Soft limit of open files of the running daemon, or 0.
  returned: always
  type: int
command:
  description: Command line of the running daemon.
  returned: always
  type: list
  elements: str
"""

import json
import re

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.runtime import docker_state, limits


def _json(host: LiveHost, request: str) -> object:
    item = host.docker(request, at="docker")
    return json.loads(item.text) if item.state == "ok" else None


def _daemon(host: LiveHost) -> tuple[int, list[str]]:
    pid = host.file("/run/docker.pid").text.strip()
    if not pid.isdigit():
        return 0, []
    command = host.file(f"/proc/{pid}/cmdline").text.rstrip("\n").split("\n")
    try:
        soft, _hard = limits.parse_proc_limits(host.file(f"/proc/{pid}/limits").text, "nofile")
    except ValueError:
        return 0, []
    return soft, command


def main() -> None:
    """Ask the program and the daemon."""
    module = AnsibleModule(argument_spec={"package": {"type": "str", "default": ""}}, supports_check_mode=True)
    host = LiveHost()
    program = host.which("dockerd")
    answer = _json(host, "/version")
    listing = _json(host, "/containers/json")
    version, min_api = "", ""
    if isinstance(answer, dict):
        version, min_api = str(answer.get("Version", "")), str(answer.get("MinAPIVersion", ""))
    elif program is not None:
        match = re.search(r"version (\S+?),", host.command([program, "--version"]).text)
        version = match.group(1) if match else ""
    elif module.params["package"]:
        # Without its caches apt reads a little longer and writes nothing: check mode leaves no trace.
        options = ["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]
        policy = host.command(["apt-cache", *options, "policy", module.params["package"]], timeout=30.0)
        match = re.search(r"Candidate: (\d\S*)", policy.text)
        version = match.group(1) if match else ""
    nofile, command = _daemon(host)
    module.exit_json(
        changed=False,
        installed=program is not None,
        client=host.which("docker") is not None,
        running=isinstance(answer, dict),
        version=version,
        min_api_version=min_api,
        can_validate=program is not None and "--validate" in host.command([program, "--help"], both=True).text,
        serving=docker_state.serving_containers(listing) if isinstance(listing, list) else [],
        apparmor=host.file("/sys/module/apparmor/parameters/enabled").text.strip() == "Y",
        nofile=nofile,
        command=command,
    )


if __name__ == "__main__":
    main()
