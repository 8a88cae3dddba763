# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""One audit, many readers: a terminal table, JSON, JUnit XML and a Prometheus textfile from the same value.

The value (``schemas/verdicts.json``) is a FleetReport: ``started``, ``seconds``, ``areas``, ``strict``, ``exit_code``,
``hosts`` and ``difference``. A host's ``error`` says why it could not be judged at all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional
from xml.etree import ElementTree

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import EXIT_FAIL, count, exit_code
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    FAIL,
    NOT_APPLICABLE,
    PASS,
    SEVERITIES,
    UNKNOWN,
    VERDICTS,
    WARN,
    Verdict,
)

WIDTH = 100
PROBLEMS = (FAIL, UNKNOWN, WARN)
WAIVED = "waived"
_MARKS = {FAIL: "FAIL", UNKNOWN: "????", WARN: "warn", PASS: "ok", NOT_APPLICABLE: "n/a"}
_MEANS = {
    0: "nothing was found that must be mended",
    1: "warnings or unknowns, and metalserve_audit_strict counts them",
    2: "something fails, or a host could not be judged",
}


def host_report(
    host: str, verdicts: Sequence[Verdict], error: str = "", strict: bool = False, notes: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the report of one host; ``error`` is set where it was unreachable or its audit did not run."""
    return {
        "host": host,
        "error": error,
        "notes": list(notes),
        "exit_code": EXIT_FAIL if error else exit_code(verdicts, strict),
        "counts": count(verdicts),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
    }


def fleet_report(
    hosts: Sequence[Mapping[str, Any]],
    started: str,
    seconds: float,
    baseline: Optional[Mapping[str, Any]] = None,
    areas: Sequence[str] = (),
    strict: bool = False,
) -> dict[str, Any]:
    """Return the whole report, worst hosts first, with the difference to ``baseline`` where there is one.

    No host at all is a failure: an audit that looked at nothing has found nothing good.
    """
    ordered = sorted(
        hosts,
        key=lambda one: (not one["error"], [-one["counts"][name] for name in (FAIL, UNKNOWN, WARN)], one["host"]),
    )
    return {
        "schema_version": 1,
        "started": started,
        "seconds": round(seconds, 1),
        "areas": list(areas),
        "strict": strict,
        "exit_code": max((one["exit_code"] for one in ordered), default=EXIT_FAIL),
        "hosts": list(ordered),
        "difference": difference(baseline, ordered) if baseline else None,
    }


def state_of(item: Mapping[str, Any]) -> str:
    """Return the word a verdict is shown and compared by: ``waived`` for a waived one."""
    return WAIVED if item["waiver"] else str(item["verdict"])


def difference(baseline: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is ``new`` (a problem only now, or a worse one), ``mended`` (passes now), ``dropped`` and ``unchanged``.

    ``dropped`` are problems that ended without a pass: waived, or no longer applicable. Hosts that were not judged now or
    before are left out: a host that does not answer has mended nothing.
    """
    found: dict[str, Any] = {"since": "", "new": [], "mended": [], "dropped": [], "unchanged": 0}
    compared = []
    for host in sorted(hosts, key=lambda one: str(one["host"])):
        known = baseline["hosts"].get(host["host"])
        if host["error"] or known is None:
            continue
        compared.append(known["at"])
        for item in sorted(host["verdicts"], key=lambda one: str(one["id"])):
            before, now = known["verdicts"].get(item["id"], ""), state_of(item)
            change = {"host": host["host"], "id": item["id"], "before": before, "now": now}
            if now in PROBLEMS:
                if before in PROBLEMS and PROBLEMS.index(before) <= PROBLEMS.index(now):
                    found["unchanged"] += 1
                else:
                    found["new"].append(change)
            elif before in PROBLEMS:
                found["mended" if now == PASS else "dropped"].append(change)
    found["since"] = min(compared, default="")
    return found


def baseline_after(baseline: Optional[Mapping[str, Any]], report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the next audit compares with: each host's last known verdicts.

    A host that was not judged keeps what was known of it, and an audit of some areas leaves the others as they were.
    """
    hosts = dict(baseline["hosts"]) if baseline else {}
    for host in report["hosts"]:
        if not host["error"]:
            known = hosts.get(host["host"], {"verdicts": {}})["verdicts"] if report["areas"] else {}
            now = {item["id"]: state_of(item) for item in host["verdicts"]}
            hosts[host["host"]] = {"at": report["started"], "verdicts": {**known, **now}}
    return {"schema_version": 1, "hosts": hosts}


def baseline_from(value: Any) -> Optional[dict[str, Any]]:
    """Return ``value`` (a file's JSON) as a baseline, or None where it is none."""
    hosts = value.get("hosts") if isinstance(value, Mapping) else None
    if not isinstance(hosts, Mapping):
        return None
    good = {
        str(name): {"at": str(one["at"]), "verdicts": {str(id): str(word) for id, word in one["verdicts"].items()}}
        for name, one in hosts.items()
        if isinstance(one, Mapping) and isinstance(one.get("verdicts"), Mapping) and "at" in one
    }
    return {"schema_version": 1, "hosts": good}


def render_terminal(report: Mapping[str, Any], passed_too: bool = False) -> str:
    """Return a table per host, worst first, at most 100 columns wide, then each remedy once, then what it comes to."""
    lines: list[str] = []
    for host in report["hosts"]:
        lines += [*_wrap(f"{host['host']}: {_summary(host)}", "", "    "), "-" * WIDTH]
        for note in host["notes"]:
            lines += _wrap(note, "note   ", " " * 7)
        for item in host["verdicts"]:
            if item["verdict"] in PROBLEMS or passed_too:
                lines += _row(item)
        lines.append("")
    if any(host["counts"][UNKNOWN] for host in report["hosts"]):
        lines += [
            f"{_MARKS[UNKNOWN]} is neither good nor bad: it could not be seen. The line names what was not read.",
            "",
        ]
    mend = remedies(report)
    lines += ["What mends it", "-" * WIDTH] if mend else []
    for item, hosts in mend:
        lines += _remedy(item, hosts)
    return "\n".join([*lines, *_difference_lines(report), *_end(report)]) + "\n"


def remedies(report: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Return each check that fails or warns somewhere, once, with the hosts: failures first, then by severity.

    Unknown is not among them: what could not be seen may need no mending.
    """
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for host in report["hosts"]:
        for item in host["verdicts"]:
            if item["verdict"] in (FAIL, WARN) and not item["waiver"]:
                found.setdefault(item["id"], (item, []))[1].append(host["host"])
    return sorted(
        found.values(), key=lambda pair: (VERDICTS.index(pair[0]["verdict"]), SEVERITIES.index(pair[0]["severity"]))
    )


def _summary(host: Mapping[str, Any]) -> str:
    if host["error"]:
        return f"NOT JUDGED: {host['error']}"
    counts = host["counts"]
    words = (("fail", FAIL), ("unknown", UNKNOWN), ("warn", WARN), ("pass", PASS), ("not applicable", NOT_APPLICABLE))
    parts = [f"{counts[name]} {word}" for word, name in words if counts[name] or name in (FAIL, PASS)]
    return ", ".join([*parts, f"{counts['waived']} waived"] if counts["waived"] else parts)


def _row(item: Mapping[str, Any]) -> list[str]:
    mark = WAIVED if item["waiver"] else _MARKS[item["verdict"]]
    text = show(item["current"])
    if item["verdict"] in (FAIL, WARN) and item["desired"] is not None:
        text += f"; should be {show(item['desired'])}"
    if item["waiver"]:
        text += f" (waived until {item['waiver']['until']}: {item['waiver']['reason']})"
    if item["ended_waiver"]:
        text += f" (its waiver ended {item['ended_waiver']['until']}: {item['ended_waiver']['reason']})"
    rows = _wrap(text or item["title"], f"{mark:<6} {item['severity']:<8} {item['id']:<33} ", " " * 50)
    for line in item["evidence"] if item["verdict"] in (FAIL, WARN) else []:
        rows += _wrap(f"| {line}", " " * 50, " " * 52)
    return rows


def _remedy(item: Mapping[str, Any], hosts: Sequence[str]) -> list[str]:
    command = f"ansible-playbook site.yml --tags {','.join(item['tags'])}" if item["tags"] else ""
    return [
        *_wrap(f"{item['id']} ({_some(hosts)}): {item['title']}", "", "    "),
        *_wrap(item["remedy"], "    remedy: ", "            "),
        *([f"    run:    {command}"] if command else []),
        *_wrap(item["why"], "    why:    ", "            "),
        "",
    ]


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
    """Return ``text`` in lines of at most WIDTH printable characters; what a host said may hold anything."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return textwrap.wrap(
        " ".join(plain.split()), WIDTH, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    ) or [first.rstrip()]


def _difference_lines(report: Mapping[str, Any]) -> list[str]:
    change = report["difference"]
    if change is None:
        return []
    if not change["since"]:
        return ["No earlier audit of these hosts to compare with."]
    lines = [
        f"Since {change['since']}: {len(change['new'])} new, {len(change['mended'])} mended, "
        f"{change['unchanged']} unchanged" + (f", {len(change['dropped'])} dropped" if change["dropped"] else "")
    ]
    for word in ("new", "mended", "dropped"):
        for one in change[word]:
            lines += _wrap(
                f"{word:<8} {one['host']} {one['id']} ({one['before'] or 'not judged'} -> {one['now']})",
                "    ",
                "      ",
            )
    return lines


def verdict_line(report: Mapping[str, Any]) -> str:
    """Return the audit in one sentence."""
    hosts = report["hosts"]
    if not hosts:
        return "No host was audited. Exit code 2: an audit of nothing is a failure."
    found = [kind_of(host) for host in hosts]
    parts = [f"{len(hosts)} host{'' if len(hosts) == 1 else 's'} in {report['seconds']} s"]
    parts += [f"{found.count(kind)} {kind}" for kind in KINDS if kind in found]
    parts += [] if set(found) - {""} else ["none fails"]
    code = report["exit_code"]
    return f"{', '.join(parts)}. Exit code {code}: {_MEANS[code]}."


KINDS = ("not fit to serve", "not judged", "not fully judged")


def kind_of(host: Mapping[str, Any]) -> str:
    """Return in words what is to be said of a host, one of KINDS; empty where all of it was seen and nothing fails."""
    if host["exit_code"] == EXIT_FAIL:
        return KINDS[0] if host["counts"][FAIL] else KINDS[1]
    return KINDS[2] if host["counts"][UNKNOWN] else ""


def _end(report: Mapping[str, Any]) -> list[str]:
    only = [f"Only these areas were judged: {', '.join(report['areas'])}."] if report["areas"] else []
    return [*only, *_wrap(verdict_line(report), "", "")]


def render_junit(report: Mapping[str, Any]) -> str:
    """Return JUnit XML, a suite per host: fail a failure, unknown an error, not applicable and waived skipped."""
    root = ElementTree.Element("testsuites", name="metalserve audit", time=str(report["seconds"]))
    for host in report["hosts"]:
        suite = ElementTree.SubElement(root, "testsuite", name=host["host"], timestamp=report["started"])
        failures = errors = skipped = 0
        if host["error"]:
            case = ElementTree.SubElement(suite, "testcase", classname=host["host"], name="audit")
            ElementTree.SubElement(case, "error", message=_xml_safe(host["error"]), type="not judged")
            errors += 1
        for item in host["verdicts"]:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{host['host']}.{item['id']}", name=item["title"]
            )
            desired = f"; should be {show(item['desired'])}" if item["desired"] is not None else ""
            message = _xml_safe(show(item["current"]) + desired)
            if item["waiver"] or item["verdict"] == NOT_APPLICABLE:
                waiver = item["waiver"] and f"waived until {item['waiver']['until']}: {item['waiver']['reason']}; "
                ElementTree.SubElement(case, "skipped", message=_xml_safe(waiver or "") + message)
                skipped += 1
            elif item["verdict"] == FAIL:
                node = ElementTree.SubElement(case, "failure", message=message, type=item["severity"])
                node.text = _xml_safe("\n".join([*item["evidence"], item["remedy"]]))
                failures += 1
            elif item["verdict"] == UNKNOWN:
                ElementTree.SubElement(case, "error", message=message, type="unknown")
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
        lines.append(f'metalserve_check{{id="{item["id"]}",verdict="{state_of(item)}"}} 1')
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
