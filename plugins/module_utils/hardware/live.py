# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a live machine: files, commands and HTTP, each bounded in time and size, none of which can raise."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import selectors
import signal
import socket
import stat
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ABSENT,
    DENIED,
    ERROR,
    OK,
    TIMEOUT,
    Item,
    ProbeResult,
    command_path,
    snapshot_path,
)

FILE_LIMIT = 1024 * 1024
COMMAND_LIMIT = 8 * 1024 * 1024
HTTP_LIMIT = 4 * 1024 * 1024
GLOB_LIMIT = 4096
"""Bounds per reading: bytes of a file, of a command's output, of an HTTP body; number of files of a pattern."""

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/bin"

_ABSENT_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ESRCH)
_DENIED_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


def decode(data: bytes) -> str:
    """Return ``data`` as text; what is not UTF-8 becomes the replacement character, and NUL a newline."""
    return data.decode("utf-8", errors="replace").replace("\x00", "\n")


def state_of(error: OSError) -> str:
    """Return the probe state that stands for a system error."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return TIMEOUT
    if error.errno in _ABSENT_ERRORS:
        return ABSENT
    if error.errno in _DENIED_ERRORS:
        return DENIED
    return ERROR


class UnixConnection(HTTPConnection):
    """HTTP over a unix socket, as the Docker daemon speaks it."""

    def __init__(self, path: str, timeout: float) -> None:
        """Remember the socket's path; ``timeout`` is in seconds and holds for each step."""
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class LiveHost:
    """The machine this runs on. ``root`` lets tests read a folder as if it were ``/`` (commands and sockets still are
    real).

    ``deadline`` is a ``time.monotonic()`` value after which nothing may still run; ``found`` holds the first round's
    results.
    """

    root: str = "/"
    deadline: float = field(default_factory=lambda: time.monotonic() + 60.0)
    search_path: str = SEARCH_PATH
    docker_socket: str = "/var/run/docker.sock"
    metalserve_root: str = "/var/lib/metalserve"
    found: dict[str, ProbeResult] = field(default_factory=dict)

    def left(self, timeout: float) -> float:
        """Return the seconds a step may take: its own limit or what is left of the whole, never less than 0.05."""
        return max(0.05, min(timeout, self.deadline - time.monotonic()))

    def real(self, path: str) -> str:
        """Return the real path of ``path`` below ``root``."""
        return path if self.root == "/" else os.path.join(self.root, path.lstrip("/"))

    def file(self, path: str, limit: int = FILE_LIMIT, tail: bool = False, at: str = "") -> Item:
        """Read one file, at most ``limit`` bytes (the last ones with ``tail``). Only regular files are opened: no
        pipe, no device.
        """
        place = at or snapshot_path(path)
        try:
            handle = os.open(self.real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            return Item(place, state_of(error), "", f"{path}: {error.strerror}")
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return Item(place, ERROR, "", f"{path}: not a regular file")
            if tail and status.st_size > limit:
                os.lseek(handle, status.st_size - limit, os.SEEK_SET)
            data = _read_all(handle, limit + 1)
        except OSError as error:
            return Item(place, state_of(error), "", f"{path}: {error.strerror}")
        finally:
            os.close(handle)
        if len(data) > limit and not tail:
            return Item(place, ERROR, decode(data[:limit]), f"{path}: longer than {limit} bytes")
        return Item(place, OK, decode(data[:limit]))

    def files(self, *patterns: str, limit: int = FILE_LIMIT) -> list[Item]:
        """Read every file that matches ``patterns``; a pattern without a match gives one absent item."""
        items: list[Item] = []
        for pattern in patterns:
            paths = self.glob(pattern)
            if not paths:
                items.append(self._nothing_matches(pattern))
            items += [self.file(path, limit) for path in paths[:GLOB_LIMIT]]
            if len(paths) > GLOB_LIMIT:
                items.append(Item(snapshot_path(pattern), ERROR, "", f"{pattern}: more than {GLOB_LIMIT} files"))
        return items

    def glob(self, pattern: str) -> list[str]:
        """Return the sorted paths that match ``pattern``, as the machine names them."""
        found = glob.glob(self.real(pattern))
        cut = 0 if self.root == "/" else len(self.root.rstrip("/"))
        return sorted(path[cut:] for path in found)

    def listdir(self, path: str) -> tuple[str, list[str], str]:
        """Return state, sorted names and error of a folder."""
        try:
            return OK, sorted(os.listdir(self.real(path))), ""
        except OSError as error:
            return state_of(error), [], f"{path}: {error.strerror}"

    def link(self, path: str) -> Optional[str]:
        """Return the target of a symbolic link, or None."""
        try:
            return os.readlink(self.real(path))
        except OSError:
            return None

    def command(
        self,
        argv: list[str],
        timeout: float = 5.0,
        codes: tuple[int, ...] = (0,),
        limit: int = COMMAND_LIMIT,
        both: bool = False,
        at: str = "",
        missing: str = ERROR,
    ) -> Item:
        """Run a command without a shell, without input, in the C locale, and return what it printed.

        ``codes`` are the exit codes that count as ok; ``both`` keeps standard error too. ``missing`` is the state where
        there is no such program: ``absent`` only where that means that the thing asked about is not there either.
        The process group is killed at the time limit; a child that does not even die (stuck in a driver) is left
        behind and never waited for.
        """
        place = at or command_path(argv)
        program = self.which(argv[0])
        if program is None:
            return Item(place, missing, "", f"{argv[0]}: no such command")
        try:
            ended = _run([program, *argv[1:]], self.left(timeout), limit, self.search_path)
        except OSError as error:
            return Item(place, state_of(error), "", f"{argv[0]}: {error.strerror}")
        output = ended.out + ended.err if both else ended.out
        if ended.code is None:
            seconds = self.left(timeout) if ended.reason == TIMEOUT else 0
            why = f"no answer in {timeout:g} s" if seconds else f"printed more than {limit} bytes"
            return Item(place, ended.reason, decode(output), f"{' '.join(argv)}: {why}")
        if ended.code not in codes:
            said = decode(ended.err or ended.out).strip().splitlines()
            words = said[0][:200] if said else "no message"
            state = DENIED if _sounds_denied(words) else ERROR
            return Item(place, state, decode(output), f"{' '.join(argv)}: exit code {ended.code}: {words}")
        return Item(place, OK, decode(output))

    def which(self, program: str) -> Optional[str]:
        """Return the path of a program: the usual folders first, so that a bare environment finds it too."""
        for folder in self.search_path.split(":"):
            path = os.path.join(folder, program)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
        return None

    def docker(self, request: str, at: str, timeout: float = 5.0) -> Item:
        """GET ``request`` from the Docker daemon's socket; no socket is absence only where no daemon is installed."""
        connection = UnixConnection(self.docker_socket, self.left(timeout))
        found = self._get(connection, request, at, f"docker {request}", {}, timeout)
        if found.state == ABSENT and not os.path.exists(self.docker_socket) and self.which("dockerd") is not None:
            return Item(
                at, ERROR, "", f"{self.docker_socket} is not there, though dockerd is installed: it does not run"
            )
        return found

    def http(self, address: str, port: int, request: str, at: str, timeout: float = 2.0) -> Item:
        """GET ``request`` from ``address``:``port`` in clear text, without following anything."""
        connection = HTTPConnection(address, port, timeout=self.left(timeout))
        return self._get(connection, request, at, f"http://{address}:{port}{request}", {}, timeout)

    def _get(
        self,
        connection: HTTPConnection,
        request: str,
        at: str,
        called: str,
        headers: dict[str, str],
        timeout: float,
    ) -> Item:
        ends = time.monotonic() + self.left(timeout)
        try:
            connection.request("GET", request, headers=headers)
            answer = connection.getresponse()
            body = b""
            while len(body) <= HTTP_LIMIT:
                chunk = answer.read1(65536)
                if not chunk:
                    break
                body += chunk
                if time.monotonic() > ends:
                    return Item(at, TIMEOUT, "", f"{called}: no whole answer in {timeout:g} s")
        except OSError as error:
            return Item(at, state_of(error), "", f"{called}: {error.strerror or error}")
        except (HTTPException, ValueError) as error:
            return Item(at, ERROR, "", f"{called}: not an HTTP answer ({type(error).__name__})")
        finally:
            connection.close()
        if len(body) > HTTP_LIMIT:
            return Item(at, ERROR, "", f"{called}: more than {HTTP_LIMIT} bytes")
        if answer.status != 200:
            state = DENIED if answer.status in (401, 403) else ABSENT if answer.status == 404 else ERROR
            return Item(at, state, decode(body[:2000]), f"{called}: HTTP status {answer.status}")
        return Item(at, OK, decode(body))

    def _nothing_matches(self, pattern: str) -> Item:
        """Tell an empty match from a folder that may not be read."""
        place = snapshot_path(pattern)
        folder = pattern
        while glob.has_magic(folder):
            folder = os.path.dirname(folder)
        state, _names, error = self.listdir(folder)
        if state in (OK, ABSENT):
            return Item(place, ABSENT)
        return Item(place, ERROR if state == OK else state, "", error)


@dataclass(frozen=True)
class _Ended:
    code: Optional[int]
    out: bytes
    err: bytes
    reason: str = ""


def _sounds_denied(words: str) -> bool:
    low = words.lower()
    return "permission denied" in low or "operation not permitted" in low or "insufficient permissions" in low


def _read_all(handle: int, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit:
        chunk = os.read(handle, min(65536, limit - len(data)))
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _run(argv: list[str], timeout: float, limit: int, search_path: str) -> _Ended:
    """Run a program in a process group of its own; ``code`` is None where it was stopped, with the reason."""
    ends = time.monotonic() + timeout
    out_end, out = os.pipe()
    err_end, err = os.pipe()
    actions = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, out, 1),
        (os.POSIX_SPAWN_DUP2, err, 2),
    )
    environment = {
        "PATH": search_path,
        "LC_ALL": "C",
        "LANG": "C",
        "HOME": "/root",
        "SYSTEMD_PAGER": "",
        "TERM": "dumb",
    }
    try:
        try:
            # Python ignores SIGPIPE, and a program that inherits this would go on writing into a closed pipe.
            # AnsibleModule.run_command bounds neither time nor output, and there is no module outside Ansible.
            pid = os.posix_spawn(  # pylint: disable=ansible-bad-function
                argv[0], argv, environment, file_actions=actions, setpgroup=0, setsigdef=(signal.SIGPIPE,)
            )
        finally:
            os.close(out)
            os.close(err)
        kept, reason = _gather((out_end, err_end), ends, limit)
    finally:
        os.close(out_end)
        os.close(err_end)
    code = None if reason else _wait(pid, ends)
    if code is None:
        reason = reason or TIMEOUT
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        _wait(pid, time.monotonic() + 0.2)
    return _Ended(code, kept[0][:limit], kept[1][:65536], reason)


def _gather(handles: tuple[int, int], ends: float, limit: int) -> tuple[tuple[bytes, bytes], str]:
    """Read two pipes until both are closed, the time is over or one gave more than ``limit`` bytes; say which."""
    kept = {handle: bytearray() for handle in handles}
    reason = ""
    with selectors.DefaultSelector() as selector:
        for handle in handles:
            os.set_blocking(handle, False)
            selector.register(handle, selectors.EVENT_READ)
        while selector.get_map() and not reason:
            left = ends - time.monotonic()
            if left <= 0:
                reason = TIMEOUT
                break
            for key, _mask in selector.select(left):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                kept[key.fd] += chunk
                if len(kept[key.fd]) > limit:
                    reason = ERROR
    return (bytes(kept[handles[0]]), bytes(kept[handles[1]])), reason


def _wait(pid: int, ends: float) -> Optional[int]:
    """Return the exit code of a child (negative: the signal that ended it), None where it still runs at ``ends``."""
    pause = 0.001
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        if time.monotonic() >= ends:
            return None
        time.sleep(pause)
        pause = min(0.05, pause * 2)
