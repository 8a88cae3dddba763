# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The three questions that the agent asks Docker, over its Unix socket. No client library: nodes have none to share.

Unversioned paths: the daemon answers with its own newest API version, so nothing is pinned that a later one drops.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

LOG_LIMIT_BYTES = 8 * 1024 * 1024  # of a start-up log; vLLM's is some 25 kB


class DockerError(Exception):
    """Docker did not answer, or not with what was asked; the message says which."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the Unix socket instead of a TCP address."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Docker:
    """A Docker daemon behind ``socket_path``; every question ends after ``timeout_s`` seconds without an answer."""

    def __init__(self, socket_path: str, timeout_s: float = 5.0) -> None:
        self._path = socket_path
        self._timeout = timeout_s

    def containers(self, name_prefix: str) -> list[dict[str, Any]]:
        """Return the containers (running or not) whose name begins with ``name_prefix``. Raises DockerError."""
        filters = quote(json.dumps({"name": ["^/" + name_prefix]}))
        found = self._json(f"/containers/json?all=1&filters={filters}")
        if not isinstance(found, list):
            raise DockerError("containers: not a list")
        return found

    def inspect(self, container: str) -> dict[str, Any]:
        """Return what Docker knows of a container. Raises DockerError."""
        found = self._json(f"/containers/{quote(container)}/json")
        if not isinstance(found, dict):
            raise DockerError("inspect: not an object")
        return found

    def log_lines(self, container: str, since: float, until: float) -> Iterator[tuple[float, str]]:
        """Yield (Unix time, line) of stdout and stderr between two Unix times, 8 MiB at most. Raises DockerError."""
        path = f"/containers/{quote(container)}/logs?stdout=1&stderr=1&timestamps=1&since={since:.0f}&until={until:.0f}"
        data, is_tty = self._get(path)
        for line in demultiplex(data, is_tty).splitlines():
            stamp, _, text = line.partition(" ")
            moment = parse_time(stamp)
            if moment is not None:
                yield moment, text

    def _json(self, path: str) -> Any:
        data, _ = self._get(path)
        try:
            return json.loads(data)
        except ValueError:
            raise DockerError("the answer is not JSON") from None

    def _get(self, path: str) -> tuple[bytes, bool]:
        connection = _Connection(self._path, self._timeout)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            data = answer.read(LOG_LIMIT_BYTES)
            is_tty = answer.headers.get("Content-Type", "") == "application/vnd.docker.raw-stream" and data[:1] not in (
                b"\x01",
                b"\x02",
            )
            status = answer.status
        except (OSError, http.client.HTTPException) as error:
            raise DockerError(f"no answer: {error}") from None
        finally:
            connection.close()
        if status != 200:
            raise DockerError(f"status {status}")
        return data, is_tty


def demultiplex(data: bytes, is_tty: bool) -> str:
    """Return the text of a Docker log stream: frames of an 8-byte header and a payload; raw with a terminal."""
    if is_tty:
        return data.decode("utf-8", "replace")
    parts = []
    position = 0
    while position + 8 <= len(data):
        (size,) = struct.unpack(">I", data[position + 4 : position + 8])
        parts.append(data[position + 8 : position + 8 + size])
        position += 8 + size
    return b"".join(parts).decode("utf-8", "replace")


def parse_time(text: str) -> float | None:
    """Return a Docker time (``2026-11-30T14:16:18.123456789Z``) in Unix seconds; None for year 1 or no time."""
    head, _, fraction = text.rstrip("Z").partition(".")
    try:
        moment = datetime.strptime(head, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
        seconds = moment.timestamp() + (float("0." + fraction) if fraction else 0.0)
    except ValueError:
        return None
    return seconds if moment.year > 1 else None
