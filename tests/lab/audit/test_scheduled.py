# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduled audit in the lab: the monitor asks every host, and a host that cannot be asked leads to the alert on its age."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.lab.lab import ENGINES, GATEWAY, NODES, address, fetch, on, playbook

pytestmark = pytest.mark.lab

REPORTS = "/var/lib/metalserve-audit/reports"
TEXTFILE = "/var/lib/prometheus/node-exporter/metalserve_audit.prom"
STAMP = "metalserve_audit_timestamp_seconds"
SEEN_S = 120
"""Seconds after which a change of a textfile has been scraped and its rule evaluated."""


def monitoring(publish: bool) -> None:
    """Run site.yml's part that sets up the schedule, or takes it away."""
    run = playbook("site.yml", "--tags", "monitoring", "-e", json.dumps({"metalserve_audit_publish": publish}))
    assert run.code == 0, run.end


def asked() -> dict[str, dict[str, Any]]:
    """Let the monitor ask all hosts now, as its timer would; return the report's hosts by name."""
    on(GATEWAY, "systemctl start metalserve-audit.service")
    return {one["host"]: one for one in json.loads(on(GATEWAY, f"cat {REPORTS}/audit.json"))["hosts"]}


def stamp(node: str) -> float:
    """Return when the audit that the node publishes ended, as Unix time."""
    return float(on(node, f"grep ^{STAMP} {TEXTFILE}").split()[1])


def query(expression: str) -> dict[str, float]:
    """Return node -> value of what Prometheus answers."""
    answer = json.loads(fetch(GATEWAY, f"http://{address(GATEWAY)}:9090/api/v1/query?query={quote(expression)}"))
    return {one["metric"].get("node", ""): float(one["value"][1]) for one in answer["data"]["result"]}


def old() -> set[str]:
    """Return the nodes of which an alert says that their audit is too old."""
    return set(query('ALERTS{alertname="MetalserveAuditOld",alertstate="firing"}'))


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until Prometheus has seen it."""
    ends = time.monotonic() + SEEN_S
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(3)


@pytest.fixture(scope="module", autouse=True)
def schedule() -> Iterator[None]:
    """Set the schedule up, and take it away at the end: the lab has none."""
    monitoring(True)
    yield
    monitoring(False)
    for node in NODES:
        assert on(node, f"ls {TEXTFILE} 2>/dev/null || true") == ""
    assert on(GATEWAY, "systemctl is-enabled metalserve-audit.timer 2>/dev/null || true").strip() != "enabled"


def test_the_timer_is_there_and_its_service_judges_every_host() -> None:
    assert on(GATEWAY, "systemctl is-active metalserve-audit.timer").strip() == "active"
    began = float(on(GATEWAY, "date +%s"))
    hosts = asked()
    assert {name: one["error"] for name, one in hosts.items()} == dict.fromkeys(NODES, "")
    assert {name: one["notes"] for name, one in hosts.items()} == {name: [] for name in NODES}
    assert {name: one["counts"]["fail"] for name, one in hosts.items()} == dict.fromkeys(NODES, 0)
    assert [node for node in NODES if stamp(node) < began] == []
    until(lambda: len(query(f"{STAMP} >= {began:.0f}")) == len(NODES), "Prometheus has no fresh audit of every node")
    assert old() == set()
    assert "gateway1" in on(GATEWAY, "journalctl -u metalserve-audit.service --no-pager -q -n 400")


def test_a_host_that_cannot_be_asked_is_named_and_its_age_becomes_an_alert() -> None:
    broken, others = ENGINES[0], {*NODES} - {ENGINES[0]}
    known = f"{REPORTS}/known_hosts"
    # As after a host was installed anew: it shows another key than the one that was noted.
    another = on(
        GATEWAY, "rm -f /root/k && ssh-keygen -q -t ed25519 -N '' -f /root/k && cut -d' ' -f1,2 /root/k.pub"
    ).strip()
    on(GATEWAY, f"cp {known} /root/known && sed -i '/^{address(broken)} /d' {known}")
    on(GATEWAY, f"echo '{address(broken)} {another}' >> {known}")
    # And as after a day in which nobody mended it.
    on(broken, f"sed -i 's/^{STAMP} .*/{STAMP} '$(($(date +%s) - 90000))'/' {TEXTFILE}")
    try:
        hosts = asked()
        assert "unreachable" in hosts[broken]["error"]
        assert {name: hosts[name]["error"] for name in others} == dict.fromkeys(others, "")
        assert hosts[broken]["exit_code"] == 2
        assert stamp(broken) < time.time() - 86400
        until(lambda: old() == {broken}, f"no alert on the age of {broken}'s audit")
        said = on(GATEWAY, "journalctl -u metalserve-audit.service --no-pager -q -n 200")
        assert f"{broken}: NOT JUDGED: unreachable" in said
    finally:
        on(GATEWAY, f"mv /root/known {known}; rm -f /root/k /root/k.pub")
    assert asked()[broken]["error"] == ""
    until(lambda: old() == set(), "the alert does not end")
