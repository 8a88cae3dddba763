# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests with real engines share: clients that judge a real answer, when an engine started, what a redeploy took."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.lab.redeploy import lab
from tests.lab.redeploy.client import Load, parts, text_of

CLIENTS, RATE, TOKENS = 8, 4.0, 2
"""What one engine bears on two cores while the other one starts, measured."""


class Echo:
    """A real engine: its answer begins with the request's own prompt and is as long as asked, under an id of its own."""

    def __init__(self) -> None:
        """Begin with no answer seen."""
        self.ids: set[str] = set()

    def body(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """Return the request."""
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": tokens, "stream": stream}
        body |= {"echo": True, "ignore_eos": True, "temperature": 0}
        return {**body, "stream_options": {"include_usage": True}} if stream else body

    def judged(self, status: int, raw: bytes, stream: bool, prompt: str, tokens: int) -> str:
        """Hold prompt, length, end and id against what was asked."""
        values = parts(status, raw, stream)
        text, ids = text_of(values), {str(value["id"]) for value in values}
        ends = [one["choices"][0]["finish_reason"] for one in values if one["choices"]]
        made = [one["usage"]["completion_tokens"] for one in values if one.get("usage")]
        again = ids & self.ids
        self.ids |= ids
        if not text.startswith(prompt) or text.count(prompt) != 1:
            return f"{text[:200]!r} instead of {prompt!r}..."
        if len(ids) != 1 or again:
            return f"answered under {sorted(ids)}" + (", seen before" if again else "")
        if made[-1:] != [tokens]:
            return f"{made} tokens instead of {tokens}"
        if [end for end in ends if end] != ["length"] or ends[-1] != "length":
            return f"it ended with {ends}"
        return ""


def load(clients: int = CLIENTS, rate: float = RATE) -> Load:
    """Return clients that ask a real engine for a few tokens each."""
    return lab.load(clients, rate, words=0, tokens=TOKENS, asked=Echo())


def seconds(text: str) -> float:
    """Return a time that Docker prints as seconds since 1970."""
    return datetime.fromisoformat(f"{text.strip()[:26].rstrip('Z')}+00:00").timestamp()


def start_of(node: str) -> tuple[float, float]:
    """Return when the engine that runs on a node was started, and how many seconds it took until it listened."""
    name = lab.container(node)
    since = lab.on(node, f"docker inspect -f '{{{{.State.StartedAt}}}}' {name}").strip()
    command = f"docker logs --timestamps --since {since} {name} 2>&1 | grep 'Application startup complete' | head -n 1"
    began = seconds(since)
    return began, seconds(lab.on(node, command).split()[0]) - began
