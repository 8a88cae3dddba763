# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Command line of scripts/plan. Exit codes: 0 a plan, 1 it does not fit (with the ways out), 2 wrong input."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic
from ansible_collections.metal.serve.plugins.module_utils.planner import calibration, constants, memory, offline, render
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import number
from ansible_collections.metal.serve.plugins.module_utils.planner.documents import read_json
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError, PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config
from ansible_collections.metal.serve.plugins.module_utils.planner.presets import PRESETS, Preset

DESCRIPTION = """Plan an engine from a model's config.json and a GPU, without touching any machine.

  scripts/plan --config CONFIG.json --gpu "NVIDIA H200:143771:1" --engine vllm==0.26.0
  scripts/plan --config CONFIG.json --gpu "NVIDIA A100-SXM4-80GB:81920:8" --engine vllm==0.26.0 \\
      --qps 50 --prompt-tokens 350:1000 --output-tokens 128:512 --set max_model_len=12288
  scripts/plan --preset finance-qa --json
  scripts/plan --config CONFIG.json --gpu "NVIDIA H200:143771:1" --calibrate engine.log --out h200.json
"""
EPILOG = "Every number is explained in docs/planning.md. Exit codes: 0 a plan, 1 it does not fit, 2 wrong input."


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and leaves with 2."""

    def error(self, message: str) -> Any:
        """Print the sentence and exit."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = _Parser(
        prog="plan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="the model's config.json")
    made.add_argument("--index", metavar="FILE", help="its model.safetensors.index.json; makes the weights exact")
    made.add_argument("--gpu", metavar="NAME:MIB:COUNT", help="name, memory as nvidia-smi says it, how many")
    made.add_argument("--engine", metavar="KIND==VERSION", help="vllm==0.26.0, sglang==0.5.23, triton_vllm==0.24.0")
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="fix a planned value")
    made.add_argument("--qps", type=float, metavar="N", help="requests a second over all replicas")
    made.add_argument("--prompt-tokens", metavar="MEAN[:P95]", help="length of prompts")
    made.add_argument("--output-tokens", metavar="MEAN[:P95]", help="length of answers")
    made.add_argument("--longest-context", type=int, metavar="N", help="prompt and answer that must work, in tokens")
    made.add_argument(
        "--shared-prefix", type=float, metavar="SHARE", help="share of a prompt that all have alike, 0 to 1"
    )
    made.add_argument("--p99", type=float, metavar="S", help="wanted P99 of the whole answer, seconds")
    made.add_argument("--ttft", type=float, metavar="S", help="wanted time to the first token, seconds")
    made.add_argument("--lengths", metavar="B:SHARE,…", help="histogram of prompt lengths: proposes pools")
    made.add_argument("--preset", metavar="NAME", help=f"a tested example: {', '.join(PRESETS)}; all: each, with --out")
    made.add_argument("--calibration", metavar="FILE", help="constants that --calibrate wrote")
    made.add_argument("--calibrate", metavar="LOG", help="refit the constants from a vLLM start-up log on this GPU")
    made.add_argument("--out", metavar="FILE", help="where --calibrate writes, or the folder of --preset all")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _json(path: str, option: str) -> Any:
    """Return a JSON file's content. Raises PlanError naming the option and the file."""
    try:
        return read_json(path, f"{option} {path}")
    except OSError as error:
        raise PlanError(f"{option} {path}: {error.strerror or error}.") from None


def _lengths(text: str | None, option: str) -> dict[str, float] | None:
    """Return {mean, p95} of ``mean[:p95]``. Raises PlanError."""
    if text is None:
        return None
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or any(not 1 <= value < 1e9 for value in numbers):
        raise PlanError(f"{option} is {text!r}; write tokens as mean or mean:p95, such as 350:1000.")
    return {"mean": numbers[0], "p95": numbers[-1]}


def _base(arguments: argparse.Namespace) -> Preset | None:
    """Return the preset that was named, None where everything is given. Raises PlanError for what is missing or in vain."""
    base = PRESETS.get(arguments.preset) if arguments.preset is not None else None
    if arguments.preset is not None and base is None:
        raise PlanError(f"--preset {arguments.preset!r} is not known; there are {', '.join(PRESETS)}.")
    if arguments.out:
        raise PlanError(f"--out is {arguments.out!r}; only --calibrate and --preset all write a file.")
    for name in ("config", "gpu", "engine") if base is None else ():
        if not getattr(arguments, name):
            raise PlanError(f"--{name} is missing; --config, --gpu and --engine are needed (or --preset).")
    return base


def _request(arguments: argparse.Namespace) -> offline.Request:
    """Return what was asked. Raises PlanError."""
    base = _base(arguments)
    config = _json(arguments.config, "--config") if arguments.config else (base.config if base else {})
    kind, version = (
        offline.parse_engine(arguments.engine)
        if arguments.engine
        else ((base.engine, base.version) if base else ("", ""))
    )
    fixed = dict(base.settings) if base else {}
    fixed.update(offline.parse_set(text) for text in arguments.set)
    workload = dict(base.workload) if base else {}
    if arguments.qps is not None:
        workload["qps"] = arguments.qps
    for name in ("prompt_tokens", "output_tokens"):
        given = _lengths(getattr(arguments, name), "--" + name.replace("_", "-"))
        if given is not None:
            workload[name] = given
    for name, value in (("longest_context", arguments.longest_context), ("shared_prefix", arguments.shared_prefix)):
        if value is not None:
            workload[name] = value
    if arguments.lengths is not None:
        workload["lengths"] = arguments.lengths
    slo = dict(base.slo) if base else {}
    for name, value in (("p99", arguments.p99), ("ttft", arguments.ttft)):
        if value is not None:
            slo[f"{name}_s"] = number(value, f"--{name}", 0.001, "seconds, above 0")
    index = offline.index_size(_json(arguments.index, "--index")) if arguments.index else None
    calibrated = None
    if arguments.calibration:
        content = _json(arguments.calibration, "--calibration")
        if not isinstance(content, dict):
            raise PlanError(f"--calibration {arguments.calibration} holds no JSON object; make it with --calibrate.")
        calibrated = constants.from_dict(content)
    return offline.Request(
        config=config,
        gpu=arguments.gpu or (base.gpu if base else ""),
        engine=kind,
        version=version,
        fixed=fixed,
        workload=workload,
        slo=slo,
        index_bytes=index,
        calibration=calibrated,
        model_name=arguments.preset or "model",
    )


def _calibrate(arguments: argparse.Namespace) -> str:
    """Write or return the refitted constants; the text says predicted and reported values. Raises PlanError."""
    for name in ("config", "gpu"):
        if not getattr(arguments, name):
            raise PlanError(f"--{name} is missing; --calibrate needs --config and --gpu of the run that the log is of.")
    try:
        with open(arguments.calibrate, encoding="utf-8", errors="replace") as stream:
            text = stream.read(calibration.MOST_LOG_BYTES)
    except OSError as error:
        raise PlanError(f"--calibrate {arguments.calibrate}: {error.strerror or error}.") from None
    gpu, total_mib, _count = memory.parse_gpu(arguments.gpu)
    shape = parse_config(_json(arguments.config, "--config"))
    reported = calibration.parse_log(text)
    given = calibration.input_of(reported, gpu, total_mib)
    fitted = calibration.calibrate(shape, reported, given)
    content = json.dumps(fitted.to_dict(), indent=2, sort_keys=True) + "\n"
    if not arguments.out:
        return content
    try:
        write_atomic(arguments.out, content)
    except OSError as error:
        raise PlanError(f"--out {arguments.out}: {error.strerror or error}.") from None
    rows = calibration.compare(shape, reported, given)
    lines = [f"{arguments.out} written; before the refit the prediction was"]
    for name, row in rows.items():
        lines.append(
            f"  {name:<18} {row['predicted']:>14,.3f} predicted {row['reported']:>14,.2f} reported "
            f"{row['error_pct']:>+8.3f} %"
        )
    return "\n".join(lines) + "\n"


def _all_presets(arguments: argparse.Namespace) -> str:
    """Write each preset's plan as JSON into the folder --out, keys sorted, so that a change is a readable difference."""
    if not arguments.out or not os.path.isdir(arguments.out):
        raise PlanError(
            f"--out is {arguments.out!r}; --preset all writes its plans into a folder, name one that exists."
        )
    folder, arguments.out = arguments.out, None
    for name in PRESETS:
        arguments.preset = name
        write_atomic(os.path.join(folder, f"{name}.json"), canonical_json(offline.plan(_request(arguments))))
    return f"{len(PRESETS)} plans written to {folder}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run scripts/plan; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.calibrate:
            sys.stdout.write(_calibrate(arguments))
            return 0
        if arguments.preset == "all":
            sys.stdout.write(_all_presets(arguments))
            return 0
        plan = offline.plan(_request(arguments))
    except DoesNotFitError as error:
        if arguments.json:
            sys.stdout.write(json.dumps({"error": error.message, "ways_out": error.ways_out}, indent=2) + "\n")
        sys.stderr.write(f"plan: {error}\n")
        return 1
    except PlanError as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    sys.stdout.write(json.dumps(plan, indent=2) + "\n" if arguments.json else render.offline(plan))
    return 0
