#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Measure what the gateway costs, beside two routers, on two cores of this machine.

The gateway (the role's own templates, mode lua, with keys, length routing and the JSON log) and each router have core 0 to
themselves, one at a time; the client (wrk) and two stand-in engines (nginx, a fixed answer) have core 1. Every round
asks all of them in turn, each round beginning with another one; differences and ratios are taken within a round, and the
medians over the rounds count. Tables are printed, and all of it is written as one JSON object, with the load before and
after. It takes six minutes with the defaults.

    python3 -m venv routers && routers/bin/pip install vllm-router sglang-router
    .venv/bin/python benchmarks/gateway/measure.py --routers routers --output gateway.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
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


Rows = dict[str, list[dict[str, float]]]
"""What was measured of each target, round by round."""


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each column."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def paired(rows: Rows, one: str, other: str, column: str, how: Callable[[float, float], float]) -> float:
    """Return the median over the rounds of what ``how`` makes of two targets' values of one round."""
    both = zip(rows[one], rows[other])
    return round(statistics.median(how(first[column], second[column]) for first, second in both), 3)


def in_turn(targets: list[Target], rounds: int, ask: Callable[[Target], dict[str, float]]) -> Rows:
    """Ask all targets once a round, each round beginning with another one."""
    rows: Rows = {target.name: [] for target in targets}
    for number in range(rounds):
        shift = number % len(targets)
        for target in targets[shift:] + targets[:shift]:
            rows[target.name].append(ask(target))
    return rows


async def one_stream(
    port: int, context: ssl.SSLContext | None, prompt: str, hold: asyncio.Semaphore, model: str = "stream"
) -> dict[str, Any]:
    """Open a connection, ask for a stream over it and note when its events come."""
    try:
        async with hold:
            name = "localhost" if context else None
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except OSError:
        return {"status": 0, "done": False, "ttft": None, "gaps": [], "tokens": 0}
    body = json.dumps({"model": model, "prompt": prompt, "stream": True}).encode()
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


async def streams(
    port: int, context: ssl.SSLContext | None, count: int, prompt: str, apart_s: float = 0
) -> list[dict[str, Any]]:
    """Hold many streams at once, each begun ``apart_s`` after the one before it."""
    hold = asyncio.Semaphore(32)

    async def later(number: int) -> dict[str, Any]:
        await asyncio.sleep(number * apart_s)
        return await one_stream(port, context, prompt, hold)

    return list(await asyncio.gather(*(later(number) for number in range(count))))


def rhythm(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of first token and of the gaps, in milliseconds."""
    gaps = [gap for one in found for gap in one["gaps"]]
    return {
        "ttft_ms": round(1000 * statistics.median(one["ttft"] for one in found if one["ttft"]), 3),
        "itl_ms": round(1000 * statistics.median(gaps), 3),
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


async def short_beside_long(gateway: harness.Gateway, model: str, seconds: float, seed: int) -> list[float]:
    """Return how many milliseconds short prompts, sent at random moments, waited for their token.

    A short one takes 20 ms of an engine; long ones beside them (not with the model "alone") 600 ms.
    """
    chance, hold = random.Random(seed), asyncio.Semaphore(1000)

    async def later(moment: float, prompt: str, model: str) -> dict[str, Any]:
        await asyncio.sleep(moment)
        return await one_stream(gateway.https, gateway.context, prompt, hold, model)

    def moments(rate: float) -> Iterator[float]:
        moment = chance.expovariate(rate)
        while moment < seconds:
            yield moment
            moment += chance.expovariate(rate)

    short = [later(moment, "work=0.02 tokens=1 gap=0", model) for moment in moments(15)]
    long_prompt = "work=0.6 tokens=1 gap=0 " + "word " * 12_000
    long = [later(moment, long_prompt, model) for moment in moments(1.2)] if model != "alone" else []
    found = await asyncio.gather(*short, *long)
    return [1000 * one["ttft"] for one in found[: len(short)] if one["ttft"]]


def isolation(gateway: harness.Gateway, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return the short prompts' times: alone, with long ones in one pool of two engines, and in two pools of one each."""
    times: dict[str, list[float]] = {"alone": [], "together": [], "apart": []}
    for seed in range(rounds):
        for model, found in times.items():
            found.extend(asyncio.run(short_beside_long(gateway, model, seconds, seed)))
    return {
        name: {
            "requests": len(found),
            "p50_ms": round(statistics.median(found), 1),
            "p99_ms": round(statistics.quantiles(found, n=100)[98], 1),
        }
        for name, found in times.items()
    }


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
    one, two, streaming, *lanes = harness.free_ports(7)
    (folder / "engines.conf").write_text(
        ENGINES.format(folder=folder, listen=f"listen 127.0.0.1:{one}; listen 127.0.0.1:{two};"), encoding="utf-8"
    )
    pools = [
        harness.pool("short", [one, two], max_model_len=8192, in_flight=6000),
        harness.pool("long", [one], max_model_len=32768, in_flight=6000),
        harness.pool("stream", [streaming], served_name="stream", in_flight=6000),
        harness.pool("alone", lanes[:2], served_name="alone", max_model_len=32768, in_flight=6000),
        harness.pool("together", lanes[:2], served_name="together", max_model_len=32768, in_flight=6000),
        harness.pool("apart-short", lanes[2:3], served_name="apart", max_model_len=8192, in_flight=6000),
        harness.pool("apart-long", lanes[3:], served_name="apart", max_model_len=32768, in_flight=6000),
    ]
    variables = {
        "gateway_rotation_file": str(folder / "rotation.json"),
        "gateway_mode": "lua",
        "gateway_workers": "1",
        "gateway_log_flush_s": 1,
    }
    harness.NGINX[:0] = ["taskset", "-c", SERVER]
    result: dict[str, Any] = {"load_before": os.getloadavg(), "rounds": options.rounds, "seconds": options.seconds}
    with ExitStack() as stack:
        stack.enter_context(running(["nginx", "-c", str(folder / "engines.conf")], CLIENT, one))
        for port in (streaming, *lanes):
            stack.enter_context(running([sys.executable, str(HERE / "engine.py"), str(port)], CLIENT, port))
        gateway = stack.enter_context(harness.gateway(folder, pools, **variables))
        direct = Target("direct", f"http://127.0.0.1:{one}")
        plain = Target("gateway", f"http://127.0.0.1:{gateway.inner}", gateway.process)
        secure = Target("gateway, TLS", f"https://127.0.0.1:{gateway.https}", gateway.process)
        others = routers(options.routers, [one, two], stack) if options.routers else []
        everyone = [direct, plain, secure, *others]
        for target in everyone:
            wrk(target, 2)  # caches and compiled code, as any server has them after its first seconds
        flat_out = in_turn(everyone, options.rounds, lambda target: wrk(target, options.seconds))
        result["flat_out"] = {name: medians(rows) for name, rows in flat_out.items()}
        if others:
            faster = max(others, key=lambda one: result["flat_out"][one.name]["requests_per_s"]).name
            result["beside_the_faster_router"] = {
                "router": faster,
                "times_its_requests_per_s": paired(
                    flat_out, "gateway", faster, "requests_per_s", lambda ours, its: ours / its
                ),
                "times_its_cpu_s_per_1000": paired(
                    flat_out, "gateway", faster, "cpu_s_per_1000", lambda ours, its: ours / its
                ),
            }
        rate = 0.2 * result["flat_out"]["gateway"]["requests_per_s"]
        pause = 1000 * CONNECTIONS / rate
        calm = in_turn([direct, plain, secure], options.rounds, lambda one: wrk(one, options.seconds, pause))
        result["at_20_percent"] = {name: medians(rows) for name, rows in calm.items()}
        result["added_at_20_percent"] = {
            column: paired(calm, "gateway", "direct", column, lambda ours, its: ours - its)
            for column in ("p50_ms", "p99_ms")
        }
        os.sched_setaffinity(0, {int(CLIENT)})

        def streamed(target: Target) -> dict[str, float]:
            port = {direct.name: streaming, plain.name: gateway.inner, secure.name: gateway.https}[target.name]
            context = gateway.context if target is secure else None
            return rhythm(asyncio.run(streams(port, context, 20, "tokens=50 gap=0.02", 0.017)))

        rhythms = in_turn([direct, plain, secure], options.rounds, streamed)
        result["streams"] = {name: medians(rows) for name, rows in rhythms.items()}
        result["added_to_streams"] = {
            column: paired(rhythms, "gateway", "direct", column, lambda ours, its: ours - its)
            for column in ("ttft_ms", "itl_ms")
        }
        result["isolation"] = isolation(gateway, 2, options.seconds)
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


def table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each name."""
    columns = list(next(iter(rows.values())))
    lines = [f"| {title} | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(str(row[column]) for column in columns)} |" for name, row in rows.items()]
    return "\n".join(lines)


def report(result: dict[str, Any]) -> str:
    """Return the results as tables."""
    tables = [
        table(name.replace("_", " "), result[name]) for name in ("flat_out", "at_20_percent", "streams", "isolation")
    ]
    for name, value in result.items():
        if isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values()):
            said = ", ".join(f"{key.replace('_', ' ')} {one}" for key, one in value.items())
            tables.append(f"{name.replace('_', ' ')}: {said}")
    loads = [", ".join(f"{one:.1f}" for one in result[name]) for name in ("load_before", "load_after")]
    return "\n\n".join(
        [*tables, f"load before {loads[0]}; after {loads[1]}; lines in the error log {result['gateway_errors']}"]
    )


def main() -> None:
    """Parse the options, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--routers", default="", help="a virtual environment with vllm-router and sglang-router; none: without them"
    )
    parser.add_argument("--output", default="", help="file for all results as JSON; none: they follow the tables")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which everything is asked in turn (5)")
    parser.add_argument(
        "--seconds", type=float, default=5, help="seconds for which each target is asked in a round (5)"
    )
    parser.add_argument("--streams", type=int, default=1800, help="streams that are held at once (1800)")
    parser.add_argument("--held-s", type=int, default=60, help="tokens, one a second, of each of them (60)")
    parser.add_argument("--idle", type=int, default=1000, help="idle connections whose memory is measured (1000)")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        result = measure(options, Path(folder))
    print(report(result))
    text = json.dumps(result, indent=2)
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    else:
        print("\n" + text)


if __name__ == "__main__":
    main()
