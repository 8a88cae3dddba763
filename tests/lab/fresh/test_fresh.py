# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""On machines that were never touched: check mode tells the truth and writes nothing; interruptions do no harm."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time

import pytest

from tests.lab.lab import NODES, ROOT, environment, on, owned_files, playbook, playbook_command

pytestmark = pytest.mark.lab

# What a real run creates that a check run cannot know: made by programs and packages, not by the bundle's own tasks.
# docs/check-mode.md says why for each.
FROM_PROGRAMS = re.compile(
    (ROOT / "tests" / "lab" / "not_in_check_diff.txt").read_text(encoding="utf-8").replace("\n", "|").rstrip("|")
)


def paths_in_diff(output: str) -> set[str]:
    """Return the paths that a --diff output names as files that would be there after the run."""
    return set(re.findall(r"^\+\+\+ after: (/\S+)", output, flags=re.MULTILINE))


def of_packages(node: str) -> set[str]:
    """Return the paths that the node's installed packages call theirs."""
    lists = on(node, "sed 's/^remove-on-upgrade //' /var/lib/dpkg/info/*.list /var/lib/dpkg/info/*.conffiles | sort -u")
    return set(lists.splitlines())


def newest(node: str) -> str:
    """Return everything below the owned folders with its time, to show that a check run wrote nothing."""
    return on(
        node, "find /etc /opt /var/lib -xdev -printf '%p %T@ %m\\n' 2>/dev/null | grep -v '^/var/lib/systemd' | sort"
    )


@pytest.fixture(scope="module")
def promised() -> dict[str, set[str]]:
    """Run site.yml --check --diff on the fresh nodes; return the promised paths per node (all nodes' output is one)."""
    before = {node: newest(node) for node in NODES}
    run = playbook("site.yml", "--check", "--diff")
    assert run.code == 0, run.end
    assert {node: newest(node) for node in NODES} == before, "a check run wrote to a node"
    return {"all": paths_in_diff(run.output)}


def test_check_mode_on_fresh_nodes_promises_files(promised: dict[str, set[str]]) -> None:
    assert len(promised["all"]) > 20


def test_five_interrupted_runs_then_one_completes_and_keeps_the_promise(promised: dict[str, set[str]]) -> None:
    before = {node: set(owned_files(node)) for node in NODES}
    rng = random.Random(int(os.environ.get("METALSERVE_SEED", "20261130")))
    for _ in range(5):
        process = subprocess.Popen(
            playbook_command("site.yml"),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(rng.uniform(6, 45))
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=120)
    run = playbook("site.yml")
    assert run.code == 0, run.end
    new = {node: set(owned_files(node)) - before[node] for node in NODES}
    ours = {path for node in NODES for path in new[node] - of_packages(node) if not FROM_PROGRAMS.match(path)}
    assert sorted(ours - promised["all"]) == [], "created, but not in the check run's diff"
    created = set().union(*new.values())
    kept = {path for path in promised["all"] if path in created or any(one.startswith(path + "/") for one in created)}
    below = ("/etc/", "/opt/", "/var/lib/metalserve/")
    assert sorted(path for path in promised["all"] - kept if path.startswith(below)) == [], "promised, but not created"
