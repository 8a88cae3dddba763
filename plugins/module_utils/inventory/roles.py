# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A role's argument_specs as ``Key`` values, so that role variables are judged like the inventory-wide ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import UNSET, Key

_TYPES = {
    "bool": "bool",
    "dict": "mapping",
    "float": "number",
    "int": "int",
    "list": "list",
    "path": "str",
    "str": "str",
}


_NUMBER = Key("", "int", "")
"""Roles take many whole numbers as text (kernel settings); without quotes they mean the same."""


def options_of(role: str, specs: Any) -> dict[str, Key]:
    """Return the variables of a role by name, from the content of its meta/argument_specs.yml.

    Only names with the role's prefix are the role's own. Anything that is no argument spec gives none.
    """
    found: dict[str, Key] = {}
    entries = specs.get("argument_specs") if isinstance(specs, Mapping) else None
    for entry in entries.values() if isinstance(entries, Mapping) else ():
        options = entry.get("options") if isinstance(entry, Mapping) else None
        for name, spec in options.items() if isinstance(options, Mapping) else ():
            if isinstance(name, str) and name.startswith(f"{role}_") and isinstance(spec, Mapping):
                found[name] = _key(name, spec)
    return found


def _key(name: str, spec: Mapping[str, Any]) -> Key:
    """Return one option, nested ones included."""
    kind = _TYPES.get(str(spec.get("type", "str")), "any")
    choices = spec.get("choices")
    nested = spec.get("options")
    keys = (
        tuple(_key(key, inner) for key, inner in nested.items() if isinstance(inner, Mapping))
        if isinstance(nested, Mapping)
        else ()
    )
    each = None
    if kind == "list" and spec.get("elements") in _TYPES:
        each = Key("", _TYPES[spec["elements"]], "", keys=keys, open=not keys)
    words = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    return Key(
        name,
        kind,
        "",
        default=spec.get("default", UNSET),
        required=bool(spec.get("required")),
        choices=tuple(choices) if kind == "str" and words and isinstance(choices, list) else (),
        keys=keys if kind == "mapping" else (),
        each=each,
        several=_NUMBER if kind == "str" else None,
        open=not keys,
    )
