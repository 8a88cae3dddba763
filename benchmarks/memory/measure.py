#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Measure what vLLM reports of its memory for each case of cases.json, on the GPUs of this machine.

Each case writes a model folder (a shape's config.json and any tokenizer), starts vLLM with dummy weights, reads the
start-up log until the engine has said its KV cache, its maximum concurrency and its memory use, and stops it. One JSON
line a case goes to --out; a case that is there already is skipped, so an interrupted run goes on where it stopped.
With several --gpu the cases are shared out, one engine on each GPU at a time.

    python3 benchmarks/memory/measure.py --tokenizer DIR --out memory.jsonl --gpu 0 --gpu 1
    python3 benchmarks/memory/measure.py --compare memory.jsonl        # predicted against reported, as a table
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GIB = r"([\d.]+) GiB"
PATTERNS = {
    "weights_gib": re.compile(rf"Model loading took {GIB}"),
    "kv_cache_gib": re.compile(rf"Available KV cache memory: {GIB}"),
    "kv_cache_tokens": re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
    "max_concurrency": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x"),
    "activation_gib": re.compile(rf"{GIB} for peak activation"),
    "non_torch_gib": re.compile(rf"{GIB} for non-torch memory"),
    "graphs_gib": re.compile(rf"{GIB} for CUDAGraph memory"),
    "attention": re.compile(r"Using (\S+) attention backend"),
    "runner": re.compile(r"Using (V2) Model Runner"),
}
WORDS = ("attention", "runner")
LAST = "activation_gib"
FAULT = re.compile(r"(CUDA out of memory|ValueError: .*|RuntimeError: .*|EngineCore failed to start.*)")
GPU = "NVIDIA H200:143771:1"
ENGINE = "vllm==0.26.0"
LEAST_S = 60.0
"""A case is not started with less time left."""


def values_in(text: str) -> dict[str, Any]:
    """Return what a log says, by the keys of PATTERNS; the last word of each counts."""
    found: dict[str, Any] = {}
    for key, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            word = match.group(1)
            found[key] = word if key in WORDS else float(word.replace(",", ""))
    return found


def gpu_memory_used_mib(gpu: int) -> int:
    """Return the used memory of a GPU in MiB, as nvidia-smi says."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip())


def start(arguments: list[str], gpu: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a server on one GPU in a session of its own; its output goes to ``log``."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def stop(server: subprocess.Popen[bytes], gpu: int, idle_mib: int) -> None:
    """End a server's whole process group and wait until the GPU's memory is as it was."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    for _ in range(120):
        if gpu_memory_used_mib(gpu) <= idle_mib + 64:
            return
        time.sleep(0.25)
    raise SystemExit(f"GPU {gpu}: its memory was not free 30 s after the engine's end: somebody else holds it")


def measure(case: dict[str, Any], gpu: int, tokenizer: Path, log: Path, limit_s: float) -> dict[str, Any]:
    """Run one case and return its record; ``error`` holds the engine's reason where it did not start."""
    shape = json.loads((HERE / "shapes" / f"{case['shape']}.json").read_text(encoding="utf-8"))
    idle_mib = gpu_memory_used_mib(gpu)
    record: dict[str, Any] = {**case, "gpu": gpu, "idle_mib": idle_mib}
    with tempfile.TemporaryDirectory() as folder:
        for file in tokenizer.iterdir():
            if file.is_file() and file.name != "config.json" and file.suffix in (".json", ".txt", ".model", ".jinja"):
                shutil.copy(file, folder)
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        arguments = ["--model", folder, "--load-format", "dummy", "--served-model-name", "m"]
        arguments += ["--host", "127.0.0.1", "--port", str(8990 + gpu)]
        for key, value in case["settings"].items():
            arguments += [f"--{key.replace('_', '-')}", str(value)]
        began = time.monotonic()
        server = start(arguments, gpu, log)
        text = ""
        while time.monotonic() - began < limit_s:
            ended = server.poll() is not None
            text = log.read_text(encoding="utf-8", errors="replace")
            if ended or PATTERNS[LAST].search(text):
                break
            time.sleep(0.25)
        record.update(values_in(text), seconds=round(time.monotonic() - began, 1))
        if LAST not in record:
            record["error"] = (FAULT.findall(text) or ["no answer within the limit, or the engine ended"])[-1]
        stop(server, gpu, idle_mib)
    return record


def worker(gpu: int, todo: queue.SimpleQueue[Any], arguments: argparse.Namespace, began: float, said: Any) -> None:
    """Measure cases on one GPU until none is left, and hand each record to ``said``."""
    while True:
        try:
            case = todo.get_nowait()
        except queue.Empty:
            return
        left = arguments.limit_s - (time.monotonic() - began)
        if left < LEAST_S:
            said({"name": case["name"], "error": f"not started, {left:.0f} s left", "skipped": True})
            continue
        log = arguments.out.parent / f"{case['name']}.log"
        said(measure(case, gpu, arguments.tokenizer, log, left))


def predicted(case: dict[str, Any]) -> dict[str, Any]:
    """Return the ``memory`` part of what scripts/plan says for a case."""
    command = [sys.executable, str(HERE.parents[1] / "scripts" / "plan"), "--json", "--gpu", GPU, "--engine", ENGINE]
    command += ["--config", str(HERE / "shapes" / f"{case['shape']}.json")]
    for key, value in case["settings"].items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plan: dict[str, Any] = json.loads(done.stdout)["memory"]
    return plan


def compare(records: list[dict[str, Any]]) -> str:
    """Return predicted against reported as a Markdown table, and the mean and the worst error below it."""
    head = ["case", "KV tokens planned", "reported", "error %", "concurrency planned", "reported", "KV % of memory"]
    rows = [[*head, "overhead planned", "reported", "error GiB"]]
    rows.append(["---"] * len(rows[0]))
    errors, gaps = [], []
    for record in records:
        if "error" in record:
            rows.append([record["name"], record["error"]] + [""] * (len(rows[0]) - 2))
            continue
        plan = predicted(record)
        tokens = int(record["kv_cache_tokens"])
        errors.append(100 * (plan["kv_cache_tokens"] / tokens - 1))
        overhead = record["activation_gib"] + record["non_torch_gib"] + record["graphs_gib"]
        gaps.append(plan["overhead_gib"] - overhead)
        share = 100 * record["kv_cache_gib"] / 139.8
        row = [record["name"], f"{plan['kv_cache_tokens']:,}", f"{tokens:,}", f"{errors[-1]:+.2f}"]
        row += [f"{plan['max_concurrency']:.2f}", f"{record['max_concurrency']:.2f}", f"{share:.0f}"]
        rows.append([*row, f"{plan['overhead_gib']:.2f}", f"{overhead:.2f}", f"{gaps[-1]:+.2f}"])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    if errors:
        mean = sum(map(abs, errors)) / len(errors)
        text += f"\n\nKV tokens: mean absolute error {mean:.2f} %, worst {max(errors, key=abs):+.2f} %; "
        text += f"overhead: worst {max(gaps, key=abs):+.2f} GiB ({len(errors)} cases)"
    return text


def main() -> int:
    """Run the cases that --out does not have yet; 0 all measured, 1 one failed or time ran out, 2 wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a folder with any tokenizer's files")
    parser.add_argument("--out", type=Path, help="JSON lines; made if it is not there")
    parser.add_argument(
        "--cases", type=Path, default=HERE / "cases.json", help="the list of cases (default cases.json)"
    )
    parser.add_argument("--case", action="append", default=[], help="only this case (may be repeated)")
    parser.add_argument("--gpu", action="append", type=int, default=[], help="GPU index (may be repeated; default 0)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="end no later than this (default 540)")
    parser.add_argument("--compare", type=Path, metavar="JSONL", help="print the table of a measured file, and end")
    arguments = parser.parse_args()
    if arguments.compare:
        lines = arguments.compare.read_text(encoding="utf-8").splitlines()
        print(compare([json.loads(line) for line in lines if line]))
        return 0
    if arguments.out is None or arguments.tokenizer is None:
        parser.error("--tokenizer and --out are needed")
    if not arguments.tokenizer.is_dir():
        parser.error(f"--tokenizer {arguments.tokenizer}: no such folder")
    done = set()
    if arguments.out.exists():
        done = {json.loads(line)["name"] for line in arguments.out.read_text(encoding="utf-8").splitlines() if line}
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for case in json.loads(arguments.cases.read_text(encoding="utf-8")):
        if case["name"] not in done and (not arguments.case or case["name"] in arguments.case):
            todo.put(case)
    failed, lock = [], threading.Lock()

    def said(record: dict[str, Any]) -> None:
        shown = {key: record.get(key) for key in ("kv_cache_tokens", "max_concurrency", "activation_gib", "error")}
        with lock:
            if "error" in record:
                failed.append(record["name"])
            if not record.get("skipped"):
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
            print(f"{record['name']}: {record.get('seconds')} s {shown}", flush=True)

    began = time.monotonic()
    threads = [
        threading.Thread(target=worker, args=(gpu, todo, arguments, began, said)) for gpu in arguments.gpu or [0]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while not todo.empty():
        said({"name": todo.get_nowait()["name"], "error": "not started: its worker ended", "skipped": True})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
