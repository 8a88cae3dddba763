#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Run the role `verify`'s all-reduce over this machine's GPUs without a container, and print what it shows.

python3 benchmarks/allreduce.py [GPUS] [--log FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "collections"))

from ansible_collections.metal.serve.plugins.module_utils.telemetry import allreduce


def main() -> int:
    """0 when the verdict is pass, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", type=int, nargs="?", default=2)
    parser.add_argument("--log", type=Path, help="write NCCL's own words here")
    arguments = parser.parse_args()
    inspected = {"Config": {"Image": "none"}, "HostConfig": {"Runtime": "nvidia"}}
    words = allreduce.command(inspected, arguments.gpus, 60, "none")
    given = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--env")
    done = subprocess.run(
        [sys.executable, "-c", allreduce.SCRIPT],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if arguments.log:
        arguments.log.write_text(done.stdout + done.stderr, encoding="utf-8")
    found = allreduce.outcome(done.returncode, done.stdout + done.stderr)
    print(json.dumps(dataclasses.asdict(found), indent=2))
    return int(found.verdict != "pass")


if __name__ == "__main__":
    sys.exit(main())
