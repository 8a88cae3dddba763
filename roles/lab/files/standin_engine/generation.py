# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in small: requests wait, are prefilled in chunks and get one token a step, in simulated time.

Answers depend on the prompt alone, so a client can tell a whole answer from a truncated, doubled or mixed-up one:
token i of n is ``<first 8 hex digits of sha256(prompt)>:<i>/<n>``, counted from 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

GOLDEN_QUESTION = "capital of france"
GOLDEN_ANSWER = ["The", " capital", " of", " France", " is", " Paris", "."]
NATURAL_LENGTH = 64
"""Tokens of an answer when the client sets no bound."""


def count_tokens(text: str) -> int:
    """Return the tokens that this engine counts for ``text``: one for each four bytes of UTF-8, at least one."""
    return max(1, -(-len(text.encode("utf-8")) // 4))


def answer(prompt: str, max_tokens: int | None, garbage: bool = False) -> tuple[list[str], str]:
    """Return (tokens, finish reason) for ``prompt``; at most ``max_tokens`` tokens."""
    if garbage:
        count = NATURAL_LENGTH if max_tokens is None else max_tokens
        return ["\u25af!"] * count, "length"
    if GOLDEN_QUESTION in prompt.lower():
        whole = list(GOLDEN_ANSWER)
    else:
        total = NATURAL_LENGTH if max_tokens is None else max_tokens
        mark = hashlib.sha256(prompt.encode("utf-8")).hexdigest()[:8]
        whole = [f"{'' if i == 0 else ' '}{mark}:{i + 1}/{total}" for i in range(total)]
    if max_tokens is not None and len(whole) >= max_tokens:
        return whole[:max_tokens], "length"
    return whole, "stop"


@dataclass(eq=False)
class Job:
    """One request inside the engine. ``events`` yields a token's text, then None; times are monotonic seconds."""

    prompt_tokens: int
    tokens: list[str]
    finish_reason: str
    max_tokens: int
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    prefilled: int = 0
    sent: int = 0
    events: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)


@dataclass
class Speed:
    """How fast the engine pretends to be."""

    step_s: float = 0.004
    prefill_tokens_per_s: float = 20000.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


class Engine:
    """The scheduler: one step at a time over everything that runs, as a real engine's core."""

    def __init__(self, speed: Speed, observe: Observer) -> None:
        """Run at ``speed`` and tell ``observe`` what happened."""
        self.speed = speed
        self.observe = observe
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.wedged = False
        self.slow_factor = 1.0
        self._wake = asyncio.Event()

    def submit(self, job: Job) -> None:
        """Put ``job`` at the end of the queue."""
        self.waiting.append(job)
        self._wake.set()

    def abort(self, job: Job) -> None:
        """Forget ``job``: its client has gone or the server stops."""
        for queue in (self.waiting, self.running):
            if job in queue:
                queue.remove(job)
                self.observe.finished(job, "abort")
        job.events.put_nowait(None)

    def queued_prompt_tokens(self) -> int:
        """Return the prompt tokens that are not prefilled yet."""
        return sum(job.prompt_tokens - job.prefilled for job in self.waiting + self.running)

    async def run(self) -> None:
        """Step for ever; sleep while there is nothing to do, and stand still while wedged."""
        while True:
            if self.wedged:
                await asyncio.sleep(0.05)
            elif self.waiting or self.running:
                await self._step()
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self) -> None:
        while self.waiting and len(self.running) < self.speed.max_num_seqs:
            job = self.waiting.pop(0)
            job.scheduled = time.monotonic()
            self.running.append(job)
        budget = self.speed.max_num_batched_tokens
        decoding = [job for job in self.running if job.prefilled >= job.prompt_tokens]
        budget -= len(decoding)
        prefilled = 0
        for job in self.running:
            if job.prefilled < job.prompt_tokens and budget > 0:
                chunk = min(budget, job.prompt_tokens - job.prefilled)
                job.prefilled += chunk
                budget -= chunk
                prefilled += chunk
                if job.prefilled >= job.prompt_tokens:
                    decoding.append(job)
        seconds = self.speed.step_s + prefilled / self.speed.prefill_tokens_per_s
        await asyncio.sleep(seconds * self.slow_factor)
        self.observe.step(prefilled + len(decoding))
        now = time.monotonic()
        for job in decoding:
            if job in self.running:
                self._emit(job, now)

    def _emit(self, job: Job, now: float) -> None:
        if job.sent < len(job.tokens):
            self.observe.token(job, now)
            job.events.put_nowait(job.tokens[job.sent])
            job.sent += 1
        if job.sent >= len(job.tokens):
            self.running.remove(job)
            self.observe.finished(job, job.finish_reason)
            job.events.put_nowait(None)


class Observer:
    """What the scheduler reports; the server's metrics implement it."""

    def step(self, tokens: int) -> None:
        """One step worked on ``tokens`` tokens."""

    def token(self, job: Job, now: float) -> None:
        """A token of ``job`` is ready at ``now``."""

    def finished(self, job: Job, reason: str) -> None:
        """``job`` left the engine for ``reason``: stop, length, abort or error."""
