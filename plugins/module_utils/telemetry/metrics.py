# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The Prometheus text format, read: what a scrape holds, as plain values.

The format is https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4). The reader is strict:
a scrape that Prometheus would refuse is refused here too, because a half-read scrape looks like missing metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SPACE = " \t"
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n"}
_SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
}


class ScrapeError(ValueError):
    """A line is not in the text format; the message names its number and what is wrong."""


@dataclass(frozen=True)
class Sample:
    """One value of one series. ``value`` is in the unit that the metric's name says."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """All samples of one scrape, in order, and the declared type of each family."""

    samples: tuple[Sample, ...]
    types: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        """Return every series name that a query can select, those of declared but still empty families included.

        A labelled counter without an event yet has a TYPE line and no sample; Prometheus stores nothing for it, but it
        is not a wrong name. Its names follow from its type (``x`` a histogram: ``x_bucket``, ``x_sum``, ``x_count``).
        """
        found = {sample.name for sample in self.samples}
        for family, kind in self.types.items():
            suffixes = _SUFFIXES.get(kind, ("",))
            found.update(family + suffix for suffix in suffixes)
        return frozenset(found)

    def select(self, name: str, /, **labels: str) -> tuple[Sample, ...]:
        """Return the samples called ``name`` that carry all of ``labels``."""
        wanted = labels.items()
        return tuple(s for s in self.samples if s.name == name and all(s.labels.get(k) == v for k, v in wanted))

    def label_names(self, name: str) -> frozenset[str]:
        """Return the label names seen on any sample called ``name``."""
        return frozenset(label for sample in self.samples if sample.name == name for label in sample.labels)


def parse_scrape(text: str) -> Scrape:
    """Return ``text`` (Prometheus text format) as a :class:`Scrape`. Raises ScrapeError with the line's number."""
    samples: list[Sample] = []
    types: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip(_SPACE + "\r")
        if not stripped:
            continue
        if stripped.startswith("#"):
            words = stripped.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                types[words[2]] = words[3].strip()
            continue
        samples.append(_sample(stripped, number))
    return Scrape(tuple(samples), types)


def merge_scrapes(scrapes: Iterable[Scrape]) -> Scrape:
    """Return one Scrape with the samples of all ``scrapes``, in order (several engines or exporters of a node)."""
    samples: list[Sample] = []
    types: dict[str, str] = {}
    for scrape in scrapes:
        samples.extend(scrape.samples)
        types.update(scrape.types)
    return Scrape(tuple(samples), types)


def _sample(line: str, number: int) -> Sample:
    match = _NAME.match(line)
    if match is None:
        raise ScrapeError(f"line {number}: a metric name was expected at {line[:40]!r}")
    position = match.end()
    labels: dict[str, str] = {}
    if line[position : position + 1] == "{":
        labels, position = _labels(line, position + 1, number)
    words = line[position:].split()
    if len(words) not in (1, 2):
        raise ScrapeError(f"line {number}: one value (and at most a timestamp) was expected after {match.group()}")
    try:
        value = float(words[0].replace("_", "x"))  # float() takes 1_000, the format does not
    except ValueError:
        raise ScrapeError(f"line {number}: {words[0]!r} is not a number") from None
    return Sample(match.group(), labels, value)


def _labels(line: str, position: int, number: int) -> tuple[dict[str, str], int]:
    labels: dict[str, str] = {}
    while True:
        position = _skip(line, position)
        if line[position : position + 1] == "}":
            return labels, position + 1
        match = _LABEL.match(line, position)
        if match is None:
            raise ScrapeError(f"line {number}: a label name was expected at {line[position : position + 40]!r}")
        position = _skip(line, match.end())
        if line[position : position + 1] != "=":
            raise ScrapeError(f"line {number}: '=' was expected after label {match.group()}")
        position = _skip(line, position + 1)
        labels[match.group()], position = _quoted(line, position, number)
        position = _skip(line, position)
        if line[position : position + 1] == ",":
            position += 1
        elif line[position : position + 1] != "}":
            raise ScrapeError(f"line {number}: ',' or '}}' was expected after label {match.group()}")


def _skip(line: str, position: int) -> int:
    while line[position : position + 1] in (" ", "\t"):
        position += 1
    return position


def _quoted(line: str, position: int, number: int) -> tuple[str, int]:
    if line[position : position + 1] != '"':
        raise ScrapeError(f"line {number}: a quoted label value was expected at {line[position : position + 40]!r}")
    value: list[str] = []
    characters = _characters(line, position + 1)
    for place, character in characters:
        if character == '"':
            return "".join(value), place + 1
        if character == "\\":
            _place, escaped = next(characters, (place, ""))
            value.append(_ESCAPES.get(escaped, "\\" + escaped))
        else:
            value.append(character)
    raise ScrapeError(f"line {number}: a label value does not end")


def _characters(line: str, start: int) -> Iterator[tuple[int, str]]:
    return ((place, line[place]) for place in range(start, len(line)))
