# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""How a configuration is judged inside its image: what is run, and what the answer means. Runs nothing itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines.base import (
    CACHE_DIR,
    MODEL_DIR,
    EngineError,
    version_of,
)

PLACE = "/metalserve-lint"
_OWN_ADDRESS = re.compile(r"^(host|port|master-addr|master-port|dist-init-addr|node-rank): .*$", re.MULTILINE)
_NOT_THERE = ("HOME", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Job:
    """One configuration to judge: for which replicas, in which image, on which model."""

    replicas: tuple[str, ...]
    kind: str
    version: str
    image: str
    model_path: str
    file: str
    text: str
    environment: Mapping[str, str]
    user: str

    def folder(self, root: str) -> str:
        """Return where results are remembered."""
        return f"{root}/lint"

    def key(self, script: bytes) -> str:
        """Return what the judgement depends on, as a file name."""
        values = {**dataclasses.asdict(self), "replicas": (), "text": _OWN_ADDRESS.sub("", self.text)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode() + script).hexdigest()


def jobs(replicas: Sequence[Mapping[str, Any]]) -> list[Job]:
    """Return what must be judged, replicas that differ in address and port alone as one."""
    found: dict[str, Job] = {}
    for item in replicas:
        spec, files = item["spec"], item["files"]
        name = next((name for name in files if name.endswith((".yaml", "/model.json"))), "")
        if not name:
            continue
        job = Job(
            replicas=(str(spec["replica"]),),
            kind=str(spec["kind"]),
            version=str(spec["version"]),
            image=str(spec["image"]),
            model_path=str(spec["model_path"]),
            file=name.rsplit("/", 1)[-1],
            text=str(files[name]),
            environment={key: str(value) for key, value in spec["environment"].items()},
            user=str(spec["container"]["user"]),
        )
        key = job.key(b"")
        before = found.get(key)
        found[key] = dataclasses.replace(job, replicas=(*before.replicas, *job.replicas)) if before else job
    return list(found.values())


def command(job: Job, folder: str, name: str, memory: str) -> list[str]:
    """Return the command line; ``folder`` on the node holds the script and the configuration."""
    environment = {key: value for key, value in job.environment.items() if key not in _NOT_THERE}
    environment["HOME"] = CACHE_DIR
    return [
        *("docker", "run", "--rm", "--name", name, "--pull", "never", "--network", "none"),
        *("--user", job.user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"),
        *("--tmpfs", "/tmp", "--tmpfs", f"{CACHE_DIR}:mode=1777", "--memory", memory, "--cpu-shares", "256"),
        *(part for key, value in sorted(environment.items()) for part in ("--env", f"{key}={value}")),
        *("--volume", f"{folder}:{PLACE}:ro", "--volume", f"{job.model_path}:{MODEL_DIR}:ro"),
        *("--entrypoint", "python3", job.image, f"{PLACE}/image_lint.py", job.kind, MODEL_DIR, f"{PLACE}/{job.file}"),
    ]


def _result(job: Job, status: str, **values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"version": "", "problems": [], "checked": [], "skipped": []}
    return {"replicas": list(job.replicas), "kind": job.kind, "image": job.image, "status": status, **empty, **values}


def unknown(job: Job, why: str) -> dict[str, Any]:
    """Return the result of a configuration that could not be judged."""
    return _result(job, "unknown", skipped=[why])


_FILE = {"problems", "checked", "skipped"}


def _first_file(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a report says of the one file that was asked about; nothing where it is not of that form."""
    files = report.get("files")
    first = files[0] if isinstance(files, list) and files else None
    return first if isinstance(first, dict) and "version" in report else {}


def result(job: Job, code: int, out: str, err: str) -> dict[str, Any]:
    """Return what the image said: exit code, standard output and standard error of the run."""
    try:
        report = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or not (report.get("error") or _FILE.issubset(_first_file(report))):
        last = " ".join(err.split())[-300:]
        return unknown(job, f"the image gave no report (exit code {code}): {last}")
    if report.get("error"):
        return unknown(job, str(report["error"]))
    found = report["files"][0]
    problems = list(found["problems"])
    try:
        inside = version_of(report["version"])
        if inside != version_of(job.version):
            text = ".".join(str(part) for part in inside)
            problems.append(
                {
                    "option": "engine_version",
                    "value": job.version,
                    "step": "version",
                    "problem": f"says {job.version}, the image holds {text}",
                    "right": f'write engine_version "{text}" in the pool, or give it another image',
                }
            )
    except EngineError:
        found["skipped"].append(f"the image's version is {report['version']!r}, which cannot be compared")
    return _result(
        job,
        "wrong" if problems else "ok",
        version=report["version"],
        problems=problems,
        checked=found["checked"],
        skipped=found["skipped"],
    )


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each problem of a result."""
    who = ", ".join(found["replicas"])
    return [
        f"{who}: "
        + (f"{one['option']} " if one["option"] else f"{found['kind']} {found['version']} refuses the configuration: ")
        + str(one["problem"])
        + (f" ({one['right']})" if one["right"] else "")
        for one in found["problems"]
    ]
