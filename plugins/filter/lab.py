# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the role lab: thin shims over module_utils/lab/host.py."""

from __future__ import annotations

from typing import Any, Callable

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.lab import host


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its ValueError turned into the one-sentence error that Ansible prints."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise AnsibleFilterError(str(error)) from error

    return call


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return filter name -> function."""
        return {
            "lab_sys_resource": _plain(host.has_capability),
            "lab_node_options": _plain(host.node_options),
            "lab_overlapping_routes": _plain(host.overlapping_routes),
            "lab_apt_sources": _plain(host.apt_sources),
            "lab_recipe_key": _plain(host.recipe_key),
            "lab_standin_images": _plain(host.standin_images),
            "lab_unfinished_nodes": _plain(host.unfinished_nodes),
            "lab_wheel_platforms": _plain(host.wheel_platforms),
        }
