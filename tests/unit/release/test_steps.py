# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""No sequence of failures and kills leaves a node silently out of rotation, or nobody serving."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ansible_collections.metal.serve.plugins.module_utils.release import headroom, steps
from ansible_collections.metal.serve.plugins.module_utils.release.steps import (
    ACTIVATE,
    DRAIN,
    PROVE,
    RETURN,
    SETTLE,
    START,
    STOP,
    Replica,
    RollbackError,
    node_way,
    replica_of,
    rollback_goal,
    way,
)

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64
OPEN: dict[str, Any] = {"current": NEW, "proven": False, "settled": False}
SERVING = Replica("short-0", OLD, OLD, OLD, running=True, proven=True, inside=True)


def test_the_same_release_needs_nothing() -> None:
    assert way(SERVING) == []


def test_another_release_takes_every_step_once_and_in_order() -> None:
    assert way(replace(SERVING, goal=NEW)) == list(steps.ORDER)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ({"inside": False}, [STOP, ACTIVATE, START, PROVE, RETURN, SETTLE]),
        ({"inside": False, "running": False}, [ACTIVATE, START, PROVE, RETURN, SETTLE]),
        ({"inside": False, "running": False, **OPEN}, [START, PROVE, RETURN, SETTLE]),
        ({"inside": False, **OPEN}, [PROVE, RETURN, SETTLE]),
        ({"inside": False, **OPEN, "proven": True}, [RETURN, SETTLE]),
        ({**OPEN, "proven": True}, [SETTLE]),
        ({"current": NEW}, []),
        (OPEN, [DRAIN, PROVE, RETURN, SETTLE]),
    ],
)
def test_what_a_killed_run_left_is_finished(left: dict[str, Any], expected: list[str]) -> None:
    assert way(replace(SERVING, goal=NEW, **left)) == expected


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ({"inside": False}, [RETURN]),
        ({"inside": False, "running": False}, [START, RETURN]),
        ({"inside": False, "running": False, **OPEN}, [ACTIVATE, START, PROVE, RETURN, SETTLE]),
        ({"inside": False, **OPEN}, [STOP, ACTIVATE, START, PROVE, RETURN, SETTLE]),
        ({**OPEN, "proven": True}, list(steps.ORDER)),
    ],
)
def test_a_failure_goes_back_to_what_served(left: dict[str, Any], expected: list[str]) -> None:
    assert way(replace(SERVING, goal=NEW, failed=True, **left)) == expected


def test_what_a_person_drained_stays_out() -> None:
    held = replace(SERVING, inside=False, held=True)
    assert way(held) == []
    assert way(replace(held, goal=NEW)) == [STOP, ACTIVATE, START, PROVE, SETTLE]


def test_a_node_does_each_step_once_for_the_replicas_that_need_it() -> None:
    other = replace(SERVING, name="short-1", goal=NEW, inside=False)
    assert node_way([replace(SERVING, goal=NEW), other, replace(SERVING, name="short-2")])[:2] == [
        {"step": DRAIN, "replicas": ["short-0"]},
        {"step": STOP, "replicas": ["short-0", "short-1"]},
    ]


@given(
    st.builds(
        Replica,
        name=st.just("short-0"),
        current=st.sampled_from([OLD, NEW, OTHER]),
        goal=st.sampled_from([OLD, NEW]),
        fallback=st.sampled_from([OLD, OTHER]),
        running=st.booleans(),
        proven=st.booleans(),
        settled=st.booleans(),
        inside=st.booleans(),
        held=st.booleans(),
        failed=st.booleans(),
    )
)
def test_every_way_ends_where_it_should_and_never_stops_what_gets_requests(start: Replica) -> None:
    now = start
    for step in way(start):
        assert steps.next_step(now) == step
        if step in (STOP, ACTIVATE, START, PROVE):
            assert not now.inside
        if step == RETURN:
            assert now.proven
            assert now.running
            assert now.current == now.wanted
        now = steps.after(now, step)
    assert now.current == now.wanted
    assert now.running
    assert now.proven
    assert now.inside or now.held
    assert now.settled


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(ValueError, match="'jump' is no step"):
        steps.after(SERVING, "jump")


def seen(**changes: Any) -> dict[str, Any]:
    return {"replica": "short-0", "current": NEW, "previous": OLD, "running": True, "record": None, **changes}


def test_the_look_becomes_a_replica() -> None:
    inside: dict[str, list[dict[str, Any]]] = {"gateway-1": [{"in": True}], "gateway-2": [{"in": True}]}
    assert replica_of(seen(), "", inside, False) == replace(SERVING, current=NEW, goal=NEW, fallback=NEW)
    one_out = {**inside, "gateway-2": [{"in": False, "run": "redeploy-1"}]}
    found = replica_of(seen(record={"from": OLD, "to": NEW, "run": "redeploy-1"}), OTHER, one_out, True)
    assert (found.inside, found.held, found.proven, found.wanted) == (False, False, False, OLD)
    assert replica_of(seen(), "", {"g": [{"in": False, "run": "drain-1"}]}, False).held
    # A gateway that does not know the replica has nothing to put back.
    assert replica_of(seen(), "", {"g": []}, False).inside


def test_rollback_goes_to_what_served_before() -> None:
    assert rollback_goal(seen()) == OLD
    assert rollback_goal(seen(record={"from": OTHER, "to": NEW})) == OTHER


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"previous": NEW}, "previous and current are the same release"),
        ({"previous": ""}, "no previous release"),
        ({"releases": [NEW]}, "no longer on this node"),
    ],
)
def test_i24_rollback_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RollbackError, match=words):
        rollback_goal(seen(**changes))


# --- a fleet, redeployed by runs that fail and are killed ------------------------------------------------------------


@dataclass
class Node:
    """What really is on a node; ``bad`` releases start and then fail their gate, ``dead`` ones do not start."""

    current: str = OLD
    fallback: str = OLD
    running: bool = True
    proven: bool = True
    settled: bool = True
    inside: bool = True
    by: str = ""
    bad: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)

    @property
    def serves(self) -> bool:
        return self.inside and self.running


class KilledError(Exception):
    """The controller is gone; nothing is tidied."""


class StepError(Exception):
    """A step did not succeed."""


class Fleet(RuleBasedStateMachine):
    """Runs as the role does them: look, way, steps; at a failure look again, the way back; then stop the run."""

    @initialize(count=st.integers(2, 4))
    def build(self, count: int) -> None:
        self.nodes = {f"node-{number}": Node() for number in range(count)}
        self.goal = OLD
        self.named: set[str] = set()
        self.lock: str = ""
        self.broken_step: str = ""
        self.kill_at = -1

    def look(self, name: str, failed: bool) -> Replica:
        node = self.nodes[name]
        return replica_of(
            {
                "replica": name,
                "current": node.current,
                "previous": node.fallback,
                "running": node.running,
                "record": None if node.settled else {"from": node.fallback, "gated": node.proven},
            },
            self.goal,
            {"gateway": [{"in": node.inside, "run": node.by}]},
            failed,
        )

    def do(self, name: str, step: str, replica: Replica) -> None:
        node = self.nodes[name]
        if self.kill_at == 0:
            raise KilledError
        self.kill_at -= 1
        if step == self.broken_step:
            self.broken_step = ""
            raise StepError(step)
        if step == DRAIN:
            node.inside, node.by = False, "redeploy-1"
        elif step == STOP:
            node.running = False
        elif step == ACTIVATE:
            if node.settled:
                node.fallback = node.current
            node.current, node.proven, node.settled = replica.wanted, False, False
        elif step == START:
            if node.current in node.dead:
                raise StepError(step)
            node.running = True
        elif step == PROVE:
            if node.current in node.bad:
                raise StepError(step)
            node.proven = True
        elif step == SETTLE:
            node.settled = True
        else:
            node.inside, node.by = True, ""

    def walk(self, name: str, failed: bool) -> None:
        replica = self.look(name, failed)
        for step in way(replica):
            self.do(name, step, replica)
            replica = steps.after(replica, step)

    def run(self) -> bool:
        """One redeploy; True where it ended well."""
        self.lock, self.named = "redeploy-1", set()
        # What serves nobody comes first: it can only add to the headroom.
        for name in sorted(self.nodes, key=lambda name: self.nodes[name].serves):
            if not way(self.look(name, False)):
                continue
            load = headroom.Load("p", tuple(key for key, node in self.nodes.items() if node.serves), 0, 1)
            if headroom.refusals([load], [name]):
                self.named.update(key for key, node in self.nodes.items() if not node.inside)
                self.lock = ""
                return False
            try:
                self.walk(name, False)
            except StepError:
                self.named.add(name)
                with contextlib.suppress(StepError):
                    self.walk(name, True)
                self.named.update(key for key, node in self.nodes.items() if not node.inside)
                self.lock = ""
                return False
        self.lock = ""
        return True

    @rule(goal=st.sampled_from([OLD, NEW, OTHER]), quality=st.sampled_from(["good", "bad", "dead"]))
    def release(self, goal: str, quality: str) -> None:
        self.goal = goal
        for node in self.nodes.values():
            node.bad.discard(goal)
            node.dead.discard(goal)
            if quality != "good" and goal not in (node.current, node.fallback):
                (node.bad if quality == "bad" else node.dead).add(goal)

    @rule(step=st.sampled_from(["", *steps.ORDER]), kill=st.integers(-1, 14))
    def redeploy(self, step: str, kill: int) -> None:
        self.broken_step, self.kill_at = step, kill
        with contextlib.suppress(KilledError):
            self.run()
        self.broken_step, self.kill_at = "", -1

    @rule()
    def next_run_puts_all_right(self) -> None:
        """Whatever happened: a run towards what is good ends with all nodes in, on one release."""
        bad = set().union(*(node.bad | node.dead for node in self.nodes.values()))
        self.goal = next(release for release in (self.goal, OLD, NEW, OTHER) if release not in bad)
        assert self.run()
        assert all(node.serves and node.current == self.goal and node.settled for node in self.nodes.values())

    @precondition(lambda self: hasattr(self, "nodes"))
    @invariant()
    def somebody_serves(self) -> None:
        assert any(node.serves for node in self.nodes.values())

    @precondition(lambda self: hasattr(self, "nodes"))
    @invariant()
    def nobody_is_silently_out(self) -> None:
        """Out means: the run said so, or it was killed and its lock is still there."""
        out = {name for name, node in self.nodes.items() if not node.inside}
        assert self.lock or out <= self.named

    @precondition(lambda self: hasattr(self, "nodes"))
    @invariant()
    def what_gets_requests_was_proven(self) -> None:
        assert all(node.proven for node in self.nodes.values() if node.serves)


Fleet.TestCase.settings = settings(max_examples=80, stateful_step_count=12)
TestFleet = Fleet.TestCase
