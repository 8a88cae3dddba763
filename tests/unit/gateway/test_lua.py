# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The Lua gateway through a real nginx: rotation without reload, health, fairness, retries, routing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.unit.gateway import harness, standin
from tests.unit.gateway.harness import QUICK, Engines, Gateway, admin, replicas, turn, until

PROMPT = {"model": "smollm2", "prompt": "a secret prompt"}
VIP = "sk-vip-0123456789"
KEYS: list[dict[str, Any]] = [
    *harness.KEYS[:1],
    {"name": "hashed", "sha256": hashlib.sha256(harness.KEYS[1]["key"].encode()).hexdigest()},
    {"name": "vip", "key": VIP, "vip": True},
]


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return harness.free_ports(11)


@pytest.fixture(scope="module")
def engines(ports: list[int]) -> Iterator[Engines]:
    running = Engines(ports)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def rotation_file() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    if os.geteuid() == 0:
        shutil.chown(folder, "www-data")
    yield folder / "rotation.json"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, ports: list[int], engines: Engines, rotation_file: Path
) -> Iterator[Gateway]:
    """Pools: short (three replicas), long (one), tight (four in flight), main and its fallback spare, pair, triton."""
    assert engines.running
    pools = [
        harness.pool("short", ports[:3], times=QUICK),
        harness.pool("long", ports[3:4], max_model_len=8192, times=QUICK),
        harness.pool("tight", ports[4:5], in_flight=4, served_name="tight-model", times=QUICK),
        harness.pool("main", ports[5:6], served_name="other", times=QUICK),
        harness.pool("spare", ports[6:8], served_name="other", times=QUICK, body_limit_bytes=4096),
        harness.pool("pair", ports[8:10], in_flight=4, served_name="pair-model", times=QUICK),
        harness.pool("triton", ports[10:], engine="triton_vllm", served_name="triton-model", times=QUICK),
    ]
    options = {
        "gateway_vip_share": 0.5,
        "gateway_rotation_file": str(rotation_file),
        "metalserve_api_keys": KEYS,
    }
    with harness.gateway(tmp_path_factory.mktemp("gateway"), pools, **options) as running:
        yield running


def engine_of(answer: Any) -> str:
    return str(answer[1]["engine"])


@pytest.fixture(autouse=True)
def everything_is_well_and_idle(gateway: Gateway) -> Iterator[None]:
    """After each test nothing is in flight and everything is back: no count leaks."""
    yield
    until(lambda: all(one["observed"]["healthy"] for one in replicas(gateway).values()), 20)
    until(lambda: all(one["in_flight"] == 0 for one in replicas(gateway).values()))
    pools = admin(gateway, "/state")[1]["pools"]
    assert all(pool["in_flight"] == 0 for pool in pools)


def test_keys_are_known_by_their_digest(gateway: Gateway) -> None:
    for key, name in ((harness.KEY, "finance"), (harness.KEYS[1]["key"], "hashed"), (VIP, "vip")):
        answer, body = gateway.ask(body=PROMPT, key=key)
        assert answer.status == 200
        assert body["headers"]["Authorization"] == f"Bearer {harness.ENGINE_KEY}"
        row = gateway.row(answer.headers["X-Request-Id"])
        assert (row["key"], row["pool"], row["status"]) == (name, "short", 200)
        assert row["replica"].endswith("/short-0")
    for bad in (
        "",
        "Bearer",
        "Bearer x",
        "Basic " + harness.KEY,
        f"Bearer {harness.KEY} x",
        "Bearer " + KEYS[1]["sha256"],
    ):
        answer, body = gateway.ask(body=PROMPT, key="", Authorization=bad)
        assert (answer.status, body["error"]["code"]) == (401, "invalid_api_key")


def test_no_clear_key_is_in_the_tree(gateway: Gateway) -> None:
    for path in gateway.folder.rglob("*"):
        if path.is_file() and "log" not in path.parts:
            assert harness.KEY.encode() not in path.read_bytes()


def test_load_goes_to_the_least_busy(gateway: Gateway) -> None:
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda _: gateway.ask(body={"prompt": "sleep=0.15"}), range(36)))
    counts = [[engine_of(one) for one in answers].count(engine) for engine in {engine_of(one) for one in answers}]
    assert len(counts) == 3
    assert min(counts) >= 9


def test_a_drained_replica_gets_nothing_and_finishes_what_it_has(gateway: Gateway, rotation_file: Path) -> None:
    workers = gateway.workers()
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(
            lambda: gateway.ask(body={"prompt": "tokens=12 gap=0.05", "stream": True}, X_Request_Id="in-the-drain")
        )
        until(lambda: any(one["in_flight"] for one in replicas(gateway).values()))
        (busy,) = [one["replica"] for one in replicas(gateway).values() if one["in_flight"]]
        turn(gateway, busy, False)
        assert json.loads(rotation_file.read_text())[busy]["by"] == "test@here"
        assert rotation_file.stat().st_mode & 0o777 == 0o640
        for _ in range(9):
            answer, _ = gateway.ask(body=PROMPT)
            assert gateway.row(answer.headers["X-Request-Id"])["replica"] != busy
        assert replicas(gateway)[busy]["desired"]["in"] is False
        assert "[DONE]" in running.result()[1]
    until(lambda: replicas(gateway)[busy]["in_flight"] == 0)
    turn(gateway, busy, True)
    assert json.loads(rotation_file.read_text())[busy]["in"] is True
    seen = set()
    for _ in range(30):
        seen.add(gateway.row(gateway.ask(body=PROMPT)[0].headers["X-Request-Id"])["replica"])
    assert busy in seen
    assert gateway.workers() == workers


def test_a_reload_keeps_rotation_and_counts(gateway: Gateway) -> None:
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(lambda: gateway.ask(body={"prompt": "tokens=20 gap=0.05", "stream": True}))
        until(lambda: any(one["in_flight"] for one in replicas(gateway).values()))
        turn(gateway, "node-0/long-0", False)
        gateway.process.send_signal(signal.SIGHUP)
        time.sleep(0.4)
        state = replicas(gateway)
        assert state["node-0/long-0"]["desired"]["in"] is False
        assert sum(one["in_flight"] for one in state.values()) == 1
        assert "[DONE]" in running.result()[1]
    turn(gateway, "node-0/long-0", True)


def test_a_whole_host_is_turned_at_once_and_mistakes_are_named(gateway: Gateway) -> None:
    status, said = admin(gateway, "/rotation", {"host": "node-2", "in": False, "by": "t"})
    assert (status, [one["replica"] for one in said["replicas"]]) == (200, ["node-2/short-0"])
    admin(gateway, "/rotation", {"host": "node-2", "in": True, "by": "t"})
    assert admin(gateway, "/rotation", {"replica": "no/such", "in": True, "by": "t"})[0] == 404
    assert admin(gateway, "/rotation", {"replica": "node-2/short-0", "in": "yes", "by": "t"})[0] == 400
    assert admin(gateway, "/rotation", {"replica": "node-2/short-0", "in": True})[0] == 400
    assert admin(gateway, "/rotation")[0] == 405


def test_with_all_drained_the_fallback_serves_and_then_nobody(gateway: Gateway) -> None:
    turn(gateway, "node-0/main-0", False)
    answer, _ = gateway.ask(body={"model": "other", "prompt": "x"})
    assert gateway.row(answer.headers["X-Request-Id"])["pool"] == "spare"
    for node in (0, 1):
        turn(gateway, f"node-{node}/spare-0", False)
    answer, body = gateway.ask(body={"model": "other", "prompt": "x"})
    assert (answer.status, body["error"]["code"], answer.headers["Retry-After"]) == (503, "unavailable", "5")
    for one in ("node-0/main-0", "node-0/spare-0", "node-1/spare-0"):
        turn(gateway, one, True)
    answer, _ = gateway.ask(body={"model": "other", "prompt": "x"})
    assert gateway.row(answer.headers["X-Request-Id"])["pool"] == "main"


def test_a_killed_engine_leaves_at_once_and_returns_by_itself(
    gateway: Gateway, engines: Engines, ports: list[int]
) -> None:
    engines.signal(ports[0], signal.SIGKILL)
    engines.running[ports[0]].wait()
    for _ in range(12):
        assert gateway.ask(body=PROMPT)[0].status == 200
    until(lambda: not replicas(gateway)["node-0/short-0"]["observed"]["healthy"], 5)
    engines.start(ports[0])
    until(lambda: replicas(gateway)["node-0/short-0"]["observed"]["healthy"])


def test_a_dead_pools_requests_go_to_the_fallback_at_once(gateway: Gateway, engines: Engines, ports: list[int]) -> None:
    """Also those that come before the checker has seen it; and a request that asks for that pool alone is told so."""
    engines.signal(ports[5], signal.SIGKILL)
    engines.running[ports[5]].wait()
    for _ in range(8):
        answer, _ = gateway.ask(body={"model": "other", "prompt": "x"})
        assert answer.status == 200
        assert gateway.row(answer.headers["X-Request-Id"])["pool"] == "spare"
    until(lambda: not replicas(gateway)["node-0/main-0"]["observed"]["healthy"])
    answer, body = gateway.ask(body={"model": "other", "prompt": "x"}, X_Metalserve_Pool="main")
    assert (answer.status, body["error"]["code"], answer.headers["Retry-After"]) == (503, "unavailable", "5")
    engines.start(ports[5])
    until(lambda: replicas(gateway)["node-0/main-0"]["observed"]["healthy"], 20)
    assert gateway.row(gateway.ask(body={"model": "other", "prompt": "x"})[0].headers["X-Request-Id"])["pool"] == "main"


def test_a_frozen_engine_leaves_and_returns(gateway: Gateway, engines: Engines, ports: list[int]) -> None:
    engines.signal(ports[1], signal.SIGSTOP)
    try:
        until(lambda: not replicas(gateway)["node-1/short-0"]["observed"]["healthy"], 5)
        assert replicas(gateway)["node-1/short-0"]["observed"]["reason"] == "no answer"
        for _ in range(6):
            assert gateway.ask(body=PROMPT)[0].status == 200
    finally:
        engines.signal(ports[1], signal.SIGCONT)
    until(lambda: replicas(gateway)["node-1/short-0"]["observed"]["healthy"])


def test_a_long_silence_is_wedged_and_a_long_stream_is_not(gateway: Gateway) -> None:
    with ThreadPoolExecutor(2) as clients:
        silent = clients.submit(lambda: gateway.ask(body={"prompt": "sleep=5"}, X_Metalserve_Pool="long"))
        talking = clients.submit(
            lambda: gateway.ask(body={"model": "other", "prompt": "tokens=45 gap=0.1", "stream": True})
        )
        until(lambda: replicas(gateway)["node-0/long-0"]["observed"].get("reason") == "wedged", 8)
        assert replicas(gateway)["node-0/main-0"]["observed"]["healthy"]
        assert silent.result()[0].status == 200
        assert "[DONE]" in talking.result()[1]


def test_one_long_prefill_alone_is_never_ejected(gateway: Gateway) -> None:
    """Neither one that takes as long as planned, nor one that takes longer while the engine's own counter moves."""
    leaves = gateway.errors().count("node-0/long-0 leaves: wedged")
    for orders in ("sleep=0.8", "sleep=4 steps=1"):
        assert gateway.ask(body={"prompt": orders}, X_Metalserve_Pool="long")[0].status == 200
    assert gateway.errors().count("node-0/long-0 leaves: wedged") == leaves


def test_load_never_ejects_a_lone_replica(gateway: Gateway) -> None:
    for _ in range(20):
        answer, body = gateway.ask(body={"model": "tight-model", "prompt": "status=503"})
        assert (answer.status, body["error"]["code"], answer.headers["Retry-After"]) == (503, "overloaded", "1")
    assert [gateway.ask(body={"model": "tight-model", "prompt": "x"})[0].status for _ in range(100)] == [200] * 100


def test_a_full_engine_makes_way_for_another_once(gateway: Gateway) -> None:
    answer, body = gateway.ask(body={"prompt": "status=503"})
    assert (answer.status, body["error"]["message"]) == (503, "engine says 503")
    row = gateway.row(answer.headers["X-Request-Id"])
    assert row["upstream_status"] == "503 : 503"
    assert row["rejected"] == "503"
    assert len(set(row["upstream"].split(" : "))) == 2


def test_engines_own_errors_pass_through(gateway: Gateway) -> None:
    for status in (400, 404, 422, 500):
        answer, body = gateway.ask(body={"prompt": f"status={status}"})
        assert (answer.status, body["error"]["message"]) == (status, f"engine says {status}")
    answer, body = gateway.ask(body={"prompt": "die"})
    assert (answer.status, body["error"]["code"]) == (502, "engine_unreachable")


def test_vip_keys_keep_their_share(gateway: Gateway) -> None:
    def one(key: str) -> int:
        return gateway.ask(body={"model": "tight-model", "prompt": "sleep=2"}, key=key)[0].status

    with ThreadPoolExecutor(8) as clients:
        plain = [clients.submit(one, harness.KEY) for _ in range(4)]
        time.sleep(0.2)
        special = [clients.submit(one, VIP) for _ in range(2)]
        assert sorted(future.result() for future in plain) == [200, 200, 429, 429]
        assert [future.result() for future in special] == [200, 200]


def test_a_pools_room_is_its_batches_and_one_queue(gateway: Gateway) -> None:
    """Two replicas with a batch of three and a queue of one: seven; four while one of them is out. A VIP has them all."""

    def statuses(count: int) -> list[int]:
        def one(_: int) -> int:
            answer, body = gateway.ask(body={"model": "pair-model", "prompt": "sleep=2"}, key=VIP)
            if answer.status == 429:
                assert (answer.headers["Retry-After"], body["error"]["type"]) == ("1", "rate_limit_error")
                assert gateway.row(answer.headers["X-Request-Id"])["rejected"] == "pool_full"
            return answer.status

        with ThreadPoolExecutor(count) as clients:
            return sorted(clients.map(one, range(count)))

    assert statuses(9) == [200] * 7 + [429] * 2
    turn(gateway, "node-1/pair-0", False)
    assert statuses(6) == [200] * 4 + [429] * 2
    turn(gateway, "node-1/pair-0", True)


def test_the_model_in_the_body_chooses(gateway: Gateway) -> None:
    nested = {"metadata": {"model": "tight-model"}, "prompt": 'say "model": "tight-model"', "model": "other"}
    answer, _ = gateway.ask(body=nested)
    assert gateway.row(answer.headers["X-Request-Id"])["pool"] == "main"
    answer, body = gateway.ask(body={"model": "no-such-model", "prompt": "x"})
    assert (answer.status, body["error"]["code"]) == (404, "model_not_found")
    assert "no-such-model" in body["error"]["message"]


def test_all_models_are_listed_whichever_replicas_are_up(gateway: Gateway) -> None:
    turn(gateway, "node-0/tight-0", False)
    answer, body = gateway.ask("/v1/models")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [
        ("smollm2", 8192),
        ("tight-model", 2048),
        ("other", 2048),
        ("pair-model", 2048),
        ("triton-model", 2048),
    ]
    assert gateway.ask("/v1/models/other")[1]["object"] == "model"
    turn(gateway, "node-0/tight-0", True)
    for path in ("/v1/models", "/v1/models/other"):
        assert gateway.ask(path, key="")[0].status == 401
        assert gateway.ask(path, PROMPT)[0].status == 405
    assert gateway.ask("/v1/models/nobody")[0].status == 404


@pytest.mark.parametrize(
    ("text", "more", "pool"),
    [
        ("word " * 1000, {}, "short"),
        ("word " * 2200, {}, "long"),
        ("word " * 1000, {"max_tokens": 1500}, "long"),
        ("word " * 1000, {"max_completion_tokens": 1500}, "long"),
        ("12345 " * 450, {}, "long"),
        ("\u4e2d\u6587" * 800, {}, "short"),
        ("\u4e2d\u6587" * 1200, {}, "long"),
        ("word " * 90_000, {}, "long"),
    ],
)
def test_tokens_are_estimated_from_the_kind_of_text(
    gateway: Gateway, text: str, more: dict[str, Any], pool: str
) -> None:
    for escaped in (True, False):
        body = json.dumps({"model": "smollm2", "prompt": text, **more}, ensure_ascii=escaped).encode()
        answer, _ = gateway.ask(body=body)
        row = gateway.row(answer.headers["X-Request-Id"])
        assert (row["status"], row["pool"]) == (200, pool), row["tokens"]


def test_a_chunked_body_counts_too(gateway: Gateway) -> None:
    with gateway.connection() as client:
        for number, (words, pool) in enumerate([(10, b"short"), (4000, b"long")]):
            headers = {"Authorization": f"Bearer {harness.KEY}", "X-Request-Id": f"chunked-{number}"}
            parts = iter([b'{"prompt":"', b"word " * words, b'"}'])
            client.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
            client.getresponse().read()
            assert gateway.row(f"chunked-{number}")["pool"] == pool.decode()


def test_the_pools_own_body_limit_holds(gateway: Gateway) -> None:
    body = {"model": "other", "prompt": "x" * 5000}
    answer, said = gateway.ask(body=body, X_Metalserve_Pool="spare")
    assert (answer.status, said["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("orders", ["sse_error=1", "sse_error=1 comment=1"])
def test_an_error_inside_a_stream_is_counted(gateway: Gateway, orders: str) -> None:
    answer, _ = gateway.ask(body={"prompt": orders, "stream": True})
    assert answer.status == 200
    assert gateway.row(answer.headers["X-Request-Id"])["rejected"] == "in_stream"


@pytest.mark.parametrize(
    ("model", "prompt", "rejected"),
    [
        ("triton-model", "status=400 queue=1", "as_400"),
        ("triton-model", "status=400", ""),
        ("other", "status=400 queue=1", ""),
    ],
)
def test_a_full_queue_that_triton_tells_as_a_400_is_counted(
    gateway: Gateway, model: str, prompt: str, rejected: str
) -> None:
    answer, body = gateway.ask(body={"model": model, "prompt": prompt})
    assert (answer.status, body["error"]["message"].startswith("engine says 400")) == (400, True)
    assert gateway.row(answer.headers["X-Request-Id"])["rejected"] == rejected


def test_a_killed_worker_leaves_no_count(gateway: Gateway) -> None:
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(lambda: gateway.ask(body={"prompt": "sleep=1.5"}))
        until(lambda: any(one["in_flight"] for one in replicas(gateway).values()))
        for child in gateway.workers():
            os.kill(int(child), signal.SIGKILL)
        with pytest.raises(Exception):  # noqa: B017, PT011 the client's connection is gone with the worker
            running.result()
    until(lambda: all(one["in_flight"] == 0 for one in replicas(gateway).values()), 10)
    until(lambda: all(pool["in_flight"] == 0 for pool in admin(gateway, "/state")[1]["pools"]))


def test_clients_that_leave_leave_no_count(gateway: Gateway) -> None:
    def leave(number: int) -> None:
        with gateway.connection() as client:
            body = json.dumps({"prompt": "sleep=0.5 tokens=50 gap=0.05", "stream": number % 2 == 0})
            client.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {harness.KEY}"})
            time.sleep(0.05 * (number % 5))

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(leave, range(24)))


def test_workers_killed_and_reloads_under_load_leave_no_count(gateway: Gateway) -> None:
    def one(number: int) -> int:
        try:
            return gateway.ask(body={"prompt": "sleep=0.1 tokens=3", "stream": number % 2 == 0})[0].status
        except (OSError, HTTPException):
            return 0  # its worker was killed

    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(one, number) for number in range(80)]
        for number in range(4):
            time.sleep(0.15)
            if number % 2:
                gateway.process.send_signal(signal.SIGHUP)
            else:
                os.kill(int(gateway.workers()[0]), signal.SIGKILL)
        statuses = [future.result() for future in running]
    assert set(statuses) <= {0, 200, 429}
    assert statuses.count(200) > 20


def test_metrics_name_every_replica(gateway: Gateway) -> None:
    with urlopen(f"http://127.0.0.1:{gateway.admin}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'metalserve_gateway_healthy{pool="short",node="node-2",replica="short-0"} 1' in text
    assert text.count("metalserve_gateway_in_flight{") == 11


class Six(ThreadingHTTPServer):
    """An engine that listens on an IPv6 address."""

    address_family = socket.AF_INET6
    daemon_threads = True


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_replica_may_have_an_ipv6_address(tmp_path: Path) -> None:
    engine = Six(("::1", 0), standin.Engine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    pool = harness.pool("six", [engine.server_port], times=QUICK)
    pool["replicas"][0]["address"] = "::1"
    with harness.gateway(tmp_path, [pool], gateway_rotation_file=str(tmp_path / "no" / "rotation.json")) as running:
        time.sleep(4 * QUICK["probe_interval_s"])
        assert running.ask(body=PROMPT)[0].status == 200
        assert [one["observed"]["healthy"] for one in replicas(running).values()] == [True]
        assert "leaves" not in running.errors()
    engine.shutdown()


def test_answers_that_the_gateway_gives_itself_are_no_sign_of_life(tmp_path: Path) -> None:
    """A lone engine that froze leaves under load, too: the 504s that clients get meanwhile are not its own."""
    ports = harness.free_ports(1)
    frozen = Engines(ports)
    pool = harness.pool("lone", ports, times={**QUICK, "gateway_read_s": 1})
    try:
        with harness.gateway(tmp_path, [pool], gateway_rotation_file=str(tmp_path / "no" / "rotation.json")) as running:
            assert running.ask(body=PROMPT)[0].status == 200
            frozen.signal(ports[0], signal.SIGSTOP)
            ends = time.monotonic() + 20

            def ask(_: int) -> set[int]:
                found = set()
                while time.monotonic() < ends and 503 not in found:
                    found.add(running.ask(body=PROMPT)[0].status)
                return found

            with ThreadPoolExecutor(6) as clients:
                found = set().union(*clients.map(ask, range(6)))
            assert found == {504, 503}
            assert not replicas(running)["node-0/lone-0"]["observed"]["healthy"]
            frozen.signal(ports[0], signal.SIGCONT)
            until(lambda: replicas(running)["node-0/lone-0"]["observed"]["healthy"], 20)
    finally:
        frozen.signal(ports[0], signal.SIGCONT)
        frozen.stop()
