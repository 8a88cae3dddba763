# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An engine serves when it completes a prompt; a start that cannot succeed is known at once, and why."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from ansible_collections.metal.serve.plugins.module_utils.engines import ready, registry

from .plans import context

LOG = registry.adapter("vllm").log()
HEALTH = registry.adapter("vllm").spec(context()).to_dict()["health"]
RUNNING = ready.Unit("active", "running", 0, 0)
UP = ready.Container("running", 0, False)

# Lines of a start of vLLM 0.26.0 on an H200; the traceback belongs to a module that is optional.
START = """\
(EngineCore pid=855) INFO 11-30 14:16:11 [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: model='/m'
(EngineCore pid=855) WARNING 11-30 14:16:13 [import_utils.py:408] Module humming was found but failed to import
(EngineCore pid=855) WARNING 11-30 14:16:13 [import_utils.py:408] Traceback (most recent call last):
(EngineCore pid=855) WARNING 11-30 14:16:13 [import_utils.py:408] ModuleNotFoundError: No module named 'elftools'
(EngineCore pid=855) INFO 11-30 14:16:15 [model_runner.py:284] Loading model from scratch...
(EngineCore pid=855) INFO 11-30 14:16:18 [model_runner.py:305] Model loading took 14.32 GiB and 3.601533 seconds
(EngineCore pid=855) INFO 11-30 14:16:46 [monitor.py:53] torch.compile took 27.03 s in total
(EngineCore pid=855) INFO 11-30 14:16:48 [kv_cache_utils.py] Maximum concurrency for 32,768 tokens per request: 64.54x
(EngineCore pid=855) INFO 11-30 14:16:54 [model_runner.py:747] Graph capturing finished in 5 secs, took 0.89 GiB
(APIServer pid=598) INFO 11-30 14:18:39 [api_server.py:677] Starting vLLM server on http://0.0.0.0:8000
(APIServer pid=598) INFO:     Application startup complete.
"""


def test_optional_tracebacks_are_no_failure() -> None:
    assert ready.fatal_line(START, LOG.fatal) == ""


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=1) ERROR 11-30 14:16:13 [core.py:1160] EngineCore failed to start.",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "(APIServer pid=1) ERROR EngineDeadError: EngineCore encountered an issue.",
        "ERROR [multiproc_executor.py] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down",
        "api_server.py: error: unrecognized arguments: --max-tokens-per-batch 5",
        "api_server.py: error: argument --max-num-seqs: invalid int value: 'x'",
    ],
)
def test_lines_after_which_nothing_will_serve(line: str) -> None:
    assert ready.fatal_line(START + line + "\nmore\n", LOG.fatal) == line


def test_what_failed_is_told_with_its_cause() -> None:
    """vLLM 0.32.0: the cause stands between two hundred lines of two processes, the last of which says to look above."""
    head = "(EngineCore pid=24) ERROR 12-01 02:33:17 [core.py:1510]"
    cause = "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 64 MiB free."
    lines = [
        f"{head} EngineCore failed to start.",
        f"{head} Traceback (most recent call last):",
        f'{head}   File "/opt/engine/lib/python3.11/site-packages/vllm/v1/engine/core.py", line 1484, in run_engine_core',
        f"{head}     raise RuntimeError(",
        f"{head} {cause}",
        "Traceback (most recent call last):",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert ready.fatal_line("\n".join(lines), LOG.fatal) == f"{lines[0]} {cause}"
    # Without a traceback of its own no other line's exception is its cause.
    assert ready.fatal_line("\n".join([lines[0], "more", *lines[5:]]), LOG.fatal) == lines[0]


def test_stage_is_the_last_that_was_reached() -> None:
    lines = START.splitlines()
    assert ready.stage("\n".join(lines[:1]), LOG.stages) == "starting the engine"
    assert ready.stage("\n".join(lines[:5]), LOG.stages) == "loading the weights"
    assert ready.stage("\n".join(lines[:7]), LOG.stages) == "compiling"
    assert ready.stage("\n".join(lines[:9]), LOG.stages) == "capturing CUDA graphs"
    assert ready.stage(START, LOG.stages) == "server listening"
    assert ready.stage("", LOG.stages) == ""


@pytest.mark.parametrize(
    ("unit", "container", "fatal", "gone", "words"),
    [
        (RUNNING, UP, "", False, ""),
        (ready.Unit("activating", "start-pre", 0, 0), None, "", False, ""),
        (RUNNING, UP, "EngineCore failed to start.", False, "its log says: EngineCore failed"),
        (RUNNING, UP, "", True, "ended, though the container is up"),
        (ready.Unit("activating", "auto-restart", 1, 1), ready.Container("exited", 3, False), "", False, "exit code 3"),
        (ready.Unit("activating", "auto-restart", 1, 127), ready.Container("created", 0, False), "", False, "code 127"),
        (ready.Unit("active", "running", 2, 0), UP, "", False, "it ended and is being restarted"),
        (ready.Unit("failed", "failed", 0, 1), None, "", False, "its unit failed"),
        (ready.Unit("inactive", "dead", 0, 0), None, "", False, "is not running"),
        (RUNNING, ready.Container("exited", 137, True), "EngineDeadError", False, "killed it for memory"),
    ],
)
def test_failure_has_a_reason(
    unit: ready.Unit, container: ready.Container | None, fatal: str, gone: bool, words: str
) -> None:
    found = ready.failure(unit, container, fatal, gone)
    assert words in found
    assert bool(words) == bool(found)


def test_a_worker_that_the_kernel_killed_is_found_in_its_log() -> None:
    """As kernel and Docker told of vLLM 0.32.0 below a limit of 3 GiB: OOMKilled was false and the exit code 1."""
    line = (
        "[40654.223482] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=b54f8d,mems_allowed=0,"
        "oom_memcg=/docker/b54f8d,task_memcg=/docker/b54f8d,task=VLLM::Worker,pid=23948,uid=0"
    )
    assert ready.killed_for_memory(f"boot\n{line}\n", "b54f8d")
    assert not ready.killed_for_memory(line, "c0ffee")
    assert not ready.killed_for_memory(line.replace("CONSTRAINT_MEMCG", "CONSTRAINT_NONE"), "b54f8d")
    assert not ready.killed_for_memory("", "b54f8d")


def test_the_time_of_a_start() -> None:
    assert ready.started_at("2026-12-01T02:44:12.189742358Z") == 1796093052


def test_restarts_of_earlier_days_are_no_failure() -> None:
    unit = ready.Unit("active", "running", 2, 0)
    assert ready.failure(unit, UP, "", False, restarts_before=2) == ""
    assert "restarted" in ready.failure(unit, UP, "", False, restarts_before=1)


class Engine(BaseHTTPRequestHandler):
    """Answers as told."""

    models: ClassVar[Any] = {"data": [{"id": "m-public"}]}
    answer: ClassVar[Any] = {"choices": [{"text": " Paris."}]}
    status = 200
    seen: ClassVar[list[tuple[str, str]]] = []

    def reply(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        self.reply(200, self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        self.reply(self.status, self.answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def engine() -> Iterator[tuple[type[Engine], int]]:
    kind = type("Told", (Engine,), {"seen": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield kind, server.server_port
        server.shutdown()


def look(port: int) -> tuple[bool, str]:
    return ready.serves("127.0.0.1", port, HEALTH, "m-public", "the-key")


def test_serves_when_it_completes(engine: tuple[type[Engine], int]) -> None:
    kind, port = engine
    assert look(port) == (True, "answers 'Paris.'")
    assert kind.seen == [("/v1/models", "Bearer the-key"), ("/v1/completions", "Bearer the-key")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": {"data": []}}, "lists no model, not m-public"),
        ({"models": {"data": [{"id": "other"}]}}, "lists other, not m-public"),
        ({"models": "x"}, "lists no model"),
        ({"status": 500}, "/v1/completions answers 500"),
        ({"answer": {"choices": [{"text": ""}]}}, "answers without any text"),
        ({"answer": {"choices": []}}, "answers without any text"),
    ],
)
def test_anything_less_is_not_serving(engine: tuple[type[Engine], int], change: dict[str, Any], words: str) -> None:
    kind, port = engine
    for name, value in change.items():
        setattr(kind, name, value)
    good, text = look(port)
    assert not good
    assert words in text


def test_nobody_listens() -> None:
    assert look(9) == (False, "nothing listens on 127.0.0.1:9 yet")
