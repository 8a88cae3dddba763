# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters for scrape targets, expected counts and the agent's settings. Thin: the work is in module_utils/telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.planner.pools import HOST_VARIABLES
from ansible_collections.metal.serve.plugins.module_utils.runtime.docker_version import cdi_method
from ansible_collections.metal.serve.plugins.module_utils.telemetry import alertmanager as _alertmanager
from ansible_collections.metal.serve.plugins.module_utils.telemetry import contract as _contract
from ansible_collections.metal.serve.plugins.module_utils.telemetry import targets as _targets

GROUPS = ("engines", "gateways", "monitors")


def _hosts(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}
    for host in {host for group in GROUPS for host in groups.get(group, [])}:
        values = hostvars[host]
        known[host] = {name: values[name] for name in HOST_VARIABLES if name in values}
    return known


def scrape_targets(
    plans: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Any], dcgm: bool
) -> list[dict[str, Any]]:
    """Return all scrape targets as the content of one target file, from the inventory alone."""
    return _targets.target_file(_targets.scrape_targets(plans, groups, _hosts(groups, hostvars), dcgm))


def expected(
    plans: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Any], dcgm: bool
) -> dict[str, Any]:
    """Return how many targets, replicas and GPUs the inventory promises."""
    return _targets.expected(plans, groups, _hosts(groups, hostvars), dcgm)


def agent_settings(
    plans: Sequence[Mapping[str, Any]], host: str, hostvars: Mapping[str, Any], **settings: Any
) -> dict[str, Any]:
    """Return the settings of the agent on ``host``."""
    values = hostvars[host]
    known = {name: values[name] for name in HOST_VARIABLES if name in values}
    return _targets.agent_settings(plans, host, known, **settings)


def all_gpus_options(docker_version: str) -> str:
    """Return the ``docker run`` options that give a container all GPUs through CDI, as this Docker takes them."""
    try:
        method = cdi_method(docker_version)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from None
    if method == "runtime":
        return "--runtime=nvidia --env=NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=all"
    return "--device=nvidia.com/gpu=all --env=NVIDIA_VISIBLE_DEVICES=void"


def known_since(metric: str, version: str) -> bool:
    """Return whether an engine of ``version`` exports ``metric``; True where no version is said."""
    return not version or _contract.known_since(metric, version)


def alertmanager_refusal(result: Mapping[str, Any]) -> str:
    """Return why Alertmanager's configuration was not taken, from the failed task, without the configuration's values."""
    return _alertmanager.refusal(result)


class FilterModule:
    """Offer the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "scrape_targets": scrape_targets,
            "expected": expected,
            "agent_settings": agent_settings,
            "known_since": known_since,
            "all_gpus_options": all_gpus_options,
            "alertmanager_refusal": alertmanager_refusal,
        }
