# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The plain gateway through a real nginx: keys, pools, errors, limits, failures, streams, logs."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from ansible_collections.metal.serve.plugins.module_utils.telemetry import access_log
from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway

PROMPT = {"model": "smollm2", "prompt": "a secret prompt"}


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return harness.free_ports(6)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[Gateway]:
    """Pools: short with two replicas, long with one, tight (2 in flight), half (one of two replicas is dead)."""
    pools = [
        harness.pool("short", ports[:2]),
        harness.pool("long", ports[2:3], max_model_len=8192),
        harness.pool("tight", ports[3:4], in_flight=2, served_name="other"),
        harness.pool("half", ports[4:6], served_name="other"),
    ]
    pools[3]["times"] = {**harness.TIMES, "gateway_read_s": 1}
    folder = tmp_path_factory.mktemp("gateway")
    with harness.standins(ports[:5]), harness.gateway(folder, pools, gateway_mode="plain") as running:
        yield running


def test_a_completion_reaches_an_engine_with_the_engines_own_key(gateway: Gateway) -> None:
    answer, body = gateway.ask("/v1/chat/completions", {"messages": [{"content": "hi"}]}, X_Evil="1", Cookie="a=b")
    assert answer.status == 200
    assert body["path"] == "/v1/chat/completions"
    assert body["headers"]["Authorization"] == f"Bearer {harness.ENGINE_KEY}"
    assert not {"X-Evil", "Cookie", "X-Forwarded-For"} & set(body["headers"])


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong-key-12345"},
        {"Authorization": "Bearer SK-FINANCE-0123456789"},
        {"Authorization": "Bearer sk-finance-0123456789x"},
        {"Authorization": "Bearer xsk-finance-0123456789"},
        {"Authorization": "Bearer sk-supXport/98+7=~"},
        {"Authorization": "Basic sk-finance-0123456789"},
        {"Authorization": "sk-finance-0123456789"},
    ],
)
def test_a_wrong_key_always_gets_the_same_answer(gateway: Gateway, header: dict[str, str]) -> None:
    answer, body = gateway.ask(body=PROMPT, key="", **header)
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="metalserve"'
    assert body["error"]["code"] == "invalid_api_key"
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("key", [entry["key"] for entry in harness.KEYS])
def test_every_key_is_accepted_and_the_scheme_has_no_case(gateway: Gateway, key: str) -> None:
    assert gateway.ask(body=PROMPT, key=key)[0].status == 200
    assert gateway.ask(body=PROMPT, key="", Authorization=f"bearer {key}")[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics", "/load", "/invocations", "/tokenize", "/health", "/version", "/", "/v1", "/v1/models/none"),
        *("/pool/short/v1/completions", "/pool/short/metrics", "/metalserve-error", "/stub_status", "/release"),
        *("/v1/../metrics", "/v1/completions/../../metrics", "//metrics", "/v1/completions/"),
    ],
)
def test_other_paths_are_closed(gateway: Gateway, path: str) -> None:
    for body in (None, PROMPT):
        answer, said = gateway.ask(path, body)
        assert answer.status == 404, path
        assert said["error"]["code"] == "not_found"


def test_methods_are_checked(gateway: Gateway) -> None:
    assert gateway.ask("/v1/completions")[0].status == 405
    assert gateway.ask("/v1/models", PROMPT)[0].status == 405
    assert gateway.ask("/v1/completions", PROMPT, method="PUT")[0].status == 405


def test_models_come_from_the_plan(gateway: Gateway) -> None:
    answer, body = gateway.ask("/v1/models")
    assert answer.headers["Content-Type"] == "application/json"
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [("smollm2", 8192), ("other", 2048)]
    assert gateway.ask("/v1/models/other")[1]["object"] == "model"
    assert gateway.ask("/v1/models", key="")[0].status == 401


def pool_of(gateway: Gateway, **request: Any) -> str:
    answer, _ = gateway.ask(**request)
    assert answer.status == 200
    return str(gateway.row(answer.headers["X-Request-Id"])["pool"])


@pytest.mark.parametrize(
    ("length", "headers", "pool"),
    [
        (100, {}, "short"),
        (6144, {}, "short"),
        (6145, {}, "long"),
        (300_000, {}, "long"),
        (100, {"X_Metalserve_Pool": "long"}, "long"),
        (100, {"X_Metalserve_Pool": "tight"}, "tight"),
        (100, {"X_Metalserve_Pool": "no-such"}, "short"),
        (100, {"X_Prompt_Tokens": "2049"}, "long"),
        (10_000, {"X_Prompt_Tokens": "2048"}, "short"),
        (100, {"X_Prompt_Tokens": "999999"}, "long"),
        (100, {"X_Prompt_Tokens": "many"}, "short"),
        (100, {"X_Prompt_Tokens": "5000", "X_Metalserve_Pool": "short"}, "short"),
    ],
)
def test_the_pool_is_chosen_by_name_then_tokens_then_length(
    gateway: Gateway, length: int, headers: dict[str, str], pool: str
) -> None:
    body = b'{"prompt":"' + b"x" * (length - 13) + b'"}'
    assert len(body) == length
    assert pool_of(gateway, body=body, **headers) == pool


def test_a_chunked_body_goes_where_it_surely_fits(gateway: Gateway) -> None:
    with gateway.connection() as client:
        headers = {"Authorization": f"Bearer {harness.KEYS[0]['key']}", "X-Request-Id": "chunked-1"}
        client.request("POST", "/v1/completions", iter([b'{"prompt":', b'"x"}']), headers, encode_chunked=True)
        answer = client.getresponse()
        assert json.loads(answer.read())["length"] == 14
    assert gateway.row("chunked-1")["pool"] == "long"


def test_large_bodies_pass_and_too_large_ones_are_refused(gateway: Gateway) -> None:
    fits = json.dumps({"prompt": "x" * 1_000_000}).encode()
    assert gateway.ask(body=fits)[1]["length"] == len(fits)
    answer, body = gateway.ask(body=json.dumps({"prompt": "x" * 1_050_000}).encode())
    assert (answer.status, body["error"]["code"]) == (413, "request_too_large")
    assert "temporary file" not in gateway.errors(), "a prompt touched the disk"


def test_request_ids_go_end_to_end(gateway: Gateway) -> None:
    answer, body = gateway.ask(body=PROMPT, X_Request_Id="client-id-0001")
    assert answer.headers.get_all("X-Request-Id") == ["client-id-0001"] == [body["headers"]["X-Request-Id"]]
    answer, body = gateway.ask(body=PROMPT, X_Request_Id='bad"id\t{}')
    made = answer.headers["X-Request-Id"]
    assert len(made) == 32
    assert body["headers"]["X-Request-Id"] == made


def test_an_engines_error_passes_through_and_a_503_says_when_to_come_back(gateway: Gateway) -> None:
    for _ in range(8):
        answer, body = gateway.ask(body={"prompt": "status=503"})
        assert (answer.status, body["error"]["message"]) == (503, "engine says 503")
        assert answer.headers["Retry-After"] == "1"
    # Eight times is more than max_fails on both replicas: load has ejected nobody.
    assert all(gateway.ask(body=PROMPT)[0].status == 200 for _ in range(4))
    answer, body = gateway.ask(body={"prompt": "status=400"})
    assert (answer.status, body["error"]["message"], answer.headers["Retry-After"]) == (400, "engine says 400", None)


def test_a_refused_connect_is_tried_on_the_other_replica(gateway: Gateway) -> None:
    for _ in range(12):
        assert gateway.ask(body=PROMPT, X_Metalserve_Pool="half")[0].status == 200
    retried = [row for row in gateway.log() if row["pool"] == "half" and ", " in row["upstream_status"]]
    assert 1 <= len(retried) <= 3, "the dead replica was not ejected after three failures"
    assert {row["upstream_status"] for row in retried} == {"502, 200"}


def test_a_request_that_was_sent_is_never_sent_again(gateway: Gateway) -> None:
    answer, body = gateway.ask(body={"prompt": "die"}, X_Metalserve_Pool="short")
    assert (answer.status, body["error"]["code"]) == (502, "engine_unreachable")
    assert gateway.row(answer.headers["X-Request-Id"])["upstream_status"] == "502"
    answer, body = gateway.ask(body={"prompt": "sleep=1.5"}, X_Metalserve_Pool="half")
    assert (answer.status, body["error"]["code"]) == (504, "engine_timeout")
    assert gateway.row(answer.headers["X-Request-Id"])["upstream_status"] in ("504", "502, 504")


def test_a_full_pool_answers_429_and_others_do_not_notice(gateway: Gateway) -> None:
    def one(_: int) -> tuple[int, Any, Any]:
        answer, body = gateway.ask(body={"prompt": "sleep=0.6"}, X_Metalserve_Pool="tight")
        return answer.status, body, answer.headers["Retry-After"]

    with ThreadPoolExecutor(6) as clients:
        waiting = [clients.submit(one, number) for number in range(6)]
        time.sleep(0.2)
        assert gateway.ask(body=PROMPT)[0].status == 200
        found = [future.result() for future in waiting]
    assert sorted(status for status, _, _ in found) == [200, 200, 429, 429, 429, 429]
    refused = [row for row in gateway.log() if row["status"] == 429]
    assert {(row["pool"], row["upstream"]) for row in refused} == {("tight", "")}
    _, body, retry = next(one for one in found if one[0] == 429)
    assert (body["error"]["type"], retry) == ("rate_limit_error", "1")
    assert gateway.ask(body=PROMPT, X_Metalserve_Pool="tight")[0].status == 200


def test_tokens_come_one_by_one(gateway: Gateway) -> None:
    with gateway.connection() as client:
        body = json.dumps({"prompt": "tokens=6 gap=0.2", "stream": True})
        client.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {harness.KEYS[0]['key']}"})
        answer = client.getresponse()
        arrivals = []
        while line := answer.readline():
            if line.startswith(b"data: {"):
                arrivals.append(time.monotonic())
    assert len(arrivals) == 6
    # Held back they would all come at the end. This client may be late itself, so single gaps prove nothing.
    assert arrivals[-1] - arrivals[0] > 0.5


def test_a_client_that_leaves_stops_its_generation(gateway: Gateway) -> None:
    with gateway.connection() as client:
        body = json.dumps({"prompt": "tokens=100 gap=0.05", "stream": True})
        headers = {"Authorization": f"Bearer {harness.KEYS[0]['key']}", "X-Request-Id": "leaves-early"}
        client.request("POST", "/v1/completions", body, headers)
        client.getresponse().readline()
    row = gateway.row("leaves-early")
    assert float(row["rt"]) < 2
    assert (row["status"], row["complete"]) == (499, "") or row["complete"] != "OK"


def test_a_broken_off_stream_is_seen_by_the_client(gateway: Gateway) -> None:
    """A stream without its last chunk must not look complete."""
    with pytest.raises(IncompleteRead):
        gateway.ask(body={"prompt": "cut tokens=2", "stream": True}, X_Request_Id="broken-off")
    row = gateway.row("broken-off")
    assert row["status"] == 200
    counted = access_log.count_causes([json.dumps(row)], gateway.errors().splitlines())
    assert counted == {"truncated": 1}


def test_the_log_has_times_and_no_secrets(gateway: Gateway) -> None:
    answer, _ = gateway.ask("/v1/completions?prompt=in-the-query", PROMPT)
    row = gateway.row(answer.headers["X-Request-Id"])
    assert (row["status"], row["key"], row["pool"], row["path"]) == (200, "finance", "short", "/v1/completions")
    assert float(row["urt"]) >= 0
    assert row["upstream_status"] == "200"
    assert row["complete"] == "OK"
    text = (gateway.folder / "log" / "gateway-access.log").read_text(encoding="utf-8")
    for secret in (*[entry["key"] for entry in harness.KEYS], harness.ENGINE_KEY, "secret prompt", "in-the-query"):
        assert secret not in text
    answer, _ = gateway.ask("/a-client/s-own-text", PROMPT)
    assert gateway.row(answer.headers["X-Request-Id"])["path"] == "other"


def test_the_admin_paths_are_on_loopback(gateway: Gateway) -> None:
    for path, text in (("stub_status", "Active connections"), ("healthz", '"ok"')):
        with urlopen(f"http://127.0.0.1:{gateway.admin}/{path}", timeout=5) as answer:
            assert text in answer.read().decode()
    with urlopen(f"http://127.0.0.1:{gateway.admin}/release", timeout=5) as answer:
        release, _, copied = answer.read().decode().strip().partition("-")
        assert (len(release), len(copied)) == (12, 8)
    assert gateway.ask("/healthz", key="")[1] == {"status": "ok"}


def test_plain_http_is_sent_to_https(gateway: Gateway) -> None:
    with closing(HTTPConnection("127.0.0.1", gateway.http, timeout=5)) as client:
        client.request("POST", "/v1/completions?x=1", body=b"{}", headers={"Host": "llm.example.com"})
        answer = client.getresponse()
        assert answer.status == 308
        assert answer.headers["Location"] == f"https://llm.example.com:{gateway.https}/v1/completions?x=1"


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x00",
    ],
)
def test_malformed_requests_get_a_json_4xx(gateway: Gateway, raw: bytes) -> None:
    with (
        closing(socket.create_connection(("127.0.0.1", gateway.https), 5)) as plain,
        closing(gateway.context.wrap_socket(plain, server_hostname="localhost")) as client,
    ):
        client.sendall(raw)
        if raw.startswith(b"\x16"):
            client.sendall(b"\r\n\r\n")
        text = b""
        while not text.endswith(b"}\n"):
            text += client.recv(65536)
    head, _, body = text.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert 400 <= status < 506
    assert status < 500 or status in (501, 505), "the client's fault was called the server's"
    assert b"nginx/" not in text
    assert json.loads(body)["error"]["code"]


def test_plain_http_on_the_tls_port_gets_json(gateway: Gateway) -> None:
    with closing(HTTPConnection("127.0.0.1", gateway.https, timeout=5)) as client:
        client.request("GET", "/v1/models")
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (400, "bad_request")


def test_a_slow_header_is_cut_off_and_holds_nobody_up(gateway: Gateway) -> None:
    plain = socket.create_connection(("127.0.0.1", gateway.https), 5)
    client = gateway.context.wrap_socket(plain, server_hostname="localhost")
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    assert gateway.ask(body=PROMPT)[0].status == 200
    client.close()


def test_keys_and_tokens_are_for_root_alone(gateway: Gateway) -> None:
    staged = next(gateway.folder.glob(".metalserve-*"))
    current = staged / "metalserve" / "current"
    for name in ("keys.conf", "engine_auth.conf", "tls/server.key"):
        assert stat.S_IMODE((current / name).stat().st_mode) == 0o600
    for path in Path(current).glob("*.conf"):
        if path.name not in ("keys.conf", "engine_auth.conf"):
            text = path.read_text(encoding="utf-8")
            assert not any(entry["key"] in text for entry in harness.KEYS)
            assert harness.ENGINE_KEY not in text


def test_connections_to_clients_and_engines_are_kept(gateway: Gateway) -> None:
    with gateway.connection() as client:
        for number in range(5):
            headers = {"Authorization": f"Bearer {harness.KEYS[0]['key']}", "X-Request-Id": f"kept-000{number}"}
            client.request("POST", "/v1/completions", json.dumps(PROMPT), headers)
            client.getresponse().read()
    rows = [gateway.row(f"kept-000{number}") for number in range(5)]
    assert len({row["connection"] for row in rows}) == 1
    assert [row["connection_requests"] for row in rows] == [1, 2, 3, 4, 5]


def test_load_is_spread_over_the_replicas(gateway: Gateway) -> None:
    seen: list[str] = []
    lock = threading.Lock()

    def one(_: int) -> None:
        body = gateway.ask(body={"prompt": "sleep=0.05"})[1]
        with lock:
            seen.append(body["engine"])

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(one, range(40)))
    counts = sorted(seen.count(engine) for engine in set(seen))
    assert len(counts) == 2
    assert counts[0] >= 12
