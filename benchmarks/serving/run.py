#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Start vLLM on one GPU as planned or with its plain defaults, put loads on it, and write down what came of it.

The engine runs a model shape with dummy weights, with the environment and the cache folder that the role `engine` gives
it. The loads of loads.json are made by the engine's own benchmark (`vllm bench serve`, random prompts); energy is the
difference of NVML's total energy counter over the load. One JSON line a start and a load goes to --out. The first run of
a load brings every engine the same prompts at the same moments, the second run others, and so on.

    run.py --gpu 0 --name planned --qps 50 --load warm --load qps-50 --cache DIR --tokenizer DIR --out FILE
    run.py --gpu 1 --name default --load warm --load qps-50 --cache DIR --tokenizer DIR --out FILE
    run.py --report FILE

Two engines may run at once, one on each GPU. A load may be given several times; --report shows the mean. Loads with
"meet" wait for each other: short and long prompts of a split.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "memory"))
sys.path.insert(0, str(ROOT / "collections"))

from measure import ENGINE, GPU, values_in

from ansible_collections.metal.serve.plugins.module_utils.engines import base
from ansible_collections.metal.serve.plugins.module_utils.planner.times import ENGINE_KEEPALIVE_S

SERVED = "m"
MEET_LIMIT_S = 400.0
KEPT = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "total_input_tokens",
    "total_output_tokens",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "p99_itl_ms",
    "median_e2el_ms",
    "p99_e2el_ms",
)


def planned(shape: Path, max_model_len: int, qps: float) -> dict[str, Any]:
    """Return the settings that scripts/plan computes for the load of loads.json at ``qps`` requests a second."""
    command = [sys.executable, str(ROOT / "scripts" / "plan"), "--json", "--gpu", GPU, "--engine", ENGINE]
    command += ["--config", str(shape), "--set", f"max_model_len={max_model_len}"]
    command += ["--qps", f"{qps:g}", "--prompt-tokens", "350", "--output-tokens", "128"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    settings: dict[str, Any] = json.loads(done.stdout)["settings"]
    return settings


def environment(cache: Path, gpu: int) -> dict[str, str]:
    """Return the environment of an engine: the role's own, with its /cache in ``cache``, and one GPU."""
    given = {**base.common_environment(), "VLLM_CACHE_ROOT": f"{base.CACHE_DIR}/vllm", "VLLM_NO_USAGE_STATS": "1"}
    own = {
        key: str(cache) + value[len(base.CACHE_DIR) :] if value.startswith(base.CACHE_DIR) else value
        for key, value in given.items()
    }
    own.update(CUDA_VISIBLE_DEVICES=str(gpu), CUDA_DEVICE_ORDER="PCI_BUS_ID")
    own["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(ENGINE_KEEPALIVE_S["vllm"])
    return {**os.environ, **own}


def answers(port: int) -> bool:
    """Return whether the engine's health endpoint says 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def start(
    model: Path, tokenizer: Path, settings: dict[str, Any], env: dict[str, str], port: int, log: Path
) -> subprocess.Popen[bytes]:
    """Start the server the way the role does, by its module.

    The tokenizer stays in a folder of its own: beside a config.json, transformers would take the model family's class.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [
        "--tokenizer",
        str(tokenizer),
        "--load-format",
        "dummy",
        "--served-model-name",
        SERVED,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    for key, value in settings.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    Path(env["HOME"]).mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def wait_ready(engine: subprocess.Popen[bytes], port: int, limit_s: float) -> None:
    """Return when the engine answers. Raises RuntimeError when it ends or the limit passes first."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if engine.poll() is not None:
            raise RuntimeError(f"the engine ended with code {engine.returncode} before it answered")
        if answers(port):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the engine did not answer within {limit_s:g} s")


def stop(engine: subprocess.Popen[bytes]) -> float:
    """End the engine's process group, kindly first; return the seconds that took."""
    began = time.monotonic()
    if engine.poll() is None:
        engine.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()
    return time.monotonic() - began


def energy_j(gpu: int) -> float | None:
    """Return the joules that the GPU has used since its driver was loaded; None where NVML cannot say."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(nvml.nvmlDeviceGetHandleByIndex(gpu))) / 1000.0
    except Exception as error:  # pynvml has no common base of all that it raises
        print(f"energy: {error!r}", flush=True)
        return None


def meet(folder: Path, own: str, count: int) -> None:
    """Wait until ``count`` parts stand ready in ``folder``, so that they begin together. Raises TimeoutError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / own).touch()
    end = time.monotonic() + MEET_LIMIT_S
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{folder}: the other part did not come within {MEET_LIMIT_S:g} s")
        time.sleep(0.05)


def load_part(
    part: dict[str, Any], port: int, tokenizer: Path, gpu: int, seed: int, ready: tuple[Path, str, int]
) -> Any:
    """Put one part of a load on the engine with vLLM's own benchmark and return what it measured."""
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.add_cli_args(parser)
    words = ["--host", "127.0.0.1", "--port", str(port), "--model", SERVED, "--tokenizer", str(tokenizer)]
    words += ["--dataset-name", "random", "--random-input-len", str(part["input"])]
    words += ["--random-output-len", str(part["output"]), "--num-prompts", str(part["prompts"]), "--seed", str(seed)]
    words += ["--request-rate", "inf" if part["rate"] is None else str(part["rate"]), "--ignore-eos"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"]
    words += ["--temperature", "0", "--ready-check-timeout-sec", "0"]
    bare, seen = serve.benchmark, {}

    async def bracketed(*args: Any, **kwargs: Any) -> Any:
        meet(*ready)
        seen.update(began=time.time(), joules=energy_j(gpu))
        result = await bare(*args, **kwargs)
        seen.update(ended=time.time(), joules_after=energy_j(gpu))
        return result

    serve.benchmark = bracketed
    result = asyncio.run(serve.main_async(parser.parse_args(words)))
    return {**{key: result.get(key) for key in KEPT}, **seen}


def child(part: dict[str, Any], out: str, log: str, *rest: Any) -> None:
    """Run one part in a forked process; its words go to ``log``, its result to ``out``."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    Path(out).write_text(json.dumps(load_part(part, *rest)), encoding="utf-8")


def seed_of(load: str, run: int) -> int:
    """Return the seed of the ``run``-th run of a load: the same for every engine, other prompts at each run."""
    return zlib.crc32(f"{load} {run}".encode()) % 2**31


def put(name: str, load: dict[str, Any], arguments: argparse.Namespace, tokenizer: Path, seed: int) -> dict[str, Any]:
    """Put one load on the engine, all of its parts at once, and return its record."""
    forked = multiprocessing.get_context("fork")
    split = "meet" in load
    alone = f"{arguments.name}-gpu{arguments.gpu}-{name}-{seed}"
    folder = arguments.out.parent / "meet" / ("split" if split else alone)
    count = load.get("meet", len(load["parts"]))
    work, parts = [], []
    for number, part in enumerate(load["parts"]):
        own = f"{arguments.name}-gpu{arguments.gpu}-{name}-{number}"
        out, log = arguments.out.parent / f"{own}.part", arguments.out.parent / f"{own}.client.log"
        out.unlink(missing_ok=True)
        ready = (folder, own, count)
        rest = (part, str(out), str(log), arguments.port, tokenizer, arguments.gpu, seed + number, ready)
        work.append(forked.Process(target=child, args=rest))
        work[-1].start()
        parts.append((part, out))
    for process in work:
        process.join()
    found = [{**part, **json.loads(out.read_text(encoding="utf-8"))} for part, out in parts if out.exists()]
    record: dict[str, Any] = {
        "kind": "load",
        "engine": arguments.name,
        "gpu": arguments.gpu,
        "load": name,
        "seed": seed,
    }
    if len(found) != len(parts):
        return {**record, "error": f"{len(parts) - len(found)} of {len(parts)} clients failed; see their logs"}
    failed = sum(part["failed"] for part in found)
    if failed:
        record["error"] = f"{failed} requests failed; see the clients' logs"
    joules = [part["joules"] for part in found] + [part["joules_after"] for part in found]
    if None not in joules:
        tokens = sum(part["total_output_tokens"] for part in found)
        both = tokens + sum(part["total_input_tokens"] for part in found)
        used = max(joules) - min(joules)
        record.update(joules=round(used, 1), joules_per_output_token=used / tokens, joules_per_token=used / both)
    return {**record, "parts": found}


def merged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each load, part and engine, in the order of the loads: the mean of its runs, and how many."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for record in (r for r in records if r["kind"] == "load" and r["load"] != "warm"):
        for number, part in enumerate(record.get("parts", [])):
            row = {**part, "joules": record.get("joules_per_output_token"), "error": record.get("error")}
            groups.setdefault((record["load"], number, record["engine"]), []).append(row)
    rows = []
    for (load, number, engine), runs in groups.items():
        means = {key: sum(r[key] for r in runs) / len(runs) for key in KEPT}
        joules = [r["joules"] for r in runs if r["joules"] is not None]
        means["joules"] = sum(joules) / len(joules) if joules else math.nan
        low, high = (pick(r["request_throughput"] for r in runs) for pick in (min, max))
        given = {key: runs[0][key] for key in ("rate", "input")}
        names = {"load": load, "part": number, "engine": engine, "runs": len(runs)}
        rows.append({**names, **means, **given, "low": low, "high": high, "failed": sum(r["failed"] for r in runs)})
    order = list(dict.fromkeys(row["load"] for row in rows))
    return sorted(rows, key=lambda row: (order.index(row["load"]), row["part"]))


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def report(records: list[dict[str, Any]], reference: str = "default") -> str:
    """Return loads and starts as Markdown tables; throughput is also compared with the engine ``reference``."""
    loads = merged(records)
    base_of = {(row["load"], row["part"]): row["request_throughput"] for row in loads if row["engine"] == reference}
    rows = []
    for row in loads:
        against = base_of.get((row["load"], row["part"]))
        line = [f"{row['load']} ({row['input']} in)", row["engine"], str(row["runs"]), f"{row['failed']:g}"]
        line += [f"{row['request_throughput']:.1f} ({row['low']:.1f} to {row['high']:.1f})"]
        line += ["" if against is None else f"{100 * (row['request_throughput'] / against - 1):+.1f} %"]
        line += [f"{row['output_throughput']:,.0f}"]
        line += [f"{row[key]:,.1f}" for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")]
        rows.append([*line, f"{row['p99_e2el_ms'] / 1000:.2f}", f"{row['joules']:.3f}"])
    head = ["load", "engine", "runs", "refused", "requests/s", f"against {reference}", "output tokens/s", "TTFT P50 ms"]
    head += ["TTFT P99", "TPOT P50", "TPOT P99", "P99 of the answer s", "J/output token"]
    starts = []
    for record in (r for r in records if r["kind"] == "start"):
        settings = ", ".join(f"{key} {value}" for key, value in record["settings"].items())
        warmth = "warm" if record["warm"] else "cold"
        starts.append([record["engine"], str(record["gpu"]), settings, warmth, str(record.get("start_s"))])
    return table(head, rows) + "\n\n" + table(["engine", "GPU", "settings", "cache", "start s"], starts)


def serve(arguments: argparse.Namespace) -> int:
    """Start the engine, put the loads on it, stop it."""
    shape = ROOT / "benchmarks" / "memory" / "shapes" / f"{arguments.shape}.json"
    settings: dict[str, Any] = {"max_model_len": arguments.max_model_len}
    if arguments.qps is not None:
        settings = planned(shape, arguments.max_model_len, arguments.qps)
    loads = json.loads(arguments.loads.read_text(encoding="utf-8"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def say(record: dict[str, Any]) -> None:
        with arguments.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        print(time.strftime("%H:%M:%S"), json.dumps(record)[:400], flush=True)

    # The same path at each start, as in a container: vLLM's compile cache is keyed by it.
    model = arguments.cache / "model"
    model.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape, model / "config.json")
    own = f"{arguments.name}-gpu{arguments.gpu}"
    count = len(list(arguments.out.parent.glob(f"{own}-*.engine.log")))
    log = arguments.out.parent / f"{own}-{count}.engine.log"
    release = hashlib.sha256(json.dumps([arguments.shape, settings]).encode()).hexdigest()[:12]
    started = arguments.cache / f"started-{release}"
    warm = started.exists()
    began = time.monotonic()
    env = environment(arguments.cache, arguments.gpu)
    engine = start(model, arguments.tokenizer, settings, env, arguments.port, log)
    record = {"kind": "start", "engine": arguments.name, "gpu": arguments.gpu, "settings": settings, "warm": warm}
    code = 0
    try:
        if arguments.load:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            importlib.import_module("vllm.benchmarks.serve")
        wait_ready(engine, arguments.port, arguments.start_limit_s)
        started.touch()
        record["start_s"] = round(time.monotonic() - began, 1)
        say({**record, **values_in(log.read_text(encoding="utf-8", errors="replace"))})
        for number, name in enumerate(arguments.load):
            run = arguments.first_run + arguments.load[:number].count(name)
            found = put(name, loads[name], arguments, arguments.tokenizer, seed_of(name, run))
            code = code or int("error" in found)
            say(found)
    except RuntimeError as error:
        say({**record, "error": str(error)})
        code = 1
    finally:
        print(f"stopped in {stop(engine):.1f} s", flush=True)
    return code


def main() -> int:
    """0 when all was measured, 1 when an engine or a load failed, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, metavar="JSONL", help="print the tables of a measured file, and end")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--name", default="default", help="what the records call this engine")
    parser.add_argument("--qps", type=float, help="plan for this rate; without it the engine runs with its defaults")
    parser.add_argument("--shape", default="dense-7b", help="a file of benchmarks/memory/shapes")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--load", action="append", default=[], help="a load of loads.json (may be repeated)")
    parser.add_argument("--first-run", type=int, default=1, help="count the runs of each load from here: other prompts")
    parser.add_argument("--loads", type=Path, default=HERE / "loads.json", help="the loads there are")
    parser.add_argument("--cache", type=Path, help="stands for the engine's /cache")
    parser.add_argument("--tokenizer", type=Path, help="a folder that make_tokenizer.py wrote")
    parser.add_argument("--out", type=Path, help="JSON lines; logs go beside it")
    parser.add_argument("--port", type=int)
    parser.add_argument("--start-limit-s", type=float, default=330.0)
    arguments = parser.parse_args()
    if arguments.report:
        lines = arguments.report.read_text(encoding="utf-8").splitlines()
        print(report([json.loads(line) for line in lines if line]))
        return 0
    for name in ("cache", "tokenizer", "out"):
        if getattr(arguments, name) is None:
            parser.error(f"--{name} is needed")
    arguments.port = arguments.port or 8100 + arguments.gpu
    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
