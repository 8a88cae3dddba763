# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The command line of vLLM's server: every option of the real one is known (options.json), any other is refused."""

from __future__ import annotations

import json
import os
import re
from typing import Any


class OptionError(Exception):
    """An option that the real server would refuse; the text is what it prints."""


def known_options() -> dict[str, str]:
    """Return option -> "value" or "flag", as the real parser lists them."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "options.json"), encoding="utf-8") as stream:
        options: dict[str, str] = json.load(stream)
    return options


def parse_yaml(text: str) -> dict[str, Any]:
    """Return the mapping in ``text``: scalars, quoted strings, JSON values, block lists and nested mappings.

    This is the part of YAML that a rendered engine configuration uses. Raises OptionError with the line's number.
    """
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = re.sub(r"(^|\s)#.*$", "", raw).rstrip() if not re.search(r"['\"\[{].*#", raw) else raw.rstrip()
        if stripped.strip() and stripped.strip() != "---":
            lines.append((number, len(stripped) - len(stripped.lstrip()), stripped.strip()))
    value, rest = _block(lines, 0)
    if rest or not isinstance(value, dict):
        number = rest[0][0] if rest else 1
        raise OptionError(f"config file: line {number} is not part of a mapping")
    return value


def _block(lines: list[tuple[int, int, str]], indent: int) -> tuple[Any, list[tuple[int, int, str]]]:
    """Return the mapping or list that starts at ``lines[0]`` and the lines after it."""
    if not lines:
        return {}, []
    if lines[0][2].startswith("- "):
        items = []
        while lines and lines[0][1] >= indent and lines[0][2].startswith("- "):
            items.append(_scalar(lines[0][2][2:].strip()))
            lines = lines[1:]
        return items, lines
    mapping: dict[str, Any] = {}
    depth = lines[0][1]
    while lines and lines[0][1] == depth:
        number, _, text = lines[0]
        match = re.match(r"""(?:"([^"]+)"|'([^']+)'|([^\s:]+))\s*:(?:\s+(.*))?$""", text)
        if match is None:
            raise OptionError(f"config file: line {number} is not 'key: value'")
        key = match.group(1) or match.group(2) or match.group(3)
        lines = lines[1:]
        if match.group(4) is not None:
            mapping[key] = _scalar(match.group(4).strip())
        elif lines and (lines[0][1] > depth or (lines[0][1] == depth and lines[0][2].startswith("- "))):
            mapping[key], lines = _block(lines, lines[0][1])
        else:
            mapping[key] = None
    return mapping, lines


def _scalar(text: str) -> Any:
    """Return the value that ``text`` is in YAML."""
    if text.startswith(("{", "[")):
        return _flow(text)
    if text.startswith('"'):
        return json.loads(text)
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    words = {"true": True, "false": False, "null": None, "~": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _flow(text: str) -> Any:
    """Return the JSON value in ``text``, or a list of bare words in brackets."""
    try:
        return json.loads(text)
    except ValueError:
        if text.startswith("[") and text.endswith("]"):
            inner = text[1:-1].strip()
            return [_scalar(part.strip()) for part in inner.split(",")] if inner else []
        raise OptionError(f"config file: {text} is not JSON") from None


def config_arguments(config: dict[str, Any]) -> list[str]:
    """Return the arguments that the real server makes of a configuration file."""
    options = known_options()
    arguments: list[str] = []
    for key, value in config.items():
        option = "--" + key.replace("_", "-")
        if value is True:
            arguments.append(option)
        elif value is False:
            negative = "--no-" + option[2:]
            if negative in options:
                arguments.append(negative)
        elif isinstance(value, list):
            arguments += [option, *(str(item) for item in value)]
        elif isinstance(value, dict):
            arguments += [option, json.dumps(value)]
        elif value is not None:
            arguments += [option, str(value)]
    return arguments


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """Return option name with underscores -> text, True or False. The file named by --config counts, the line wins.

    A first bare word is the model. Raises OptionError for an option that does not exist.
    """
    options = known_options()
    given = _parse(arguments, options)
    path = given.pop("config", None)
    if path is None:
        return given
    if not str(path).endswith((".yaml", ".yml")):
        raise OptionError(f"The config file must be of a yaml/yml type. {path} was given.")
    try:
        with open(path, encoding="utf-8") as stream:
            config = parse_yaml(stream.read())
    except OSError as error:
        raise OptionError(f"config file {path}: {error.strerror}") from error
    return {**_parse(config_arguments(config), options), **given}


def _parse(arguments: list[str], options: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    unknown: list[str] = []
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        found["model"] = rest.pop(0)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        option = "--" + option[2:].replace("_", "-") if option.startswith("--") else option
        kind = options.get(option)
        if kind is None:
            unknown.append(word)
            while rest and not rest[0].startswith("-"):
                unknown.append(rest.pop(0))
            continue
        name = option.lstrip("-").replace("-", "_")
        if kind.startswith("="):  # a short name of another option
            name = kind[1:].lstrip("-").replace("-", "_")
            kind = options[kind[1:]]
        if kind == "flag":
            found[name[3:] if name.startswith("no_") and "--" + option[5:] in options else name] = not (
                name.startswith("no_") and "--" + option[5:] in options
            )
            continue
        values = [value] if equals else []
        while not equals and rest and not _looks_like_option(rest[0]):
            values.append(rest.pop(0))
        if not values:
            raise OptionError(f"argument {option}: expected one argument")
        found[name] = values[0] if len(values) == 1 else values
    if unknown:
        raise OptionError(f"unrecognized arguments: {' '.join(unknown)}")
    return found


def _looks_like_option(word: str) -> bool:
    """Return whether ``word`` is an option and not a negative number."""
    return word.startswith("-") and re.fullmatch(r"-\d+(\.\d+)?", word) is None
