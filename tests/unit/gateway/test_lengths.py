# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Pools by request length through a real nginx: what is read of a body however it comes, and the way up a pool."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway import harness
from tests.unit.gateway.harness import Gateway, admin, replicas, turn, until

LARGE = 24 * 1024 * 1024


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return harness.free_ports(5)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[Gateway]:
    """Pools: short, middle and long of one model, and one of another model whose name has a slash."""
    pools = [
        harness.pool("short", ports[:1], body_limit_bytes=LARGE),
        harness.pool("middle", ports[1:3], max_model_len=8192, body_limit_bytes=LARGE),
        harness.pool("long", ports[3:4], max_model_len=32768, body_limit_bytes=LARGE),
        harness.pool("other", ports[4:5], served_name="lab/other", body_limit_bytes=LARGE),
    ]
    options = {"gateway_rotation_file": f"{tempfile.mkdtemp()}/rotation.json", "gateway_affinity": "prefix"}
    Path(options["gateway_rotation_file"]).parent.chmod(0o777)
    with harness.standins(ports), harness.gateway(tmp_path_factory.mktemp("lengths"), pools, **options) as running:
        yield running
        until(lambda: all(pool["in_flight"] == 0 for pool in admin(running, "/state")[1]["pools"]))


@pytest.fixture(autouse=True)
def everything_is_well(gateway: Gateway) -> None:
    until(lambda: all(one["observed"]["healthy"] for one in replicas(gateway).values()), 30)


def served(gateway: Gateway, answer: Any) -> tuple[str, str]:
    """Return pool and upstream statuses of an answered request."""
    row = gateway.row(answer.headers["X-Request-Id"])
    return row["pool"], row["upstream_status"]


def test_what_a_replica_finds_too_long_goes_up_a_pool(gateway: Gateway, ports: list[int]) -> None:
    text = f"too_long={ports[0]} " + "word " * 700
    answer, body = gateway.ask(body={"model": "smollm2", "prompt": text})
    assert answer.status == 200
    assert int(body["engine"]) in ports[1:3]
    assert json.loads(json.dumps({"model": "smollm2", "prompt": text}))["prompt"] == text
    assert body["length"] == len(json.dumps({"model": "smollm2", "prompt": text}))
    assert served(gateway, answer) == ("middle", "400 : 200")


def test_a_stream_goes_up_too(gateway: Gateway, ports: list[int]) -> None:
    answer, body = gateway.ask(body={"prompt": f"too_long={ports[0]} tokens=3 " + "word " * 700, "stream": True})
    assert (answer.status, body.count("data: {"), "[DONE]" in body) == (200, 3, True)
    assert served(gateway, answer) == ("middle", "400 : 200")


def test_the_longest_pool_has_the_last_word(gateway: Gateway, ports: list[int]) -> None:
    text = f"too_long={ports[3]} " + "word " * 12_000
    answer, body = gateway.ask(body={"model": "smollm2", "prompt": text})
    assert answer.status == 400
    assert "maximum context length" in body["error"]["message"]
    assert served(gateway, answer) == ("long", "400")


def test_a_short_clients_mistake_is_not_asked_twice(gateway: Gateway) -> None:
    answer, body = gateway.ask(body={"model": "smollm2", "prompt": "status=400"})
    assert (answer.status, body["error"]["message"]) == (400, "engine says 400")
    assert served(gateway, answer) == ("short", "400")


def test_a_long_clients_mistake_keeps_the_engines_words(gateway: Gateway) -> None:
    answer, body = gateway.ask(body={"model": "smollm2", "prompt": "status=400 " + "word " * 700})
    assert (answer.status, body["error"]["message"]) == (400, "engine says 400")
    assert served(gateway, answer) == ("middle", "400 : 400")


def test_the_way_up_leaves_out_what_is_drained(gateway: Gateway, ports: list[int]) -> None:
    for node in (0, 1):
        turn(gateway, f"node-{node}/middle-0", False)
    answer, body = gateway.ask(body={"prompt": f"too_long={ports[0]} " + "word " * 700})
    assert (answer.status, body["engine"]) == (200, str(ports[3]))
    turn(gateway, "node-0/long-0", False)
    answer, body = gateway.ask(body={"prompt": f"too_long={ports[0]} " + "word " * 700})
    assert (answer.status, "maximum context length" in body["error"]["message"]) == (400, True)
    for replica in ("node-0/middle-0", "node-1/middle-0", "node-0/long-0"):
        turn(gateway, replica, True)


def test_a_dead_pools_requests_go_only_where_they_fit(gateway: Gateway) -> None:
    """With the two longer pools gone, a short request is served and a long one is told to come back."""
    gone = ("node-0/middle-0", "node-1/middle-0", "node-0/long-0")
    for replica in gone:
        turn(gateway, replica, False)
    for headers, body in (({}, {"prompt": "word " * 4000}), ({"X_Prompt_Tokens": "4000"}, {"prompt": "x"})):
        answer, said = gateway.ask(body=body, **headers)
        assert (answer.status, said["error"]["code"], answer.headers["Retry-After"]) == (503, "unavailable", "5")
        assert gateway.row(answer.headers["X-Request-Id"])["rejected"] == "no_replica"
    assert served(gateway, gateway.ask(body={"prompt": "x"})[0]) == ("short", "200")
    turn(gateway, "node-0/long-0", True)
    assert served(gateway, gateway.ask(body={"prompt": "word " * 4000})[0]) == ("long", "200")
    for replica in gone[:2]:
        turn(gateway, replica, True)
    assert served(gateway, gateway.ask(body={"prompt": "word " * 4000})[0]) == ("middle", "200")


def test_a_named_pool_is_that_pool(gateway: Gateway, ports: list[int]) -> None:
    answer, body = gateway.ask(body={"prompt": f"too_long={ports[0]} " + "word " * 700}, X_Metalserve_Pool="short")
    assert (answer.status, "maximum context length" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("tokens", "pool"), [("10", "short"), ("2049", "middle"), ("9000", "long"), ("1e3", "short")])
def test_a_client_that_counted_is_believed(gateway: Gateway, tokens: str, pool: str) -> None:
    answer, _ = gateway.ask(body={"prompt": "x"}, X_Prompt_Tokens=tokens)
    assert served(gateway, answer)[0] == pool


@pytest.mark.parametrize("name", [r"lab\/other", r"lab\u002fother", "lab/other"])
def test_a_models_name_may_be_escaped(gateway: Gateway, name: str) -> None:
    answer, _ = gateway.ask(body=b'{"prompt": "x", "model" :\n "' + name.encode() + b'"}')
    assert (answer.status, served(gateway, answer)[0]) == (200, "other")


@pytest.mark.parametrize("name", ['no\\"such', "n\\ud83d", "\\u0000", "x" * 5000])
def test_an_odd_models_name_is_told_in_json(gateway: Gateway, name: str) -> None:
    answer, body = gateway.ask(body=b'{"model": "' + name.encode() + b'", "prompt": "x"}')
    assert answer.status in (200, 404)
    assert isinstance(body, dict)


def test_prompts_that_begin_alike_stay_together(gateway: Gateway) -> None:
    """On one of the two replicas, until it is much busier than the other."""

    def engines(prompts: list[str], together: int) -> list[str]:
        with ThreadPoolExecutor(together) as clients:
            asked = [clients.submit(gateway.ask, body={"prompt": text}, X_Metalserve_Pool="middle") for text in prompts]
            return [future.result()[1]["engine"] for future in asked]

    beginnings = ["".join(f"clause {number} of template {name}. " for number in range(90)) for name in "abcdefgh"]
    homes = {
        beginning: engines([beginning + "one", beginning + "two", beginning + "three"], 1) for beginning in beginnings
    }
    assert all(len(set(found)) == 1 for found in homes.values())
    assert len({found[0] for found in homes.values()}) == 2
    busy = engines([f"sleep=0.6 {beginnings[0]}"] * 14, 14)
    assert min(busy.count(engine) for engine in set(busy)) >= 3
    assert len(set(busy)) == 2


def over_http2(gateway: Gateway, body: bytes, *options: str) -> tuple[int, str, Any]:
    """Send a body over HTTP/2 with curl; return status, version and answer."""
    command = [
        *("curl", "-sS", "--http2", "--cacert", str(gateway.folder / "made" / "server.crt")),
        *("-H", f"Authorization: Bearer {harness.KEY}", "-H", "Content-Type: application/json", *options),
        *("-w", "\n%{http_code} %{http_version}", f"https://localhost:{gateway.https}/v1/completions"),
    ]
    command[command.index("--cacert") : command.index("--cacert")] = [
        "--connect-to",
        f"localhost:{gateway.https}:127.0.0.1:{gateway.https}",
    ]
    said = subprocess.run(command, input=body, capture_output=True, check=True, timeout=60).stdout.decode()
    text, _, numbers = said.rpartition("\n")
    status, version = numbers.split()
    return int(status), version, json.loads(text)


@pytest.mark.parametrize("options", [("--data-binary", "@-"), ("-X", "POST", "-T", "-")])
@pytest.mark.parametrize(
    ("words", "model", "engine"), [(10, "smollm2", 0), (10, "lab/other", 4), (12_000, "smollm2", 3)]
)
def test_http2_with_and_without_a_length(
    gateway: Gateway, ports: list[int], options: tuple[str, ...], words: int, model: str, engine: int
) -> None:
    body = json.dumps({"prompt": "word " * words, "model": model}).encode()
    status, version, said = over_http2(gateway, body, *options)
    assert (status, version, said.get("length"), said.get("engine")) == (200, "2", len(body), str(ports[engine]))


def test_a_body_beyond_memory_is_read_from_its_file(gateway: Gateway) -> None:
    large = json.dumps({"prompt": "word " * 3_600_000, "model": "lab/other"}).encode()
    assert len(large) > 16 * 1024 * 1024
    answer, body = gateway.ask(body=large)
    assert (answer.status, body["length"]) == (200, len(large))
    row = gateway.row(answer.headers["X-Request-Id"])
    assert row["pool"] == "other"
    assert 3_600_000 < int(row["tokens"]) < 4_600_000
    folder = Path("/var/lib/nginx/body")
    assert not folder.exists() or not [path for path in folder.rglob("*") if path.is_file()]
