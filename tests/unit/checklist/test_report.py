# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reports: 100 columns, remedies once, honest differences, valid XML, escaped HTML."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.filter.reports import audit_html
from ansible_collections.metal.serve.plugins.module_utils.checklist.report import (
    difference,
    fleet_exit_code,
    fleet_report,
    host_report,
    render_junit,
    render_terminal,
    render_textfile,
)

from .helpers import verdict


def fleet(**hosts: Any) -> dict[str, Any]:
    """Return a report; a host is a list of (id, verdict) or an error text."""
    made = []
    for name, content in hosts.items():
        if isinstance(content, str):
            made.append(host_report(name, [], content))
        else:
            made.append(host_report(name, [verdict(id, word) for id, word in content]))
    return fleet_report(made, "2027-01-31T03:00:00Z", 1.5)


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
    assert fleet_exit_code(fleet(a=[("x.y", "pass")])) == 0
    assert fleet_exit_code(fleet(a=[("x.y", "pass")], b="unreachable: timed out")) == 2
    assert fleet_exit_code(fleet()) == 2
    assert "NOT JUDGED: unreachable" in render_terminal(fleet(b="unreachable: timed out"))


def test_difference_counts_only_hosts_judged_in_both_runs() -> None:
    before = fleet(a=[("x.old", "fail"), ("x.same", "warn")], gone=[("x.old", "fail")])
    after = fleet(a=[("x.old", "pass"), ("x.same", "warn"), ("x.new", "fail")], gone="unreachable: no route")
    change = difference(before, after)
    assert change["mended"] == [{"host": "a", "id": "x.old"}]
    assert change["new"] == [{"host": "a", "id": "x.new"}]
    assert change["unchanged"] == 1


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
    assert "http" not in page


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
