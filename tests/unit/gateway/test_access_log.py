# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Every kind of row in an access log has its own cause (case I19)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.telemetry import access_log

CLOSED = "upstream prematurely closed connection while reading response header from upstream"
MIDWAY = "upstream prematurely closed connection while reading upstream"
RESET = "recv() failed (104: Connection reset by peer) while reading response header from upstream"

ROWS = [
    ({"status": 504, "urt": "60.001"}, "", "read_timeout", True),
    ({"status": 504, "uct": "0.001", "urt": "60.001", "upstream": "10.0.0.1:8100"}, "", "read_timeout", True),
    ({"status": 504, "uct": "-", "urt": "1.001", "upstream": "10.0.0.1:8100"}, "", "connect_timeout", True),
    ({"status": 499, "rt": 600.0}, "", "client_limit", False),
    ({"status": 499, "rt": "59.98", "uct": "0.000"}, "", "client_limit", False),
    ({"status": 499, "rt": 3.2}, "", "client_left", False),
    ({"status": 499, "rt": 17.4}, "", "client_left", False),
    ({"status": 502, "uct": "0.000"}, CLOSED, "keepalive_race", True),
    ({"status": 502, "uct": "0.000", "urt": "0.001", "upstream": "10.0.0.1:8100"}, RESET, "keepalive_race", True),
    ({"status": 502, "uct": "0.000", "urt": "12.4", "upstream": "10.0.0.1:8100"}, CLOSED, "engine_closed", True),
    ({"status": 502, "uct": "0.002", "urt": "0.003", "upstream": "10.0.0.1:8100"}, CLOSED, "engine_closed", True),
    ({"status": 502}, "no live upstreams while connecting to upstream", "ejection", True),
    ({"status": 502, "uct": "-", "urt": "0.000", "upstream": "metalserve_short"}, "", "ejection", True),
    ({"status": 502, "uct": "-, -", "urt": "0.0, 0.0", "upstream": "10.0.0.1:81, metalserve_x"}, "", "ejection", True),
    ({"status": 502, "uct": "-", "urt": "0.000", "upstream": "10.0.0.1:8100"}, "", "refused", True),
    ({"status": 502}, "connect() failed (111: Connection refused) while connecting to upstream", "refused", True),
    ({"status": 413}, "", "body_limit", False),
    ({"status": 429}, "", "rate_limit", False),
    ({"status": 429, "upstream_status": "429"}, "", "rate_limit", False),
    ({"status": 503, "upstream_status": "503", "uct": "0.000"}, "", "overload", False),
    ({"status": 500, "upstream_status": "500"}, "", "engine_error", True),
    ({"status": 500, "upstream_status": ""}, "", "gateway", False),
    ({"status": 401}, "", "not_allowed", False),
    ({"status": 404}, "", "client_request", False),
    ({"status": 400, "upstream_status": "400"}, "", "client_request", False),
    ({"status": 200, "complete": "OK"}, "", "served", False),
    ({"status": 200}, "", "served", False),
    ({"status": 200, "complete": ""}, "", "client_left", False),
    (
        {"status": 200, "complete": ""},
        "upstream prematurely closed connection while reading upstream",
        "truncated",
        True,
    ),
    ({"status": "502", "upstream_connect_time": "0.000"}, CLOSED, "keepalive_race", True),
    # Retried after a refused connect, and served: nobody's failure.
    ({"status": 200, "uct": "-, 0.001", "upstream_status": "502, 200", "complete": "OK"}, "", "served", False),
]


@pytest.mark.parametrize(("row", "error", "name", "engine"), ROWS)
def test_each_row_has_its_cause(row: dict[str, Any], error: str, name: str, engine: bool) -> None:
    cause = access_log.cause_of(row, error)
    assert (cause.name, cause.engine) == (name, engine)


def test_a_row_without_a_status_is_named() -> None:
    with pytest.raises(ValueError, match="status of the row is ''"):
        access_log.cause_of({"urt": "1"})


def test_rows_are_read_from_json_and_from_pairs() -> None:
    assert access_log.parse_row('{"status": 504, "urt": "60.001"}') == {"status": 504, "urt": "60.001"}
    assert access_log.parse_row('status=502 uct=0.000 upstream="10.0.0.1:8100"') == {
        "status": "502",
        "uct": "0.000",
        "upstream": "10.0.0.1:8100",
    }
    assert access_log.parse_row("nginx: ready") is None
    assert access_log.parse_row("{broken") is None


def test_the_error_log_explains_the_rows_of_its_connection() -> None:
    row = {"status": 502, "uct": "0.000", "urt": "0.001", "upstream": "10.0.0.1:8100", "connection": 12}
    row["time"] = "2026-11-30T15:56:09+01:00"
    line = f'2026/11/30 15:56:08 [error] 35#35: *12 {CLOSED}, client: 10.0.0.9, server: _, request: "POST /v1 HTTP/2.0"'
    assert access_log.parse_error(line) == ("12", "2026-11-30T15:56:08", CLOSED)
    later = {**row, "status": 200, "complete": "OK", "time": "2026-11-30T15:56:11+01:00"}
    rows = [json.dumps(row), json.dumps(later), json.dumps({**later, "time": "yesterday"}), "no row"]
    assert access_log.count_causes(rows, [line, "2026/11/30 [notice] 35#35: signal"]) == {
        "keepalive_race": 1,
        "served": 2,
    }


@given(
    st.fixed_dictionaries(
        {"status": st.integers(0, 599)},
        optional={
            name: st.text(alphabet="0123456789.,:- \u00e9", max_size=12) for name in ("rt", "uct", "urt", "upstream")
        },
    ),
    st.text(max_size=40),
)
def test_any_row_has_a_cause(row: dict[str, Any], error: str) -> None:
    assert access_log.cause_of(row, error).name in access_log.CAUSES
