# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A small server that behaves like a model hub."""

from __future__ import annotations

import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.models import store

COMMIT = "a" * 40
REPO = "owner/model"


class Hub(ThreadingHTTPServer):
    """The server, what it holds, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.break_after: dict[str, int] = {}
        self.fail_first: dict[str, int] = {}
        self.elsewhere = ""
        self.ignore_ranges = False
        self.slow_s = 0.0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"type": "directory", "path": "sub"}]
        for item in store.list_source(str(self.folder)):
            path = self.folder / item.path
            entry: dict[str, Any] = {"type": "file", "path": item.path, "size": item.size}
            if path.suffix in (".safetensors", ".bin"):
                entry["lfs"] = {"oid": hashlib.sha256(path.read_bytes()).hexdigest(), "size": item.size}
                entry["oid"] = "0" * 40
            else:
                entry["oid"] = store.git_blob_id(str(path))
            found.append(entry)
        return found


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        left = self.server.fail_first.get(self.path, 0)
        if left:
            self.server.fail_first[self.path] = left - 1
            self.send_error(503)
        elif self.path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
            self.tree()
        elif self.path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            name = self.path.rsplit("/", 1)[1]
            if self.server.elsewhere and name.endswith(".safetensors"):
                self.send_response(302)
                self.send_header("Location", f"{self.server.elsewhere}/cdn/{name}")
                self.end_headers()
            else:
                self.file(name)
        elif self.path.startswith("/cdn/"):
            self.file(self.path.rsplit("/", 1)[1])
        else:
            self.send_error(404)

    def tree(self) -> None:
        listing = self.server.listing()
        second = "page=2" in self.path
        body = json.dumps(listing[3:] if second else listing[:3]).encode()
        self.send_response(200)
        if not second:
            self.send_header("Link", f'<{self.server.endpoint}{self.path}&page=2>; rel="next"')
        self.end_headers()
        self.wfile.write(body)

    def file(self, name: str) -> None:
        data = (self.server.folder / name).read_bytes()
        begin = 0
        wanted = self.headers.get("Range")
        if wanted and not self.server.ignore_ranges:
            begin = int(wanted.split("=")[1].rstrip("-"))
            if begin >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        stop = self.server.break_after.pop(name, None)
        data = data[begin : begin + stop] if stop else data[begin:]
        for at in range(0, len(data), 50_000):
            self.wfile.write(data[at : at + 50_000])
            time.sleep(self.server.slow_s)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
