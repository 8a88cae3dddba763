# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""docs/variables.md from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import (
    HOST,
    INVENTORY,
    RUN,
    UNSET,
    VARIABLES,
    Key,
)

_SCOPES = {
    INVENTORY: (
        "The same for all hosts",
        "They belong in `group_vars/all.yml`, so that every host sees them.",
    ),
    HOST: ("For each host or group", "They may differ from host to host."),
    RUN: ("For one run", "Give them on the command line when they are needed: `-e name=true`."),
}
_TYPES = {
    "bool": "true or false",
    "int": "whole number",
    "number": "number",
    "str": "text",
    "size": "size",
    "list": "list",
    "mapping": "mapping",
    "map": "mapping with free names",
    "any": "anything",
}

_HEAD = """# Variables

Every `metalserve_*` variable. This page is made from `plugins/module_utils/inventory/schema.py` by
`scripts/generate_variable_docs`; change it there.

Nothing is coerced: `"8"` in quotes is text and no number, `"false"` is text and not false, and `0.26` without quotes is
a number and no version. A size is a number of bytes, or text such as `88G` (powers of 1024). Names that end in `_s` are
seconds. Variables of a role are in its own `README.md`. How to write an inventory: [inventory.md](inventory.md).
"""


def render() -> str:
    """Return the whole page in Markdown."""
    lines = [_HEAD]
    for scope, (title, text) in _SCOPES.items():
        lines += [f"## {title}", "", text, ""]
        chosen = [key for key in VARIABLES if key.scope == scope]
        lines += [*_table(chosen), ""]
        for key in chosen:
            for name, nested in _nested(key.name, key):
                lines += [f"### `{name}`", "", *_table(nested), ""]
    return "\n".join(lines).rstrip() + "\n"


def _nested(name: str, key: Key) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """Yield (dotted name, keys) for a key and everything below it that has keys of its own."""
    if key.keys:
        yield name, key.keys
    for inner in key.keys:
        yield from _nested(f"{name}.{inner.name}", inner)
    for kind, keys in (key.variants or {}).items():
        yield f"{name}, type: {kind}", keys
    if key.each is not None:
        yield from _nested(f"{name}[]" if key.type == "list" else f"{name}.<name>", key.each)


def _table(keys: Iterable[Key]) -> list[str]:
    """Return the rows of a Markdown table."""
    lines = ["| name | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        cells = (f"`{key.name}`", _type(key), _default(key), _meaning(key))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _type(key: Key) -> str:
    """Return type and bounds in words."""
    if key.choices:
        return " or ".join(f"`{choice}`" for choice in key.choices)
    text = _TYPES[key.type]
    if key.type == "list" and key.each is not None:
        text = f"list of {_TYPES[key.each.type]}s" if key.each.type != "str" else "list of texts"
    if key.several is not None:
        text += f", or a {_TYPES[key.several.type]}"
    if key.low is not None and key.high is not None:
        text += f", {key.low:.15g} to {key.high:.15g}"
    elif key.low is not None:
        text += f", {key.low:.15g} or more"
    return text


def _default(key: Key) -> str:
    """Return the default, or that the variable must be given."""
    if key.required:
        return "**required**"
    return "" if key.default is UNSET else f"`{json.dumps(key.default)}`"


def _meaning(key: Key) -> str:
    """Return the description with form, example and a word on secrets."""
    text = key.description
    if key.hint and key.hint not in text:
        text += f" Form: {key.hint}."
    if key.example:
        text += f" Example: `{key.example}`."
    if key.secret:
        text += " Never shown in a report."
    return text
