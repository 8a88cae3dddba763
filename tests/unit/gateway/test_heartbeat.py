# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Signs of life in silent streams, through a real nginx."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway, admin, until

SIGN = ": still working\n\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    ports = harness.free_ports(2)
    options = {
        **harness.UNKEPT,
        "gateway_heartbeat_s": 1,
    }
    pools = [harness.pool("short", ports[:1]), harness.pool("tight", ports[1:], in_flight=1, served_name="tight")]
    with harness.standins(ports), harness.gateway(tmp_path_factory.mktemp("heart"), pools, **options) as running:
        yield running
        until(lambda: all(pool["in_flight"] == 0 for pool in admin(running, "/state")[1]["pools"]))


def test_silence_before_the_first_token_is_broken(gateway: Gateway) -> None:
    answer, text = gateway.ask(body={"prompt": "sleep=2.4 tokens=3", "stream": True}, X_Request_Id="silent-0001")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
    assert answer.headers.get_all("X-Request-Id") == ["silent-0001"]
    assert text.startswith(SIGN)
    events = [event for event in text.split("\n\n") if event.startswith("data: ")]
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]] == ["t0 ", "t1 ", "t2 "]
    assert events[-1] == "data: [DONE]"
    row = gateway.row("silent-0001")
    assert (row["status"], row["client"], row["key"], row["pool"]) == (200, "127.0.0.1", "finance", "short")
    assert [one["id"] for one in gateway.log()].count("silent-0001") == 1


def test_silence_between_tokens_is_broken_between_events(gateway: Gateway) -> None:
    _, text = gateway.ask(body={"prompt": "tokens=2 gap=2.5", "stream": True})
    assert text.count(SIGN) >= 2
    assert text.replace(SIGN, "").count("data: {") == 2
    assert text.endswith("data: [DONE]\n\n")


def test_a_lively_stream_and_a_whole_answer_get_none(gateway: Gateway) -> None:
    assert SIGN not in gateway.ask(body={"prompt": "tokens=30 gap=0.05", "stream": True})[1]
    answer, body = gateway.ask(body={"prompt": "sleep=1.5", "stream": False})
    assert (answer.status, body["choices"][0]["text"]) == (200, "ok")


def test_an_early_error_keeps_its_status(gateway: Gateway) -> None:
    answer, body = gateway.ask(body={"prompt": "status=422", "stream": True})
    assert (answer.status, body["error"]["message"]) == (422, "engine says 422")
    answer, body = gateway.ask(body={"prompt": "status=503", "stream": True})
    assert (answer.status, answer.headers.get_all("Retry-After"), body["error"]["code"]) == (503, ["1"], "overloaded")
    answer, body = gateway.ask(body={"prompt": "x", "stream": True, "model": "nobody"})
    assert (answer.status, body["error"]["code"]) == (404, "model_not_found")


def test_a_late_error_becomes_an_event(gateway: Gateway) -> None:
    answer, text = gateway.ask(body={"prompt": "sleep=1.6 status=500", "stream": True})
    assert answer.status == 200
    event = text.replace(SIGN, "").split("\n\n")[0]
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "engine says 500"
    assert text.endswith("data: [DONE]\n\n")


def test_a_broken_off_stream_looks_broken_off(gateway: Gateway) -> None:
    with pytest.raises(IncompleteRead):
        gateway.ask(body={"prompt": "cut tokens=2", "stream": True})


def test_a_client_that_leaves_in_the_silence_frees_its_replica(gateway: Gateway) -> None:
    def in_flight() -> int:
        return sum(int(pool["in_flight"]) for pool in admin(gateway, "/state")[1]["pools"])

    with gateway.connection() as client:
        body = json.dumps({"prompt": "sleep=20", "stream": True})
        client.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {harness.KEY}"})
        until(lambda: in_flight() == 1)
    until(lambda: in_flight() == 0)


def test_http2_gets_them_too(gateway: Gateway) -> None:
    body = json.dumps({"prompt": "sleep=1.6 tokens=2", "stream": True})
    command = [
        *("curl", "-sS", "--http2", "--cacert", str(gateway.folder / "made" / "server.crt"), "-d", body),
        *("-H", f"Authorization: Bearer {harness.KEY}", "-w", "%{http_version}"),
        f"https://127.0.0.1:{gateway.https}/v1/completions",
    ]
    text = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    assert text.startswith(SIGN)
    assert text.endswith("data: [DONE]\n\n2")


def test_the_inner_door_wants_a_key_and_is_on_loopback(gateway: Gateway) -> None:
    conf = next(Path(gateway.folder).glob(".metalserve-*/metalserve/current/lua/server.conf")).read_text()
    assert f"listen 127.0.0.1:{gateway.inner};" in conf
    asked = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-d", "{}"]
    said = subprocess.run([*asked, f"http://127.0.0.1:{gateway.inner}/v1/completions"], capture_output=True, check=True)
    assert said.stdout == b"401"
