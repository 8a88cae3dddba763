# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A small client that asks engines and gateways for completions and times them. Standard library only."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.metal.serve.plugins.module_utils.telemetry.streaming import Timing, timing, token_in

BUSY = (429, 503)
BUSY_TRIES = 3
BUSY_WAIT_S = 1.0
"""A full engine is no broken one: asked again after a second, three times in all."""


class CompletionError(Exception):
    """No answer, or not the right one; one sentence."""


@dataclass(frozen=True)
class Target:
    """Where to ask. ``server_name`` is what a TLS certificate must carry, ``ca_file`` what it is checked with."""

    url: str
    token: str = ""
    ca_file: str = ""
    server_name: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """A completion: its text, the number of tokens that the server counted (0 if it did not), and seconds."""

    text: str
    tokens: int
    seconds: float


class _NamedConnection(http.client.HTTPSConnection):
    """HTTPS to an address whose certificate carries another name."""

    def __init__(self, host: str, port: int, server_name: str, context: ssl.SSLContext, timeout: float) -> None:
        super().__init__(host, port, context=context, timeout=timeout)
        self._named, self._trusted = server_name or host, context

    def connect(self) -> None:
        """Connect and check the certificate against the name."""
        plain = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._trusted.wrap_socket(plain, server_hostname=self._named)


@lru_cache(maxsize=4)
def trust(ca_file: str) -> ssl.SSLContext:
    """Return a TLS context that trusts ``ca_file`` alone, or the system's authorities where it is empty.

    Raises OSError where the file cannot be read.
    """
    if not ca_file:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca_file)
    # The gateway's own certificate may stand for its authority: what is checked is that this very one is served.
    context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)
    return context


def connection(target: Target, timeout: float) -> http.client.HTTPConnection:
    """Return an unopened connection to a target. Raises CompletionError for a URL that is none."""
    parts = urlsplit(target.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CompletionError(f"{target.url!r} is no http or https address")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
    context = trust(target.ca_file)
    return _NamedConnection(parts.hostname, parts.port or 443, target.server_name, context, timeout)


def body_of(model: str, prompt: str, max_tokens: int, stream: bool, extra: Mapping[str, Any]) -> bytes:
    """Return the JSON body of a completion request."""
    value = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream, **extra}
    return json.dumps(value).encode("utf-8")


@contextmanager
def asked(target: Target, body: bytes, timeout: float) -> Iterator[tuple[http.client.HTTPResponse, float]]:
    """Send one request; yield its answer once it is a 200, and when it was sent. Ask again where the server is full.

    The connection is made before the clock starts: what is compared are answers, not handshakes.

    Raises CompletionError with the status and the server's own words for anything else.
    """
    headers = {"Content-Type": "application/json", **dict(target.headers)}
    if target.token:
        headers["Authorization"] = f"Bearer {target.token}"
    for attempt in range(BUSY_TRIES):
        client = None
        try:
            client = connection(target, timeout)
            client.connect()
            sent = time.monotonic()
            client.request("POST", "/v1/completions", body=body, headers=headers)
            response = client.getresponse()
            if response.status in BUSY and attempt + 1 < BUSY_TRIES:
                time.sleep(BUSY_WAIT_S)
                continue
            if response.status != 200:
                said = response.read(400).decode("utf-8", "replace").strip()
                raise CompletionError(f"{target.url} answers {response.status}: {said}")
            yield response, sent
            return
        except (OSError, http.client.HTTPException) as error:
            raise CompletionError(f"{target.url} does not answer: {error or type(error).__name__}") from None
        finally:
            if client is not None:
                client.close()


def complete(target: Target, body: bytes, timeout: float) -> Answer:
    """Ask for a completion and return it. Raises CompletionError, also for an empty or malformed answer."""
    with asked(target, body, timeout) as (response, sent):
        raw = response.read()
        seconds = time.monotonic() - sent
    try:
        value = json.loads(raw)
        choice = value["choices"][0]
        text = str(choice.get("text") or (choice.get("message") or {}).get("content") or "")
        tokens = int((value.get("usage") or {}).get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise CompletionError(f"{target.url} answers 200 with something that is no completion") from None
    if not text:
        raise CompletionError(f"{target.url} answers with an empty completion")
    return Answer(text, tokens, seconds)


def stream(target: Target, body: bytes, timeout: float) -> Timing:
    """Ask for a streamed completion and return its times. Raises CompletionError, also for an error inside a 200."""
    arrivals: list[float] = []
    done = False
    with asked(target, body, timeout) as (response, sent):
        # readline returns as soon as a line is there; iterating over the response would read ahead.
        while True:
            raw = response.readline()
            if not raw:
                break
            line = raw.decode("utf-8", "replace").strip()
            done = done or line == "data: [DONE]"
            try:
                if token_in(line):
                    arrivals.append(time.monotonic())
            except ValueError as error:
                raise CompletionError(f"{target.url} breaks a stream off: {error}") from None
    if not done:
        raise CompletionError(f"{target.url} ends a stream without its end mark, after {len(arrivals)} tokens")
    try:
        return timing(sent, arrivals)
    except ValueError as error:
        raise CompletionError(f"{target.url}: {error}") from None
