# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""metal.serve.engine_switch on a machine made of two dictionaries: what systemctl and docker would do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.release import content, lock, state
from ansible_collections.metal.serve.plugins.modules import engine_switch

OLD, NEW = "a" * 64, "b" * 64
UNIT = "metalserve-engine@short-0.service"


class Machine:
    """Units and containers; a unit runs the container that ``current`` names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unit = "active"
        self.containers = {content.container_name("short-0", OLD): "running"}
        self.tags: set[str] = set()
        self.calls: list[str] = []
        self.stubborn = False

    @property
    def current(self) -> str:
        release = state.read_link(str(self.root / "engines" / "short-0" / "current"))
        return content.container_name("short-0", release)

    def run_command(self, argv: list[str]) -> tuple[int, str, str]:
        words = " ".join(argv)
        self.calls.append(words)
        if words.startswith("systemctl show"):
            return 0, f"ActiveState={self.unit}\nSubState={'running' if self.unit == 'active' else 'dead'}\n", ""
        if words.startswith("systemctl stop"):
            if self.stubborn and "--no-block" in words:
                self.unit = "deactivating"
                return 0, "", ""
            self.unit = "inactive"
            for name, status in self.containers.items():
                self.containers[name] = "exited" if status == "running" else status
        elif words.startswith("systemctl start"):
            self.unit, self.containers[self.current] = "active", "running"
        elif words.startswith("docker container inspect"):
            found = self.containers.get(argv[-1])
            return (0, f"{found}\n", "") if found else (1, "", "no such container")
        elif words.startswith("docker container rm"):
            del self.containers[argv[-1]]
        elif words.startswith("docker image tag"):
            self.tags.add(argv[-1])
        elif words.startswith("docker image rm"):
            self.tags.discard(argv[-1])
        return 0, "", ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(state.Replica, "drop_in", property(lambda self: str(tmp_path / "unit.d" / "release.conf")))
    replica = state.Replica(str(tmp_path), "short-0")
    for release in (OLD, NEW):
        os.makedirs(replica.release(release))
        document = {"content": {"unit": {"stop_s": 60}}, "image": f"r/engine@sha256:{release}", "gpus": []}
        Path(replica.release(release), state.RELEASE_FILE).write_text(json.dumps(document))
    state.activate(replica, OLD, keep_previous=False)
    return Machine(tmp_path)


def do(machine: Machine, what: str, check: bool = False, **more: Any) -> dict[str, Any]:
    params = {
        "root": str(machine.root),
        "state": what,
        "replicas": ["short-0"],
        "releases": {},
        "measured": {},
        "verify": False,
        "graceful": True,
        "wait": 0,
        "run": "redeploy-1",
        "by": "ada@desk",
        "phase": "",
        **more,
    }
    module: Any = SimpleNamespace(params=params, check_mode=check, run_command=machine.run_command)
    return engine_switch.Run(module).run()


def forward(machine: Machine) -> None:
    machine.containers[content.container_name("short-0", NEW)] = "created"
    assert do(machine, "stopped")["waiting"] == []
    assert do(machine, "activated", releases={"short-0": NEW})["changed"]
    assert do(machine, "started")["changed"]


def test_forward_to_the_end(machine: Machine) -> None:
    seen = do(machine, "observed")["replicas"][0]
    assert (seen["current"], seen["previous"], seen["running"], seen["record"]) == (OLD, "", True, None)
    forward(machine)
    seen = do(machine, "proven", measured={"short-0": {"p99_s": 1.0}})["replicas"][0]
    assert (seen["current"], seen["previous"], seen["running"]) == (NEW, OLD, True)
    assert (seen["record"]["gated"], seen["gate"]) == (True, {"p99_s": 1.0})
    seen = do(machine, "settled")["replicas"][0]
    assert seen["record"] is None
    names = {content.container_name("short-0", release) for release in (OLD, NEW)}
    assert machine.tags == {f"metalserve/pinned:{name}" for name in names}
    assert machine.containers == {
        content.container_name("short-0", OLD): "exited",
        content.container_name("short-0", NEW): "running",
    }
    assert machine.calls.count("systemctl daemon-reload") == 1, "the unit's times changed once"


def test_each_state_twice_changes_nothing(machine: Machine) -> None:
    forward(machine)
    assert not do(machine, "activated", releases={"short-0": NEW})["changed"]
    assert not do(machine, "started")["changed"]
    do(machine, "proven")
    do(machine, "settled")
    for what in ("started", "proven", "settled"):
        assert not do(machine, what)["changed"], what


def test_back_stops_starts_and_forgets_the_bad_release(machine: Machine) -> None:
    forward(machine)
    do(machine, "stopped", graceful=False)
    assert f"docker stop --time {engine_switch.KILL_S} {content.container_name('short-0', NEW)}" in machine.calls
    do(machine, "activated", releases={"short-0": OLD})
    do(machine, "started")
    do(machine, "proven")
    seen = do(machine, "settled")["replicas"][0]
    assert (seen["current"], seen["previous"], seen["running"], seen["record"]) == (OLD, "", True, None)
    assert seen["releases"] == [OLD]
    assert list(machine.containers) == [content.container_name("short-0", OLD)]


def test_a_unit_that_does_not_stop_is_waited_for(machine: Machine) -> None:
    machine.stubborn = True
    assert do(machine, "stopped")["waiting"] == ["short-0: unit deactivating, container running"]
    assert do(machine, "stopped")["waiting"]
    assert machine.calls.count(f"systemctl stop --no-block {UNIT}") == 1


def test_a_release_without_container_is_not_made_current(machine: Machine) -> None:
    with pytest.raises(engine_switch.SwitchError, match="is not there, so its release cannot start"):
        do(machine, "activated", releases={"short-0": NEW})
    assert state.read_link(str(machine.root / "engines" / "short-0" / "current")) == OLD


def test_a_lock_that_was_lost_stops_the_run(machine: Machine) -> None:
    with pytest.raises(engine_switch.SwitchError, match="not held by run redeploy-1 any more"):
        do(machine, "stopped", phase="stop")
    assert machine.unit == "active"
    lock.hold(str(machine.root / lock.NAME), lock.Holder("redeploy-1", "ada@desk"), 1.0, False)
    assert do(machine, "stopped", phase="stop")["changed"]


def test_a_check_changes_nothing(machine: Machine) -> None:
    machine.containers[content.container_name("short-0", NEW)] = "created"
    for what in ("stopped", "activated"):
        assert do(machine, what, check=True, releases={"short-0": NEW})["changed"]
    do(machine, "settled", check=True)
    assert (machine.unit, state.read_link(str(machine.root / "engines" / "short-0" / "current"))) == ("active", OLD)
    assert not [call for call in machine.calls if call.startswith(("systemctl st", "docker stop"))]


def test_the_node_knows_that_it_is_out(machine: Machine) -> None:
    path = machine.root / "engines" / "short-0" / "rotation.json"
    assert do(machine, "noted_out", check=True)["changed"]
    assert not path.exists()
    assert do(machine, "noted_out")["changed"]
    assert {**json.loads(path.read_text()), "since": ""} == {
        "in": False,
        "by": "ada@desk",
        "run": "redeploy-1",
        "since": "",
    }
    assert not do(machine, "noted_out", run="redeploy-2")["changed"], "it stays with whoever took it out"
    assert json.loads(path.read_text())["run"] == "redeploy-1"
    assert do(machine, "noted_in")["changed"]
    assert not path.exists()
    assert not do(machine, "noted_in")["changed"]
