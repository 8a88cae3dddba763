# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whether an engine truly serves, how far its start is, and whether it will never get there."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

TAIL = 15


@dataclass(frozen=True)
class Answer:
    """What a question to an engine gave: HTTP status (0: nobody answered), the text, and why there is none."""

    status: int
    body: str
    problem: str = ""


@dataclass(frozen=True)
class Unit:
    """What systemd says: active state, sub state, restarts since somebody started it, last exit code of the
    main process.
    """

    active: str
    sub: str
    restarts: int
    code: int


@dataclass(frozen=True)
class Container:
    """What Docker says: state word, exit code, and whether the kernel killed it for memory."""

    status: str
    code: int
    oom_killed: bool


def ask(
    address: str, port: int, path: str, key: str = "", body: Mapping[str, Any] | None = None, timeout: float = 5.0
) -> Answer:
    """Send one request (POST where there is a ``body``) and return the answer. Never raises for a server that
    is not there.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    payload = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        payload = json.dumps(body)
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("POST" if body is not None else "GET", path, body=payload, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(4 * 1024 * 1024).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, "", str(error) or type(error).__name__)
    finally:
        connection.close()


def listed_models(text: str) -> list[str]:
    """Return the model names in an answer of /v1/models; empty where it is none."""
    try:
        return [str(item["id"]) for item in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def dig(text: str, path: Sequence[Any]) -> str | None:
    """Return the text at ``path`` (keys and indexes) of a JSON answer, None where there is none."""
    try:
        value = json.loads(text)
        for step in path:
            value = value[step]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return value if isinstance(value, str) else None


def serves(
    address: str, port: int, health: Mapping[str, Any], served_name: str, key: str, timeout: float = 60.0
) -> tuple[bool, str]:
    """Return whether the model is listed and completes a prompt within ``timeout`` seconds, and otherwise what is
    missing, in words.
    """
    models = ask(address, port, str(health["models"]), key)
    if models.status == 0:
        return False, f"nothing listens on {address}:{port} yet"
    if models.status != 200:
        return False, f"{health['models']} answers {models.status}"
    names = listed_models(models.body)
    if served_name not in names:
        return False, f"{health['models']} lists {', '.join(names) or 'no model'}, not {served_name}"
    answer = ask(address, port, str(health["completion"]), key, health["body"], timeout=timeout)
    if answer.status != 200:
        return False, f"{health['completion']} answers {answer.status or answer.problem}: {answer.body[:200]}"
    text = dig(answer.body, health["answer"])
    if not text:
        return False, f"{health['completion']} answers without any text"
    return True, f"answers {' '.join(text.split())[:60]!r}"


_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"(?:^|\] )([A-Za-z_][\w.]*(?:Error|Exception)\b.*)")


def fatal_line(log: str, patterns: Sequence[str]) -> str:
    """Return the first line of ``log`` after which the engine will never serve, ``""`` where there is none.

    Where its traceback follows, the exception at the end of that is added: the line itself says only that it failed.
    """
    compiled = [re.compile(pattern) for pattern in patterns]
    lines = [line.strip() for line in log.splitlines()]
    for number, line in enumerate(lines):
        if any(pattern.search(line) for pattern in compiled):
            rest = lines[number + 1 :]
            told = (_EXCEPTION.search(item) for item in rest) if rest and _TRACEBACK in rest[0] else ()
            cause = next((match.group(1) for match in told if match), "")
            return f"{line} {cause}".strip()
    return ""


def stage(log: str, stages: Sequence[Sequence[str]]) -> str:
    """Return in words how far the start is: of the stages that the log shows, the last one in their order."""
    reached = ""
    for pattern, words in stages:
        if re.search(pattern, log):
            reached = words
    return reached


def failure(unit: Unit, container: Container | None, fatal: str, core_gone: bool, restarts_before: int = 0) -> str:
    """Return why this start has failed, ``""`` while it may still succeed.

    ``restarts_before`` is how often the unit had restarted it when somebody began to wait.
    """
    # A container that is being started again has forgotten its code; the unit keeps it a while longer.
    code = (container.code if container is not None else 0) or unit.code
    ended = f"it ended with exit code {code}" if code else "it ended"
    causes = (
        (
            container is not None and container.oom_killed,
            "the kernel killed it for memory: its limit (container.memory) is too small for this model",
        ),
        (bool(fatal), f"its log says: {fatal}"),
        (unit.active == "failed", f"its unit failed (exit code {unit.code})"),
        (
            unit.restarts > restarts_before or unit.sub == "auto-restart",
            f"{ended} and is being restarted",
        ),
        (unit.active == "inactive", "its unit is not running"),
        (core_gone, "the process that does the work ended, though the container is up"),
    )
    return next((words for happened, words in causes if happened), "")


def killed_for_memory(kernel_log: str, container_id: str) -> bool:
    """Return whether the kernel says that it killed a process of this container because of the container's own limit.

    Docker tells of the container's first process at most, and of none on some hosts; an engine's worker is a child.
    """
    return any(
        "oom-kill:constraint=CONSTRAINT_MEMCG" in line and container_id in line for line in kernel_log.splitlines()
    )


def started_at(text: str) -> float:
    """Return a time that Docker prints (``2026-12-01T02:44:12.189742358Z``) as seconds since 1970. Raises ValueError."""
    return datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc).timestamp()


def tail(log: str, lines: int = TAIL) -> list[str]:
    """Return the last lines of a log that say something."""
    return [line.rstrip()[:300] for line in log.splitlines() if line.strip()][-lines:]
