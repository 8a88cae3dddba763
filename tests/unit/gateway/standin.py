# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A small engine for gateway tests: it says what it was asked, streams when told, and misbehaves on request.

Run as ``standin.py PORT [PORT...]``; every port is one engine. The prompt (first message, or ``prompt``) may hold
orders: ``sleep=S`` before answering, ``held=1`` (until /release was asked), ``steps=1`` (its counter moves meanwhile),
``status=N`` (for want of room with ``queue=1``), ``tokens=N``, ``gap=S`` between tokens, ``too_long=PORT`` (the engine
on that port says that it is), ``sse_error=1`` (a 200 whose first event is an error; with ``comment=1`` after a
comment), ``die`` (close without an answer), ``cut`` (break a stream off).
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Engine(BaseHTTPRequestHandler):
    """One request to the stand-in."""

    protocol_version = "HTTP/1.1"
    # Headers and the first token must not wait for each other in the kernel.
    wbufsize = 0
    disable_nagle_algorithm = True
    server_version = "uvicorn"
    stepping = 0
    released = threading.Event()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer /health, /release, and /metrics with a counter that moves while somebody works."""
        if self.path == "/release":
            Engine.released.set()
        if self.path == "/metrics":
            value = int(time.monotonic() * 1000) if Engine.stepping else 7
            data = f'# TYPE x counter\nvllm:iteration_tokens_total_count{{model_name="x"}} {value}\n'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self._json(200, {"path": self.path})

    def do_POST(self) -> None:
        """Answer a completion, streamed or not."""
        body = self._body()
        try:
            asked = json.loads(body or b"{}")
            if not isinstance(asked, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            self._json(400, {"error": {"message": "not JSON", "type": "BadRequestError", "code": 400}})
            return
        prompt = str(asked.get("prompt") or (asked.get("messages") or [{}])[0].get("content", ""))
        orders = dict(re.findall(r"(\w+)=([\d.]+)", prompt[:100]))
        if "die" in prompt.split():
            self.close_connection = True
            return
        Engine.stepping += "steps" in orders
        time.sleep(float(orders.get("sleep", 0)))
        if "held" in orders:
            Engine.released.wait()
        Engine.stepping -= "steps" in orders
        status = int(orders.get("status", 200))
        if status != 200:
            why = ": Exceeds maximum queue size" if "queue" in orders else ""
            self._json(status, {"error": {"message": f"engine says {status}{why}", "code": status}})
            return
        if orders.get("too_long") == str(self.connection.getsockname()[1]):
            text = "This model's maximum context length is 2048 tokens. However, you requested 3000 tokens."
            self._json(400, {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}})
            return
        if "sse_error" in orders:
            self._refuse_in_stream(b": wait\n\n" if "comment" in orders else b"")
            return
        if asked.get("stream"):
            self._stream(int(orders.get("tokens", 8)), float(orders.get("gap", 0.02)), "cut" in prompt.split())
            return
        self._json(
            200,
            {
                "engine": str(self.connection.getsockname()[1]),
                "model": asked.get("model"),
                "path": self.path,
                "headers": dict(self.headers.items()),
                "length": len(body),
                "choices": [{"index": 0, "text": "ok", "message": {"role": "assistant", "content": "ok"}}],
                "usage": {"completion_tokens": 1},
            },
        )

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if size == 0:
                return b"".join(parts)

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Request-Id", "the-engine's-own")
        self.send_header("X-Engine-Host", "node-a.internal")
        self.send_header("Via", "vllm/0.26.0")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, tokens: int, gap: float, cut: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(tokens):
            time.sleep(gap)
            event = {"choices": [{"index": 0, "text": f"t{number} ", "delta": {"content": f"t{number} "}}]}
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())
        if cut:
            self.close_connection = True
            return
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _refuse_in_stream(self, comment: bytes) -> None:
        """Refuse as vLLM does when a burst of streams finds it full: a 200 whose first event is an error."""
        data = b'data: {"error":{"message":"queue is full","code":503}}\n\ndata: [DONE]\n\n'
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(comment + data)))
        self.end_headers()
        if comment:
            self.wfile.write(comment)
            time.sleep(0.2)
        self.wfile.write(data)

    def handle(self) -> None:
        """Serve a connection; one that the other side gave up is no fault."""
        with suppress(BrokenPipeError, ConnectionResetError):
            super().handle()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def serve(ports: list[int]) -> None:
    """Serve on every port until the process ends."""
    for port in ports:
        server = ThreadingHTTPServer(("127.0.0.1", port), Engine)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    serve([int(port) for port in sys.argv[1:]])
