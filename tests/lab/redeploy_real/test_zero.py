# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""No client notices a redeploy or a rollback of real engines: each answer is judged by its content."""

from __future__ import annotations

from pathlib import Path

from tests.lab.redeploy import lab
from tests.lab.redeploy_real import real

WAITS = ("wait", "soak")


def run(log: Path, *arguments: str) -> tuple[int, str]:
    """Run scripts/redeploy; return its exit code and what it said, and print what each node's turn took."""
    with lab.script(*arguments, "--log", str(log)) as process:
        output, _ = process.communicate(timeout=1500)
    if process.returncode == 0:
        for host, phases in lab.spent(log, lab.ENGINES).items():
            start_s = real.start_of(host)[1]
            own = start_s + sum(phases.get(name, 0.0) for name in WAITS)
            shown = ", ".join(f"{name} {took:.1f}" for name, took in phases.items())
            print(
                f"{arguments[0]} {host}: {sum(phases.values()):.1f} s ({shown}); its engine's own start {start_s:.1f} s;"
            )
            print(f"  beyond start, drain and soak {sum(phases.values()) - own:.1f} s")
    return process.returncode, output


def test_nothing_is_lost_over_a_redeploy_and_a_rollback(tmp_path: Path) -> None:
    lab.wait_until_all_serve()
    before = {gateway: lab.workers(gateway) for gateway in lab.GATEWAYS}
    releases = [lab.current(node) for node in lab.ENGINES]
    with real.load() as load:
        load.until(50, 120)
        forward = run(tmp_path / "redeploy.jsonl", "redeploy", "-e", "test_seqs=12")
        deployed = [lab.current(node) for node in lab.ENGINES]
        back = run(tmp_path / "rollback.jsonl", "rollback")
        load.until(2000, 900)
    seen = load.seen
    print(f"{seen.good} answers at {seen.rate:.1f}/s, slowest {seen.slowest_s:.2f} s, failed {len(seen.failed)}")
    assert forward[0] == 0, forward[1]
    assert back[0] == 0, back[1]
    assert seen.failed == []
    assert seen.good == seen.sent >= 2000
    assert all(one != other for one, other in zip(releases, deployed, strict=True))
    assert [lab.current(node) for node in lab.ENGINES] == releases
    assert {gateway: lab.workers(gateway) for gateway in lab.GATEWAYS} == before
    lab.wait_until_all_serve()
    assert lab.no_locks() == []
