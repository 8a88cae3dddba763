# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Why a request of the gateway's access log ended as it did.

The status alone does not tell: a 502 may be a dead engine, an idle connection that the engine closed at the wrong
moment, or a pool whose replicas were all ejected; a 429 is the gateway's own limit and no failure of an engine at all.
Input is a row of the JSON log (docs/gateway.md#logs) and, where there is one, the text of the error log for the same
connection.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

ALIASES = {
    "rt": ("rt", "request_time"),
    "uct": ("uct", "upstream_connect_time"),
    "uht": ("uht", "upstream_header_time"),
    "urt": ("urt", "upstream_response_time"),
    "upstream": ("upstream", "upstream_addr"),
    "upstream_status": ("upstream_status",),
    "status": ("status",),
    "complete": ("complete", "request_completion"),
    "connection": ("connection",),
    "rejected": ("rejected",),
    "error": ("error",),
}
"""Names of a row's fields: ours first, then nginx's own, so that logs of other gateways can be read too."""

REFUSALS = {401: "not_allowed", 403: "not_allowed", 413: "body_limit", 429: "rate_limit"}
"""Causes that the status alone tells."""

COMBINED = re.compile(r"\[(\d\d)/(\w{3})/(\d{4}):(\d\d:\d\d:\d\d) [+-]\d{4}\] \"[^\"]*\" (\d{3}) ")
"""Day, month, year, time and status of a row in nginx's `combined` form, to which many add times as key=value."""

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

ERROR_LINE = re.compile(r"\A(\d{4}/\d\d/\d\d) (\S+) \[\w+\] \d+#\d+: \*(\d+) (.*?)(?:, client: |\Z)")

RACE_S = 0.05
"""An engine that closes within this time after a request was sent had decided to before: its idle limit was over."""

ROUND_S = 0.15
"""A client that gives up this close to a whole multiple of CLIENT_STEP_S does so by its own timer."""

CLIENT_STEP_S = 5
CLIENT_FLOOR_S = 10


@dataclass(frozen=True)
class Cause:
    """``name`` is a key of CAUSES; ``engine`` tells an engine's error; ``why`` and ``remedy`` are sentences."""

    name: str
    engine: bool
    why: str
    remedy: str


CAUSES = {
    cause.name: cause
    for cause in (
        Cause("served", False, "The request was answered in full.", ""),
        Cause("client_request", False, "The request itself was refused.", "Read the engine's or gateway's error text."),
        Cause("not_allowed", False, "No valid key.", "Check the client's key."),
        Cause("body_limit", False, "The body is larger than the gateway takes.", "Raise the pool's max_model_len."),
        Cause("rate_limit", False, "The gateway's own limit: as many in flight as the pool takes.", "Add replicas."),
        Cause("client_limit", False, "The client gave up at its own time limit.", "Let it wait longer, or stream."),
        Cause("client_left", False, "The client went away before the answer was complete.", ""),
        Cause("overload", False, "The engine was full (503): load, not death.", "Add replicas, or admit fewer."),
        Cause("read_timeout", True, "The engine said nothing within the read time.", "Look for a wedged engine."),
        Cause("connect_timeout", True, "The engine's node did not answer a connect.", "Is the node up, the port open?"),
        Cause("refused", True, "Nothing listens at the engine's address.", "Is the engine's unit running?"),
        Cause(
            "keepalive_race",
            True,
            "The engine closed an idle connection as the gateway used it again.",
            "Let the gateway's upstream keep-alive end before the engine's.",
        ),
        Cause("engine_closed", True, "The engine closed the connection while it worked.", "Read the engine's log."),
        Cause("truncated", True, "The engine broke off in the middle of its answer.", "Read the engine's log."),
        Cause("ejection", True, "All replicas of the pool were out after failures.", "See the failures before it."),
        Cause("engine_error", True, "The engine answered with an error of its own.", "Read the engine's log."),
        Cause("gateway", False, "The gateway could not handle it.", "Read the gateway's error log."),
    )
}
"""Every cause by name."""


def field(row: Mapping[str, Any], name: str) -> str:
    """Return a field of a row as text, by our or nginx's name; empty where it is missing or ``-``."""
    for alias in ALIASES[name]:
        if row.get(alias) is not None:
            text = str(row[alias]).strip()
            return "" if text == "-" else text
    return ""


def last_number(text: str) -> float | None:
    """Return the last value of a time such as ``0.000, 1.002``; None where the last try has none.

    nginx separates tries with commas, and internal redirects with colons.
    """
    last = re.split(r"[,:]", text)[-1].strip()
    try:
        return float(last)
    except ValueError:
        return None


def cause_of(row: Mapping[str, Any], error: str = "") -> Cause:
    """Return why a request ended as it did.

    ``row`` is a line of the access log as a mapping (numbers may be text), ``error`` what the error log says for its
    connection. Raises ValueError when ``row`` has no status.
    """
    status_text = field(row, "status")
    if not status_text.isdigit():
        raise ValueError(f"status of the row is {status_text!r}; it must be a number")
    return CAUSES[_name(int(status_text), row, error.lower())]


def _name(status: int, row: Mapping[str, Any], error: str) -> str:
    # A full engine in disguise: an error inside a stream that began as a 200, a full queue told as a 400.
    if (status, field(row, "rejected")) in ((200, "in_stream"), (400, "as_400")):
        return "overload"
    if status < 400:
        return _served(row, error)
    if status in (499, 0):
        return _client_left(last_number(field(row, "rt")) or 0.0)
    if status in (502, 504):
        return _unreachable(status, row, error)
    if status < 500:
        return REFUSALS.get(status, "client_request")
    from_engine = bool(field(row, "upstream_status"))
    if status == 503:
        return "ejection" if not from_engine or "no live upstreams" in error else "overload"
    return "engine_error" if from_engine else "gateway"


def _served(row: Mapping[str, Any], error: str) -> str:
    if "prematurely closed" in error or "while reading upstream" in error:
        return "truncated"
    if any(alias in row for alias in ALIASES["complete"]) and field(row, "complete") != "OK":
        return "client_left"
    return "served"


def _client_left(seconds: float) -> str:
    off = abs(seconds - CLIENT_STEP_S * round(seconds / CLIENT_STEP_S))
    return "client_limit" if seconds >= CLIENT_FLOOR_S and off <= ROUND_S else "client_left"


def _unreachable(status: int, row: Mapping[str, Any], error: str) -> str:
    connect, total = last_number(field(row, "uct")), last_number(field(row, "urt"))
    address = re.split(r"[,:] ", field(row, "upstream"))[-1].strip()
    if "no live upstreams" in error or (address and not re.search(r":\d+$|^unix:", address)):
        return "ejection"
    if status == 504 or "timed out" in error:
        connecting = "while connecting" in error or (connect is None and bool(field(row, "upstream")))
        return "connect_timeout" if connecting else "read_timeout"
    if "refused" in error or "while connecting" in error:
        return "refused"
    if connect is None and field(row, "upstream"):
        return "refused"
    closed = "prematurely closed" in error or "reset by peer" in error or connect is not None
    if not closed:
        return "engine_error" if field(row, "upstream_status") else "gateway"
    # A connection that is made anew takes a moment too; one that is used again takes none.
    reused = connect is not None and connect < 0.001
    return "keepalive_race" if reused and (total is None or total <= RACE_S) else "engine_closed"


def parse_row(line: str) -> dict[str, Any] | None:
    """Return a line of the access log as a mapping: JSON, ``key=value`` pairs, or nginx's combined form with such pairs
    behind it; None for anything else.
    """
    line = line.strip()
    if line.startswith("{"):
        try:
            row = json.loads(line)
        except ValueError:
            return None
        return row if isinstance(row, dict) and "status" in row else None
    match = COMBINED.search(line)
    if match is None or match.group(2) not in MONTHS:
        row = _pairs(line)
        return row if "status" in row else None
    day, month, year, time, status = match.groups()
    # The request itself may hold text that looks like a field: what counts stands behind the status.
    when = f"{year}-{MONTHS.index(month) + 1:02d}-{day}T{time}"
    return {**_pairs(line[match.end() :]), "status": status, "time": when}


def _pairs(text: str) -> dict[str, Any]:
    return {name: value.strip('"') for name, value in re.findall(r"(\w+)=(\"[^\"]*\"|\S+)", text)}


class ErrorLine(NamedTuple):
    """A line of the error log: number of the connection, local time to the second, message."""

    connection: str
    second: str
    message: str


def parse_error(line: str) -> ErrorLine | None:
    """Return a line of nginx's error log; None for lines without a connection."""
    match = ERROR_LINE.search(line.strip())
    if match is None:
        return None
    return ErrorLine(match.group(3), f"{match.group(1).replace('/', '-')}T{match.group(2)}", match.group(4))


def count_causes(lines: Iterable[str], errors: Iterable[str] = ()) -> dict[str, int]:
    """Return how many requests of a log ended for which cause; lines that are no rows are left out.

    ``errors`` are lines of the error log. A connection carries many requests, so an error explains the row of its
    connection that ended in the same second or the next; a failure that names no connection is explained where all
    errors of these seconds say the same. nginx logs an answer that the engine broke off as a 200 like any other: only
    the error log tells.
    """
    known = [one for one in map(parse_error, errors) if one is not None]
    said = {(one.connection, one.second): one.message for one in known}
    at: dict[str, set[str]] = {}
    for one in known:
        at.setdefault(one.second, set()).add(one.message)
    counts: dict[str, int] = {}
    for line in lines:
        row = parse_row(line)
        if row is None:
            continue
        connection = field(row, "connection")
        message = field(row, "error")
        if connection:
            message = next(
                (said[connection, second] for second in _seconds(row) if (connection, second) in said), message
            )
        elif field(row, "status") in ("502", "503", "504"):
            alike = set().union(*(at.get(second, set()) for second in _seconds(row)))
            message = message or (alike.pop() if len(alike) == 1 else "")
        cause = cause_of(row, message)
        counts[cause.name] = counts.get(cause.name, 0) + 1
    return counts


def _seconds(row: Mapping[str, Any]) -> list[str]:
    """Return the second in which a row ended and the one before, as local times; none where it has no time."""
    try:
        ended = datetime.strptime(str(row.get("time", ""))[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return []
    return [(ended - timedelta(seconds=back)).isoformat() for back in (0, 1)]
