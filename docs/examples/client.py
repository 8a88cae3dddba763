#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A client that keeps its connection: it streams answers over it, and every 25 s of silence it says hello.

    python3 docs/examples/client.py https://llm.example.com --ca gateway1.crt --model smollm2 < questions.txt

The key comes from METALSERVE_API_KEY; each line of the input is a question. Standard library only. Why it is so:

- One TLS handshake serves a thousand requests.
- Firewalls and address translators forget a connection that is silent for a minute or more. ``GET /healthz`` every 25 s keeps
  it known; the gateway itself waits 180 s.
- Before a request the connection is looked at: what the gateway closed meanwhile (a reload, say) is opened anew first. A
  request that was sent is never sent a second time: the engine may be generating.
- A line that begins with a colon is a sign of life while the engine thinks; a stream without any line for a minute is dead.
- 429 and 503 say in Retry-After when to come back.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPSConnection
from urllib.parse import urlsplit

HEARTBEAT_S = 25.0
SILENCE_S = 60.0
TRIES = 5


class Client:
    """One connection to a gateway, used by one caller at a time."""

    def __init__(self, url: str, key: str, ca: str = "", heartbeat_s: float = HEARTBEAT_S) -> None:
        parts = urlsplit(url)
        context = ssl.create_default_context(cafile=ca or None)
        self._connection = HTTPSConnection(parts.hostname or "", parts.port, timeout=SILENCE_S, context=context)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._used, self._lock, self._closed = time.monotonic(), threading.Lock(), threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(heartbeat_s,), daemon=True)
        self._heart.start()

    def ask(self, model: str, question: str) -> Iterator[str]:
        """Yield an answer piece by piece. Raises RuntimeError with the gateway's words, or where a stream broke off."""
        wanted = {"model": model, "messages": [{"role": "user", "content": question}], "stream": True}
        with self._lock:
            for _ in range(TRIES):
                self._freshen()
                self._connection.request("POST", "/v1/chat/completions", json.dumps(wanted), self._headers)
                answer = self._connection.getresponse()
                if answer.status not in (429, 503):
                    break
                answer.read()
                time.sleep(float(answer.headers["Retry-After"] or 1))
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read().decode('utf-8', 'replace')}")
            done = False
            try:
                for line in answer:
                    if line.startswith(b"data: [DONE]"):
                        done = True
                    elif line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise RuntimeError(str(event["error"].get("message")))
                        yield str(event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
            finally:
                if not done or not answer.isclosed():
                    # Who leaves in the middle stops the generation by closing; what broke off is of no more use.
                    self._connection.close()
                self._used = time.monotonic()
            if not done:
                raise RuntimeError("the stream broke off")

    def close(self) -> None:
        """End the connection and its heart."""
        self._closed.set()
        self._heart.join()
        self._connection.close()

    def _freshen(self) -> None:
        """Open the connection anew where the other side closed it: what is readable on an idle connection is its end."""
        socket = self._connection.sock
        if socket is not None and select.select([socket], [], [], 0)[0]:
            self._connection.close()

    def _beat(self, every_s: float) -> None:
        while not self._closed.wait(min(1.0, every_s)):
            if time.monotonic() - self._used < every_s or not self._lock.acquire(blocking=False):
                continue
            try:
                self._freshen()
                self._connection.request("GET", "/healthz")
                self._connection.getresponse().read()
            except (OSError, HTTPException):
                self._connection.close()
            finally:
                self._used = time.monotonic()
                self._lock.release()


def main() -> None:
    """Answer each line of the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--ca", default="", help="the authority that signed the gateway's certificate")
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    client = Client(options.url, os.environ["METALSERVE_API_KEY"], options.ca)
    for line in sys.stdin:
        for piece in client.ask(options.model, line.strip()):
            print(piece, end="", flush=True)
        print()
    client.close()


if __name__ == "__main__":
    main()
