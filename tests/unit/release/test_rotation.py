# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""metal.serve.gateway_rotation against a real nginx with its Lua."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.release import lock, rotation
from ansible_collections.metal.serve.plugins.modules import gateway_rotation
from tests.unit.gateway import harness
from tests.unit.gateway.harness import QUICK, Engines, Gateway, until

NAME = "node-0/short-0"


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return harness.free_ports(2)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[Gateway]:
    engines = Engines(ports)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    if os.geteuid() == 0:
        shutil.chown(folder, "www-data")
    options = {"gateway_rotation_file": str(folder / "rotation.json")}
    try:
        with harness.gateway(
            tmp_path_factory.mktemp("gateway"), [harness.pool("short", ports, times=QUICK)], **options
        ) as running:
            yield running
    finally:
        engines.stop()
        shutil.rmtree(folder)


def ask(gateway: Gateway, root: Path, what: str, *names: str, check: bool = False, **more: Any) -> dict[str, Any]:
    params = {
        "state": what,
        "replicas": list(names),
        "run": "redeploy-1",
        "by": "ada@desk",
        "wait": 5,
        "phase": "",
        "root": str(root),
        "port": gateway.admin,
        "textfile_dir": str(root),
        "engines": {},
        **more,
    }
    module: Any = SimpleNamespace(params=params, check_mode=check, get_bin_path=lambda *_args, **_more: None)
    return gateway_rotation.Run(module).run()


def test_out_and_in_without_a_reload(gateway: Gateway, tmp_path: Path) -> None:
    assert ask(gateway, tmp_path, "out", NAME, check=True)["changed"]
    out = ask(gateway, tmp_path, "out", NAME)
    assert out["changed"]
    assert [(item["replica"], item["in"], item["run"]) for item in out["replicas"]] == [(NAME, False, "redeploy-1")]
    assert f'replica="{NAME}"' in (tmp_path / rotation.NAME).read_text()
    assert not ask(gateway, tmp_path, "out", NAME)["changed"]
    assert ask(gateway, tmp_path, "drained", NAME)["waiting"] == []
    back = ask(gateway, tmp_path, "in", NAME)
    assert back["changed"]
    assert NAME not in (tmp_path / rotation.NAME).read_text()
    assert ask(gateway, tmp_path, "healthy", NAME)["waiting"] == []
    assert ask(gateway, tmp_path, "steady", NAME, wait=0)["waiting"] == []


def test_what_somebody_took_out_stays_with_him(gateway: Gateway, tmp_path: Path) -> None:
    ask(gateway, tmp_path, "out", NAME, run="drain-1", by="bob@laptop")
    found = ask(gateway, tmp_path, "out", NAME)
    assert (found["changed"], found["replicas"][0]["run"]) == (False, "drain-1")
    ask(gateway, tmp_path, "in", NAME)


def test_a_drain_waits_for_what_is_in_flight_and_loses_nothing(
    gateway: Gateway, ports: list[int], tmp_path: Path
) -> None:
    body = {"model": "smollm2", "prompt": "held=1"}
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(gateway.ask(body=body)[0].status), daemon=True)
        for _number in range(4)
    ]
    workers = gateway.workers()
    assert ask(gateway, tmp_path, "healthy", NAME, wait=60)["waiting"] == []
    for thread in threads:
        thread.start()
    until(lambda: harness.replicas(gateway)[NAME]["in_flight"] == 2, 60)
    ask(gateway, tmp_path, "out", NAME)
    assert ask(gateway, tmp_path, "drained", NAME, wait=0)["waiting"] == [f"{NAME}: 2 in flight"]
    for port in ports:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/release", timeout=60).close()
    assert ask(gateway, tmp_path, "drained", NAME, wait=60)["waiting"] == []
    ask(gateway, tmp_path, "in", NAME)
    for thread in threads:
        thread.join()
    assert answers == [200] * 4
    assert gateway.workers() == workers


def test_a_check_neither_changes_nor_waits(gateway: Gateway, tmp_path: Path) -> None:
    assert ask(gateway, tmp_path, "drained", NAME, check=True)["waiting"] == []
    assert ask(gateway, tmp_path, "read")["replicas"][0]["in"]


def test_a_lock_that_was_lost_changes_nothing(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(gateway_rotation.GatewayError, match="not held by run redeploy-1 any more"):
        ask(gateway, tmp_path, "out", NAME, phase="drain")
    lock.hold(str(tmp_path / lock.NAME), lock.Holder("redeploy-1", "ada@desk"), 1.0, False)
    assert ask(gateway, tmp_path, "drained", NAME, phase="drain")["waiting"] == []
    holder = lock.read(str(tmp_path / lock.NAME))
    assert holder is not None
    assert (holder.phase, holder.heartbeat > 1.0) == ("drain", True)


def test_a_gateway_that_does_not_answer_is_one_sentence(tmp_path: Path, gateway: Gateway) -> None:
    with pytest.raises(gateway_rotation.GatewayError, match="does not answer"):
        ask(gateway, tmp_path, "read", port=harness.free_ports(1)[0])
