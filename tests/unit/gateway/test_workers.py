# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What several workers of one nginx must know of each other: counts, rotation, ids; and rows that are written together."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway, admin, replicas, turn, until

WORKERS = 4


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    ports = harness.free_ports(3)
    folder = tempfile.mkdtemp()
    Path(folder).chmod(0o777)
    options = {
        "gateway_rotation_file": f"{folder}/rotation.json",
        "gateway_workers": str(WORKERS),
        "gateway_log_flush_s": 1,
    }
    with (
        harness.standins(ports),
        harness.gateway(tmp_path_factory.mktemp("workers"), [harness.pool("short", ports)], **options) as running,
    ):
        yield running
        until(lambda: all(pool["in_flight"] == 0 for pool in admin(running, "/state")[1]["pools"]))


def sockets(worker: str) -> int:
    """Return how many connections a worker holds."""
    folder = Path(f"/proc/{worker}/fd")
    return sum(os.readlink(entry).startswith("socket:") for entry in folder.iterdir())


def spread(gateway: Gateway, stack: ExitStack, least: int) -> list[HTTPConnection]:
    """Return open connections, of which two workers at least hold ``least`` each."""
    before = {worker: sockets(worker) for worker in gateway.workers()}
    assert len(before) == WORKERS
    opened: list[HTTPConnection] = []

    def connect(client: HTTPConnection) -> None:
        client.connect()

    for _ in range(40):
        some = [stack.enter_context(gateway.connection()) for _ in range(12)]
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(connect, some))
        opened += some
        if sum(sockets(worker) - count >= least for worker, count in before.items()) >= 2:
            return opened
    raise AssertionError("one worker took every connection")


def send(client: HTTPConnection, prompt: str, **more: object) -> None:
    body = json.dumps({"prompt": prompt, **more})
    client.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {harness.KEY}"})


def test_the_least_busy_is_known_to_every_worker(gateway: Gateway) -> None:
    """One request after the other, each while all before it run: the counts never differ by more than one."""
    with ExitStack() as stack:
        clients = spread(gateway, stack, 6)
        picked = clients[:: max(1, len(clients) // 12)][:12]
        for number, client in enumerate(picked, 1):
            send(client, "tokens=400 gap=0.05", stream=True)
            until(lambda: sum(one["in_flight"] for one in replicas(gateway).values()) == number)  # noqa: B023
            counts = [one["in_flight"] for one in replicas(gateway).values()]
            assert max(counts) - min(counts) <= 1, (number, counts)


def test_a_drain_is_in_force_for_every_worker_with_its_answer(gateway: Gateway) -> None:
    until(lambda: all(one["in_flight"] == 0 for one in replicas(gateway).values()))
    with ExitStack() as stack:
        clients = spread(gateway, stack, 3)[:40]
        for replica in list(replicas(gateway)) * 2:
            turn(gateway, replica, False)
            port = replicas(gateway)[replica]["address"].split(":")[1]
            for client in clients[:12]:
                send(client, "x")
                assert json.loads(client.getresponse().read())["engine"] != port
            clients = clients[12:] + clients[:12]
            turn(gateway, replica, True)


def test_ids_go_end_to_end_and_are_never_the_same(gateway: Gateway) -> None:
    answer, body = gateway.ask(body={"prompt": "x"}, X_Request_Id="client-id-0001")
    assert answer.headers.get_all("X-Request-Id") == ["client-id-0001"] == [body["headers"]["X-Request-Id"]]
    with ExitStack() as stack:
        made = set()
        clients = spread(gateway, stack, 3)
        for client in clients:
            send(client, "x")
            answer = client.getresponse()
            own = answer.headers["X-Request-Id"]
            assert json.loads(answer.read())["headers"]["X-Request-Id"] == own
            assert re.fullmatch("[0-9a-f]{32}", own)
            made.add(own)
    assert len(made) == len(clients)
    bad, body = gateway.ask(body={"prompt": "x"}, X_Request_Id='bad"id\t{}')
    refused, _ = gateway.ask(body={"prompt": "x"}, key="sk-nobody-0123456789")
    ids = {bad.headers["X-Request-Id"], refused.headers["X-Request-Id"]}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert body["headers"]["X-Request-Id"] == bad.headers["X-Request-Id"]


def test_rows_that_are_written_together_all_come(gateway: Gateway) -> None:
    ids = [f"together-{number:04}" for number in range(60)]
    with ThreadPoolExecutor(6) as clients:
        list(clients.map(lambda one: gateway.ask(body={"prompt": "x"}, X_Request_Id=one), ids))
    until(lambda: {row["id"] for row in gateway.log()} >= set(ids))
    assert [row["id"] for row in gateway.log()].count(ids[0]) == 1
