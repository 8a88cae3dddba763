# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a real browser: it loads, asks for nothing, filters, and is legible in light, dark, narrow and print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.filter.reports import audit_html
from ansible_collections.metal.serve.plugins.module_utils.checklist.report import (
    baseline_after,
    fleet_report,
    host_report,
)

from .browser import PROGRAM, Page, browser
from .helpers import verdict

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium that runs (scripts/test setup installs Debian's)")

WAIVER = {"reason": "the firmware owns it", "until": "2027-06-30"}


def report() -> dict[str, Any]:
    """Return a small fleet with everything that the page can show."""
    bad = verdict("driver.minimum_version", "fail", severity="critical", current="470.82.01", desired=">= 525.85.12")
    dark = verdict("gpu.count", "unknown", severity="critical", current="nvidia_smi: timeout", tags=[])
    warned = verdict("container.init", "warn", severity="minor", current="no init: <b>short-0</b>")
    waived = verdict("topology.cpu_governor", "fail", severity="minor", waiver=WAIVER)
    ended = verdict("limits.dockerd", "fail", ended_waiver={"reason": "until the new image", "until": "2027-01-01"})
    fine = [verdict("numa.balancing", "pass"), verdict("topology.acs", "not_applicable", current="tensor parallel 1")]
    hosts = [
        host_report("node-a", [bad, dark, warned, waived, *fine]),
        host_report("node-b", [ended, warned, *fine], notes=["Not published: the folder is not there."]),
        host_report("gate-a", fine),
        host_report("node-c", [], "unreachable: ssh: connect to host 192.0.2.13 port 22: No route to host"),
    ]
    before = [
        host_report("node-a", [*fine, verdict("gpu.count", "pass")]),
        host_report("gate-a", [verdict("numa.balancing", "fail")]),
    ]
    known = baseline_after(None, fleet_report(before, "2027-01-30T03:00:00Z", 1.0))
    return fleet_report(hosts, "2027-01-31T03:00:00Z", 4.2, known)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("page") / "audit.html"
    path.write_text(audit_html(report()), encoding="utf-8")
    with browser() as opened:
        opened.path = path  # type: ignore[attr-defined]
        yield opened


@pytest.fixture(autouse=True)
def fresh(page: Page) -> None:
    page.media()
    page.open(page.path)  # type: ignore[attr-defined]


def ids(page: Page) -> list[str]:
    """Return the checks whose rows are shown."""
    return [re.findall(r"[a-z]+\.[a-z_]+", text)[0] for text in page.visible("section.host tbody tr .check code")]


def test_it_loads_without_a_complaint_and_asks_for_nothing_else(page: Page) -> None:
    assert page.errors == []
    assert set(page.requests) == {page.path.as_uri()}  # type: ignore[attr-defined]
    assert page.visible(".banner") == ["3 of 4 hosts are not fit to serve or could not be judged"]
    assert page.run("document.title") == "Serving audit 2027-01-31 03:00:00 UTC"


def test_problems_are_shown_first_and_everything_on_request(page: Page) -> None:
    problems = ["driver.minimum_version", "gpu.count", "container.init", "limits.dockerd", "container.init"]
    assert ids(page) == problems
    page.choose("show", "all")
    assert len(ids(page)) == 12
    assert "topology.cpu_governor" in ids(page)


def test_host_severity_and_text_filter(page: Page) -> None:
    page.choose("host", "node-b")
    assert ids(page) == ["limits.dockerd", "container.init"]
    assert len(page.visible("section.host")) == 1
    assert [text.split()[0] for text in page.visible(".remedy h3")] == ["fails", "warning"]
    page.choose("severity", "minor")
    assert ids(page) == ["container.init"]
    page.choose("host", "")
    page.choose("severity", "critical")
    assert ids(page) == ["driver.minimum_version", "gpu.count"]
    page.choose("severity", "")
    page.choose("find", "470.82")
    assert ids(page) == ["driver.minimum_version"]
    page.choose("find", "no such thing")
    assert page.visible("#nothing") == ["Nothing matches these filters."]


def test_each_remedy_is_told_once_with_its_hosts(page: Page) -> None:
    told = page.visible(".remedy")
    assert len(told) == 3
    assert re.findall(r"node-[a-c]", next(text for text in told if "container.init" in text)) == ["node-a", "node-b"]


def test_a_host_that_was_not_judged_is_seen_with_its_reason(page: Page) -> None:
    assert any("No route to host" in text for text in page.visible("section.host header"))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_nothing_runs_over_the_edge(page: Page, width: int, scheme: str) -> None:
    page.media(scheme=scheme)
    page.open(page.path, width)  # type: ignore[attr-defined]
    page.choose("show", "all")
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("kind", "scheme"), [("screen", "light"), ("screen", "dark"), ("print", "light"), ("print", "dark")]
)
def test_every_text_stands_out_from_what_is_behind_it(page: Page, kind: str, scheme: str) -> None:
    page.media(kind, scheme)
    page.open(page.path)  # type: ignore[attr-defined]
    page.choose("show", "all")
    low = page.run(CONTRAST)
    assert low == []
    if kind == "print":
        assert page.visible("form") == []
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


# Text whose contrast with the nearest solid background is below 4.5 (WCAG AA).
CONTRAST = """
(() => {
  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = getComputedStyle(at).backgroundColor;
      if (/^rgb\\(/.test(found)) return light(numbers(found));
    }
    return light(numbers(getComputedStyle(document.body).backgroundColor));
  };
  const low = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.checkVisibility() || one.tagName === "SCRIPT") continue;
    const [high, below] = [light(numbers(getComputedStyle(one).color)), behind(one)].sort((a, b) => b - a);
    if ((high + 0.05) / (below + 0.05) < 4.5) low.push(one.tagName + " " + one.textContent.trim().slice(0, 40));
  }
  return low;
})()
"""
