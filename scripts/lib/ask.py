#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Ask the lab's model one question through the gateway and print the answer as it comes."""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event until ``[DONE]``."""
    for raw in response:
        line = raw.decode("utf-8").strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])


def ask(url: str, key: str, authority: Path, model: str, question: str) -> tuple[str, float, float]:
    """Print the answer while it comes; return (text, seconds to the first token, seconds in all).

    Raises OSError when the gateway cannot be reached or refuses, ValueError when the stream carries an error.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # the gateway is on this machine, whatever proxy the rest goes through
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(authority))),
    )
    text, begun, first = "", time.monotonic(), 0.0
    with opener.open(request, timeout=120) as response:
        for event in events(response):
            if "error" in event:
                raise ValueError(event["error"].get("message", "the stream carries an error"))
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not text:
                    first = time.monotonic() - begun
                text += piece
                print(piece, end="", flush=True)
    print()
    return text, first, time.monotonic() - begun


def main() -> int:
    """Read the arguments and ask; 1 when no answer came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="the gateway, for example https://172.30.77.10")
    parser.add_argument("--lab", type=Path, required=True, help="the lab's folder, .lab")
    parser.add_argument("--model", required=True, help="the name under which the model is served")
    parser.add_argument("--question", required=True)
    arguments = parser.parse_args()
    try:
        key = (arguments.lab / "secrets/api_key").read_text(encoding="utf-8").strip()
        text, first, whole = ask(
            arguments.url, key, arguments.lab / "tls/gateway1.crt", arguments.model, arguments.question
        )
    except urllib.error.HTTPError as error:
        print(f"{arguments.url} answered {error.code}: {error.read().decode(errors='replace')[:300]}", file=sys.stderr)
        return 1
    except (OSError, ValueError, KeyError) as error:
        print(f"{arguments.url}: {error}", file=sys.stderr)
        return 1
    if not text.strip():
        print("the answer is empty", file=sys.stderr)
        return 1
    print(f"(first token after {first:.2f} s, whole answer after {whole:.2f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
