#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Measure what the gateway costs, beside two routers, on two cores of this machine.

The gateway (the role's own templates, mode lua, with keys, length routing and the JSON log) and each router have core 0 to
themselves, one at a time; the client (wrk) and two stand-in engines (nginx, a fixed answer) have core 1. Every round
asks all of them in turn; the medians over the rounds count. One JSON object comes out, with the load before and after.

    python3 -m venv routers && routers/bin/pip install vllm-router sglang-router
    .venv/bin/python benchmarks/gateway/measure.py --routers routers --rounds 5 --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT / "collections"), str(ROOT)]

from tests.unit.gateway import harness

SERVER, CLIENT = "0", "1"
CONNECTIONS = 32
TICKS = os.sysconf("SC_CLK_TCK")
ENGINES = """
worker_processes 1; daemon off; pid {folder}/engines.pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
    access_log off; keepalive_requests 100000000; client_body_buffer_size 64k; default_type application/json;
    server {{
        {listen}
        location = /v1/models {{ return 200 '{{"object":"list","data":[{{"id":"smollm2","object":"model"}}]}}'; }}
        location / {{ return 200 '{{"choices":[{{"index":0,"text":"word"}}],"usage":{{"completion_tokens":1}}}}'; }}
    }}
}}
"""


@dataclass
class Target:
    """Something that wrk asks: where, and which process (with its children) it costs."""

    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None


@contextmanager
def running(command: list[str], core: str, port: int, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on one core until the block ends."""
    process = subprocess.Popen(["taskset", "-c", core, *command], stdout=subprocess.DEVNULL, **more)
    try:
        for _ in range(1500):
            try:
                harness.wait_for(port, None)
                break
            except AssertionError:
                if process.poll() is not None:
                    raise
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def family(pid: int) -> list[int]:
    """Return a process and all below it."""
    below = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [pid, *(one for child in below for one in family(int(child)))]


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time that a process and all below it have used."""
    total = 0
    for one in family(pid):
        fields = Path(f"/proc/{one}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def memory_kib(pid: int) -> int:
    """Return the memory of a process and all below it, shared pages counted once."""
    texts = (Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii") for one in family(pid))
    return sum(int(re.findall(r"^Pss: +(\d+)", text, re.MULTILINE)[0]) for text in texts)


def wrk(target: Target, seconds: float, pause_ms: float = 0) -> dict[str, float]:
    """Ask a target as fast as it answers, or with a pause; return rate, latency and processor time."""
    before = cpu_s(target.process.pid) if target.process else 0.0
    command = ["taskset", "-c", CLIENT, "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s"]
    environment = {**os.environ, "KEY": harness.KEY, "PAUSE_MS": str(pause_ms)}
    said = subprocess.run(
        [*command, "-s", str(HERE / "post.lua"), target.url + "/v1/completions"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(said.strip().splitlines()[-1])
    used = cpu_s(target.process.pid) - before if target.process else 0.0
    return {
        "requests_per_s": found["requests"] / found["seconds"],
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "cpu_s_per_1000": 1000 * used / max(1, found["requests"]),
        "errors": found["errors"],
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each column."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def in_turn(
    targets: list[Target], rounds: int, ask: Callable[[Target], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Ask all targets once a round, each round beginning with another one; return each one's medians."""
    rows: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    for number in range(rounds):
        shift = number % len(targets)
        for target in targets[shift:] + targets[:shift]:
            rows[target.name].append(ask(target))
    return {name: medians(found) for name, found in rows.items()}


async def one_stream(port: int, context: ssl.SSLContext | None, prompt: str, hold: asyncio.Semaphore) -> dict[str, Any]:
    """Open a connection, ask for a stream over it and note when its events come."""
    try:
        async with hold:
            name = "localhost" if context else None
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except OSError:
        return {"status": 0, "done": False, "ttft": None, "gaps": [], "tokens": 0}
    body = json.dumps({"model": "stream", "prompt": prompt, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {harness.KEY}\r\n"
    begun = time.monotonic()
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    times: list[float] = []
    status, done = 0, False
    try:
        while line := await asyncio.wait_for(reader.readline(), 120):
            if line.startswith(b"HTTP/1.1 "):
                status = int(line.split()[1])
            elif line.startswith(b"data: {"):
                times.append(time.monotonic())
            elif line.startswith(b"data: [DONE]"):
                done = True
                break
            elif status not in (0, 200):
                break
    except (OSError, asyncio.TimeoutError):
        pass
    writer.close()
    gaps = [after - before for before, after in zip(times, times[1:])]
    return {
        "status": status,
        "done": done,
        "ttft": times[0] - begun if times else None,
        "gaps": gaps,
        "tokens": len(times),
    }


async def streams(port: int, context: ssl.SSLContext | None, count: int, prompt: str) -> list[dict[str, Any]]:
    """Hold many streams at once."""
    hold = asyncio.Semaphore(32)
    return list(await asyncio.gather(*(one_stream(port, context, prompt, hold) for _ in range(count))))


def rhythm(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of first token and of the gaps, in milliseconds."""
    gaps = [gap for one in found for gap in one["gaps"]]
    return {
        "ttft_ms": 1000 * statistics.median(one["ttft"] for one in found if one["ttft"]),
        "itl_ms": 1000 * statistics.median(gaps),
    }


def handshakes(gateway: harness.Gateway, requests: int, reuse: bool) -> dict[str, float]:
    """Ask one after the other over one connection or over one each; return what that took."""
    headers = {"Authorization": f"Bearer {harness.KEY}", "Content-Type": "application/json"}
    body = json.dumps({"model": "smollm2", "prompt": "x"})
    before, begun, made = cpu_s(gateway.process.pid), time.monotonic(), 0
    client = HTTPSConnection("127.0.0.1", gateway.https, context=gateway.context)
    for _ in range(requests):
        made += client.sock is None
        client.request("POST", "/v1/completions", body, headers)
        client.getresponse().read()
        if not reuse:
            client.close()
    client.close()
    return {
        "handshakes": made,
        "seconds": round(time.monotonic() - begun, 3),
        "gateway_cpu_s": round(cpu_s(gateway.process.pid) - before, 3),
    }


def idle_memory(gateway: harness.Gateway, count: int) -> dict[str, float]:
    """Return what ``count`` idle keep-alive connections that were each used once cost."""
    before = memory_kib(gateway.process.pid)
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(gateway.connection())
            client.request("GET", "/v1/models", headers={"Authorization": f"Bearer {harness.KEY}"})
            client.getresponse().read()
        after = memory_kib(gateway.process.pid)
    return {"connections": count, "mib": round((after - before) / 1024, 1)}


def routers(folder: str, engines: list[int], stack: ExitStack) -> list[Target]:
    """Start both routers, round robin over the engines."""
    urls = [f"http://127.0.0.1:{port}" for port in engines]
    found = []
    for name, program in (
        ("vllm-router", [f"{folder}/bin/vllm-router"]),
        ("sglang-router", [f"{folder}/bin/python", "-m", "sglang_router.launch_router"]),
    ):
        port, metrics = harness.free_ports(2)
        more = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "warn"]
        if name == "vllm-router":
            more[-1] = "warning"
        command = [*program, "--worker-urls", *urls, *more, "--prometheus-port", str(metrics)]
        process = stack.enter_context(running(command, SERVER, port, stderr=subprocess.DEVNULL))
        found.append(Target(name, f"http://127.0.0.1:{port}", process))
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; return the results by name."""
    one, two, streaming = harness.free_ports(3)
    (folder / "engines.conf").write_text(
        ENGINES.format(folder=folder, listen=f"listen 127.0.0.1:{one}; listen 127.0.0.1:{two};"), encoding="utf-8"
    )
    pools = [
        harness.pool("short", [one, two], max_model_len=8192, in_flight=6000),
        harness.pool("long", [one], max_model_len=32768, in_flight=6000),
        harness.pool("stream", [streaming], served_name="stream", in_flight=6000),
    ]
    harness.NGINX[:0] = ["taskset", "-c", SERVER]
    result: dict[str, Any] = {"load_before": os.getloadavg(), "rounds": options.rounds, "seconds": options.seconds}
    with ExitStack() as stack:
        stack.enter_context(running(["nginx", "-c", str(folder / "engines.conf")], CLIENT, one))
        stack.enter_context(running([sys.executable, str(HERE / "engine.py"), str(streaming)], CLIENT, streaming))
        rotation = str(folder / "rotation.json")
        gateway = stack.enter_context(
            harness.gateway(folder, pools, gateway_rotation_file=rotation, gateway_mode="lua", gateway_workers="1")
        )
        direct = Target("direct", f"http://127.0.0.1:{one}")
        plain = Target("gateway", f"http://127.0.0.1:{gateway.inner}", gateway.process)
        secure = Target("gateway, TLS", f"https://127.0.0.1:{gateway.https}", gateway.process)
        others = routers(options.routers, [one, two], stack) if options.routers else []
        everyone = [direct, plain, secure, *others]
        result["flat_out"] = in_turn(everyone, options.rounds, lambda target: wrk(target, options.seconds))
        rate = 0.2 * result["flat_out"]["gateway"]["requests_per_s"]
        pause = 1000 * CONNECTIONS / rate
        result["at_20_percent"] = in_turn(
            [direct, plain, secure], options.rounds, lambda one: wrk(one, options.seconds, pause)
        )
        os.sched_setaffinity(0, {int(CLIENT)})

        def streamed(target: Target) -> dict[str, float]:
            port, context = (streaming, None) if target is direct else (gateway.https, gateway.context)
            return rhythm(asyncio.run(streams(port, context, 20, "tokens=50 gap=0.02")))

        result["streams"] = in_turn([direct, secure], options.rounds, streamed)
        result["idle_connections"] = idle_memory(gateway, options.idle)
        result["without_reuse"] = handshakes(gateway, 1000, False)
        result["with_reuse"] = handshakes(gateway, 1000, True)
        begun = time.monotonic()
        many = asyncio.run(streams(gateway.https, gateway.context, options.streams, f"tokens={options.held_s} gap=1"))
        whole = [found for found in many if found["done"] and found["tokens"] == options.held_s]
        result["held_streams"] = {
            "asked": options.streams,
            "whole": len(whole),
            "seconds": round(time.monotonic() - begun, 1),
            "statuses": sorted({found["status"] for found in many}),
        }
        result["gateway_errors"] = len(gateway.errors().splitlines())
    result["load_after"] = os.getloadavg()
    return result


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default="", help="a virtual environment with vllm-router and sglang-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--streams", type=int, default=1800)
    parser.add_argument("--held-s", type=int, default=60)
    parser.add_argument("--idle", type=int, default=1000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        print(json.dumps(measure(options, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
