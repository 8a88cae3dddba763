# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/facts.md, the table of docs/snapshots.md, schemas/facts.json and schemas/snapshot.json from the code.

With ``collections/`` on the path, run this file as a module with the repository's root as its argument to write them; a
test compares.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import NONE, HostFacts, hints
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import STATES
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import BASE, PROBES

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
BEGIN, END = "<!-- probes: made from the code -->", "<!-- end of probes -->"


def classes() -> list[type[Any]]:
    """Return HostFacts and every dataclass inside it, in the order in which they are met."""
    found: list[type[Any]] = []

    def visit(hint: Any) -> None:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if hint not in found:
                found.append(hint)
                for inner in hints(hint).values():
                    visit(inner)
            return
        for inner in typing.get_args(hint):
            visit(inner)

    visit(HostFacts)
    return found


def _schema_of(hint: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        inner = _schema_of(next(arg for arg in args if arg is not NONE))
        if isinstance(inner.get("type"), str):
            return {**inner, "type": [inner["type"], "null"]}
        return {"anyOf": [inner, {"type": "null"}]} if inner else {}
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(args[1])}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return {"type": names[hint]} if hint in names else {}


def _says(one: dataclasses.Field[Any]) -> str:
    unit = one.metadata.get("unit")
    return str(one.metadata["says"]) + (f" [{unit}]" if unit else "")


def facts_schema() -> dict[str, Any]:
    """Return the JSON Schema of HostFacts."""
    definitions: dict[str, Any] = {}
    for kind in classes():
        types = hints(kind)
        definitions[kind.__name__] = {
            "type": "object",
            "description": (kind.__doc__ or "").strip().splitlines()[0],
            "additionalProperties": False,
            "required": [one.name for one in dataclasses.fields(kind)],
            "properties": {
                one.name: {**_schema_of(types[one.name]), "description": _says(one)} for one in dataclasses.fields(kind)
            },
        }
    definitions["ProbeState"]["properties"]["state"]["enum"] = list(STATES)
    return {
        "$schema": _DRAFT,
        "title": "HostFacts",
        "description": "What is known about one machine. null: not known, which is never the same as absent.",
        "$ref": "#/$defs/HostFacts",
        "$defs": definitions,
    }


def snapshot_schema() -> dict[str, Any]:
    """Return the JSON Schema of a snapshot's index.json."""
    state = {"type": "string", "enum": list(STATES)}
    entry = {
        "description": "how the reading went: the state alone, or with the reason and the seconds it took",
        "anyOf": [
            state,
            {
                "type": "object",
                "required": ["state"],
                "properties": {
                    "state": state,
                    "error": {"type": "string"},
                    "seconds": {"type": "number", "minimum": 0},
                },
            },
        ],
    }
    return {
        "$schema": _DRAFT,
        "title": "index.json of a snapshot",
        "type": "object",
        "properties": {
            "schema_version": {"const": 1},
            "collected_at": {"type": "string", "description": "UTC, as 2026-01-31T00:00:00Z"},
            "as_root": {"type": "boolean", "description": "whether root read the machine"},
            "masked": {"type": "boolean", "description": "whether names, addresses and serial numbers are stand-ins"},
            "probes": {
                "type": "object",
                "description": "probe name (docs/snapshots.md) -> state",
                "additionalProperties": entry,
            },
            "files": {
                "type": "object",
                "description": "path in the snapshot -> state, for what is not ok",
                "additionalProperties": entry,
            },
        },
    }


def _type_words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        return _type_words(next(arg for arg in args if arg is not NONE)) + " or null"
    if origin is list:
        return f"list of {_type_words(args[0])}"
    if origin is dict:
        return f"mapping to {_type_words(args[1])}"
    names = {str: "text", int: "whole number", float: "number", bool: "boolean", Any: "any value"}
    return names.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


_HEAD = """# Host facts

The module `metal.serve.host_facts` returns these under `host_facts`; in Python they are the dataclasses of
`plugins/module_utils/hardware/facts.py` (`HostFacts.from_dict` builds them from the module's answer), and
[schemas/facts.json](../schemas/facts.json) is their JSON Schema. This page is made from the code.

- `null` means *not known*. Whether a thing was looked for and is not there, could not be read, or was never asked for
  is said by the state of its probe: `facts.probe("numa_balancing").state` is one of `{states}`.
- Only `absent` means that the thing is not there. Nothing else may be taken for good news.
- A list is `null` where its source could not be read, and empty where the source says that there is nothing.
- An unlimited limit is 9223372036854775807, so that it compares as the largest number.
- Values that look secret (in environments, command lines, nginx's configuration, releases) are `***`.
- `unknown_fields` names the elements of nvidia-smi's answer that are not known here: a driver that renamed a field
  shows up there, and the fact it fed is `null`.

Groups of probes: {groups}. `base` stands for {base}. docs/snapshots.md lists the probes.
"""


def facts_markdown() -> str:
    """Return docs/facts.md."""
    groups = sorted({probe.group for probe in PROBES})
    parts = [
        _HEAD.format(
            states=" | ".join(STATES),
            groups=", ".join(f"`{name}`" for name in groups),
            base=", ".join(f"`{name}`" for name in BASE),
        )
    ]
    for kind in classes():
        types = hints(kind)
        rows = [
            f"| `{one.name}` | {_type_words(types[one.name])} | {_cell(_says(one))} |"
            for one in dataclasses.fields(kind)
        ]
        about = (kind.__doc__ or "").strip().splitlines()[0]
        table = "\n".join(["| field | type | what |", "| --- | --- | --- |", *rows])
        parts.append(f"## {kind.__name__}\n\n{about}\n\n{table}\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def probe_table() -> str:
    """Return the table of probes for docs/snapshots.md."""
    rows = ["| probe | group | files in the snapshot | what |", "| --- | --- | --- | --- |"]
    for probe in sorted(PROBES, key=lambda one: (one.group, one.name)):
        paths = "<br>".join(f"`{path}`" for path in probe.paths)
        rows.append(f"| `{probe.name}` | {probe.group} | {paths} | {_cell(probe.says)} |")
    return "\n".join([BEGIN, "", *rows, "", END])


def with_table(text: str) -> str:
    """Return docs/snapshots.md with its table of probes renewed. Raises ValueError where the markers are missing."""
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/snapshots.md has no markers {BEGIN} and {END}")
    return before + probe_table() + after


def main(arguments: Optional[list[str]] = None) -> int:
    """Write the files below the repository root that is named."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or not os.path.isdir(words[0]):
        sys.stderr.write("usage: describe ROOT, where ROOT is the repository\n")
        return 2
    root = words[0]
    snapshots = os.path.join(root, "docs", "snapshots.md")
    with open(snapshots, encoding="utf-8") as stream:
        text = stream.read()
    write_atomic(os.path.join(root, "docs", "facts.md"), facts_markdown())
    write_atomic(snapshots, with_table(text))
    write_atomic(os.path.join(root, "schemas", "facts.json"), canonical_json(facts_schema()))
    write_atomic(os.path.join(root, "schemas", "snapshot.json"), canonical_json(snapshot_schema()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
