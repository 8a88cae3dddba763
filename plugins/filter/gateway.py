# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the gateway's templates: thin shims over module_utils/gateway."""

from __future__ import annotations

from typing import Any, Callable

from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.module_utils.gateway import plan


def _clear(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its GatewayError turned into the error that Ansible prints without a trace."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except plan.GatewayError as error:
            raise AnsibleFilterError(str(error)) from None

    return wrapped


class FilterModule:
    """The filters ``metal.serve.gateway_*``."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "gateway_plan": _clear(plan.gateway_plan),
            "gateway_client_keys": _clear(plan.client_keys),
            "gateway_engine_token": _clear(plan.engine_token),
            "gateway_alt_names": _clear(plan.subject_alt_names),
        }
