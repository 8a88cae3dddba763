# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The stand-in engine against what the real one was measured to do."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "roles/lab/files/standin_engine/standin_engine.py"
CAPTURE = ROOT / "tests/fixtures/metrics/vllm-0.32.0-cpu.prom"


def free_port() -> int:
    """Return a port nobody listens on now, low enough that the control port above it exists."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 50000:
            return port


class Engine:
    """A running stand-in."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(ENGINE), "--port", str(self.port), "--host", "127.0.0.1", *arguments],
            env={**os.environ, "METALSERVE_STANDIN_LOAD_S": "0", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_ready(self) -> Engine:
        """Return once it answers."""
        for _ in range(100):
            try:
                self.request("GET", "/health")
                return self
            except ConnectionError:
                time.sleep(0.05)
        raise AssertionError("the stand-in did not start")

    def request(self, method: str, path: str, body: Any = None, port: int = 0, **headers: str) -> tuple[int, bytes]:
        """Return status and body of one request on its own connection."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=10)
        payload = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content

    def fault(self, name: str, **more: Any) -> None:
        """Set a fault through the control endpoint."""
        assert self.request("POST", "/", {"fault": name, **more}, port=self.port + 10000)[0] == 200

    def complete(self, prompt: str = "hello", **more: Any) -> tuple[int, Any]:
        """Ask for a completion and return status and parsed body."""
        status, body = self.request("POST", "/v1/completions", {"prompt": prompt, **more})
        return status, json.loads(body)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """A factory of engines that are ended afterwards."""
    engines: list[Engine] = []

    def run(*arguments: str, ready: bool = True, **environment: str) -> Engine:
        engine = Engine(*arguments, **environment)
        engines.append(engine)
        return engine.wait_ready() if ready else engine

    yield run
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for the tests that leave it as it was."""
    running = Engine("--served-model-name", "tiny", "--max-model-len", "1024").wait_ready()
    yield running
    running.close()


def families(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Return family -> (type, label names) of a metrics page."""
    found: dict[str, tuple[str, set[str]]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            found[current] = (kind, set())
        elif line and not line.startswith("#"):
            name = re.split(r"[{ ]", line)[0]
            assert name == current or name in {current + end for end in ("_bucket", "_count", "_sum")}, line
            found[current][1].update(re.findall(r'(\w+)="', line))
    return {name: (kind, frozenset(labels)) for name, (kind, labels) in found.items()}


def test_metrics_have_the_families_types_and_labels_of_the_real_engine(engine: Engine) -> None:
    for path in ("/v1/models", "/nowhere"):
        engine.request("GET", path)
    engine.complete()
    real = families(CAPTURE.read_text(encoding="utf-8"))
    ours = families(engine.request("GET", "/metrics")[1].decode())
    assert set(ours) == set(real)
    for name, expected in real.items():
        assert ours[name] == expected, name


def test_histogram_buckets_are_the_real_ones(engine: Engine) -> None:
    def buckets(text: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name, le in re.findall(r'^(\S+)_bucket\{.*?le="([^"]+)"', text, re.MULTILINE):
            found.setdefault(name, set()).add(le)
        return found

    assert buckets(engine.request("GET", "/metrics")[1].decode()) == buckets(CAPTURE.read_text(encoding="utf-8"))


def test_answer_shows_truncation_and_mix_ups(engine: Engine) -> None:
    first = engine.complete("a question", max_tokens=5)[1]
    again = engine.complete("a question", max_tokens=5)[1]
    other = engine.complete("another question", max_tokens=5)[1]
    text = first["choices"][0]["text"]
    assert text == again["choices"][0]["text"] != other["choices"][0]["text"]
    assert [part.split(":")[1] for part in text.split(" ")] == [f"{i}/5" for i in range(1, 6)]
    assert first["usage"] == {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}
    assert first["choices"][0]["finish_reason"] == "length"


def test_golden_question_has_the_golden_answer(engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
    status, raw = engine.request("POST", "/v1/chat/completions", body)
    answer = json.loads(raw)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "The capital of France is Paris.")
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_stream_is_the_same_answer_and_ends_with_usage(engine: Engine) -> None:
    body = {"prompt": "stream me", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    status, raw = engine.request("POST", "/v1/completions", body)
    events = [line[6:] for line in raw.decode().split("\n\n") if line]
    assert status == 200
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == engine.complete("stream me", max_tokens=4)[1]["choices"][0]["text"]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["choices"] == []
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{not json", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", [], 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": "3"}, 400),
        ("/v1/completions", {"prompt": "x" * 9000}, 400),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400),
        ("/v1/nothing", {}, 404),
        ("/health", {}, 405),
    ],
)
def test_bad_requests_get_a_well_formed_error(engine: Engine, path: str, body: Any, status: int) -> None:
    code, raw = engine.request("POST", path, body)
    assert code == status
    assert isinstance(json.loads(raw), dict)
    assert engine.request("GET", "/health")[0] == 200


def test_models_version_tokens(engine: Engine) -> None:
    models = json.loads(engine.request("GET", "/v1/models")[1])["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 1024)]
    assert json.loads(engine.request("GET", "/version")[1]) == {"version": "0.32.0"}
    assert json.loads(engine.request("POST", "/tokenize", {"prompt": "12345678"})[1])["count"] == 2


def test_api_key_guards_only_the_model_paths(start: Callable[..., Engine]) -> None:
    engine = start(VLLM_API_KEY="geheim")
    assert engine.request("GET", "/v1/models")[0] == 401
    assert engine.request("GET", "/v1/models", Authorization="Bearer wrong")[0] == 401
    assert engine.request("GET", "/v1/models", Authorization="Bearer geheim")[0] == 200
    assert engine.request("GET", "/metrics")[0] == 200


def stream_in_thread(engine: Engine, result: dict[str, Any], **body: Any) -> threading.Thread:
    """Start a completion in the background; ``result`` gets its status and text, or the exception."""

    def run() -> None:
        try:
            result["status"], raw = engine.request("POST", "/v1/completions", {"prompt": "p", **body})
            result["body"] = raw.decode()
        except (OSError, http.client.HTTPException) as error:
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    return thread


def test_drain_finishes_what_is_inside_and_lies_about_health(start: Callable[..., Engine]) -> None:
    engine = start("--shutdown-timeout", "10", METALSERVE_STANDIN_STEP_S="0.05")
    result: dict[str, Any] = {}
    thread = stream_in_thread(engine, result, max_tokens=30, stream=True)
    engine.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert engine.request("GET", "/health")[0] == 200
    assert engine.complete()[0] == 500
    thread.join()
    assert result["status"] == 200
    assert "30/30" in result["body"]
    assert result["body"].endswith("[DONE]\n\n")
    assert engine.process.wait(5) == 0


def test_without_a_shutdown_timeout_what_is_inside_is_cut(start: Callable[..., Engine]) -> None:
    engine = start(METALSERVE_STANDIN_STEP_S="0.05")
    result: dict[str, Any] = {}
    thread = stream_in_thread(engine, result, max_tokens=60, stream=True)
    engine.process.send_signal(signal.SIGTERM)
    thread.join()
    assert "error" in result or "[DONE]" not in result["body"]
    assert engine.process.wait(5) == 0


def test_queue_limit_rejects_with_503_and_counts(start: Callable[..., Engine]) -> None:
    engine = start("--max-num-queued-reqs", "1", METALSERVE_STANDIN_STEP_S="0.05")
    result: dict[str, Any] = {}
    thread = stream_in_thread(engine, result, max_tokens=15)
    assert engine.complete()[0] == 503
    thread.join()
    assert result["status"] == 200
    page = engine.request("GET", "/metrics")[1].decode()
    assert re.search(r'admission_rejections_total\{model_name="standin",reason="max_num_queued_reqs"\} 1\.0', page)


def test_prefill_takes_time_in_proportion_to_the_prompt(start: Callable[..., Engine]) -> None:
    engine = start(METALSERVE_STANDIN_PREFILL_TOKENS_PER_S="1000", METALSERVE_STANDIN_STEP_S="0.001")

    def seconds(size: int) -> float:
        begun = time.monotonic()
        assert engine.complete("x" * size, max_tokens=1)[0] == 200
        return time.monotonic() - begun

    assert seconds(40) < 0.3
    assert 0.7 < seconds(3200) < 2.0


def test_faults_at_run_time(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.fault("garbage")
    assert ":" not in engine.complete(max_tokens=3)[1]["choices"][0]["text"]
    engine.fault("error")
    assert engine.complete()[0] == 500
    engine.fault("reject")
    assert engine.complete()[0] == 503
    engine.fault("reject_stream")
    status, raw = engine.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
    assert status == 200
    assert json.loads(raw.decode().split("\n\n")[0][6:])["error"]["code"] == 503
    engine.fault("truncate")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        engine.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
    engine.fault("slow", factor=40)
    begun = time.monotonic()
    assert engine.complete(max_tokens=4)[0] == 200
    assert time.monotonic() - begun > 0.5
    engine.fault("wedge")
    with pytest.raises(TimeoutError):
        http_with_timeout(engine, 0.6)
    assert engine.request("GET", "/health")[0] == 200
    engine.fault("none")
    assert engine.complete()[0] == 200
    assert engine.request("POST", "/", {"fault": "nonsense"}, port=engine.port + 10000)[0] == 400
    engine.fault("oom")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        engine.complete()
    assert engine.process.wait(5) == 137


def http_with_timeout(engine: Engine, seconds: float) -> None:
    """Ask for a completion and give up after ``seconds``."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=seconds)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
    connection.getresponse()


def test_fault_at_the_start(start: Callable[..., Engine]) -> None:
    engine = start(ready=False, METALSERVE_STANDIN_FAULT="crash")
    assert engine.process.wait(5) == 1
    assert "Engine core initialization failed" in (engine.process.stdout.read() if engine.process.stdout else "")


def test_unknown_option_is_refused(start: Callable[..., Engine]) -> None:
    engine = start("--max-tokens-per-batch", "4096", ready=False)
    assert engine.process.wait(5) == 2
    assert "unrecognized arguments: --max-tokens-per-batch 4096" in (
        engine.process.stdout.read() if engine.process.stdout else ""
    )


def test_configuration_file_counts_and_the_command_line_wins(start: Callable[..., Engine], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "# rendered\nserved-model-name: [one, two]\nmax_model_len: 512\nenable-prefix-caching: true\n"
        'compilation_config: {"level": 0}\nmax-num-seqs: 4  # few\n'
    )
    engine = start("--config", str(config), "--max-model-len", "256")
    models = json.loads(engine.request("GET", "/v1/models")[1])["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("one", 256), ("two", 256)]
    config.write_text("batch_delay: 20\n")
    refused = start("--config", str(config), ready=False)
    assert refused.process.wait(5) == 2


def test_the_real_engine_s_command_starts_it() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--nonsense"],
        env={**os.environ, "PYTHONPATH": str(ENGINE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "unrecognized arguments: --nonsense" in result.stderr
