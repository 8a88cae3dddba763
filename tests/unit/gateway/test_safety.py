# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What must not leak and who must not get in, through a real nginx in mode lua; and a restart that remembers."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway, admin, replicas, turn, until

CANARY = "canary-7f3a-Zebra"
LARGE = 20 * 1024 * 1024
SHOWN = {
    *("connection", "content-length", "content-type", "date", "keep-alive", "retry-after", "server"),
    *("transfer-encoding", "www-authenticate", "x-request-id"),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    made = Path(tempfile.mkdtemp())
    made.chmod(0o777)
    return made


@pytest.fixture(scope="module")
def options(folder: Path) -> dict[str, Any]:
    return {
        "gateway_rotation_file": str(folder / "rotation.json"),
        "gateway_client_header_timeout_s": 3,
        "gateway_client_body_timeout_s": 3,
        "gateway_affinity": "session",
    }


@pytest.fixture(scope="module")
def pools() -> list[dict[str, Any]]:
    ports = harness.free_ports(4)
    return [
        harness.pool("short", ports[:2], body_limit_bytes=LARGE),
        harness.pool("long", ports[2:3], max_model_len=8192, body_limit_bytes=LARGE),
        # Nothing listens there.
        harness.pool("dead", ports[3:], served_name="dead"),
    ]


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, pools: list[dict[str, Any]], options: dict[str, Any]
) -> Iterator[Gateway]:
    ports = [replica["port"] for pool in pools[:2] for replica in pool["replicas"]]
    with harness.standins(ports), harness.gateway(tmp_path_factory.mktemp("safety"), pools, **options) as running:
        yield running


def secured(gateway: Gateway, **limits: ssl.TLSVersion) -> ssl.SSLSocket:
    """Return a connection over TLS of the given versions."""
    context = ssl.create_default_context(cafile=str(gateway.folder / "made" / "server.crt"))
    for name, version in limits.items():
        setattr(context, name, version)
    plain = socket.create_connection(("127.0.0.1", gateway.https), 30)
    return context.wrap_socket(plain, server_hostname="localhost")


def until_closed(client: socket.socket) -> bytes:
    text = b""
    try:
        while part := client.recv(65536):
            text += part
    except OSError:
        pass
    return text


def test_no_log_holds_a_prompt_or_a_key(gateway: Gateway) -> None:
    """Neither in the normal path nor when something goes wrong; a wrong key may be somebody's right one elsewhere."""
    prompts: list[dict[str, Any]] = [
        {"prompt": f"{CANARY} x"},
        {"prompt": f"tokens=2 {CANARY}", "stream": True},
        {"prompt": f"status=500 {CANARY}"},
        {"prompt": f"status=503 {CANARY}"},
        {"prompt": f"die {CANARY}"},
        {"prompt": f"sse_error=1 {CANARY}", "stream": True},
        {"prompt": CANARY, "model": CANARY},
        {"prompt": CANARY, "model": "dead"},
        {"prompt": f"{CANARY} " * 1_000_000},
        {"prompt": f"{CANARY} " * 1_200_000},
        {"prompt": f"{CANARY} " * 2000, "max_tokens": 99},
    ]
    statuses = {gateway.ask(body=body)[0].status for body in prompts}
    assert {200, 404, 413, 500, 502, 503} <= statuses
    gateway.ask(body=f'{{"prompt": "{CANARY}'.encode())
    gateway.ask(body=b"x", key=f"sk-{CANARY}")
    gateway.ask(f"/v1/{CANARY}", b"x")
    gateway.ask(f"/v1/completions?prompt={CANARY}", {"prompt": "x"})
    for name in (
        "X_Request_Id",
        "X_Metalserve_Pool",
        "X_Prompt_Tokens",
        "X_Session_Id",
        "Traceparent",
        "User_Agent",
        "Cookie",
    ):
        gateway.ask(body={"prompt": "x"}, **{name: f"{CANARY} {{}}"})
    with secured(gateway) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + f"{harness.KEY}\r\nTransfer-Encoding: chunked\r\n\r\n{CANARY}\r\n".encode()
        )
        until_closed(client)
    assert CANARY not in (gateway.folder / "log" / "gateway-access.log").read_text(encoding="utf-8")
    for line in gateway.errors().splitlines():
        assert CANARY not in line or f'"POST /v1/{CANARY}' in line or "?prompt=" in line, line
        assert harness.KEY not in line


def test_an_engines_own_headers_stay_inside(gateway: Gateway) -> None:
    for body in (
        {"prompt": "x"},
        {"prompt": "status=422"},
        {"prompt": "tokens=2", "stream": True},
        {"prompt": "x" * 9000},
    ):
        answer, _ = gateway.ask(body=body)
        assert {name.lower() for name in answer.headers} <= SHOWN
        assert answer.headers["Server"] == "nginx"


def test_bad_keys_get_one_answer(gateway: Gateway) -> None:
    def told(**headers: str) -> tuple[Any, ...]:
        answer, body = gateway.ask(body={"prompt": "x"}, key="", **headers)
        kept = sorted((name, value) for name, value in answer.headers.items() if name not in ("Date", "X-Request-Id"))
        return answer.status, kept, json.dumps(body)

    wrong = [
        told(),
        *(told(Authorization=text) for text in ("", "x", "Bearer", f"Bearer {harness.KEY}x", "Bearer " + "k" * 900)),
    ]
    assert len({str(one) for one in wrong}) == 1
    assert wrong[0][0] == 401


@pytest.mark.parametrize(
    "path", ["/metrics", "/state", "/rotation", "/stub_status", "/release", "/v1/load", "/tokenize"]
)
def test_inner_paths_are_closed_at_the_public_door(gateway: Gateway, path: str) -> None:
    for body in (None, b"{}"):
        answer, said = gateway.ask(path, body)
        assert (answer.status, said["error"]["code"]) == (404, "not_found")


def test_the_inner_ports_are_for_this_machine(gateway: Gateway) -> None:
    said = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    for port in (gateway.admin, gateway.inner):
        assert [line.split()[3] for line in said.splitlines() if line.split()[3].endswith(f":{port}")] == [
            f"127.0.0.1:{port}"
        ]


def test_old_tls_is_refused(gateway: Gateway) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        with secured(gateway, minimum_version=version, maximum_version=version) as client:
            assert client.version() == version.name.replace("_", ".")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # Level 0 lets this side offer it; the gateway must be the one that refuses.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        closing(socket.create_connection(("127.0.0.1", gateway.https), 30)) as plain,
        pytest.raises(ssl.SSLError, match=r"protocol version|PROTOCOL_VERSION"),
    ):
        context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize(
    "begin",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {harness.KEY}\r\n".encode()
        + b'Content-Length: 900\r\n\r\n{"prompt": "',
    ],
)
def test_slow_clients_are_cut_off_and_hold_nobody_up(gateway: Gateway, begin: bytes) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(secured(gateway)) for _ in range(60)]
        for client in slow:
            client.sendall(begin)
        assert gateway.ask(body={"prompt": "x"})[0].status == 200
        for client in slow:
            text = until_closed(client)
            assert not text or text.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400")), text
    assert all(pool["in_flight"] == 0 for pool in admin(gateway, "/state")[1]["pools"])


def test_sessions_stay_on_their_replica(gateway: Gateway) -> None:
    homes = {}
    for session in map(str, range(12)):
        homes[session] = {gateway.ask(body={"prompt": "x"}, X_Session_Id=session)[1]["engine"] for _ in range(3)}
    assert all(len(found) == 1 for found in homes.values())
    assert len({next(iter(found)) for found in homes.values()}) == 2


def test_a_session_leaves_a_replica_that_is_much_busier(gateway: Gateway) -> None:
    with ThreadPoolExecutor(14) as clients:
        asked = [clients.submit(gateway.ask, body={"prompt": "sleep=0.8"}, X_Session_Id="busy") for _ in range(14)]
        engines = [future.result()[1]["engine"] for future in asked]
    assert len(set(engines)) == 2
    assert min(engines.count(engine) for engine in set(engines)) >= 3


def test_a_restart_remembers_the_rotation(
    gateway: Gateway, tmp_path: Path, pools: list[dict[str, Any]], options: dict[str, Any], folder: Path
) -> None:
    turn(gateway, "node-0/long-0", False)
    turn(gateway, "node-1/short-0", False)
    turn(gateway, "node-1/short-0", True)
    before = {name: one["desired"] for name, one in replicas(gateway).items()}
    assert before["node-0/long-0"] == {
        "in": False,
        "by": "test@here",
        "run": "r1",
        "since": before["node-0/long-0"]["since"],
    }
    assert abs(before["node-0/long-0"]["since"] - time.time()) < 600
    with harness.gateway(tmp_path, pools, **options) as another:
        after = {name: one["desired"] for name, one in replicas(another).items()}
        assert after == before
        until(lambda: not replicas(another)["node-0/dead-0"]["observed"]["healthy"])
    (folder / "rotation.json").write_text("{half a file")
    again = tmp_path / "again"
    again.mkdir()
    with harness.gateway(again, pools, **options) as another:
        assert all(one["desired"]["in"] for one in replicas(another).values())
        assert "rotation.json cannot be read" in another.errors()
    turn(gateway, "node-0/long-0", True)
