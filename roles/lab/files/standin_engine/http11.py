# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Just enough HTTP/1.1 for an engine's server: keep-alive, bodies by length or in chunks, streamed answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD_BYTES = 65536
MAX_BODY_BYTES = 64 * 1024 * 1024
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    422: "Unprocessable Entity",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class BadRequest(Exception):
    """A request that is not HTTP; the connection is answered with ``status`` and closed."""

    def __init__(self, status: int, message: str) -> None:
        """Keep the status beside the message."""
        super().__init__(message)
        self.status = status


@dataclass
class Request:
    """One request; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def keep_alive(self) -> bool:
        """Return whether the client wants the connection to stay."""
        return "close" not in self.headers.get("connection", "").lower()


@dataclass
class Response:
    """One whole answer; ``body`` is bytes or anything that JSON can hold."""

    status: int
    body: Any = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, keep_alive: bool) -> bytes:
        """Return the bytes on the wire."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return (
            head(self.status, self.content_type, keep_alive, {"content-length": str(len(body)), **self.headers}) + body
        )


def head(status: int, content_type: str, keep_alive: bool, headers: dict[str, str]) -> bytes:
    """Return status line and headers."""
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}", "server: uvicorn", f"content-type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle_s: float) -> Request | None:
    """Return the next request, or None when the client closed or stayed silent for ``idle_s``. Raises BadRequest."""
    try:
        raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), idle_s)
    except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
        return None
    except asyncio.LimitOverrunError as error:
        raise BadRequest(431, "request header is too large") from error
    first, *rest = raw[:-4].decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadRequest(400, "Invalid HTTP request received.")
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise BadRequest(400, "Invalid HTTP request received.")
        headers[name.lower()] = value.strip()
    if parts[2] == "HTTP/1.0":
        headers.setdefault("connection", "close")
    request = Request(parts[0], parts[1], headers)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.body = await _read_body(reader, headers)
    return request


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """Return the body that follows ``headers``. Raises BadRequest."""
    try:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = b""
            while True:
                size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
                if size == 0:
                    while await reader.readuntil(b"\r\n") != b"\r\n":
                        pass
                    return body
                if len(body) + size > MAX_BODY_BYTES:
                    raise BadRequest(413, "request body is too large")
                body += await reader.readexactly(size)
                await reader.readexactly(2)
        length = int(headers.get("content-length", "0"))
        if length < 0:
            raise ValueError("negative length")
        if length > MAX_BODY_BYTES:
            raise BadRequest(413, "request body is too large")
        return await reader.readexactly(length) if length else b""
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise BadRequest(400, "Invalid HTTP request received.") from error


class EventStream:
    """A server-sent event stream in a chunked answer. The head goes out with the first event."""

    def __init__(self, writer: asyncio.StreamWriter, keep_alive: bool) -> None:
        """Write to ``writer`` and say whether the connection stays."""
        self.writer = writer
        self.keep_alive = keep_alive
        self.started = False

    def send(self, text: str) -> None:
        """Send one event: ``data: text``."""
        self._write(f"data: {text}\n\n".encode())

    def comment(self) -> None:
        """Send a comment line, which clients ignore: it keeps the connection from looking idle."""
        self._write(b": keep-alive\n\n")

    def end(self) -> None:
        """Finish the answer so that the connection can carry the next request."""
        self._write(b"")

    def _write(self, payload: bytes) -> None:
        start = b""
        if not self.started:
            self.started = True
            start = head(200, "text/event-stream; charset=utf-8", self.keep_alive, {"transfer-encoding": "chunked"})
        self.writer.write(start + f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
