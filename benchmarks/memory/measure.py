#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Measure what vLLM reports of its memory for each case of cases.json, on the GPU of this machine.

Each case writes a model folder (a shape's config.json and any tokenizer), starts vLLM with dummy weights, reads the
start-up log until the engine has said its KV cache, its maximum concurrency and its memory use, and stops it. One JSON
line a case goes to --out; a case that is there already is skipped, so an interrupted run goes on where it stopped.

    python3 benchmarks/memory/measure.py --tokenizer DIR --out memory.jsonl [--case NAME ...] [--limit-s 540]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
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
}
LAST = "activation_gib"
FAULT = re.compile(r"(CUDA out of memory|ValueError: .*|RuntimeError: .*|EngineCore failed to start.*)")


def values_in(line: str) -> dict[str, Any]:
    """Return what one log line says, by the keys of PATTERNS."""
    found: dict[str, Any] = {}
    for key, pattern in PATTERNS.items():
        match = pattern.search(line)
        if match:
            text = match.group(1).replace(",", "")
            found[key] = text if key == "attention" else float(text)
    return found


def gpu_memory_used_mib() -> int:
    """Return the used memory of GPU 0 in MiB, as nvidia-smi says."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip())


def stop(process: subprocess.Popen[str], idle_mib: int) -> None:
    """End the engine's whole process group and wait until the GPU's memory is as it was."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(60):
        if gpu_memory_used_mib() <= idle_mib + 64:
            return
        time.sleep(0.5)
    raise SystemExit("the GPU's memory was not free 30 s after the engine's end: somebody else holds it")


def measure(case: dict[str, Any], tokenizer: Path, log_folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one case and return its record; ``error`` holds the engine's reason where it did not start."""
    shape = json.loads((HERE / "shapes" / f"{case['shape']}.json").read_text(encoding="utf-8"))
    idle_mib = gpu_memory_used_mib()
    record: dict[str, Any] = {**case, "idle_mib": idle_mib}
    with tempfile.TemporaryDirectory() as folder:
        for file in tokenizer.iterdir():
            if file.is_file() and file.name != "config.json" and file.suffix in (".json", ".txt", ".model", ".jinja"):
                shutil.copy(file, folder)
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--load-format", "dummy", "--served-model-name", "m", "--host", "127.0.0.1", "--port", "8999"]
        for key, value in case["settings"].items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert process.stdout is not None
        tail: list[str] = []
        with (log_folder / f"{case['name']}.log").open("w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                tail = [*tail[-40:], line]
                record.update(values_in(line))
                if LAST in record or time.monotonic() - began > limit_s:
                    break
        record["seconds"] = round(time.monotonic() - began, 1)
        if LAST not in record:
            faults = [match.group(1) for line in tail if (match := FAULT.search(line))]
            record["error"] = (faults or ["no answer within the limit, or the engine ended"])[-1]
        stop(process, idle_mib)
    return record


def main() -> int:
    """Run the cases that --out does not have yet; 0 all measured, 1 one failed or time ran out, 2 wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with any tokenizer's files")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; made if it is not there")
    parser.add_argument("--case", action="append", default=[], help="only this case (may be repeated)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="start no case later than this (default 540)")
    arguments = parser.parse_args()
    if not arguments.tokenizer.is_dir():
        parser.error(f"--tokenizer {arguments.tokenizer}: no such folder")
    cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    done = set()
    if arguments.out.exists():
        done = {json.loads(line)["name"] for line in arguments.out.read_text(encoding="utf-8").splitlines() if line}
    began, code = time.monotonic(), 0
    for case in cases:
        if case["name"] in done or (arguments.case and case["name"] not in arguments.case):
            continue
        left = arguments.limit_s - (time.monotonic() - began)
        if left < 80:
            print(f"{case['name']}: not started, {left:.0f} s left", flush=True)
            code = 1
            continue
        record = measure(case, arguments.tokenizer, arguments.out.parent, left)
        with arguments.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        shown = {key: record.get(key) for key in ("kv_cache_tokens", "max_concurrency", "activation_gib", "error")}
        print(f"{case['name']}: {record['seconds']} s {shown}", flush=True)
        code = code or int("error" in record)
    return code


if __name__ == "__main__":
    sys.exit(main())
