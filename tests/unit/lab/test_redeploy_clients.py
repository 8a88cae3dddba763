# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The judges of the redeploy tests find what is wrong: a judge that finds nothing would make every redeploy look lossless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.redeploy import lab
from tests.lab.redeploy.client import Standin, expected, parts
from tests.lab.redeploy_real import real

PROMPT = "client 3 request 12 at 1796092000123456789 "


def answer(number: int = 1, text: str = f"{PROMPT}and so", tokens: int = 2, end: str | None = "length") -> bytes:
    """Return a real engine's answer that is no stream."""
    choice = {"index": 0, "text": text, "finish_reason": end}
    return json.dumps({"id": f"cmpl-{number}", "choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


def stream(*texts: str, tokens: int = 2, done: bool = True, ids: tuple[str, ...] = ()) -> bytes:
    """Return a real engine's stream, its last text with the reason why it ended."""
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        end = "length" if number == len(texts) - 1 else None
        rows.append({"choices": [{"index": 0, "text": text, "finish_reason": end}]})
    rows.append({"choices": [], "usage": {"completion_tokens": tokens}})
    for number, row in enumerate(rows):
        row["id"] = ids[number] if ids else "cmpl-9"
    lines = [f"data: {json.dumps(row)}\n\n" for row in rows]
    return "".join(lines + ["data: [DONE]\n\n"] * done).encode()


def judged(raw: bytes, is_stream: bool, judge: real.Echo | None = None) -> str:
    """Return what a judge says, or why it could not."""
    try:
        return (judge or real.Echo()).judged(200, raw, is_stream, PROMPT, 2)
    except (ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_whole_answer_is_right() -> None:
    assert judged(answer(), False) == ""
    assert judged(stream(f"{PROMPT}and", " so"), True) == ""


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (answer(text="client 4 request 12 and so"), "instead of"),
        (answer(text=f"{PROMPT}and {PROMPT}"), "instead of"),
        (answer(tokens=1), "[1] tokens instead of 2"),
        (answer(end="stop"), "it ended with ['stop']"),
        (answer(end=None), "it ended with [None]"),
        (answer()[:-9], "JSONDecodeError"),
    ],
)
def test_an_answer_that_is_not_right(raw: bytes, words: str) -> None:
    assert words in judged(raw, False)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (stream(f"{PROMPT}and", " so", done=False), "a stream without its end"),
        (stream("and", " so"), "instead of"),
        (stream(f"{PROMPT}and", " so", tokens=1), "[1] tokens instead of 2"),
        (stream(f"{PROMPT}and", " so", ids=("a", "b", "a")), "answered under ['a', 'b']"),
        (stream(f"{PROMPT}and", f"{PROMPT}and"), "instead of"),
    ],
)
def test_a_stream_that_is_not_right(raw: bytes, words: str) -> None:
    assert words in judged(raw, True)


def test_the_same_answer_twice_is_one_too_many() -> None:
    judge = real.Echo()
    assert judged(answer(1), False, judge) == ""
    assert judged(answer(2), False, judge) == ""
    assert "seen before" in judged(answer(1), False, judge)


def test_an_error_is_no_answer() -> None:
    with pytest.raises(ValueError, match="503 busy"):
        parts(503, b"busy", False)


def test_the_standin_is_judged_word_by_word() -> None:
    def said(text: str) -> str:
        return Standin().judged(200, json.dumps({"choices": [{"text": text}]}).encode(), False, PROMPT, 8)

    assert said(expected(PROMPT)) == ""
    assert "instead of" in said(expected(PROMPT).rpartition(" ")[0])
    assert "instead of" in said(expected("another prompt"))


def test_a_nodes_turn_is_counted_from_its_lock_to_the_next_ones(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    rows: list[dict[str, Any]] = [
        {"time": 1, "event": "phase", "host": "engine1", "phase": "prefetch"},
        {"time": 2, "event": "phase", "host": "engine2", "phase": "prefetch"},
        {"time": 10, "event": "phase", "host": "engine1", "phase": "lock"},
        {"time": 12, "event": "phase", "host": "engine1", "phase": "wait"},
        {"time": 17, "event": "phase", "host": "engine1", "phase": "lock"},
        {"time": 20, "event": "phase", "host": "engine2", "phase": "lock"},
        {"time": 26, "event": "phase", "host": "engine2", "phase": "soak"},
        {"time": 30, "event": "end"},
    ]
    log.write_text("\n".join(json.dumps(row) for row in rows))
    assert lab.spent(log, ["engine1", "engine2"]) == {
        "engine1": {"lock": 5.0, "wait": 5.0},
        "engine2": {"lock": 6.0, "soak": 4.0},
    }
