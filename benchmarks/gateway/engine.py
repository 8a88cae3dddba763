#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in engine that streams: ``engine.py PORT``. The prompt orders ``tokens=N`` and ``gap=S`` between them.

With ``work=S`` the prompt first takes S seconds in which nobody else's does: a long prompt holds up all behind it.
"""

from __future__ import annotations

import asyncio
import re
import resource
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LANE = asyncio.Lock()
EVENT = b'data: {"choices":[{"index":0,"text":"word "}]}\n\n'


def chunk(data: bytes) -> bytes:
    """Return one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            body = await reader.readexactly(int(length.group(1))) if length else b""
            orders = dict(re.findall(rb"(\w+)=([\d.]+)", body))
            if not body:
                writer.write(HEALTHY)
                if b"HTTP/1.0" in head:
                    break
                continue
            if b"work" in orders:
                async with LANE:
                    await asyncio.sleep(float(orders[b"work"]))
            writer.write(HEAD)
            for _ in range(int(orders.get(b"tokens", 8))):
                await asyncio.sleep(float(orders.get(b"gap", 0.02)))
                writer.write(chunk(EVENT))
                await writer.drain()
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    """Serve for ever."""
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main())
