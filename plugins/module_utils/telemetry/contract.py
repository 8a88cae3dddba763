# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The contract between what rules and dashboards ask for and what a scrape really holds.

A rule on a metric that was renamed does not fail: it is silent for ever. So every selector of every expression is
looked up in a real scrape of the pinned engine version. The reader of PromQL here knows the grammar's words (functions,
aggregations, ``by (…)``, ``on (…)``, ``offset``, durations, strings, comments) and takes only what selects a series.
Grammar: https://prometheus.io/docs/prometheus/latest/querying/basics/ (2.31 to 3.x).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .metrics import Scrape

_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\n]+)
    | (?P<comment>\#[^\n]*)
    | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
    | (?P<range>\[[^\[\]]*\])
    | (?P<duration>(?:[0-9]+(?:ms|[smhdwy]))+(?![A-Za-z0-9_]))
    | (?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<variable>\$[a-zA-Z_][a-zA-Z0-9_]*|\$\{[^}]*\})
    | (?P<operator>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){},@])
    """,
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OPERATORS = {"and", "or", "unless", "atan2", "bool", "offset"}
_NUMBERS = {"inf", "nan"}
_MATCHES = ("=", "!=", "=~", "!~")

# Names that dashboards and rules still carry, and what the engine says today ("" = nothing replaces it).
# Sources: vLLM 0.32 scraped and 0.33 read (v1/metrics/loggers.py); SGLang 0.5.23 read (metrics_collector.py).
RENAMED: Mapping[str, str] = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:cpu_cache_usage_perc": "",
    "vllm:num_requests_swapped": "",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hit_rate": "vllm:prefix_cache_hits_total",
    "vllm:avg_generation_throughput_toks_per_s": "vllm:generation_tokens_total",
    "vllm:avg_prompt_throughput_toks_per_s": "vllm:prompt_tokens_total",
    "vllm:model_load_time_seconds": "metalserve_replica_model_load_seconds",
    "sglang:gen_throughput_total": "sglang:gen_throughput",
}

# First vLLM version (as numbers) whose scrape holds the name; absent before it.
SINCE: Mapping[str, tuple[int, int]] = {"vllm:admission_rejections_total": (0, 32)}


class ExpressionError(ValueError):
    """An expression is not PromQL; the message holds the place and what was expected."""


@dataclass(frozen=True)
class Selector:
    """One vector selector: the metric's ``name`` ('' where only labels select), its name as a pattern, its labels.

    ``name_pattern`` is the regular expression of a ``__name__=~"…"`` matcher, '' without one.
    """

    name: str
    labels: tuple[tuple[str, str, str], ...] = ()
    name_pattern: str = ""


@dataclass(frozen=True)
class Missing:
    """A metric (or label) that an expression asks for and no scrape holds, with the name of today where it is known."""

    name: str
    label: str = ""
    hint: str = ""

    def __str__(self) -> str:
        what = f"{self.name} has no label {self.label}" if self.label else self.name
        return f"{what} ({self.hint})" if self.hint else what


def selectors(expression: str) -> tuple[Selector, ...]:
    """Return the vector selectors of a PromQL ``expression``, in order. Raises ExpressionError for what is not PromQL.

    Dashboard variables (``$pool``, ``[$__rate_interval]``) are accepted where a dashboard may put them.
    """
    tokens = _tokens(expression)
    found: list[Selector] = []
    position = 0
    depth: list[str] = []
    while position < len(tokens):
        kind, text = tokens[position]
        following = tokens[position + 1][1] if position + 1 < len(tokens) else ""
        if kind == "name" and text.lower() in _GROUPING and following == "(":
            position = _end_of_group(tokens, position + 1, expression)
            continue
        if kind == "name" and not _is_word(text, following):
            selector, position = _selector(tokens, position, expression)
            found.append(selector)
            continue
        if text == "{":
            selector, position = _selector(tokens, position, expression)
            found.append(selector)
            continue
        _balance(depth, text, expression)
        position += 1
    if depth:
        raise ExpressionError(f"{depth[-1]!r} is not closed in {_short(expression)}")
    return tuple(found)


def metric_names(expression: str) -> tuple[str, ...]:
    """Return the distinct metric names that ``expression`` selects, sorted. Raises ExpressionError."""
    return tuple(sorted({selector.name for selector in selectors(expression) if selector.name}))


def missing_metrics(
    expressions: Iterable[str],
    scrape: Scrape,
    *,
    recorded: Iterable[str] = (),
    target_labels: Iterable[str] = (),
    check_labels: bool = False,
) -> tuple[Missing, ...]:
    """Return what ``expressions`` ask for and ``scrape`` does not hold, sorted; empty when the contract is kept.

    ``recorded`` are names that recording rules make, ``target_labels`` labels that the scrape configuration adds.
    With ``check_labels`` a selector's labels must be on a sample of the metric too (dashboards keyed on ``model_name``
    see nothing of Triton, which says ``model``). ``up``, ``ALERTS`` and the scrape's own series are Prometheus' own.
    """
    known = scrape.names() | set(recorded) | _PROMETHEUS_OWN
    allowed = set(target_labels) | {"instance", "job"}
    missing: set[Missing] = set()
    for expression in expressions:
        for selector in selectors(expression):
            if selector.name_pattern:
                pattern = _pattern(selector.name_pattern, expression)
                if not any(pattern.fullmatch(name) for name in known):
                    missing.add(Missing(f'{{__name__=~"{selector.name_pattern}"}}'))
            elif selector.name and selector.name not in known:
                missing.add(Missing(selector.name, hint=_hint(selector.name)))
            elif selector.name and check_labels and selector.name not in recorded:
                missing.update(_missing_labels(selector, scrape, allowed))
    return tuple(sorted(missing, key=lambda one: (one.name, one.label)))


def known_since(name: str, version: str) -> bool:
    """Return whether vLLM ``version`` (``0.26.0``) exports ``name``; True for names without a recorded beginning.

    Raises ValueError for a version that does not begin with two numbers.
    """
    match = re.match(r"\A(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"engine version {version!r} does not begin with two numbers, such as 0.26.0")
    return (int(match.group(1)), int(match.group(2))) >= SINCE.get(name, (0, 0))


_PROMETHEUS_OWN = frozenset(
    {
        "up",
        "ALERTS",
        "ALERTS_FOR_STATE",
        "scrape_duration_seconds",
        "scrape_samples_scraped",
        "scrape_samples_post_metric_relabeling",
        "scrape_series_added",
    }
)


def _missing_labels(selector: Selector, scrape: Scrape, allowed: set[str]) -> Iterable[Missing]:
    present = scrape.label_names(selector.name)
    if not scrape.select(selector.name):
        return  # a declared family without a sample yet says nothing about its labels
    for label, operator, value in selector.labels:
        matches_absent = (operator in ("=", "=~") and value == "") or operator in ("!=", "!~")
        if label not in present and label not in allowed and not matches_absent:
            yield Missing(selector.name, label, f"it has {', '.join(sorted(present)) or 'none'}")


def _hint(name: str) -> str:
    for suffix in ("", "_bucket", "_sum", "_count"):
        if suffix and not name.endswith(suffix):
            continue
        base = name[: -len(suffix)] if suffix else name
        if base in RENAMED:
            new = RENAMED[base]
            return f"today {new}{suffix}" if new else "it is gone, nothing replaces it"
    if name in SINCE:
        return f"only since {'.'.join(map(str, SINCE[name]))}"
    return ""


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ExpressionError(f"{expression[position : position + 20]!r} is not PromQL in {_short(expression)}")
        if match.lastgroup not in ("space", "comment"):
            tokens.append((str(match.lastgroup), match.group()))
        position = match.end()
    return tokens


def _is_word(text: str, following: str) -> bool:
    """Return whether the name ``text`` is a word of the grammar: a function or aggregation, an operator, a number."""
    lowered = text.lower()
    if following == "(" or lowered in _OPERATORS or lowered in _NUMBERS or lowered in _GROUPING:
        return True
    # An aggregation may carry its grouping before its argument: sum by (pool) (…)
    return following.lower() in ("by", "without")


def _end_of_group(tokens: list[tuple[str, str]], position: int, expression: str) -> int:
    while position < len(tokens):
        if tokens[position][1] == ")":
            return position + 1
        position += 1
    raise ExpressionError(f"a label list does not end in {_short(expression)}")


def _selector(tokens: list[tuple[str, str]], position: int, expression: str) -> tuple[Selector, int]:
    name = ""
    pattern = ""
    labels: list[tuple[str, str, str]] = []
    if tokens[position][0] == "name":
        name = tokens[position][1]
        position += 1
    if position < len(tokens) and tokens[position][1] == "{":
        position += 1
        while True:
            if position >= len(tokens):
                raise ExpressionError(f"'{{' is not closed in {_short(expression)}")
            kind, text = tokens[position]
            if text == "}":
                position += 1
                break
            if text == ",":
                position += 1
                continue
            following = tokens[position + 1][1] if position + 1 < len(tokens) else ""
            if kind == "string" and following not in _MATCHES:  # {"name with dots"}, Prometheus 3
                name = text[1:-1]
                position += 1
                continue
            if kind not in ("name", "string") or following not in _MATCHES or position + 2 >= len(tokens):
                raise ExpressionError(f"a label matcher was expected at {text!r} in {_short(expression)}")
            value_kind, value = tokens[position + 2]
            if value_kind not in ("string", "variable"):
                raise ExpressionError(f"a quoted value was expected after {text!r} in {_short(expression)}")
            value = value[1:-1] if value_kind == "string" else value
            if text == "__name__":
                name, pattern = (
                    (value, pattern) if following == "=" else (name, value if following == "=~" else pattern)
                )
            else:
                labels.append((text, following, value))
            position += 3
    return Selector(name, tuple(labels), pattern), position


def _balance(depth: list[str], text: str, expression: str) -> None:
    if text == "(":
        depth.append(text)
    elif text == "}" or (text == ")" and (not depth or not depth.pop())):
        raise ExpressionError(f"{text!r} closes nothing in {_short(expression)}")


def _pattern(pattern: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ExpressionError(f"{pattern!r} is not a regular expression ({error}) in {_short(expression)}") from None


def _short(expression: str) -> str:
    text = " ".join(expression.split())
    return repr(text if len(text) <= 80 else text[:77] + "...")
