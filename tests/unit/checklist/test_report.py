# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reports: 100 columns, remedies once, honest differences, valid XML, escaped HTML."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.filter.reports import audit_html
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Verdict
from ansible_collections.metal.serve.plugins.module_utils.checklist.report import (
    baseline_after,
    baseline_from,
    fleet_report,
    host_report,
    render_junit,
    render_terminal,
    render_textfile,
)

from .helpers import verdict

WAIVER = {"reason": "known", "until": "2027-06-30"}


def _verdict(id: str, word: str) -> Verdict:
    return verdict(id, "fail", waiver=WAIVER) if word == "waived" else verdict(id, word)


def fleet(baseline: Any = None, areas: tuple[str, ...] = (), **hosts: Any) -> dict[str, Any]:
    """Return a report; a host is a list of (id, verdict) or an error text."""
    made = []
    for name, content in hosts.items():
        if isinstance(content, str):
            made.append(host_report(name, [], content))
        else:
            made.append(host_report(name, [_verdict(*one) for one in content]))
    return fleet_report(made, "2027-01-31T03:00:00Z", 1.5, baseline, areas)


def test_terminal_is_at_most_100_columns_worst_host_first_and_each_remedy_once() -> None:
    text = render_terminal(
        fleet(a=[("gpu.x", "pass")], b=[("gpu.x", "fail"), ("gpu.y", "fail")], c=[("gpu.x", "fail")])
    )
    assert max(map(len, text.splitlines())) <= 100
    assert text.index("b: ") < text.index("c: ") < text.index("a: ")
    assert text.count("mend gpu.x") == 1
    assert "gpu.x (b, c)" in text


@given(st.text(max_size=400), st.lists(st.text(max_size=300), max_size=3))
def test_whatever_was_found_terminal_and_xml_hold(current: str, evidence: list[str]) -> None:
    report = fleet_report(
        [host_report("h", [verdict("a.b", "fail", current=current, evidence=evidence)])], "2027-01-31", 1.0
    )
    assert max(map(len, render_terminal(report).splitlines())) <= 100
    root = ElementTree.fromstring(render_junit(report))
    assert root[0].get("failures") == "1"


def test_unreachable_is_a_failure_and_no_host_is_one_too() -> None:
    assert fleet(a=[("x.y", "pass")])["exit_code"] == 0
    assert fleet(a=[("x.y", "pass")], b="unreachable: timed out")["exit_code"] == 2
    assert fleet()["exit_code"] == 2
    text = render_terminal(fleet(a=[("x.y", "pass")], b="unreachable: timed out"))
    assert "b: NOT JUDGED: unreachable" in text
    assert "2 hosts in 1.5 s, 1 not judged. Exit code 2" in text


def changes(report: dict[str, Any]) -> dict[str, Any]:
    """Return the difference as short texts."""
    found = report["difference"]
    short = {
        key: [f"{one['host']} {one['id']} {one['before'] or '-'}>{one['now']}" for one in found[key]]
        for key in ("new", "mended", "dropped")
    }
    return {**{key: value for key, value in short.items() if value}, "unchanged": found["unchanged"]}


def test_the_first_audit_has_nothing_to_compare_with() -> None:
    assert fleet(a=[("x.y", "pass")])["difference"] is None
    known = baseline_after(None, fleet(a=[("x.y", "pass")]))
    assert "No earlier audit of these hosts" in render_terminal(fleet(known, b=[("x.y", "pass")]))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("fail", "pass", {"mended": ["a x.y fail>pass"], "unchanged": 0}),
        ("pass", "fail", {"new": ["a x.y pass>fail"], "unchanged": 0}),
        ("not_applicable", "warn", {"new": ["a x.y not_applicable>warn"], "unchanged": 0}),
        ("warn", "fail", {"new": ["a x.y warn>fail"], "unchanged": 0}),
        ("unknown", "fail", {"new": ["a x.y unknown>fail"], "unchanged": 0}),
        ("fail", "unknown", {"unchanged": 1}),
        ("fail", "warn", {"unchanged": 1}),
        ("fail", "fail", {"unchanged": 1}),
        ("fail", "waived", {"dropped": ["a x.y fail>waived"], "unchanged": 0}),
        ("fail", "not_applicable", {"dropped": ["a x.y fail>not_applicable"], "unchanged": 0}),
        ("waived", "fail", {"new": ["a x.y waived>fail"], "unchanged": 0}),
        ("waived", "waived", {"unchanged": 0}),
        ("pass", "pass", {"unchanged": 0}),
    ],
)
def test_difference_of_one_check(before: str, after: str, said: dict[str, Any]) -> None:
    known = baseline_after(None, fleet(a=[("x.y", before)]))
    assert changes(fleet(known, a=[("x.y", after)])) == said


def test_a_host_that_does_not_answer_mends_nothing_and_is_compared_when_it_is_back() -> None:
    first = baseline_after(None, fleet(a=[("x.y", "fail")], b=[("x.y", "pass")]))
    gone = fleet(first, a="unreachable: no route", b=[("x.y", "pass")])
    assert changes(gone) == {"unchanged": 0}
    back = fleet(baseline_after(first, gone), a=[("x.y", "pass")], b=[("x.y", "fail")])
    assert changes(back) == {"mended": ["a x.y fail>pass"], "new": ["b x.y pass>fail"], "unchanged": 0}


def test_an_audit_of_some_areas_or_hosts_leaves_the_rest_of_the_baseline() -> None:
    first = baseline_after(None, fleet(a=[("x.y", "fail"), ("z.y", "fail")], b=[("x.y", "fail")]))
    part = fleet(first, ("x",), a=[("x.y", "pass")])
    assert changes(part) == {"mended": ["a x.y fail>pass"], "unchanged": 0}
    assert "Only these areas were judged: x." in render_terminal(part)
    whole = fleet(baseline_after(first, part), a=[("x.y", "pass"), ("z.y", "fail")], b=[("x.y", "fail")])
    assert changes(whole) == {"unchanged": 2}


@pytest.mark.parametrize("value", [None, [], 3, {}, {"hosts": []}, {"hosts": {"a": 3}}, {"hosts": {"a": {"at": 1}}}])
def test_nonsense_is_no_baseline(value: Any) -> None:
    found = baseline_from(value)
    assert found is None or found["hosts"] == {}


def test_a_waiver_that_ended_says_so_and_counts() -> None:
    ended = verdict("a.b", "fail", ended_waiver={"reason": "known", "until": "2027-01-30"})
    report = fleet_report([host_report("a", [ended])], "2027-01-31T03:00:00Z", 1.0)
    assert report["exit_code"] == 2
    assert "its waiver ended 2027-01-30: known" in " ".join(render_terminal(report).split())
    assert "2027-01-30" in audit_html(report)


def test_a_host_of_which_not_all_was_seen_is_not_called_fit() -> None:
    report = fleet(a=[("x.fine", "pass"), ("x.dark", "unknown")], b=[("x.fine", "pass")])
    assert report["exit_code"] == 0
    assert "2 hosts in 1.5 s, 1 not fully judged. Exit code 0" in render_terminal(report)
    assert "No check fails, but 1 of 2 hosts" in audit_html(report)
    assert "All 2 hosts are fit to serve" in audit_html(fleet(a=[("x.fine", "pass")], b=[("x.fine", "pass")]))


def test_an_unknown_offers_no_remedy() -> None:
    text = render_terminal(fleet(a=[("x.dark", "unknown"), ("x.bad", "fail")]))
    assert "mend x.bad" in text
    assert "mend x.dark" not in text
    assert "neither good nor bad" in text


def test_junit_counts_match_its_children() -> None:
    report = fleet(a=[("x.a", "pass"), ("x.b", "fail"), ("x.c", "unknown"), ("x.d", "not_applicable"), ("x.e", "warn")])
    (suite,) = ElementTree.fromstring(render_junit(report))
    counts = [int(suite.get(key, "-1")) for key in ("tests", "failures", "errors", "skipped")]
    assert counts == [5, 1, 1, 1]
    assert [len(suite.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped")] == [1, 1, 1]


def test_html_escapes_what_a_host_said_and_loads_nothing_from_outside() -> None:
    hostile = verdict("a.b", "fail", current="<script>alert(1)</script>", evidence=["</pre><img src=x>"])
    page = audit_html(fleet_report([host_report("h<i>", [hostile])], "2027-01-31", 1.0))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "h&lt;i&gt;" in page
    assert "://" not in page


def test_textfile_has_one_sample_per_check() -> None:
    lines = render_textfile(
        host_report("h", [verdict("b.x", "fail"), verdict("a.x", "pass")]), 1800000000.4
    ).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert samples == [
        'metalserve_check{id="a.x",verdict="pass"} 1',
        'metalserve_check{id="b.x",verdict="fail"} 1',
        "metalserve_audit_timestamp_seconds 1800000000",
    ]
