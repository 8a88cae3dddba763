# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that never close their connections and read every word of every answer, against all gateways at once."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

TOKENS = 12
BUSY = (429,)


@dataclass
class Seen:
    """What the clients saw. ``failed`` has a sentence per request whose answer was not exactly right."""

    sent: int = 0
    good: int = 0
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return self.good / max(0.001, self.ended - self.began)


def expected(prompt: str) -> str:
    """Return the only right answer of the stand-in engine: each token names its prompt and its place."""
    mark = hashlib.sha256(prompt.encode()).hexdigest()[:8]
    return " ".join(f"{mark}:{number + 1}/{TOKENS}" for number in range(TOKENS))


class Load:
    """So many clients, each with one connection, every other request a stream."""

    def __init__(self, gateways: Sequence[tuple[str, str]], key: str, clients: int = 12, pause_s: float = 0.0) -> None:
        """``gateways``: address and CA file."""
        self.gateways, self.key, self.pause_s = list(gateways), key, pause_s
        self.seen = Seen()
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Load:
        """Begin."""
        self.seen.began = time.monotonic()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; requests in flight are finished."""
        self.stop.set()
        for thread in self.threads:
            thread.join(timeout=60)
        self.seen.ended = time.monotonic()

    def work(self, number: int) -> None:
        """One client."""
        address, ca_file = self.gateways[number % len(self.gateways)]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca_file)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        connection = http.client.HTTPSConnection(address, timeout=45, context=context)
        count = 0
        while not self.stop.is_set():
            count += 1
            prompt = f"client {number} request {count} at {time.time_ns()}"
            begin = time.monotonic()
            try:
                problem = self.one(connection, prompt, stream=count % 2 == 0)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                connection.close()
            with self.lock:
                self.seen.sent += 1
                self.seen.good += not problem
                self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - begin)
                if problem:
                    self.seen.failed.append(f"{time.strftime('%H:%M:%S')} {address}: {problem}")
            time.sleep(self.pause_s)

    def one(self, connection: http.client.HTTPSConnection, prompt: str, stream: bool) -> str:
        """Send one request; return what was wrong with its answer."""
        body = json.dumps({"model": "standin", "prompt": prompt, "max_tokens": TOKENS, "stream": stream})
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        raw = response.read().decode()
        if response.status != 200:
            return f"{response.status} {raw[:200]}"
        if stream:
            events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                return f"a stream without its end: {raw[-200:]}"
            values = [json.loads(event) for event in events[:-1]]
            text = "".join(value["choices"][0].get("text") or "" for value in values if value.get("choices"))
        else:
            text = json.loads(raw)["choices"][0]["text"]
        return "" if text == expected(prompt) else f"{text[:200]!r} instead of {expected(prompt)[:60]!r}..."
