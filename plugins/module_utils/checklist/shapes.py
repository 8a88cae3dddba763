# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What each key of the policy may hold, as JSON Schema: schemas/policy.json shows it, and the same is enforced.

A threshold that nothing can fall below (no number, a version that is none) would turn its check green for ever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Shape = Mapping[str, Any]
Told = tuple[Shape, str]
"""A schema, and in words what is right."""

ROLES = ("engine", "gateway", "monitor")
_VERSION = r"^v?\d+(\.\d+)*$"
_SIZE = r"^\s*\d+(\.\d+)?\s*[bkmgtBKMGT]?[iI]?[bB]?\s*$"
_TEXTS: Shape = {"type": "array", "items": {"type": "string", "minLength": 1}}
_PATTERNS: Shape = {"type": "array", "items": {"type": "string", "format": "regex", "minLength": 1}}
_NUMBER: Shape = {"type": "number", "minimum": 0}
_WHOLE: Shape = {"type": "integer", "minimum": 0}


def _or_null(shape: Shape) -> Shape:
    return {**shape, "type": [shape["type"], "null"]}


_ALERT: Shape = {
    "type": "object",
    "additionalProperties": False,
    "required": ["metrics", "what"],
    "properties": {
        "what": {"type": "string", "minLength": 1},
        "metrics": {**_PATTERNS, "minItems": 1},
        "above": {"type": "number", "exclusiveMinimum": 0},
        "for_s": _NUMBER,
        "gpu": {"type": "boolean"},
    },
}
_SIZE_OR_EMPTY: Told = ({"type": "string", "pattern": f"^$|{_SIZE}"}, "a size such as 88G, or an empty text")
_SWITCH: Told = (_or_null({"type": "boolean"}), "true, false or null")
_SECONDS: Told = (_or_null(_NUMBER), "a number from 0, or null")

SHAPES: dict[str, Told] = {
    "driver_minimum": ({"type": "string", "pattern": _VERSION}, 'a text with a version, such as "525.85.12"'),
    "numa_balancing": (_WHOLE, "a whole number from 0"),
    "nofile_minimum": (_WHOLE, "a whole number from 0"),
    "nofile_maximum": (_WHOLE, "a whole number from 0"),
    "container_memory": _SIZE_OR_EMPTY,
    "container_memory_swap": _SIZE_OR_EMPTY,
    "alerts": (
        {"type": "array", "items": _ALERT},
        "a list of mappings with what, metrics (patterns), and above, for_s, gpu where they apply",
    ),
    "metrics_with_the_first_event": (_PATTERNS, "a list of regular expressions"),
    "expected.roles": ({"type": "array", "items": {"enum": list(ROLES)}}, "a list of engine, gateway, monitor"),
    "expected.accelerator": ({"enum": ["", "nvidia", "cpu"]}, "nvidia, cpu or an empty text"),
    "expected.gpus": (_or_null(_WHOLE), "a whole number from 0, or null"),
    "expected.gpu_memory_mib": _SECONDS,
    "expected.mig": _SWITCH,
    "expected.tensor_parallel": (_WHOLE, "a whole number from 0"),
    "expected.peer_to_peer": _SWITCH,
    "expected.rdma": _SWITCH,
    "expected.image_cuda": (
        {"type": "string", "pattern": f"^$|{_VERSION}"},
        'a text with a version, such as "13.0", or an empty text',
    ),
    "expected.gpu_memory_utilization": (
        _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "a share above 0 and up to 1, or null",
    ),
    "expected.gateways": (_TEXTS, "a list of addresses"),
    "expected.monitors": (_TEXTS, "a list of addresses"),
    "expected.engine_ports": (
        {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}},
        "a list of ports",
    ),
    "expected.engine_keepalive_s": _SECONDS,
    "expected.longest_silent_prefill_s": _SECONDS,
    "expected.body_limit_bytes": (_or_null(_WHOLE), "a whole number from 0, or null"),
    "expected.releases": (
        {"type": "object", "additionalProperties": {"type": "object"}},
        "a mapping of replicas to mappings",
    ),
}

_OF_DEFAULT: tuple[tuple[type, Told], ...] = (
    (bool, ({"type": "boolean"}, "true or false")),
    (int, (_NUMBER, "a number from 0")),
    (float, (_NUMBER, "a number from 0")),
    (str, ({"type": "string"}, "a text")),
    (list, ({"type": "array"}, "a list")),
    (dict, ({"type": "object"}, "a mapping")),
)


def told(name: str, default: Any) -> Told:
    """Return what the key ``name`` may hold, and that in words: its own entry, else by the type of its default."""
    return SHAPES.get(name) or next(told for kind, told in _OF_DEFAULT if isinstance(default, kind))


def fits(value: Any, shape: Shape) -> bool:
    """Tell whether ``value`` fits the few words of JSON Schema that are used here; a number must be finite."""
    kinds = shape.get("type")
    names = _kinds(value)
    if kinds is not None and not names & ({kinds} if isinstance(kinds, str) else set(kinds)):
        return False
    if "enum" in shape:
        return isinstance(value, str) and value in shape["enum"]
    if "number" in names:
        low, above, high = (shape.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
        return not (
            (low is not None and value < low) or (above is not None and value <= above) or (high and value > high)
        )
    if isinstance(value, str):
        return _text_fits(value, shape)
    if isinstance(value, list):
        return len(value) >= shape.get("minItems", 0) and all(fits(one, shape.get("items", {})) for one in value)
    if isinstance(value, Mapping):
        known, other = shape.get("properties", {}), shape.get("additionalProperties", {})
        return set(shape.get("required", ())) <= set(value) and all(
            fits(one, known[key]) if key in known else other is not False and fits(one, other)
            for key, one in value.items()
        )
    return True


def _kinds(value: Any) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} if math.isfinite(value) else set()
    names = ((str, "string"), (list, "array"), (Mapping, "object"))
    return {name for kind, name in names if isinstance(value, kind)}


def _text_fits(value: str, shape: Shape) -> bool:
    if len(value) < shape.get("minLength", 0) or not re.search(shape.get("pattern", ""), value):
        return False
    if shape.get("format") == "regex":
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError):
            return False
    return True
