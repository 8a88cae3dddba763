# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The engine kinds by name. A new one is a subclass of Adapter, its templates, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ansible_collections.metal.serve.plugins.module_utils.engines.base import Adapter, EngineError
from ansible_collections.metal.serve.plugins.module_utils.engines.sglang import Sglang
from ansible_collections.metal.serve.plugins.module_utils.engines.triton_vllm import TritonVllm
from ansible_collections.metal.serve.plugins.module_utils.engines.vllm import Vllm

ADAPTERS: Mapping[str, type[Adapter]] = {adapter.kind: adapter for adapter in (Vllm, Sglang, TritonVllm)}


def adapter(kind: str) -> Adapter:
    """Return the adapter of an engine kind. Raises EngineError naming those that exist."""
    if kind not in ADAPTERS:
        raise EngineError(f"engine {kind!r} is not known; it must be one of {', '.join(sorted(ADAPTERS))}")
    return ADAPTERS[kind]()
