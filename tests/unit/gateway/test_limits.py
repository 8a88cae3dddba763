# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Limits per key and of a pool's rate, in both modes; one key's use is not another's, nor one pool's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway


@pytest.fixture(scope="module", params=["plain", "lua"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    ports = harness.free_ports(1)
    options = {
        "gateway_mode": request.param,
        **harness.UNKEPT,
        "gateway_key_requests_per_second": 1,
        "gateway_key_burst": 5,
        "gateway_key_max_in_flight": 2,
    }
    with (
        harness.standins(ports),
        harness.gateway(tmp_path_factory.mktemp("limits"), [harness.pool("short", ports)], **options) as running,
    ):
        yield running


def test_a_key_has_its_rate_and_its_room(gateway: Gateway) -> None:
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda _: gateway.ask(body={"prompt": "sleep=0.4"})[0].status, range(4)))
    assert sorted(together) == [200, 200, 429, 429]
    answers = [gateway.ask(body={"prompt": "x"}) for _ in range(6)]
    codes = [answer.status for answer, _ in answers]
    assert codes.count(200) in (2, 3)
    refused = next((answer, body) for answer, body in answers if answer.status == 429)
    assert (refused[1]["error"]["code"], refused[0].headers["Retry-After"]) == ("rate_limit_exceeded", "1")
    assert gateway.ask(body={"prompt": "x"}, key=harness.KEYS[1]["key"])[0].status == 200


@pytest.fixture(scope="module", params=["plain", "lua"])
def paced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    ports = harness.free_ports(2)
    options = {
        "gateway_mode": request.param,
        **harness.UNKEPT,
        "gateway_limit_rates": True,
    }
    room = {"max_in_flight": 4, "queue": 1}
    pools = [
        harness.pool("short", ports[:1], admission={**room, "requests_per_s": 1}),
        harness.pool("other", ports[1:], admission={**room, "requests_per_s": 0}),
    ]
    with (
        harness.standins(ports),
        harness.gateway(tmp_path_factory.mktemp("rates"), pools, **options) as running,
    ):
        yield running


def test_a_pool_has_its_planned_rate_where_that_is_wanted(paced: Gateway) -> None:
    def answers(pool: str) -> list[tuple[Any, Any]]:
        return [paced.ask(body={"prompt": "x"}, X_Metalserve_Pool=pool) for _ in range(12)]

    began = time.monotonic()
    short = answers("short")
    more = 1 + int(time.monotonic() - began)
    # As many at once as the pool has room for (nginx counts one more), then one a second.
    assert [answer.status for answer, _ in short[:4]] == [200] * 4
    refused = [(answer, error) for answer, error in short if answer.status == 429]
    assert len(refused) >= 12 - 5 - more
    assert [answer.status for answer, _ in answers("other")] == [200] * 12
    for answer, error in refused:
        assert (error["error"]["code"], answer.headers["Retry-After"]) == ("rate_limit_exceeded", "1")
        if paced.mode == "lua":
            assert paced.row(answer.headers["X-Request-Id"])["rejected"] == "pool_rate"
