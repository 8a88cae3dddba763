# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What must hold before an engine starts. The unit runs it as ExecStartPre, from one file:
/opt/metalserve/engine-guard.pyz.

It checks that the GPUs of the replica hold no process of somebody else, and that the model is what arrived. It
says what is in the way and kills nothing. Where an engine keeps failing, it also makes the unit wait longer from
one start to the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, TextIO

from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic
from ansible_collections.metal.serve.plugins.module_utils.models import manifest

ROOT = "/var/lib/metalserve"
RUN = "/run/metalserve"
STEADY_S = 600.0
FIRST_DELAY_S = 10.0
LONGEST_DELAY_S = 300.0
GPU_FREE_S = 45.0
"""Seconds that the memory of an engine which was just stopped may take to be given back."""

Command = Callable[[Sequence[str]], tuple[int, str]]


class GuardError(ValueError):
    """A reason why the engine must not start; one sentence for the journal."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU: process id, GPU UUID, name as the driver gives it, memory as text."""

    pid: int
    gpu: str
    name: str
    memory: str


def run_command(argv: Sequence[str]) -> tuple[int, str]:
    """Run a program for at most 60 s; return its exit code and its output (127: not there, 124: too slow)."""
    try:
        # A program of its own, with no module around it whose run_command it could use.
        with subprocess.Popen(  # pylint: disable=ansible-bad-function
            list(argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                out, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                return 124, f"{argv[0]} did not answer for 60 s"
            return process.returncode, (out or err).strip()
    except FileNotFoundError:
        return 127, f"{argv[0]} is not installed"


def say(text: str, to: TextIO) -> None:
    """Write a line to the journal at once."""
    to.write(f"{text}\n")
    to.flush()


def backoff(starts: Sequence[float], now: float) -> tuple[float, list[float]]:
    """Return the seconds to wait before this start, and the starts to remember (this one included).

    ``starts`` are the times of earlier ones, seconds. Only starts that follow one another within ``STEADY_S``
    count: an engine that served for long starts again at once. The wait doubles from 10 s to 300 s, from the
    second failure on.
    """
    chain: list[float] = []
    for moment in sorted(starts):
        if chain and moment - chain[-1] > STEADY_S + LONGEST_DELAY_S:
            chain = []
        chain.append(moment)
    if not chain or now - chain[-1] > STEADY_S or now < chain[-1]:
        return 0.0, [now]
    failures = len(chain)
    delay = 0.0 if failures < 2 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (failures - 2))
    return delay, [*chain[-12:], now + delay]


def parse_gpu_processes(text: str) -> list[GpuProcess]:
    """Read ``nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory,process_name --format=csv,noheader``.

    Raises GuardError for a line of another shape: a process that cannot be read is not an absent one.
    """
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("No running processes"):
            continue
        parts = [part.strip() for part in line.split(",", 3)]
        if len(parts) != 4 or not parts[1].isdigit():
            raise GuardError(f"nvidia-smi lists a process as {line.strip()!r}, which cannot be read")
        found.append(GpuProcess(int(parts[1]), parts[0], parts[3], parts[2]))
    return found


def command_line(pid: int, proc: str = "/proc") -> str:
    """Return the command line of a process, at most 200 characters; ``""`` where it cannot be read."""
    try:
        with open(os.path.join(proc, str(pid), "cmdline"), "rb") as stream:
            text = stream.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return text[:200]


def foreign(processes: Sequence[GpuProcess], gpus: Sequence[str], proc: str = "/proc") -> list[str]:
    """Return a sentence per process on one of ``gpus``."""
    return [
        f"process {item.pid} ({command_line(item.pid, proc) or item.name}) holds {item.memory} of {item.gpu}"
        for item in processes
        if item.gpu in gpus
    ]


def check_gpus(gpus: Sequence[str], command: Command, patience_s: float, sleep: Callable[[float], None]) -> None:
    """Raise GuardError where a GPU is missing, or still holds a process after ``patience_s`` seconds."""
    if not gpus:
        return
    code, text = command(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    if code != 0:
        raise GuardError(f"nvidia-smi does not list the GPUs: {text or f'code {code}'}")
    present = set(text.split())
    missing = [gpu for gpu in gpus if gpu not in present]
    if missing:
        raise GuardError(f"{', '.join(missing)}: this machine has no such GPU; it has {', '.join(sorted(present))}")
    waited = 0.0
    while True:
        code, text = command(
            [
                "nvidia-smi",
                "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
                "--format=csv,noheader",
            ]
        )
        if code != 0:
            raise GuardError(f"nvidia-smi does not list the processes: {text or f'code {code}'}")
        found = foreign(parse_gpu_processes(text), gpus)
        if not found:
            return
        if waited >= patience_s:
            raise GuardError(f"{'; '.join(found)}. End it, then start the unit again; it is not killed from here")
        sleep(3.0)
        waited += 3.0


def check_model(path: str, manifest_path: str) -> str:
    """Compare the model with its manifest; return what was done. Raises GuardError naming the files that differ."""
    try:
        sealed = manifest.load(manifest_path)
    except (manifest.ManifestError, OSError) as error:
        raise GuardError(str(error)) from error
    if sealed is None:
        raise GuardError(f"{manifest_path} is missing: {path} was never completed; put the model there again")
    found = manifest.verify(path, sealed)
    if found.problems:
        raise GuardError(f"{path} is not what arrived: {'; '.join(found.problems)}")
    if found.refreshed is not None:
        manifest.save(manifest_path, found.refreshed)
    return f"{path}: {len(sealed.files)} files as they arrived, {len(found.hashed)} of them hashed again"


def read_release(root: str, replica: str) -> Mapping[str, Any]:
    """Return release.json of the release that ``current`` points to. Raises GuardError."""
    path = os.path.join(root, "engines", replica, "current", "release.json")
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except FileNotFoundError:
        raise GuardError(f"{path} is missing: no release of {replica} was ever put on this node") from None
    except (OSError, ValueError) as error:
        raise GuardError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise GuardError(f"{path} is not a release")
    return document


def wait_after_failures(replica: str, run: str, command: Command, now: float, sleep: Callable[[float], None]) -> None:
    """Wait as ``backoff`` says, from what earlier starts left in ``<run>/<replica>.starts``.

    A start that a person or a playbook asked for (the unit counts no restart yet) never waits.
    """
    path = os.path.join(run, f"{replica}.starts")
    try:
        with open(path, encoding="utf-8") as stream:
            starts = [float(moment) for moment in json.load(stream)]
    except (OSError, ValueError, TypeError):
        starts = []
    code, restarts = command(["systemctl", "show", "--property=NRestarts", "--value", f"metalserve-engine@{replica}"])
    delay, remembered = backoff([] if code == 0 and restarts == "0" else starts, now)
    os.makedirs(run, exist_ok=True)
    write_atomic(path, json.dumps(remembered))
    if delay:
        say(f"{replica} failed {len(remembered) - 1} times in a row; waiting {delay:.0f} s", sys.stdout)
        sleep(delay)


def before_start(replica: str, root: str = ROOT, run: str = RUN, command: Command = run_command) -> str:
    """Do everything that must come before a start; return what to say. Raises GuardError."""
    document = read_release(root, replica)
    container = str(document.get("container_name", ""))
    code, text = command(["docker", "container", "inspect", "--format", "{{.State.Running}}", container])
    if code != 0:
        raise GuardError(f"container {container} is not there ({text}); run site.yml to have it created")
    if text == "true":
        # Docker was restarted under a living engine: it goes on, the unit only takes hold of it again.
        return f"{container} is running already"
    wait_after_failures(replica, run, command, time.time(), time.sleep)
    check_gpus([str(gpu) for gpu in document.get("gpus", [])], command, GPU_FREE_S, time.sleep)
    return check_model(str(document["model_path"]), str(document["manifest_path"]))


def main(argv: Sequence[str] | None = None) -> int:
    """``engine-guard before-start REPLICA [ROOT]``; 0: may start, 1: must not, 2: wrong call."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) not in (2, 3) or arguments[0] != "before-start":
        say("usage: engine-guard before-start REPLICA [ROOT]", sys.stderr)
        return 2
    try:
        say(before_start(arguments[1], root=arguments[2] if len(arguments) == 3 else ROOT), sys.stdout)
    except (GuardError, OSError, KeyError) as error:
        say(f"{arguments[1]} must not start: {error}", sys.stderr)
        return 1
    return 0
