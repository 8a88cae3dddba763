# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""One audit, many readers: a terminal table, JSON, JUnit XML and a Prometheus textfile from the same value.

The value (``schemas/verdicts.json``) is ``{"started", "seconds", "hosts": [HostReport], "difference"}``; a HostReport
is ``{"host", "error", "counts", "verdicts"}`` where ``error`` says why a host could not be judged at all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Optional
from xml.etree import ElementTree

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import EXIT_FAIL, count, exit_code
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    FAIL,
    NOT_APPLICABLE,
    PASS,
    UNKNOWN,
    WARN,
    Verdict,
)

WIDTH = 100
_MARKS = {FAIL: "FAIL", UNKNOWN: "????", WARN: "warn", PASS: "ok", NOT_APPLICABLE: "n/a"}


def host_report(host: str, verdicts: Sequence[Verdict], error: str = "") -> dict[str, Any]:
    """Return the report of one host; ``error`` is set where it was unreachable or its audit did not run."""
    return {
        "host": host,
        "error": error,
        "counts": count(verdicts),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
    }


def fleet_report(
    hosts: Sequence[Mapping[str, Any]],
    started: str,
    seconds: float,
    previous: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    """Return the whole report, worst hosts first, with the difference to ``previous`` where there is one."""
    ordered = sorted(
        hosts, key=lambda one: (not one["error"], [-one["counts"][name] for name in (FAIL, UNKNOWN, WARN)])
    )
    report: dict[str, Any] = {"started": started, "seconds": round(seconds, 1), "hosts": list(ordered)}
    report["difference"] = difference(previous, report) if previous else None
    return report


def fleet_exit_code(report: Mapping[str, Any], strict: bool = False) -> int:
    """Return the worst exit code of the hosts; 2 where there is no host or one could not be judged."""
    codes = [
        EXIT_FAIL if host["error"] else exit_code([Verdict(**item) for item in host["verdicts"]], strict)
        for host in report["hosts"]
    ]
    return max(codes, default=EXIT_FAIL)


def difference(previous: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is ``new`` (a problem only now), what is ``mended``, and how many are ``unchanged``.

    Only hosts that were judged in both runs count: a host that was unreachable has mended nothing.
    """
    before, after = _problems(previous), _problems(current)
    both = _judged(previous) & _judged(current)
    return {
        "since": previous.get("started", ""),
        "new": [{"host": host, "id": id} for host, id in sorted(after - before) if host in both],
        "mended": [{"host": host, "id": id} for host, id in sorted(before - after) if host in both],
        "unchanged": len([pair for pair in before & after if pair[0] in both]),
    }


def _judged(report: Mapping[str, Any]) -> set[str]:
    return {host["host"] for host in report["hosts"] if not host["error"]}


def _problems(report: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {
        (host["host"], item["id"])
        for host in report["hosts"]
        for item in host["verdicts"]
        if item["verdict"] in (FAIL, WARN, UNKNOWN) and not item["waiver"]
    }


def render_terminal(report: Mapping[str, Any], passed_too: bool = False) -> str:
    """Return a table per host, worst first, at most 100 columns wide, then each remedy once."""
    lines: list[str] = []
    remedies: dict[str, tuple[str, list[str]]] = {}
    for host in report["hosts"]:
        lines += [f"{host['host']}: {_summary(host)}", "-" * WIDTH]
        for item in host["verdicts"]:
            if item["verdict"] in (FAIL, WARN, UNKNOWN):
                lines += _row(item)
                if not item["waiver"]:
                    remedies.setdefault(item["id"], (_remedy(item), []))[1].append(host["host"])
            elif passed_too:
                lines += _row(item)
        lines.append("")
    if remedies:
        lines += ["What mends it", "-" * WIDTH]
        for id, (remedy, hosts) in remedies.items():
            lines += _wrap(f"{id} ({_some(hosts)}): {remedy}", "", "    ")
        lines.append("")
    return "\n".join(lines + _difference_lines(report)) + "\n"


def _summary(host: Mapping[str, Any]) -> str:
    if host["error"]:
        return f"NOT JUDGED: {host['error']}"
    counts = host["counts"]
    words = (("fail", FAIL), ("unknown", UNKNOWN), ("warn", WARN), ("pass", PASS), ("not applicable", NOT_APPLICABLE))
    parts = [f"{counts[name]} {word}" for word, name in words if counts[name] or name in (FAIL, PASS)]
    return ", ".join([*parts, f"{counts['waived']} waived"] if counts["waived"] else parts)


def _row(item: Mapping[str, Any]) -> list[str]:
    mark = "waived" if item["waiver"] else _MARKS[item["verdict"]]
    text = show(item["current"])
    if item["verdict"] in (FAIL, WARN) and item["desired"] is not None:
        text += f"; should be {show(item['desired'])}"
    if item["waiver"]:
        text += f" (waived until {item['waiver']['until']}: {item['waiver']['reason']})"
    rows = _wrap(text or item["title"], f"{mark:<6} {item['id']:<34} ", " " * 42)
    for line in item["evidence"] if item["verdict"] in (FAIL, WARN) else []:
        rows += _wrap(f"| {line}", " " * 42, " " * 44)
    return rows


def _remedy(item: Mapping[str, Any]) -> str:
    tags = f" (site.yml --tags {','.join(item['tags'])})" if item["tags"] else ""
    return f"{item['remedy']}{tags}. Why: {item['why']}"


def show(value: Any) -> str:
    """Return ``value`` as a person writes it: lists with commas, mappings as key=value, None as nothing."""
    if isinstance(value, (list, tuple)):
        return ", ".join(show(one) for one in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={show(one)}" for key, one in value.items())
    return "" if value is None else str(value)


def _some(hosts: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(hosts[:limit])
    return shown if len(hosts) <= limit else f"{shown} and {len(hosts) - limit} more"


def _wrap(text: str, first: str, following: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    ) or [first.rstrip()]


def _difference_lines(report: Mapping[str, Any]) -> list[str]:
    change = report.get("difference")
    if not change:
        return []
    lines = [
        f"Since {change['since']}: {len(change['new'])} new, {len(change['mended'])} mended, "
        f"{change['unchanged']} unchanged"
    ]
    for word in ("new", "mended"):
        lines += [f"    {word}: {one['host']} {one['id']}" for one in change[word]]
    return lines


def render_junit(report: Mapping[str, Any]) -> str:
    """Return JUnit XML, a suite per host: fail a failure, unknown an error, not applicable and waived skipped."""
    root = ElementTree.Element("testsuites", name="metalserve audit", time=str(report["seconds"]))
    for host in report["hosts"]:
        suite = ElementTree.SubElement(root, "testsuite", name=host["host"], timestamp=report["started"])
        failures = errors = skipped = 0
        if host["error"]:
            case = ElementTree.SubElement(suite, "testcase", classname=host["host"], name="audit")
            ElementTree.SubElement(case, "error", message=_xml_safe(host["error"]))
            errors += 1
        for item in host["verdicts"]:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{host['host']}.{item['id']}", name=item["title"]
            )
            message = _xml_safe(f"{show(item['current'])}; should be {show(item['desired'])}")
            if item["waiver"] or item["verdict"] == NOT_APPLICABLE:
                ElementTree.SubElement(case, "skipped", message=message)
                skipped += 1
            elif item["verdict"] == FAIL:
                node = ElementTree.SubElement(case, "failure", message=message, type=item["severity"])
                node.text = _xml_safe("\n".join([*item["evidence"], item["remedy"]]))
                failures += 1
            elif item["verdict"] == UNKNOWN:
                ElementTree.SubElement(case, "error", message=message)
                errors += 1
            elif item["verdict"] == WARN:
                ElementTree.SubElement(case, "system-out").text = f"warning: {message}"
        tests = len(host["verdicts"]) + bool(host["error"])
        for key, value in (("tests", tests), ("failures", failures), ("errors", errors), ("skipped", skipped)):
            suite.set(key, str(value))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def render_textfile(host: Mapping[str, Any], finished: float) -> str:
    """Return one host's verdicts for the node exporter's textfile collector; ``finished`` is Unix time in seconds."""
    lines = [
        "# HELP metalserve_check Verdict of one check of the last audit (1 = this one).",
        "# TYPE metalserve_check gauge",
    ]
    for item in sorted(host["verdicts"], key=lambda one: str(one["id"])):
        verdict = "waived" if item["waiver"] else item["verdict"]
        lines.append(f'metalserve_check{{id="{item["id"]}",verdict="{verdict}"}} 1')
    lines += [
        "# HELP metalserve_audit_timestamp_seconds When the last audit of this host ended.",
        "# TYPE metalserve_audit_timestamp_seconds gauge",
        f"metalserve_audit_timestamp_seconds {finished:.0f}",
    ]
    return "\n".join(lines) + "\n"


def _xml_safe(text: str) -> str:
    """Drop the control characters that XML 1.0 cannot hold."""
    return "".join(
        char
        for char in text
        if char in "\t\n"
        or (ord(char) >= 0x20 and not 0xD800 <= ord(char) <= 0xDFFF and ord(char) not in (0xFFFE, 0xFFFF))
    )
