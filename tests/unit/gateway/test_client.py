# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The documented client against a real nginx: one connection, heartbeats, a reload in between, errors."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway, until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    ports = harness.free_ports(1)
    with (
        harness.standins(ports),
        harness.gateway(tmp_path_factory.mktemp("client"), [harness.pool("short", ports)], **harness.UNKEPT) as running,
    ):
        yield running


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("client", harness.ROOT / "docs" / "examples" / "client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ca = str(gateway.folder / "made" / "server.crt")
    opened = module.Client(f"https://localhost:{gateway.https}", harness.KEY, ca, heartbeat_s=0.3)
    yield opened
    opened.close()


def connections(gateway: Gateway, skip: int) -> list[int]:
    return [row["connection"] for row in gateway.log()[skip:] if row["path"] == "/v1/chat/completions"]


def test_answers_and_heartbeats_share_a_connection(gateway: Gateway, client: Any) -> None:
    skip = len(gateway.log())
    for _ in range(3):
        assert "".join(client.ask("smollm2", "tokens=4")) == "t0 t1 t2 t3 "
    used = client._used
    until(lambda: client._used > used)
    assert "".join(client.ask("smollm2", "tokens=1")) == "t0 "
    until(lambda: len(connections(gateway, skip)) == 4)
    assert len(set(connections(gateway, skip))) == 1
    # The last request is the fifth of its connection at least: a heartbeat was one, too.
    assert gateway.log()[-1]["connection_requests"] >= 5


def test_a_reload_costs_no_request(gateway: Gateway, client: Any) -> None:
    assert "".join(client.ask("smollm2", "tokens=1")) == "t0 "
    workers = gateway.workers()
    gateway.process.send_signal(signal.SIGHUP)
    until(lambda: (now := set(gateway.workers())) and not now & set(workers), 30)
    assert "".join(client.ask("smollm2", "tokens=1")) == "t0 "


@pytest.mark.parametrize("order", ["status=500", "sse_error=1", "cut tokens=2"])
def test_what_went_wrong_is_said(client: Any, order: str) -> None:
    with pytest.raises(Exception, match=r"engine says 500|queue is full|broke off|IncompleteRead"):
        list(client.ask("smollm2", order))
    assert "".join(client.ask("smollm2", "tokens=1")) == "t0 "
