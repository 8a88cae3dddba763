# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads nginx's configuration as ``nginx -T`` dumps it, with includes put in their places, and its version and logs."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Directive

MAX_DIRECTIVES = 50_000
MAX_DEPTH = 30
MAX_INCLUDES = 2_000


class BadConfig(ValueError):
    """The text is no nginx configuration; the message names file and line."""


def split_dump(text: str) -> dict[str, str]:
    """Return file -> text of an ``nginx -T`` dump; a text without its headers is taken as one file."""
    found: dict[str, list[str]] = {}
    current: Optional[list[str]] = None
    for line in text.splitlines():
        match = re.match(r"\A# configuration file (.+):\s*\Z", line)
        if match:
            current = found.setdefault(match.group(1), [])
        elif current is not None:
            current.append(line)
    if not found:
        return {"/etc/nginx/nginx.conf": text} if text.strip() else {}
    return {path: "\n".join(lines) for path, lines in found.items()}


def parse_config(files: dict[str, str], main: Optional[str] = None) -> list[Directive]:
    """Return the directives of ``main`` (default: the first file) with the files that it includes in place.

    Raises BadConfig for unbalanced braces or quotes, and for more than any real configuration holds.
    """
    if not files:
        return []
    start = main or next(iter(files))
    parsed: dict[str, list[Directive]] = {}
    for path, text in files.items():
        parsed[path] = _Parser(path, text).block(0)
    budget = [MAX_INCLUDES]
    return _expand(parsed[start], parsed, os.path.dirname(start), (start,), budget)


def _expand(
    directives: list[Directive],
    files: dict[str, list[Directive]],
    prefix: str,
    inside: tuple[str, ...],
    budget: list[int],
) -> list[Directive]:
    found: list[Directive] = []
    for directive in directives:
        if directive.name == "include" and directive.args:
            pattern = directive.args[0]
            wanted = pattern if pattern.startswith("/") else os.path.join(prefix, pattern)
            matches = [path for path in sorted(files) if path == wanted or fnmatch.fnmatchcase(path, wanted)]
            for path in matches:
                budget[0] -= 1
                if path in inside or budget[0] < 0:
                    raise BadConfig(f"{directive.file}:{directive.line}: includes go round in circles")
                found += _expand(files[path], files, prefix, (*inside, path), budget)
            if matches:
                continue
        if directive.block is not None:
            block = _expand(directive.block, files, prefix, inside, budget)
            directive = Directive(directive.name, directive.args, directive.file, directive.line, block)  # noqa: PLW2901
        found.append(directive)
    return found


class _Parser:
    """A reader of one file: words, ``;`` and braces."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.at, self.line, self.count = 0, 1, 0

    def fail(self, why: str) -> BadConfig:
        return BadConfig(f"{self.path}:{self.line}: {why}")

    def block(self, depth: int) -> list[Directive]:
        """Read directives up to the closing brace (or, at depth 0, the end of the file)."""
        if depth > MAX_DEPTH:
            raise self.fail("nested too deeply")
        found: list[Directive] = []
        words: list[str] = []
        line = self.line
        while True:
            token = self.token()
            if token is None or token == "}":
                if words:
                    raise self.fail(f"{words[0][:40]!r} does not end with ;")
                if (token is None) != (depth == 0):
                    raise self.fail("a closing brace is missing" if token is None else "a closing brace too many")
                return found
            if token not in (";", "{"):
                if not words:
                    line = self.line
                words.append(token[1:] if token.startswith("\0") else token)
                continue
            if not words:
                raise self.fail(f"{token!r} without a directive")
            self.count += 1
            if self.count > MAX_DIRECTIVES:
                raise self.fail("too many directives")
            directive = Directive(words[0], words[1:], self.path, line)
            if token == "{":
                if words[0].endswith("_by_lua_block"):
                    directive.args = [self.lua()]
                else:
                    directive.block = self.block(depth + 1)
            found.append(directive)
            words = []

    def token(self) -> Optional[str]:
        """Return the next word, ``;``, ``{`` or ``}``; a quoted word is marked with a leading NUL."""
        text, size = self.text, len(self.text)
        while self.at < size:
            char = text[self.at]
            if char == "\n":
                self.line += 1
                self.at += 1
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                end = text.find("\n", self.at)
                self.at = size if end < 0 else end
            elif char in ";{}":
                self.at += 1
                return char
            elif char in "\"'":
                return "\0" + self.quoted(char)
            else:
                return self.word()
        return None

    def quoted(self, quote: str) -> str:
        found: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self.at + 1 < len(self.text):
                following = self.text[self.at + 1]
                found.append(following if following in (quote, "\\") else char + following)
                self.at += 2
                continue
            self.at += 1
            if char == quote:
                return "".join(found)
            if char == "\n":
                self.line += 1
            found.append(char)
        raise self.fail("a quote is never closed")

    def word(self) -> str:
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
                continue
            if char == "$" and self.text[self.at + 1 : self.at + 2] == "{":
                end = self.text.find("}", self.at)
                self.at = len(self.text) if end < 0 else end + 1
                continue
            if char in " \t\r\n;{}":
                break
            self.at += 1
        return self.text[start : self.at]

    def lua(self) -> str:
        """Return the Lua code up to the brace that closes the block; those in its strings and comments do not count."""
        start, depth = self.at, 1
        pattern = re.compile(r"--\[(=*)\[|--[^\n]*|\[(=*)\[|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[{}]", re.DOTALL)
        while True:
            match = pattern.search(self.text, self.at)
            if match is None:
                raise self.fail("a Lua block is never closed")
            word = match.group(0)
            self.at = match.end()
            if word.startswith(("--[", "[")) and word.endswith("["):
                level = match.group(1) if match.group(1) is not None else match.group(2)
                end = self.text.find(f"]{level}]", self.at)
                if end < 0:
                    raise self.fail("a long Lua string is never closed")
                self.at = end + len(level) + 2
            elif word == "{":
                depth += 1
            elif word == "}":
                depth -= 1
                if depth == 0:
                    code = self.text[start : match.start()]
                    self.line += code.count("\n")
                    return code.strip()


def parse_version(text: str) -> tuple[Optional[str], list[str]]:
    """Read ``nginx -V``: version, and the names of the modules it was built with (``http_ssl``, ``http_v2``, …)."""
    match = re.search(r"nginx version: (?:nginx|openresty|angie|tengine)/([\w.]+)", text)
    modules = re.findall(r"--with-((?:http|stream|mail)_\w+?)_module(?:=dynamic)?\b", text)
    return (match.group(1) if match else None), sorted(set(modules))


def failures(text: str, limit: int) -> list[str]:
    """Return the last ``limit`` lines of an access log whose status is 400 or more, or 0, or cannot be told."""
    kept = [line for line in text.splitlines() if line.strip() and _failed(line)]
    return kept[-limit:]


def _failed(line: str) -> bool:
    if line.startswith("{"):
        try:
            status = json.loads(line).get("status")
        except (ValueError, RecursionError, AttributeError):
            return False  # the first line of a tail may be cut
        return not isinstance(status, (int, str)) or not re.match(r"\A[123]\d\d\Z", str(status))
    match = re.search(r'" (\d{3}) ', line)
    return match is None or int(match.group(1)) >= 400


def resolve(path: str, prefix: str = "/etc/nginx") -> str:
    """Return a file that a directive names, as nginx finds it: a relative one below the configuration's folder."""
    return path if path.startswith("/") else os.path.join(prefix, path)
