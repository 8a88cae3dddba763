# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the YAML that configuration files of this field really use; the machines have no YAML library for modules.

Block mappings and sequences, plain and quoted scalars, block scalars (``|`` and ``>``), flow lists and mappings on
one or more lines, comments. Anchors, tags, merge keys and several documents are refused: the answer is then (None,
why), never a guess.
"""

from __future__ import annotations

import re
from typing import Any, Optional

MAX_LINES = 200_000
MAX_DEPTH = 60


class _Bad(ValueError):
    """The text is outside the subset."""


class _Line:
    __slots__ = ("indent", "number", "text")

    def __init__(self, number: int, indent: int, text: str) -> None:
        self.number, self.indent, self.text = number, indent, text


def load(text: str) -> tuple[Any, Optional[str]]:
    """Return the value of a YAML text and None, or None and why it was not read. An empty text is None without an
    error.
    """
    try:
        return _Reader(text).document(), None
    except (_Bad, RecursionError) as error:
        return None, f"not the simple YAML that is read here: {error}"[:200]


class _Reader:
    def __init__(self, text: str) -> None:
        self.raw = text.replace("\r\n", "\n").split("\n")
        if len(self.raw) > MAX_LINES:
            raise _Bad("too many lines")
        self.at = 0
        self.depth = 0

    def document(self) -> Any:
        line = self.peek()
        if line is not None and line.text == "---":
            self.at = line.number + 1
        elif line is not None and line.text.startswith("--- "):
            raise _Bad(f"line {line.number + 1}: content after ---")
        line = self.peek()
        if line is None:
            return None
        value = self.node(line.indent)
        rest = self.peek()
        if rest is not None and rest.text != "...":
            raise _Bad(f"line {rest.number + 1}: unexpected {rest.text[:40]!r}")
        return value

    def peek(self) -> Optional[_Line]:
        """Return the next line that holds something, without moving past it."""
        number = self.at
        while number < len(self.raw):
            raw = self.raw[number]
            stripped = raw.lstrip(" ")
            if stripped.startswith("\t"):
                raise _Bad(f"line {number + 1}: tab in the indentation")
            text = _without_comment(stripped).rstrip()
            if text:
                self.at = number
                return _Line(number, len(raw) - len(stripped), text)
            number += 1
        self.at = number
        return None

    def node(self, indent: int) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Bad("nested too deeply")
        line = self.peek()
        if line is None:
            return None
        if line.text == "-" or line.text.startswith("- "):
            value: Any = self.sequence(indent)
        elif _split_key(line.text) is not None:
            value = self.mapping(indent)
        else:
            self.at = line.number + 1
            value = self.scalar(line.text, line, indent - 1)
        self.depth -= 1
        return value

    def sequence(self, indent: int) -> list[Any]:
        found: list[Any] = []
        while True:
            line = self.peek()
            if line is None or line.indent != indent or not (line.text == "-" or line.text.startswith("- ")):
                if line is not None and line.indent > indent:
                    raise _Bad(f"line {line.number + 1}: wrong indentation")
                return found
            rest = line.text[1:].lstrip(" ")
            if not rest:
                self.at = line.number + 1
                below = self.peek()
                found.append(self.node(below.indent) if below is not None and below.indent > indent else None)
                continue
            inner = indent + len(line.text) - len(rest)
            if rest == "-" or rest.startswith("- ") or _split_key(rest) is not None:
                # "- key: value" opens a block whose indentation is where the key stands.
                self.raw[line.number] = " " * inner + self.raw[line.number].lstrip(" ")[1:].lstrip(" ")
                found.append(self.node(inner))
            else:
                self.at = line.number + 1
                found.append(self.scalar(rest, line, indent))

    def mapping(self, indent: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while True:
            line = self.peek()
            if line is None or line.indent < indent or line.text in ("---", "..."):
                return found
            if line.indent > indent:
                raise _Bad(f"line {line.number + 1}: wrong indentation")
            split = _split_key(line.text)
            if split is None:
                if line.text == "-" or line.text.startswith("- "):
                    return found
                raise _Bad(f"line {line.number + 1}: no key in {line.text[:40]!r}")
            key = _key(split[0], line.number)
            if key in found:
                raise _Bad(f"line {line.number + 1}: key {str(key)[:40]!r} stands twice")
            self.at = line.number + 1
            found[key] = self.value(split[1], line, indent)

    def value(self, rest: str, line: _Line, indent: int) -> Any:
        if rest:
            return self.scalar(rest, line, indent)
        below = self.peek()
        if below is None:
            return None
        dash = below.text == "-" or below.text.startswith("- ")
        if below.indent > indent or (dash and below.indent == indent):
            return self.node(below.indent)
        return None

    def scalar(self, text: str, line: _Line, indent: int) -> Any:
        first = text[0]
        if first in "|>":
            return self.block(text, line, indent)
        if first in "&*!%@`":
            raise _Bad(f"line {line.number + 1}: {first} is not read here")
        if first in "[{":
            return self.flow(text, line)
        if first in "\"'":
            while not _quote_closed(text):
                text += "\n" + self.continuation(line)
            return _quoted(text, line.number)
        # A plain scalar goes on over deeper lines.
        parts = [text]
        while True:
            below = self.peek()
            if below is None or below.indent <= indent or below.text in ("---", "..."):
                break
            if _split_key(below.text) is not None:
                raise _Bad(f"line {below.number + 1}: key inside a plain scalar")
            parts.append(below.text)
            self.at = below.number + 1
        return _plain(" ".join(parts))

    def continuation(self, line: _Line) -> str:
        if self.at >= len(self.raw):
            raise _Bad(f"line {line.number + 1}: quote or bracket is never closed")
        text = self.raw[self.at]
        self.at += 1
        return text.strip()

    def flow(self, text: str, line: _Line) -> Any:
        while True:
            value, end = _flow(text, 0, line.number, 0)
            if end >= 0:
                break
            text += " " + _without_comment(self.continuation(line)).rstrip()
            if len(text) > 1_000_000:
                raise _Bad(f"line {line.number + 1}: flow collection is too long")
        if _without_comment(text[end:]).strip():
            raise _Bad(f"line {line.number + 1}: text after a closing bracket")
        return value

    def block(self, header: str, line: _Line, indent: int) -> str:
        match = re.match(r"\A([|>])([1-9]?[+-]?|[+-]?[1-9]?)\Z", header)
        if match is None:
            raise _Bad(f"line {line.number + 1}: block scalar header {header[:20]!r}")
        digits = re.sub(r"\D", "", match.group(2))
        own = max(indent, 0) + int(digits) if digits else None
        lines: list[str] = []
        while self.at < len(self.raw):
            raw = self.raw[self.at]
            blank = not raw.strip(" ")
            depth = len(raw) - len(raw.lstrip(" "))
            if not blank:
                if own is None:
                    if depth <= indent:
                        break
                    own = depth
                if depth < own:
                    break
            lines.append("" if blank and (own is None or depth < own) else raw[own or 0 :])
            self.at += 1
        return _fold(lines, match.group(1) == ">", match.group(2))


def _fold(lines: list[str], folded: bool, header: str) -> str:
    body = list(lines)
    tail = 0
    while body and not body[-1].strip(" "):
        body.pop()
        tail += 1
    if not body:
        return "\n" * tail if "+" in header else ""
    if folded:
        text = body[0]
        blanks = 0
        for before, this in zip(body, body[1:]):
            if this == "":
                blanks += 1
                continue
            more_indented = this.startswith((" ", "\t")) or (before != "" and before.startswith((" ", "\t")))
            if blanks:
                text += "\n" * (blanks + (1 if more_indented else 0)) + this
            else:
                text += ("\n" if more_indented else " ") + this
            blanks = 0
    else:
        text = "\n".join(body)
    if "-" in header:
        return text
    return text + "\n" * (tail + 1 if "+" in header else 1)


def _without_comment(text: str) -> str:
    """Return a line without its comment; a # inside quotes or right after a character is none."""
    if "#" not in text:
        return text
    quote = ""
    for position, char in enumerate(text):
        if quote:
            if char == quote and not (quote == '"' and text[position - 1] == "\\"):
                quote = ""
        elif char in "\"'" and (position == 0 or text[position - 1] in " [{,:("):
            quote = char
        elif char == "#" and (position == 0 or text[position - 1] in " \t"):
            return text[:position]
    return text


def _split_key(text: str) -> Optional[tuple[str, str]]:
    """Return key and rest of ``key: value``; None where the line is no mapping entry."""
    if text[0] in "\"'":
        end = _quote_end(text)
        if end < 0:
            return None
        after = text[end:]
        if after == ":" or after.startswith(": "):
            return text[:end], after[1:].strip()
        return None
    if text[0] in "[{|>&*!%@`#,":
        return None
    if text[0] == "?" and (len(text) == 1 or text[1] == " "):
        raise _Bad("complex keys are not read here")
    position = text.find(": ")
    if position >= 0:
        return text[:position].rstrip(), text[position + 1 :].strip()
    return (text[:-1].rstrip(), "") if text.endswith(":") else None


def _key(text: str, number: int) -> Any:
    key = _quoted(text, number) if text[:1] in ("'", '"') else _plain(text)
    if key == "<<":
        raise _Bad(f"line {number + 1}: merge keys are not read here")
    return key


def _quote_end(text: str) -> int:
    """Return the position after the quote that closes the one at the start, or -1."""
    quote, position = text[0], 1
    while position < len(text):
        if text[position] == "\\" and quote == '"':
            position += 2
            continue
        if text[position] == quote:
            if quote == "'" and text[position + 1 : position + 2] == "'":
                position += 2
                continue
            return position + 1
        position += 1
    return -1


def _quote_closed(text: str) -> bool:
    return _quote_end(text) >= 0


_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "0": "\0",
    '"': '"',
    "\\": "\\",
    "/": "/",
    " ": " ",
    "b": "\b",
    "e": "\x1b",
    "f": "\f",
}


def _quoted(text: str, number: int) -> str:
    end = _quote_end(text)
    if end < 0 or _without_comment(" " + text[end:]).strip():
        raise _Bad(f"line {number + 1}: text after a closing quote")
    if "\\\n" in text:
        raise _Bad(f"line {number + 1}: an escaped line end is not read here")
    inner = re.sub(r"[ \t]*\n(\n*)[ \t]*", lambda match: match.group(1) or " ", text[1 : end - 1])
    if text[0] == "'":
        return inner.replace("''", "'")

    def escape(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "xuU" and len(code) > 1:
            point = int(code[1:], 16)
            if point > 0x10FFFF or 0xD800 <= point < 0xE000:
                raise _Bad(f"line {number + 1}: escape {code}")
            return chr(point)
        if code not in _ESCAPES:
            raise _Bad(f"line {number + 1}: escape \\{code}")
        return _ESCAPES[code]

    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", escape, inner, flags=re.DOTALL)


def _plain(text: str) -> Any:
    """Return a plain scalar with the types of YAML 1.1 as PyYAML reads them (booleans, null, numbers)."""
    low = text.lower()
    if text in ("", "~") or text in ("null", "Null", "NULL"):
        return None
    if text in (low, low.capitalize(), low.upper()):
        if low in ("true", "yes", "on"):
            return True
        if low in ("false", "no", "off"):
            return False
    bare = text.replace("_", "")
    if re.match(r"\A[-+]?(?:0|[1-9][0-9_]*)\Z", text) and len(text) < 4000:
        return int(bare)
    if re.match(r"\A[-+]?0x[0-9a-fA-F_]+\Z", text):
        return int(bare, 16)
    if re.match(r"\A[-+]?0[0-7_]+\Z", text):
        return int(bare, 8)
    if re.match(r"\A[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?\Z", text):
        return float(bare)
    return text


def _flow(text: str, position: int, number: int, depth: int) -> tuple[Any, int]:  # noqa: PLR0912 - one per form
    """Return a flow value and the position after it; the position is -1 where the text ends too early."""
    if depth > MAX_DEPTH:
        raise _Bad(f"line {number + 1}: nested too deeply")
    position = _blank(text, position)
    if position >= len(text):
        return None, -1
    char = text[position]
    if char in "\"'":
        end = _quote_end(text[position:])
        if end < 0:
            raise _Bad(f"line {number + 1}: a quote that goes on over lines in brackets is not read here")
        return _quoted(text[position : position + end], number), position + end
    if char not in "[{":
        if char in "&*!|>%@`":
            raise _Bad(f"line {number + 1}: {char} is not read here")
        match = re.compile(r"(?:[^,\[\]{}:]|:(?![\s,\[\]{}]|\Z))*").match(text, position)
        end = match.end() if match else position
        return (None, -1) if end >= len(text) else (_plain(text[position:end].strip()), end)
    close = "]" if char == "[" else "}"
    items: list[Any] = []
    table: dict[Any, Any] = {}
    position += 1
    while True:
        position = _blank(text, position)
        if position >= len(text):
            return None, -1
        if text[position] == close:
            return (items if close == "]" else table), position + 1
        value, position = _flow(text, position, number, depth + 1)
        if position < 0:
            return None, -1
        position = _blank(text, position)
        if position < len(text) and text[position] == ":":
            if close == "]" or isinstance(value, (list, dict)):
                raise _Bad(f"line {number + 1}: pair inside a list")
            key = value
            value, position = _flow_after_colon(text, position + 1, number, depth)
            if position < 0:
                return None, -1
            if key in table:
                raise _Bad(f"line {number + 1}: key {str(key)[:40]!r} stands twice")
            table[key] = value
        elif close == "}":
            if isinstance(value, (list, dict)):
                raise _Bad(f"line {number + 1}: collection as a key")
            table[value] = None
        else:
            items.append(value)
        position = _blank(text, position)
        if position >= len(text):
            return None, -1
        if text[position] == ",":
            position += 1
        elif text[position] != close:
            raise _Bad(f"line {number + 1}: expected , or {close}")


def _flow_after_colon(text: str, position: int, number: int, depth: int) -> tuple[Any, int]:
    """Return the value of a pair in braces; one that is left out is None."""
    position = _blank(text, position)
    if position < len(text) and text[position] in ",}":
        return None, position
    return _flow(text, position, number, depth + 1)


def _blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n":
        position += 1
    return position
