# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A lab with one pool behind Triton and one plain vLLM: both answer, a second site.yml changes nothing, the audit is green, and a
new version of the model replaces the old one under load. ``scripts/test triton`` builds it, runs this and takes it down.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import pytest

from tests.lab import lab

pytestmark = pytest.mark.lab

INVENTORY = "tests/lab/triton/inventory"
LAB = lab.ROOT / ".lab" / "triton"
NAME, PREFIX = "metalserve-triton", "172.30.81"
MODEL = "smollm2-135m"
LONGEST_LOAD_S = 600
"""A load took 185 s on two cores under other work."""

CURRENT = "/var/lib/metalserve/engines/short-0/current/model_repository/" + MODEL


def on(node: str, command: str) -> str:
    """Return what a command prints on a node of this lab."""
    return lab.on(node, f"set -e; {command}", lab=NAME, timeout_s=LONGEST_LOAD_S)


def ask(path: str, body: dict[str, Any], timeout_s: float = 120) -> dict[str, Any]:
    """Return the gateway's answer. Raises OSError for anything but 200."""
    trust = ssl.create_default_context(cafile=str(LAB / "tls" / "gateway1.crt"))
    trust.check_hostname = False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust))
    head = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {(LAB / 'secrets' / 'api_key').read_text().strip()}",
    }
    request = urllib.request.Request(f"https://{PREFIX}.10{path}", json.dumps(body).encode(), head)
    with opener.open(request, timeout=timeout_s) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def complete(prompt: str = "The capital of France is", **more: Any) -> dict[str, Any]:
    """Return a completion of the gateway."""
    return ask("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more})


def container(pool: str) -> str:
    """Return identity and start of a pool's container: a restart changes it."""
    name = on("engine1", f"docker ps --format '{{{{.Names}}}}' | grep metalserve-{pool}-0").strip()
    return on("engine1", f"docker inspect --format '{{{{.Id}}}} {{{{.State.StartedAt}}}}' {name}")


def engine(path: str, method: str = "GET") -> str:
    """Return what Triton's frontend answers on the node itself; nobody else but gateways and monitors may ask it."""
    address = f"http://{PREFIX}.11:8100{path}"
    call = f"u.urlopen(u.Request('{address}', method='{method}'), timeout={LONGEST_LOAD_S}).read().decode()"
    return on("engine1", f'python3 -c "import urllib.request as u; print({call})"')


def load() -> None:
    """Load the newest version of the model that is in the repository."""
    engine(f"/v1/models/{MODEL}/load", "POST")


def test_both_kinds_answer() -> None:
    short, long = complete(), complete("word " * 1200)
    assert "Paris" in short["choices"][0]["text"]
    # Triton's frontend says which version of the model answered; plain vLLM does not.
    assert short["system_fingerprint"] == "version-1"
    assert long["usage"]["prompt_tokens"] > 1024
    assert long.get("system_fingerprint") != "version-1"


def test_a_chat_through_triton() -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = ask("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0})
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_second_run_changes_nothing_and_restarts_nothing() -> None:
    before = [container(pool) for pool in ("short", "long")]
    run = lab.playbook("site.yml", inventory=INVENTORY)
    assert run.code == 0, run.end
    assert {host: count for host, count in run.changed.items() if count} == {}
    assert [container(pool) for pool in ("short", "long")] == before


def test_the_audit_is_green() -> None:
    assert lab.audit(inventory=INVENTORY) == (0, set(), {})


def test_a_new_version_is_loaded_and_the_old_one_unloaded_while_requests_flow() -> None:
    before = container("short")
    seen: list[str] = []
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            try:
                seen.append(str(complete()["system_fingerprint"]))
            except (OSError, KeyError) as error:
                seen.append(f"failed: {error}")
            time.sleep(0.5)

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        fewer = """sed 's/"max_num_seqs": 8/"max_num_seqs": 4/'"""
        on("engine1", f"mkdir -p {CURRENT}/2 && {fewer} {CURRENT}/1/model.json > {CURRENT}/2/model.json")
        load()
        time.sleep(10)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    counts = Counter(seen)
    assert set(counts) == {"version-1", "version-2"}, counts
    assert seen[-1] == "version-2"
    assert container("short") == before
    index = json.loads(engine("/v1/models"))
    assert [item["id"] for item in index["data"]] == [MODEL]


def test_the_way_back_to_the_first_version() -> None:
    on("engine1", f"rm -r {CURRENT}/2")
    load()
    assert complete()["system_fingerprint"] == "version-1"
