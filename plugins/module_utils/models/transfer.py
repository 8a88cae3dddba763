# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes over HTTP and from a mount, resumable: a download that breaks goes on where it stopped."""

from __future__ import annotations

import errno
import fnmatch
import functools
import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.models.store import Expected, StoreError

_CHUNK = 1024 * 1024
_COMMIT = re.compile(r"\A[0-9a-f]{40}\Z")
_REPO = re.compile(r"\A[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
# Formats that the three engines do not read when safetensors are there, and files about the repository itself.
EXCLUDE = (".git*", "original/*", "onnx/*", "*.onnx", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but give a token to nobody but the host it was meant for."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        hosts = [urllib.parse.urlsplit(url).netloc for url in (req.full_url, newurl)]
        if following is not None and hosts[0] != hosts[1]:
            following.remove_header("Authorization")
        return following


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Return the one opener: each new one would read this machine's certificates again."""
    return urllib.request.build_opener(_Redirects())


@dataclass(frozen=True)
class Http:
    """How to fetch: ``token`` (bearer, may be empty), ``timeout`` seconds without a byte, tries, pause factor
    in seconds.
    """

    token: str = ""
    timeout: float = 60.0
    tries: int = 6
    pause: float = 1.0

    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        """Open ``url`` once. Raises urllib.error.URLError (HTTPError among them) and OSError."""
        scheme = urllib.parse.urlsplit(url).scheme
        if scheme not in ("http", "https"):
            raise StoreError(f"{url} is not an http or https address")
        request = urllib.request.Request(url, headers={"User-Agent": "metalserve", **(headers or {})})
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        return _opener().open(request, timeout=self.timeout)

    def retry(self, what: str, action: Callable[[], Any]) -> Any:
        """Run ``action`` until it succeeds or fails for good; a wait doubles from ``pause``. Raises StoreError."""
        problem = ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(min(30.0, self.pause * 2 ** (attempt - 1)))
            try:
                return action()
            except urllib.error.HTTPError as error:
                error.close()
                problem = f"HTTP {error.code} {error.reason}"
                if error.code not in _RETRIED:
                    break
            except (OSError, EOFError) as error:
                if getattr(error, "errno", None) in _LOCAL:
                    raise  # this machine's disk, not the network: trying again does not help
                problem = str(getattr(error, "reason", error)) or type(error).__name__
        raise StoreError(f"{what}: {problem}{_advice(problem)}")

    def get_json(self, url: str) -> tuple[Any, str]:
        """Return the JSON at ``url`` and the address of the next page (``""`` at the end). Raises StoreError."""

        def once() -> tuple[Any, str]:
            with self.open(url) as response:
                body = response.read()
                link = response.headers.get("Link", "")
            following = _NEXT.search(link)
            return json.loads(body), urllib.parse.urljoin(url, following.group(1)) if following else ""

        try:
            result: tuple[Any, str] = self.retry(url, once)
        except ValueError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{url} does not answer with JSON") from error
        return result

    def get_bytes(self, url: str, limit: int) -> bytes:
        """Return the body at ``url``, at most ``limit`` bytes. Raises StoreError."""

        def once() -> bytes:
            with self.open(url) as response:
                body: bytes = response.read(limit + 1)
            return body

        body: bytes = self.retry(url, once)
        if len(body) > limit:
            raise StoreError(f"{url} is larger than {limit} bytes")
        return body

    def download(self, url: str, target: str, size: int | None) -> None:
        """Fetch ``url`` into ``target``; a ``target.incomplete`` of an earlier run is continued.

        ``size`` in bytes is checked where it is known. Raises StoreError and OSError (a full disk, for one).
        """
        if size is not None and os.path.isfile(target) and os.path.getsize(target) == size:
            return
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        partial = f"{target}.incomplete"
        self.retry(url, lambda: self._continue(url, partial, size))
        os.replace(partial, target)

    def _continue(self, url: str, partial: str, size: int | None) -> None:
        have = os.path.getsize(partial) if os.path.isfile(partial) else 0
        if size is not None and have > size:
            os.unlink(partial)
            have = 0
        if size is not None and have == size and have > 0:
            return
        try:
            response = self.open(url, {"Range": f"bytes={have}-"} if have else {})
        except urllib.error.HTTPError as error:
            if error.code == 416 and have:  # the server has another file than the one begun
                os.unlink(partial)
                raise OSError("the file changed while it was fetched; starting again") from error
            raise
        with response:
            if have and not str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-"):
                have = 0
            length = response.headers.get("Content-Length")
            with open(partial, "ab" if have else "wb") as output:
                for chunk in iter(lambda: response.read1(_CHUNK), b""):
                    output.write(chunk)
                output.flush()
                os.fsync(output.fileno())
        got = os.path.getsize(partial)
        wanted = size if size is not None else (have + int(length) if length else got)
        if got != wanted:
            if got > wanted:
                os.unlink(partial)
            raise OSError(f"{got} of {wanted} bytes arrived")


def _advice(problem: str) -> str:
    if problem.startswith(("HTTP 401", "HTTP 403")):
        return "; the repository needs a token (source.token), or the token may not read it"
    if problem.startswith("HTTP 404"):
        return "; check the repository, the commit and the endpoint"
    return ""


def hub_tree(http: Http, endpoint: str, repo: str, commit: str, exclude: Sequence[str]) -> list[Expected]:
    """Return the files of ``repo`` at ``commit`` from a hub's tree interface, without those that match ``exclude``.

    Large files carry their sha256 there, small ones their git blob id. ``*.bin`` weights are left out where
    safetensors exist. Raises StoreError for a moving revision name, an unknown repository, or an answer of
    another shape.
    """
    if not _REPO.match(repo):
        raise StoreError(f"source.repository {repo!r} is not a repository; write owner/name")
    if not _COMMIT.match(commit):
        raise StoreError(
            f"source.commit {commit!r} may move; write the 40 hexadecimal digits of the commit that you tested"
        )
    url = f"{endpoint.rstrip('/')}/api/models/{repo}/tree/{commit}?recursive=true"
    found: list[Expected] = []
    while url:
        page, url = http.get_json(url)
        if not isinstance(page, list):
            raise StoreError(f"{endpoint} does not list {repo} as a hub does; is source.endpoint right?")
        found.extend(_tree_file(item, endpoint) for item in page if item.get("type") == "file")
    safetensors = any(item.path.endswith(".safetensors") for item in found)
    patterns = [*exclude, "*.bin"] if safetensors else list(exclude)
    kept = [item for item in found if not any(fnmatch.fnmatch(item.path, pattern) for pattern in patterns)]
    if not kept:
        raise StoreError(f"{repo} at {commit} has no files that an engine reads")
    return kept


def _tree_file(item: Mapping[str, Any], endpoint: str) -> Expected:
    path, size, lfs = item.get("path"), item.get("size"), item.get("lfs")
    if not isinstance(path, str) or not isinstance(size, int) or path.startswith("/") or ".." in path.split("/"):
        raise StoreError(f"{endpoint} lists a file without a usable path and size: {item!r}")
    if isinstance(lfs, Mapping):
        return Expected(path, int(lfs.get("size", size)), sha256=str(lfs.get("oid", "")))
    return Expected(path, size, git_oid=str(item.get("oid", "")))


def hub_url(endpoint: str, repo: str, commit: str, path: str) -> str:
    """Return the address of one file of a hub repository."""
    return f"{endpoint.rstrip('/')}/{repo}/resolve/{commit}/{urllib.parse.quote(path)}"


def hub_download(
    http: Http, endpoint: str, repo: str, commit: str, files: Sequence[Expected], folder: str, threads: int = 4
) -> None:
    """Fetch ``files`` into ``folder``, ``threads`` at a time, each resumable. Raises the first StoreError or
    OSError.
    """
    with ThreadPoolExecutor(max_workers=threads) as pool:
        jobs = [
            pool.submit(
                http.download,
                hub_url(endpoint, repo, commit, item.path),
                os.path.join(folder, item.path),
                item.size,
            )
            for item in files
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def copy_tree(source: str, files: Sequence[Expected], folder: str) -> list[Expected]:
    """Copy ``files`` from the folder ``source`` and return them with the sha256 of the bytes that were read.

    Raises OSError. A file that an earlier run finished is copied again only when its size differs.
    """
    done = []
    for item in files:
        target = os.path.join(folder, item.path)
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        complete = os.path.isfile(target) and os.path.getsize(target) == item.size
        sha256 = _read_through(os.path.join(source, item.path), None if complete else f"{target}.incomplete")
        if not complete:
            os.replace(f"{target}.incomplete", target)
        done.append(Expected(item.path, item.size, sha256))
    return done


def _read_through(source: str, target: str | None) -> str:
    digest = hashlib.sha256()
    with open(source, "rb", buffering=0) as stream, open(target or os.devnull, "wb") as output:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
            if target:
                output.write(chunk)
        if target:
            output.flush()
            os.fsync(output.fileno())
    return digest.hexdigest()
