# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Malformed requests get a well-formed 4xx from both kinds of gateway; nothing restarts, nothing answers 5xx."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway

COUNT = {"lua": 500, "plain": 120}
SOAK = 2000 if os.environ.get("METALSERVE_SOAK") else 0
GOOD = json.dumps({"model": "smollm2", "prompt": "hello", "max_tokens": 4}).encode()


@pytest.fixture(scope="module", params=["plain", "lua"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    ports = harness.free_ports(2)
    options = {
        "gateway_mode": request.param,
        **harness.UNKEPT,
        "gateway_client_body_timeout_s": 1,
    }
    with (
        harness.standins(ports),
        harness.gateway(tmp_path_factory.mktemp("fuzz"), [harness.pool("short", ports)], **options) as running,
    ):
        yield running


def bodies(chance: random.Random) -> bytes:
    """Return a body that is broken in one of many ways."""
    cut = chance.randrange(len(GOOD))
    noise = bytes(chance.randrange(256) for _ in range(chance.choice([1, 8, 200])))
    return chance.choice(
        [
            GOOD[:cut],
            GOOD[:cut] + noise + GOOD[cut:],
            noise,
            b"",
            b"[" * chance.choice([10, 5000]),
            b"null",
            b'"' + b"\\" * 999,
            b'{"model":' * 50,
            b'{"model":1,"prompt":{}}',
            b'{"prompt":"\xff\xfe"}',
            json.dumps(["not", "an", "object"]).encode(),
            json.dumps({"prompt": None, "max_tokens": -1, "stream": "yes"}).encode(),
            GOOD.decode().encode("utf-16"),
        ]
    )


def chunked(body: bytes, chance: random.Random) -> bytes:
    """Return a body in chunks, mostly with a mistake."""
    right = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return chance.choice(
        [
            right,
            right.replace(b"\r\n", b"\n"),
            b"zz\r\n" + body,
            b"-5\r\n" + body,
            f"{10**30:x}\r\n".encode(),
            b"0\r\n\r\n",
        ]
    )


def headers(chance: random.Random) -> list[bytes]:
    """Return odd headers."""
    odd = [
        b"Authorization: Bearer " + harness.KEY.encode(),
        b"Authorization: Bearer " + b"x" * chance.choice([1, 600, 5000]),
        b"Authorization: \xff\xfe",
        b"X-Request-Id: " + bytes(chance.randrange(33, 256) for _ in range(50)),
        b"X-Prompt-Tokens: " + chance.choice([b"-1", b"9" * 40, b"1e9", b"\xd9\xa3"]),
        b"X-Metalserve-Pool: " + chance.choice([b"../../etc", b"short\x01", b"x" * 3000]),
        b"Content-Type: " + chance.choice([b"text/xml", b"multipart/form-data; boundary=", b"\x01"]),
        b"Content-Encoding: gzip",
        b"Expect: 100-continue",
        b"Expect: the-unexpected",
        b"Host: " + chance.choice([b"", b"a b", b"[::1", b"x" * 300]),
        b": no name",
        b"no-colon",
        b"Bad Header: x",
        b"Connection: upgrade\r\nUpgrade: websocket",
        b"Transfer-Encoding: gzip, chunked",
        b"Range: bytes=0-" + b"9" * 40,
    ]
    return chance.sample(odd, chance.randrange(0, 3))


def request(seed: int) -> bytes:
    """Return one request, malformed in some way, as bytes."""
    chance = random.Random(seed)
    method = chance.choice([b"POST"] * 6 + [b"GET", b"PUT", b"TRACE", b"CONNECT", b"post", b"P\x00ST", b"X" * 300])
    path = chance.choice(
        [b"/v1/completions"] * 5
        + [b"/v1/chat/completions?x=%00", b"/v1/completions%zz", b"/%2e%2e/metrics", b"*", b"", b"/" + b"a" * 9000]
    )
    version = chance.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/9.1", b"HTTP", b""])
    body = bodies(chance)
    lines = [b"Host: x", b"Authorization: Bearer " + harness.KEY.encode()] if chance.random() < 0.8 else []
    lines += headers(chance)
    if chance.random() < 0.3:
        lines.append(b"Transfer-Encoding: chunked")
        body = chunked(body, chance)
    else:
        length = chance.choice([len(body)] * 5 + [-1, len(body) + 5, 10**12, 10**30])
        lines.append(b"Content-Length: " + str(length).encode())
    return b"\r\n".join([b" ".join([method, path, version]), *lines, b"Connection: close", b"", b""]) + body


def answer_of(gateway: Gateway, raw: bytes) -> bytes:
    """Return everything that comes back until the connection ends."""
    with (
        closing(socket.create_connection(("127.0.0.1", gateway.https), 5)) as plain,
        closing(gateway.context.wrap_socket(plain, server_hostname="localhost")) as client,
    ):
        text = b""
        try:
            client.sendall(raw)
            # A server that waits for more of the body gets the end of it.
            client.settimeout(3)
            while part := client.recv(65536):
                text += part
        except OSError:
            pass
        return text


def is_error(body: bytes) -> bool:
    """Return whether a body is an error in the form that OpenAI's clients read."""
    try:
        return bool(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return False


def test_malformed_requests(gateway: Gateway) -> None:
    workers = gateway.workers()
    requests = [request(seed) for seed in range(SOAK or COUNT[gateway.mode])]
    # Together, since the server waits a second for what a length promises and nobody sends.
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda raw: answer_of(gateway, raw), requests))
    unanswered = 0
    for seed, (raw, text) in enumerate(zip(requests, answers)):
        if not text:
            unanswered += 1  # a body that never came as a whole: nginx closes without a word
            continue
        if not text.startswith(b"HTTP/1."):
            assert is_error(text), (seed, text[:200])  # HTTP/0.9 has no head
            continue
        head, _, body = text.partition(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head, _, body = body.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        assert status < 500 or status in (501, 505), (seed, raw[:300], text[:300])
        assert b"nginx/" not in text, seed
        if status >= 400:
            if b"chunked" in head.lower():
                body = re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", body)
            # A body whose chunks are broken is answered by nginx's own page, unless Lua replaces it.
            page = gateway.mode == "plain" and status == 400 and b"Transfer-Encoding" in raw and b"<html>" in body
            assert page or is_error(body), (seed, raw[:300], text[:600])
    assert unanswered < len(requests) / 20
    assert gateway.workers() == workers
    log = Path(gateway.folder / "log" / "gateway-access.log").read_text(encoding="utf-8")
    assert all(json.loads(line) for line in log.splitlines()), "a row that is no JSON"
    assert gateway.ask(body=json.loads(GOOD))[0].status == 200
