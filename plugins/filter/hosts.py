# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the roles gpu_host and container_runtime. Thin: the work is in module_utils/runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
from ansible_collections.metal.serve.plugins.module_utils.runtime import docker_state, docker_version, preflight


def gpu_host_findings(
    facts: Mapping[str, Any], expected_gpus: Optional[int] = None, driver_branch: str = "580"
) -> dict[str, Any]:
    """Return what stops a GPU node, the packages to install, what is pending and whether it has NVSwitches."""
    try:
        host = preflight.from_facts(HostFacts.from_dict(dict(facts)))
        # 0 stands for "do not count": an inventory may leave the number out.
        found = preflight.findings(host, expected_gpus or None, str(driver_branch))
        return {**preflight.as_dict(found), "nvswitch": host.nvswitch}
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from None


def container_gpu_arguments(docker_version_: str, uuids: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of community.docker.docker_container that give a container these GPUs."""
    try:
        return docker_version.container_gpu_arguments(docker_version_, uuids)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from None


def daemon_gpu_settings(docker_version_: str) -> dict[str, Any]:
    """Return the part of daemon.json that lets containers use GPUs under this Docker."""
    try:
        return docker_version.daemon_gpu_settings(docker_version_)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from None


def docker_decision(docker: Mapping[str, Any], restart_for: Sequence[str]) -> dict[str, str]:
    """Return ``action`` and ``message`` for a running dockerd; ``docker`` is what metal.serve.docker_facts returned."""
    decision = docker_state.decide(restart_for, bool(docker["running"]), docker["serving"])
    return {"action": decision.action, "message": decision.message}


def pending_list(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per thing that is pending, host name and sentence, from the hostvars of ``hosts``."""
    lines = [
        f"{host['inventory_hostname']}: {sentence}"
        for host in hosts
        for name in ("__gpu_host_pending", "__container_runtime_pending")
        for sentence in host.get(name, [])
    ]
    return list(dict.fromkeys(lines))


class FilterModule:
    """Offer the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "gpu_host_findings": gpu_host_findings,
            "container_gpu_arguments": container_gpu_arguments,
            "daemon_gpu_settings": daemon_gpu_settings,
            "docker_decision": docker_decision,
            "pending_list": pending_list,
        }
