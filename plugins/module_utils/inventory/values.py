# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""One value against one ``Key``: types without any coercion, bounds, allowed values, unknown and missing keys."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import parse_size
from ansible_collections.metal.serve.plugins.module_utils.inventory import knobs
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import Path, Unresolved, dotted
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import PLACEHOLDER, UNSET, Key

SHOWN = 70
"""Longest text of a value that the report shows."""

SECRET = "(a secret, not shown)"
DOC = "docs/variables.md"

UNTRIMMED = {
    False: "remove the spaces",
    True: "write it without them; encrypt_string keeps the end of the line that it reads, so give it none:\n"
    "printf %s THE_SECRET | ansible-vault encrypt_string --stdin-name NAME",
}
"""What is right for text with spaces or a line break around it, by whether it is secret."""

_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "number": "a number",
    "str": "text",
    "size": "a size such as 88G",
    "list": "a list",
    "mapping": "a mapping (name: value lines)",
    "map": "a mapping (name: value lines)",
}
_TRUE = {"true", "yes", "on", "y", "t"}
_FALSE = {"false", "no", "off", "n", "f"}


@dataclass(frozen=True)
class Finding:
    """A problem at a place inside a value; checks.py adds the variable's name and where it stands.

    ``about`` replaces the value that the report shows; None: show what stands there.
    """

    path: Path
    problem: str
    right: str
    about: str | None = None
    secret: bool = False
    severity: str = "error"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is most like ``name`` (case and dashes do not count), or an empty text."""
    candidates = {other.lower().replace("-", "_"): other for other in known}
    wanted = name.lower().replace("-", "_").strip()
    if wanted in candidates:
        return candidates[wanted]
    found = difflib.get_close_matches(wanted, list(candidates), n=1, cutoff=cutoff)
    return candidates[found[0]] if found else ""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return ``did you mean X?``, or ``otherwise`` where nothing is near."""
    found = nearest(name, known)
    return f"did you mean {found}?" if found else otherwise


def listed(names: Iterable[Any], conjunction: str = "or") -> str:
    """Return names as people list them: ``a, b or c``."""
    texts = [str(name) for name in names]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} {conjunction} {texts[-1]}"


def show(value: Any) -> str:
    """Return a value as the report shows it: text in quotes, so that 8 and "8" look different; never long."""
    if isinstance(value, Unresolved):
        return value.shown
    if value is None:
        return "(empty)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a mapping ({listed(value, 'and')})" if 0 < len(value) <= 4 else f"a mapping of {len(value)} keys"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(show(item) for item in value)
        return f"[{inner}]" if len(inner) <= SHOWN and "mapping" not in inner else f"a list of {len(value)}"
    text = json.dumps(str(value), ensure_ascii=False) if isinstance(value, str) else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def kind(value: Any) -> str:
    """Return in words what type a value has."""
    if value is None:
        return "nothing"
    for types, words in (
        (bool, "a truth value"),
        (int, "a number"),
        (float, "a number with a decimal point"),
        (str, "text"),
        (Mapping, "a mapping"),
        ((list, tuple), "a list"),
        (datetime.datetime, "a date and time"),
        (datetime.date, "a date"),
        (bytes, "raw bytes"),
    ):
        if isinstance(value, types):
            return words
    return f"a {type(value).__name__}"


def unfilled(key: Key) -> str:
    """Return what to write instead of a placeholder."""
    example = f", such as {key.example}" if key.example else ""
    return f"write {key.hint or key.description[:1].lower() + key.description[1:].rstrip('.')}{example}"


def walk(key: Key, value: Any, path: Path = (), command_line: bool = False) -> Iterator[Finding]:
    """Yield all that is wrong with ``value`` under ``key``, nested values included. Nothing is coerced."""
    if isinstance(value, Unresolved):
        yield Finding(path, value.problem, value.right, about=value.shown)
        return
    if value is None:
        want = _WANTED.get(key.type, "a value")
        otherwise = "" if key.required else ", or remove the line"
        yield Finding(path, "has a name but no value", f"{_article(key, want)}{otherwise}")
        return
    if key.several is not None and not _is(key.type, value) and _is(key.several.type, value):
        yield from walk(key.several, value, path, command_line)
        return
    wrong = _wrong_type(key, value, command_line)
    if wrong is not None:
        yield Finding(path, wrong[0], wrong[1], secret=key.secret)
        return
    yield from _scalar(key, value, path)
    if key.type == "list" and key.each is not None:
        for index, item in enumerate(value):
            yield from walk(key.each, item, (*path, index), command_line)
    elif key.type == "map" and key.each is not None:
        yield from _names(key, value, path)
        for name, item in value.items():
            yield from walk(key.each, item, (*path, name), command_line)
    elif key.type == "mapping":
        yield from _keys(key, value, path, command_line)


def _article(key: Key, want: str) -> str:
    if key.choices:
        return f"write {listed(key.choices)}"
    example = f", such as {key.example}" if key.example and key.type in ("list", "mapping", "map") else ""
    # The hint of a map is about its names.
    return f"write {key.hint if key.hint and key.type != 'map' else want}{example}"


_TYPES: Mapping[str, tuple[type, ...]] = {
    "any": (object,),
    "bool": (bool,),
    "int": (int,),
    "number": (int, float),
    "size": (int, str),
    "str": (str,),
    "list": (list, tuple),
    "mapping": (Mapping,),
    "map": (Mapping,),
}


def _is(type_: str, value: Any) -> bool:
    """Tell whether a value has a type of the schema, strictly: true and "8" are no numbers, 8.0 is not whole."""
    if isinstance(value, bool):
        return type_ in ("bool", "any")
    if type_ == "number" and isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, _TYPES[type_])


def _wrong_type(key: Key, value: Any, command_line: bool) -> tuple[str, str] | None:
    """Return (problem, what is right) for a value of another type, or None."""
    if _is(key.type, value):
        return None
    want = _WANTED[key.type]
    if isinstance(value, str):
        return _wrong_text(key, value, command_line)
    if key.type == "int" and isinstance(value, float):
        whole = f"write {int(value)}" if math.isfinite(value) and value == int(value) else _article(key, want)
        return "has a decimal point where a whole number is meant", whole
    if key.type == "str":
        hint = f"; expected: {key.hint}" if key.hint else ""
        return f"is {kind(value)} to YAML, not text", f"write it in quotes, as it is meant{hint}"
    return f"is {kind(value)}, not {want}", _article(key, want)


def _wrong_text(key: Key, value: str, command_line: bool) -> tuple[str, str]:
    """Return (problem, what is right) for text where something else is meant."""
    want = _WANTED[key.type]
    bare = _unquoted(key.type, value)
    if not bare:
        right = f"write it in brackets: [{value}]" if key.type == "list" and not key.secret else _article(key, want)
        return f"is text, not {want}", right
    what = "truth value" if key.type == "bool" else "number"
    if command_line:
        return (
            f"is text, not a {what}: -e name=value always makes text",
            f"give it as JSON: -e '{{\"{key.name or 'name'}\": {bare}}}'",
        )
    ini = f" (in an .ini inventory: {bare.capitalize()})" if key.type == "bool" else ""
    return f"is text, not a {what}: it stands in quotes or was made text", f"write {bare} without quotes{ini}"


def _unquoted(type_: str, text: str) -> str:
    """Return how ``text`` would be written as the bool or number it looks like, or an empty text."""
    small = text.strip().lower()
    if type_ == "bool" and small in _TRUE | _FALSE:
        return "true" if small in _TRUE else "false"
    pattern = {"int": r"[+-]?\d+", "number": r"[+-]?\d+(\.\d+)?"}.get(type_)
    return small.lstrip("+") if pattern and re.fullmatch(pattern, small) else ""


def _scalar(key: Key, value: Any, path: Path) -> Iterator[Finding]:
    """Yield what is wrong with a value of the right type: choices, bounds, pattern, size, emptiness."""
    if key.choices and value not in key.choices:
        near = nearest(value, key.choices, 0.5)
        yield Finding(
            path,
            "is not one of the allowed values",
            f"write {listed(key.choices)}" + (f"; did you mean {near}?" if near else ""),
        )
    if key.type in ("int", "number"):
        yield from _bounds(key.low, key.high, value, path)
    if key.type == "size":
        try:
            if parse_size(value) == 0:
                yield Finding(path, "is no size: 0 bytes", "write a size such as 88G")
        except ValueError:
            yield Finding(path, "is not a size", "write bytes, or a number with K, M, G or T behind it, such as 88G")
    if key.type == "str":
        if PLACEHOLDER in value and not key.secret:
            yield Finding(path, "is still the placeholder of the example", unfilled(key))
        elif not key.empty and not value.strip():
            yield Finding(
                path,
                "is empty text",
                _article(key, "text") if key.required else f"{_article(key, 'text')}, or remove the line",
            )
        elif (
            key.pattern and not re.fullmatch(key.pattern, value) and not (key.empty and not value and not key.required)
        ):
            yield Finding(
                path,
                f"is not {key.hint}" if key.hint else "has another form than it should",
                f"write {key.hint}",
                secret=key.secret,
            )
        elif value != value.strip():
            yield Finding(path, "has spaces or a line break around it", UNTRIMMED[key.secret], secret=key.secret)


def _bounds(low: float | None, high: float | None, value: Any, path: Path) -> Iterator[Finding]:
    """Yield a finding for a number out of its bounds."""
    if low is not None and value < low:
        upper = f" and at most {high:.15g}" if high is not None else ""
        yield Finding(path, "is too small", f"write a number of at least {low:.15g}{upper}")
    elif high is not None and value > high:
        lower = f"at least {low:.15g} and " if low is not None else ""
        yield Finding(path, "is too large", f"write a number of {lower}at most {high:.15g}")


def _names(key: Key, value: Mapping[Any, Any], path: Path) -> Iterator[Finding]:
    """Yield findings for the free names of a map."""
    if key.required and not value:
        yield Finding(path, "is empty", "describe at least one")
    for name in value:
        if not isinstance(name, str):
            yield Finding(
                (*path, name),
                f"has a name that is {kind(name)} to YAML, not text",
                "write the name in quotes, or choose another",
                about="",
            )
        elif key.pattern and not re.fullmatch(key.pattern, name):
            yield Finding((*path, name), "has a name that will not do", f"choose {key.hint}", about="")


def _keys(key: Key, value: Mapping[Any, Any], path: Path, command_line: bool) -> Iterator[Finding]:
    """Yield findings for the keys of a mapping: unknown, missing, and what is wrong inside each."""
    fields = {field.name: field for field in key.keys}
    if key.variants is not None:
        yield from _variant(key.variants, value, path)
        chosen = value.get("type")
        if not isinstance(chosen, str) or chosen not in key.variants:
            return
        fields = {"type": Key("type", "str", ""), **{field.name: field for field in key.variants[chosen]}}
    for name, item in value.items():
        if name in fields:
            yield from walk(fields[name], item, (*path, name), command_line)
        elif not key.open:
            yield _unknown(name, fields, path)
    for name, field in fields.items():
        if field.required and name not in value:
            example = f", such as {field.example}" if field.example else ""
            yield Finding(
                (*path, name), "is missing", f"{_article(field, _WANTED.get(field.type, 'a value'))}{example}", about=""
            )


def _unknown(name: Any, fields: Mapping[str, Key], path: Path) -> Finding:
    """Return the finding for a key that a mapping does not have."""
    knob = knobs.KNOBS.get(knobs.plain(name)) if isinstance(name, str) else None
    known = f"known keys: {', '.join(fields)}"
    if knob is not None and not nearest(name, fields, 0.99):
        return Finding((*path, name), knob.why, knob.right())
    if not isinstance(name, str):
        return Finding((*path, name), f"is a key that is {kind(name)} to YAML, not text", known)
    elsewhere = knobs.POOL_KEYS_OF_SETTINGS.get(knobs.plain(name), "")
    if elsewhere in fields and elsewhere != name:
        return Finding((*path, name), "is not known here", f"did you mean {elsewhere}?")
    if "settings" in fields and knobs.plain(name) in knobs.SETTINGS and not nearest(name, fields, 0.85):
        return Finding((*path, name), "is not known here", f"write it under {dotted('settings', (knobs.plain(name),))}")
    return Finding((*path, name), "is not known here", did_you_mean(name, fields, known))


def _variant(variants: Mapping[str, tuple[Key, ...]], value: Mapping[Any, Any], path: Path) -> Iterator[Finding]:
    """Yield findings for the key ``type`` that chooses among variants."""
    chosen = value.get("type", UNSET)
    if chosen is UNSET:
        yield Finding((*path, "type"), "is missing", f"write type: {listed(variants)}", about="")
    elif isinstance(chosen, Unresolved):
        yield Finding((*path, "type"), chosen.problem, chosen.right, about=chosen.shown)
    elif not isinstance(chosen, str) or chosen not in variants:
        near = nearest(str(chosen), variants, 0.5)
        yield Finding(
            (*path, "type"),
            "is not one of the allowed values",
            f"write {listed(variants)}" + (f"; did you mean {near}?" if near else ""),
        )
