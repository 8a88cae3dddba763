# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The engine kinds by name. A new one is a subclass of Adapter, its templates, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines import lint, sglang
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


def lacks(kind: str, version: str, name: str, value: Any) -> tuple[str, str] | None:
    """Return (problem, what to do) where an engine of this version cannot have this setting, None where it can.

    ``name`` is a setting's name, in vLLM's words or the engine's own. Nothing is said of a version without a catalogue.
    """
    if kind == "sglang":
        if name in sglang.REFUSED:
            return "is nothing that SGLang has", f"use {sglang.REFUSED[name]}"
        if name in (*sglang.NAMES, *sglang.IMPLIED, *sglang.TRANSLATED):
            return None
    if kind not in ADAPTERS:
        return None
    found = lint.lacking(kind, version, name)
    if found or name not in lint.known(kind, version):
        return found
    problems = lint.lint(kind, version, {name: value})
    return (problems[0].problem, problems[0].right) if problems else None
