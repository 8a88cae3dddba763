# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, spoken to over its debugging pipe: pages as a person's browser shows them."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _program() -> str | None:
    """Return the browser that runs here; Ubuntu's package is a script that asks for a snap, and ends with an error."""
    found = [path for path in map(shutil.which, ("chromium", "chromium-browser")) if path]
    return next(
        (
            path
            for path in found
            if subprocess.call([path, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
        ),
        None,
    )


PROGRAM = _program()


class Page:
    """One tab. ``errors`` are what its console complained about, ``requests`` every address that it asked for."""

    def __init__(self, sender: int, receiver: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        """Open the tab and listen to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send one command and return its result. Raises AssertionError with the browser's words."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._sender, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Load a file and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()

    def media(self, kind: str = "screen", scheme: str = "light") -> None:
        """Show the page on paper or screen, in light or dark."""
        self.call(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def choose(self, field: str, value: str) -> None:
        """Set a field as a person does, with the event that follows."""
        self.run(
            f"{{const one = document.getElementById({field!r}); one.value = {value!r};"
            " one.dispatchEvent(new Event('input', {bubbles: true}));}"
        )

    def visible(self, selector: str) -> list[str]:
        """Return the text of each element that is really shown."""
        found: list[str] = self.run(
            f"[...document.querySelectorAll({selector!r})].filter((one) => one.checkVisibility())"
            ".map((one) => one.textContent.replace(/\\s+/g, ' ').trim())"
        )
        return found

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a screenshot."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        ends = time.monotonic() + 60
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receiver], [], [], max(0.0, ends - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._receiver, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(raw)
        method, about = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"].get("exception", about["exceptionDetails"])))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str(about["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        if method:
            self._events.append(found)
        return found


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start Chromium with a profile of its own and end it afterwards."""
    assert PROGRAM, "chromium is not installed"
    to_browser, sender = os.pipe()
    receiver, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="metalserve-page-", ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        command += ["--disable-gpu", "--hide-scrollbars", "--disable-background-networking", "--disable-dev-shm-usage"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        # The browser reads from descriptor 3 and writes to 4.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        child = os.posix_spawn(PROGRAM, command, os.environ, file_actions=actions, setpgroup=0)
        for end in (to_browser, from_browser, *high):
            os.close(end)
        try:
            page = Page(sender, receiver)
            page.attach()
            yield page
        finally:
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGTERM)
            os.waitpid(child, 0)
            os.close(sender)
            os.close(receiver)
