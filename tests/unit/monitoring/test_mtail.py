# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""mtail itself, with the program as it is shipped, on lines of the gateway's access log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.telemetry.access_log import cause_of
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import Scrape

from . import scrapes
from .scrapes import OWN, log_line

ROWS: list[str] = [
    log_line(200),
    log_line(200, complete="", rt=3.0),
    log_line(504, urt="60.001", uht="-", rt=60.001),
    log_line(504, uct="-", uht="-", urt="1.001"),
    log_line(499, rt=4.2),
    log_line(502, uct="0.000", uht="-", urt="0.001", rt=0.001),
    log_line(502, uct="0.000", uht="-", urt="3.000", rt=3.0),
    log_line(502, uct="0.002", uht="-", urt="0.004", rt=0.004),
    log_line(502, uct="-", uht="-", urt="0.000", rt=0.0),
    log_line(502, uct="-", uht="-", urt="0.000", rt=0.0, upstream="pool_short"),
    log_line(502, uct="0.001, -", uht="-, -", urt="0.002, 0.000", upstream="10.0.0.11:8100, pool_short", rt=0.002),
    log_line(502, uct="0.000", uht="-", urt="0.001", upstream="[fd00::11]:8100", rt=0.001),
    log_line(503, upstream_status="503"),
    log_line(503, upstream="10.0.0.11:8100, 10.0.0.12:8100", upstream_status="503, 503", urt="0.005, 0.005"),
    log_line(503, **OWN),
    log_line(500),
    log_line(500, **OWN),
    log_line(501),
    log_line(400),
    log_line(400, **OWN),
    log_line(401, **OWN),
    log_line(403, **OWN),
    log_line(404, **OWN),
    log_line(408, **OWN),
    log_line(413, **OWN),
    log_line(422),
    log_line(429, **OWN),
    log_line(429),
    log_line(200, rejected="in_stream"),
    log_line(400, rejected="as_400"),
    log_line(200, rejected="503", upstream="10.0.0.11:8100 : 10.0.0.12:8100", upstream_status="503 : 200"),
]


def causes(scrape: Scrape) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in ("errors", "rejected", "client_failures"):
        for sample in scrape.select(f"metalserve_gateway_{family}_total"):
            if sample.value:
                found[sample.labels["cause"]] = found.get(sample.labels["cause"], 0) + sample.value
    return found


def test_causes_are_those_of_the_log_reader() -> None:
    """One run over all rows; the log reader also knows clients that stop at a time of their own, mtail does not."""
    wanted: dict[str, float] = {}
    for row in ROWS:
        name = cause_of(json.loads(row)).name.replace("client_limit", "client_left")
        if name != "served":
            wanted[name] = wanted.get(name, 0) + 1
    assert causes(scrapes.mtail("\n".join(ROWS) + "\n")) == wanted


def test_what_is_an_error_and_what_is_not() -> None:
    found = scrapes.mtail("\n".join(ROWS) + "\n")
    errors = {sample.labels["cause"] for sample in found.select("metalserve_gateway_errors_total")}
    rejected = {sample.labels["cause"] for sample in found.select("metalserve_gateway_rejected_total")}
    assert rejected == {"rate_limit", "overload"}
    assert not errors & {"rate_limit", "overload", "client_left", "body_limit", "not_allowed", "client_request"}


def value(scrape: Scrape, name: str, **labels: str) -> float:
    return sum(sample.value for sample in scrape.select(name, **labels))


def test_counts_bytes_and_times() -> None:
    found = scrapes.mtail(
        "\n".join(
            [
                log_line(200, rt=0.4, uht="0.1", urt="0.399", bytes=100, request_bytes=10),
                log_line(
                    200, rt=1.6, uht="-, 0.3", urt="0.001, 1.598", upstream="a:1, b:1", upstream_status="502, 200"
                ),
                log_line(200, rt=0.4, uht="0.1 : 0.1", urt="0.1 : 0.3", upstream="a:1 : b:1", bytes=0, request_bytes=0),
                log_line(200, path="/healthz", **OWN),
                log_line(429, **OWN),
                "not a line of the log",
            ]
        )
        + "\n"
    )
    assert value(found, "metalserve_gateway_log_lines_total") == 5
    assert value(found, "metalserve_gateway_requests_total", pool="short", status="200") == 3
    assert value(found, "metalserve_gateway_requests_total", pool="") == 1
    assert value(found, "metalserve_gateway_retries_total", pool="short") == 2
    assert value(found, "metalserve_gateway_sent_bytes_total", pool="short") == 1300
    assert value(found, "metalserve_gateway_received_bytes_total", pool="short") == 510
    assert value(found, "metalserve_gateway_request_seconds_count") == 3
    assert value(found, "metalserve_gateway_request_seconds_sum", pool="short") == pytest.approx(2.4)
    assert value(found, "metalserve_gateway_request_seconds_bucket", pool="short", le="1.5") == 2
    assert value(found, "metalserve_gateway_first_byte_seconds_sum", pool="short") == pytest.approx(0.5)
    assert value(found, "metalserve_gateway_upstream_seconds_sum", pool="short") == pytest.approx(2.297)


def test_every_cause_is_there_at_zero_from_the_first_request() -> None:
    found = scrapes.mtail(log_line(200) + "\n")
    assert len(found.select("metalserve_gateway_errors_total", pool="short")) == 8
    assert all(sample.value == 0 for sample in found.select("metalserve_gateway_errors_total"))
    assert len(found.select("metalserve_gateway_rejected_total", pool="short")) == 2


def test_the_order_of_the_fields_does_not_matter() -> None:
    row: dict[str, Any] = json.loads(log_line(504, urt="60.001", uht="-", rt=60.001))
    first = row.pop("time")
    turned = json.dumps({"time": first, **dict(reversed(list(row.items())))}, separators=(",", ":"))
    assert causes(scrapes.mtail(turned + "\n")) == {"read_timeout": 1}
