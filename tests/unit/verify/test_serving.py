# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Verify against stand-in engines: what answers, what does not, what is buffered."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.module_utils.telemetry import completions, scraped, summary
from ansible_collections.metal.serve.plugins.modules import verify_serving, verify_targets
from tests.unit.gateway import harness

SLOW = "tokens=8 gap=0.02"


class BufferingProxy(BaseHTTPRequestHandler):
    """Passes requests on and holds every answer back until it is whole, as proxy_buffering does with a small one."""

    protocol_version = "HTTP/1.1"
    engine = 0

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Pass a request on."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://127.0.0.1:{self.engine}{self.path}"
        with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=5) as answer:
            whole = answer.read()
        self.send_response(200)
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole)


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    (port,) = harness.free_ports(1)
    with harness.standins([port]):
        yield port


@pytest.fixture(scope="module")
def buffering(engine: int) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Proxy", (BufferingProxy,), {"engine": engine}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield int(server.server_address[1])
    server.shutdown()


def run(module: Any, **params: Any) -> dict[str, Any]:
    said = io.StringIO()
    with patch_module_args(params), redirect_stdout(said), pytest.raises(SystemExit):
        module.main()
    result: dict[str, Any] = json.loads(said.getvalue())
    return result


def serving(gateway: int, ports: list[int], required: list[str], **more: Any) -> dict[str, Any]:
    return run(
        verify_serving,
        gateway=f"http://127.0.0.1:{gateway}",
        api_key="sk-finance-0123456789",
        pools=[harness.pool("short", ports)],
        required_hosts=required,
        prompt=SLOW,
        rounds=1,
        timeout=5,
        **more,
    )


def test_a_gateway_that_serves(engine: int) -> None:
    said = serving(engine, [engine], ["node-0"])
    assert not said.get("failed")
    assert not said["changed"]
    assert (said["pools"][0]["verdict"], said["problems"]) == ("ok", [])
    assert said["replicas"][0]["address"] == f"127.0.0.1:{engine}"
    assert "sk-finance" not in json.dumps(said)


def test_a_gateway_that_buffers(engine: int, buffering: int) -> None:
    said = serving(buffering, [engine], ["node-0"])
    assert said["failed"]
    assert said["pools"][0]["verdict"] == "buffered"
    assert "pool short: Something holds tokens back" in said["msg"]


def test_a_dead_replica_fails_where_it_is_required_and_is_noted_elsewhere(engine: int) -> None:
    (dead,) = harness.free_ports(1)
    said = serving(engine, [engine, dead], ["node-0", "node-1"])
    assert said["failed"]
    assert f"node-1 short-0: http://127.0.0.1:{dead} does not answer" in said["msg"]
    said = serving(engine, [engine, dead], ["node-0"])
    assert not said.get("failed")
    assert "node-1 short-0" in said["warnings_found"][0]


def test_a_check_reports_without_failing() -> None:
    dead, engine = harness.free_ports(2)
    said = serving(dead, [engine], ["node-0"], _ansible_check_mode=True)
    assert not said.get("failed")
    assert len(said["problems"]) == 2


def test_an_engine_that_says_no_is_quoted(engine: int) -> None:
    target = completions.Target(f"http://127.0.0.1:{engine}")
    body = completions.body_of("m", "status=418", 4, False, {})
    with pytest.raises(completions.CompletionError, match=r"answers 418: .*engine says 418"):
        completions.complete(target, body, 5)


def test_a_full_engine_is_asked_again(engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(completions.CompletionError, match="answers 503"):
        completions.complete(
            completions.Target(f"http://127.0.0.1:{engine}"), completions.body_of("m", "status=503", 4, False, {}), 5
        )
    assert waits == [completions.BUSY_WAIT_S] * 2


def test_a_stream_without_its_end_is_no_stream(engine: int) -> None:
    body = completions.body_of("m", "cut tokens=2", 4, True, {})
    with pytest.raises(completions.CompletionError, match=r"without its end mark|does not answer"):
        completions.stream(completions.Target(f"http://127.0.0.1:{engine}"), body, 5)


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(completions.CompletionError, match="no http or https address"):
        completions.complete(completions.Target(url), b"{}", 1)


def targets(*states: tuple[str, str, str]) -> dict[str, Any]:
    return {
        "data": {
            "activeTargets": [
                {
                    "health": health,
                    "labels": {"job": job, **({"node": node} if node else {})},
                    "scrapeUrl": f"http://{node or 'x'}:1/metrics",
                    "lastError": "" if health == "up" else "connection refused",
                }
                for job, node, health in states
            ]
        }
    }


def test_targets_are_sorted_out_by_node() -> None:
    answer = targets(("engines", "a", "up"), ("engines", "b", "down"), ("agents", "c", "unknown"), ("x", "", "down"))
    state = scraped.target_state(answer, {"a", "b"})
    assert (state.up, state.total) == (1, 4)
    assert state.down == [
        "engines http://b:1/metrics: connection refused",
        "x http://x:1/metrics: connection refused",
    ]
    assert state.elsewhere == ["agents http://c:1/metrics: connection refused"]


@pytest.mark.parametrize("answer", [None, [], {}, {"data": None}, {"data": {"activeTargets": None}}, "text"])
def test_answers_of_another_shape_have_no_target(answer: Any) -> None:
    assert scraped.target_state(answer, set()) == scraped.TargetState(0, 0, [], [])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([(targets(("e", "a", "up")), "")], ""),
        ([(targets(("e", "a", "down")), ""), (targets(("e", "a", "up")), "")], ""),
        ([(targets(("e", "a", "down")), "")], "1 of 1 targets are not up: e http://a:1/metrics: connection refused"),
        ([(targets(), "")], "knows 0 targets; 1 were expected"),
        ([(None, "refused")], "does not answer: refused"),
    ],
)
def test_targets_are_waited_for(answers: list[tuple[Any, str]], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([*answers, *[answers[-1]] * 99])
    clock = iter(range(0, 999))
    monkeypatch.setattr(verify_targets, "read", lambda _url: next(asked))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    said = run(verify_targets, url="http://127.0.0.1:9090", required_nodes=["a"], wait=5)
    assert bool(said.get("failed")) == bool(message)
    assert message in said.get("msg", "")


def test_a_node_in_a_few_words() -> None:
    replica = {
        "replica": "short-0",
        "engine": "vllm",
        "version": "0.26.0",
        "model": "m",
        "revision": "r1",
        "devices": "GPU 0 NVIDIA H200",
        "release": "0123456789abcdef",
        "unit": "active",
        "allreduce": {"verdict": "pass", "transport": "P2P/CUMEM", "reason": "0.42 ms"},
    }
    measured = [
        {
            "host": "node-a",
            "replica": "short-0",
            "pool": "short",
            "address": "10.0.0.1:8100",
            "error": "",
            "seconds": 0.31,
        }
    ]
    (line,) = summary.node_lines("node-a", [replica], measured, [])
    assert line == (
        "short-0: vllm 0.26.0, m r1, on GPU 0 NVIDIA H200, release 0123456789ab, unit active, at 10.0.0.1:8100, "
        "answered in 0.31 s, all-reduce pass over P2P/CUMEM (0.42 ms)"
    )
    assert summary.node_lines("node-b", [], measured, []) == ["no replica is installed here"]


def test_devices_have_names() -> None:
    names = summary.device_names("GPU 0: NVIDIA H200 (UUID: GPU-0000)\nGPU 1: NVIDIA H200 (UUID: GPU-0001)\n")
    assert names == {"GPU-0000": "GPU 0 NVIDIA H200", "GPU-0001": "GPU 1 NVIDIA H200"}
    assert summary.devices_of(["GPU-0001", "GPU-9"], names, "") == "GPU 1 NVIDIA H200 + GPU-9"
    assert summary.devices_of([], names, "2 x Xeon") == "2 x Xeon"
