# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that never close their connections and read every word of every answer, against all gateways at once.

They share one event loop in a thread of its own, so that a machine which also runs gateways, engines and a playbook has
CPU left for those.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TOKENS = 8
TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Failure:
    """A request whose answer was not exactly right: when it was sent (seconds since 1970), through whom, and why."""

    sent: float
    gateway: str
    why: str


@dataclass
class Seen:
    """What the clients saw; times in seconds."""

    sent: int = 0
    good: int = 0
    failed: list[Failure] = field(default_factory=list)
    slowest_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return self.good / max(0.001, self.ended - self.began)


class Asked(Protocol):
    """What an engine is asked, and what is wrong with its answer."""

    def body(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """Return the request."""

    def judged(self, status: int, raw: bytes, stream: bool, prompt: str, tokens: int) -> str:
        """Return what is wrong with the answer, "" for one that is exactly right. Raises ValueError, KeyError."""


def expected(prompt: str, tokens: int = TOKENS) -> str:
    """Return the only right answer of the stand-in engine: each token names its prompt and its place."""
    mark = hashlib.sha256(prompt.encode()).hexdigest()[:8]
    return " ".join(f"{mark}:{number + 1}/{tokens}" for number in range(tokens))


class Connection:
    """One HTTP/1.1 connection over TLS that is kept, and opened again only where it was lost."""

    def __init__(self, address: str, context: ssl.SSLContext, key: str) -> None:
        """Connect with the first request."""
        self.address, self.context, self.key = address, context, key
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.opened = 0

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer. Raises OSError, EOFError, ValueError."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.address, 443, ssl=self.context)
            self.opened += 1
        reader, writer = self.streams
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.address}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        if "content-length" in fields:
            text = await reader.readexactly(int(fields["content-length"]))
        else:
            text = await self.chunks(reader)
        if fields.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), text

    async def chunks(self, reader: asyncio.StreamReader) -> bytes:
        """Return a chunked body. Raises EOFError where it ends before its end."""
        found = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            found.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        return b"".join(found)

    def close(self) -> None:
        """Let it go."""
        if self.streams is not None:
            self.streams[1].transport.abort()
        self.streams = None


def parts(status: int, raw: bytes, stream: bool) -> list[dict[str, Any]]:
    """Return the parts of an answer, one where it is no stream. Raises ValueError where it is no whole answer."""
    text = raw.decode("utf-8", "replace")
    if status != 200:
        raise ValueError(f"{status} {text[:200]}")
    if not stream:
        return [json.loads(text)]
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"a stream without its end: {text[-200:]}")
    return [json.loads(event) for event in events[:-1]]


def text_of(values: Sequence[dict[str, Any]]) -> str:
    """Return the text of all parts of an answer."""
    return "".join(value["choices"][0].get("text") or "" for value in values if value.get("choices"))


class Standin:
    """The stand-in engine, whose answers are known beforehand."""

    def body(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """Return the request."""
        return {"model": "standin", "prompt": prompt, "max_tokens": tokens, "stream": stream}

    def judged(self, status: int, raw: bytes, stream: bool, prompt: str, tokens: int) -> str:
        """Compare word by word."""
        answer, right = text_of(parts(status, raw, stream)), expected(prompt, tokens)
        return "" if answer == right else f"{answer[:200]!r} instead of {right[:60]!r}..."


class Load:
    """So many clients, each with one connection, every other request a stream.

    With a ``rate`` (requests a second, all clients together) each sends at its own times and catches up where it is
    late; without, each sends as soon as it has its answer.
    """

    def __init__(
        self,
        gateways: Sequence[tuple[str, str]],
        key: str,
        clients: int = 12,
        rate: float = 0.0,
        words: int = 8,
        tokens: int = TOKENS,
        asked: Asked | None = None,
    ) -> None:
        """``gateways``: address and CA file; ``words``: length of a prompt; ``tokens``: length of an answer;
        ``asked``: what is asked, the stand-in engine where it is not given.
        """
        self.gateways, self.key, self.clients, self.rate = list(gateways), key, clients, rate
        self.words, self.tokens = words, tokens
        self.asked = asked or Standin()
        self.seen = Seen()
        self.times: list[float] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.work()), daemon=True)

    def __enter__(self) -> Load:
        """Begin."""
        self.seen.began = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; requests in flight are finished."""
        self.stop.set()
        self.thread.join(timeout=TIMEOUT_S + 15)
        self.seen.ended = time.monotonic()

    def until(self, good: int, seconds: float = 30.0) -> None:
        """Wait for so many good answers in all."""
        ends = time.monotonic() + seconds
        while self.seen.good < good:
            assert time.monotonic() < ends, self.seen.failed[:3]
            time.sleep(0.1)

    async def work(self) -> None:
        """All clients."""
        await asyncio.gather(*(self.client(number) for number in range(self.clients)))

    async def client(self, number: int) -> None:
        """One client."""
        address, ca_file = self.gateways[number % len(self.gateways)]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca_file)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        connection = Connection(address, context, self.key)
        began, count = time.monotonic() + number / max(self.rate, 1.0), 0
        while not self.stop.is_set():
            if self.rate:
                await asyncio.sleep(max(0.0, began + count * self.clients / self.rate - time.monotonic()))
            count += 1
            prompt = f"client {number} request {count} at {time.time_ns()} " + "word " * self.words
            await self.one(connection, prompt, stream=count % 2 == 0)
        connection.close()

    async def one(self, connection: Connection, prompt: str, stream: bool) -> None:
        """Send one request and judge its answer."""
        body = self.asked.body(prompt, self.tokens, stream)
        sent, begin = time.time(), time.monotonic()
        try:
            status, raw = await asyncio.wait_for(connection.post(json.dumps(body).encode()), TIMEOUT_S)
            problem = self.asked.judged(status, raw, stream, prompt, self.tokens)
        except (OSError, EOFError, ValueError, KeyError, asyncio.TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
            connection.close()
        took = time.monotonic() - begin
        self.seen.sent += 1
        self.seen.good += not problem
        self.seen.slowest_s = max(self.seen.slowest_s, took)
        self.times.append(took)
        if problem:
            self.seen.failed.append(Failure(sent, connection.address, problem))
