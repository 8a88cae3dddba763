# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads Prometheus, certificates, sockets, clock, space, and what this bundle leaves on a machine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    Certificate,
    Disk,
    FileMode,
    Listener,
    ModelFile,
    Rule,
    Scrape,
    Target,
    TimeSync,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_system import key_values, seconds
from ansible_collections.metal.serve.plugins.module_utils.hardware.yaml_subset import load
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import Sample, ScrapeError, parse_scrape

MAX_SAMPLES = 4000


def loaded_rules(text: str) -> Optional[list[Rule]]:
    """Read ``/api/v1/rules`` of Prometheus."""
    answer, _error = values.json_object(text)
    groups = values.get(answer, "data", "groups")
    if not isinstance(groups, list):
        return None
    found = []
    for group in groups:
        rules = values.get(group, "rules")
        for rule in rules if isinstance(rules, list) else []:
            duration = values.get(rule, "duration")
            found.append(
                Rule(
                    name=values.as_str(values.get(rule, "name")) or "",
                    kind=values.as_str(values.get(rule, "type")) or "",
                    expr=values.as_str(values.get(rule, "query")) or "",
                    for_s=float(duration) if isinstance(duration, (int, float)) else None,
                    labels=values.as_table(values.get(rule, "labels")),
                    file=values.as_str(values.get(group, "file")),
                    health=values.as_str(values.get(rule, "health")),
                    error=values.as_str(values.get(rule, "lastError")),
                )
            )
    return found


def rules_in_file(path: str, text: str) -> tuple[list[Rule], Optional[str]]:
    """Read a Prometheus rule file: its rules, and what is wrong with it. A file of another kind has none."""
    value, error = load(text)
    if error is not None:
        return [], error
    found: list[Rule] = []
    groups = values.get(value, "groups")
    for group in groups if isinstance(groups, list) else []:
        rules = values.get(group, "rules")
        for rule in rules if isinstance(rules, list) else []:
            alert, record = values.get(rule, "alert"), values.get(rule, "record")
            expr = values.get(rule, "expr")
            if isinstance(expr, (int, float)):
                expr = str(expr)
            name = alert if isinstance(alert, str) else record
            if isinstance(name, str) and isinstance(expr, str):
                wait = values.get(rule, "for")
                found.append(
                    Rule(
                        name=name,
                        kind="alerting" if isinstance(alert, str) else "recording",
                        expr=expr.strip(),
                        for_s=seconds(wait) if isinstance(wait, str) else (0.0 if wait is None else None),
                        labels=values.as_table(values.get(rule, "labels")),
                        file=path,
                    )
                )
    return found, None


def targets(text: str) -> Optional[list[Target]]:
    """Read ``/api/v1/targets`` of Prometheus."""
    answer, _error = values.json_object(text)
    active = values.get(answer, "data", "activeTargets")
    if not isinstance(active, list):
        return None
    return [
        Target(
            job=values.as_str(values.get(one, "labels", "job")),
            instance=values.as_str(values.get(one, "labels", "instance")),
            url=values.as_str(values.get(one, "scrapeUrl")),
            health=values.as_str(values.get(one, "health")),
            error=values.as_str(values.get(one, "lastError")) or None,
        )
        for one in active
    ]


def expressions(value: Any, depth: int = 0) -> list[str]:
    """Return every ``expr`` of a dashboard, at any depth."""
    found: list[str] = []
    if depth > 40:
        return found
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "expr" and isinstance(inner, str):
                found.append(inner)
            else:
                found += expressions(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            found += expressions(inner, depth + 1)
    return found


def read_scrape(scrape: Scrape, text: str) -> None:
    """Add names and values of a scrape; one that is not in Prometheus' text format becomes an error."""
    try:
        parsed = parse_scrape(text)
    except ScrapeError as error:
        scrape.state, scrape.error = "error", str(error)[:200]
        return
    scrape.metrics = sorted(parsed.names())
    for sample in parsed.samples:
        if sample.name.endswith("_bucket") or sample.name.startswith(("go_", "process_", "promhttp_", "node_")):
            continue
        if len(scrape.samples) >= MAX_SAMPLES:
            continue
        if sample.value == sample.value and abs(sample.value) != float("inf"):
            scrape.samples[series(sample)] = sample.value


def series(sample: Sample) -> str:
    """Return a sample's series as Prometheus writes it, labels sorted: ``name{a="1",b="2"}``."""
    labels = ",".join(f'{key}="{one}"' for key, one in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def certificate(path: str, text: str) -> Certificate:
    """Read ``openssl x509 -noout -startdate -enddate -subject -ext subjectAltName``."""
    found = Certificate(path)
    found.not_before = _date(re.search(r"^notBefore=(.+)$", text, re.MULTILINE))
    found.not_after = _date(re.search(r"^notAfter=(.+)$", text, re.MULTILINE))
    subject = re.search(r"^subject\s*=\s*(.+)$", text, re.MULTILINE)
    found.subject = subject.group(1).strip() if subject else None
    found.names = re.findall(r"(?:DNS|IP Address):([^,\s]+)", text)
    if found.not_after is None:
        found.error = "no end of validity in what openssl printed"
    return found


def _date(match: Optional[re.Match[str]]) -> Optional[str]:
    """Return ``Nov 30 15:35:00 2027 GMT`` (or ISO) as ISO in UTC."""
    words = " ".join(match.group(1).split()) if match else ""
    for form in ("%b %d %H:%M:%S %Y GMT", "%Y-%m-%d %H:%M:%SZ", "%Y-%m-%dT%H:%M:%SZ"):
        try:
            return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.strptime(words, form))
        except ValueError:
            continue
    return None


def sockets(text: str) -> list[Listener]:
    """Read ``ss -Hltnp``."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or words[0] != "LISTEN":
            continue
        address, colon, port = words[3].rpartition(":")
        if not colon or not re.match(r"\A\d{1,5}\Z", port, re.ASCII):
            continue
        address = address.strip("[]").partition("%")[0]
        process = re.search(r'users:\(\("([^"]{1,64})"', line)
        found.append(Listener("::" if address == "*" else address, int(port), process.group(1) if process else None))
    return found


def time_sync(clock: Optional[str], chrony: Optional[str], services: dict[str, Optional[str]]) -> TimeSync:
    """Read adjtimex (or ``timedatectl show``) and ``chronyc -n tracking``; ``services`` is unit -> active state.

    The kernel's clock is synchronised where neither its state is TIME_ERROR (5) nor the flag STA_UNSYNC (0x40) is set.
    """
    found = TimeSync()
    fields = key_values(clock or "")
    found.synchronized = values.switch(fields.get("NTPSynchronized"))
    found.ntp_enabled = values.switch(fields.get("NTP"))
    state, status = values.integer(fields.get("state")), values.integer(fields.get("status"))
    if found.synchronized is None and state is not None and status is not None:
        found.synchronized = state != 5 and not status & 0x40
    error = values.integer(fields.get("esterror_us"))
    found.estimated_error_s = error / 1e6 if error is not None and found.synchronized else None
    if chrony is not None:
        leap = re.search(r"^Leap status\s*:\s*(.+?)\s*$", chrony, re.MULTILINE)
        if leap and found.synchronized is None:
            found.synchronized = leap.group(1) == "Normal"
        offset = re.search(r"^System time\s*:\s*([\d.]+) seconds (slow|fast)", chrony, re.MULTILINE)
        if offset:
            found.offset_s = float(offset.group(1)) * (-1 if offset.group(2) == "slow" else 1)
    for unit, name in (
        ("chrony.service", "chrony"),
        ("chronyd.service", "chrony"),
        ("ntpsec.service", "ntpsec"),
        ("ntp.service", "ntp"),
        ("systemd-timesyncd.service", "systemd-timesyncd"),
    ):
        if services.get(unit) == "active":
            found.service = name
            break
    if found.ntp_enabled is None and services:
        found.ntp_enabled = found.service is not None
    return found


def disk(path: str, text: str) -> Disk:
    """Read ``df -P -B1 <path>``."""
    lines = [line for line in text.splitlines() if line.strip()]
    words = lines[-1].split() if len(lines) > 1 else []
    found = Disk(path)
    if len(words) >= 6:
        found.total_bytes, found.free_bytes = values.integer(words[-5]), values.integer(words[-3])
    if found.free_bytes is None:
        found.error = "df printed something else than a table"
    return found


def file_modes(text: str) -> list[FileMode]:
    """Read lines ``mode owner group size mtime_ns kind path``."""
    found = []
    for line in text.splitlines():
        words = line.split(" ", 6)
        if len(words) == 7 and re.match(r"\A[0-7]{3,5}\Z", words[0]):
            found.append(
                FileMode(
                    words[6], words[5], words[0], words[1], words[2], values.integer(words[3]), values.integer(words[4])
                )
            )
    return found


def model_files(text: str) -> list[ModelFile]:
    """Read lines ``size mtime_ns ctime_ns inode path``."""
    found = []
    for line in text.splitlines():
        words = line.split(" ", 4)
        if len(words) == 5:
            numbers = [values.integer(word) for word in words[:4]]
            found.append(ModelFile(words[4], numbers[0], numbers[1], numbers[2], numbers[3]))
    return found


def index_files(text: str) -> Optional[list[str]]:
    """Read model.safetensors.index.json: the weight files that it lists, sorted; None where it is not one."""
    answer, _error = values.json_object(text)
    weights = values.get(answer, "weight_map")
    if not isinstance(weights, dict):
        return None
    return sorted({one for one in weights.values() if isinstance(one, str)})


def progress_names(document: Optional[dict[str, Any]]) -> dict[str, str]:
    """Return what an engine calls the metrics of its queue and progress, from its release; '' where it has none."""
    return {
        name: values.as_str(values.get(document, "metrics", name)) or "" for name in ("running", "waiting", "progress")
    }


def selected_samples(text: str, names: Iterable[str]) -> dict[str, float]:
    """Return series -> value of the metrics ``names`` in a scrape; nothing of one that cannot be read."""
    wanted = {name for name in names if name}
    try:
        samples = parse_scrape(text).samples
    except ScrapeError:
        return {}
    return {series(sample): sample.value for sample in samples if sample.name in wanted}


def total(samples: dict[str, float], name: str) -> Optional[float]:
    """Return the sum over the series of one metric; None where there is none."""
    found = [value for series, value in samples.items() if name and series.partition("{")[0] == name]
    return sum(found) if found else None


def in_flight(samples: dict[str, float], names: dict[str, str]) -> float:
    """Return how many requests run or wait, as far as the engine says."""
    return sum(total(samples, names[one]) or 0.0 for one in ("running", "waiting"))


def interval(text: str) -> Optional[float]:
    """Return the seconds in the first line of a second scrape (``# interval_s 0.25``)."""
    match = re.match(r"\A# interval_s (\d+(?:\.\d+)?)\s", text)
    return float(match.group(1)) if match else None


def metric_names(names: Optional[str], metadata: Optional[str]) -> Optional[list[str]]:
    """Read ``/api/v1/label/__name__/values`` and ``/api/v1/metadata``: what can be asked for; None where neither is.

    A labelled counter without an event yet has no series, but is declared: its family counts, with the series that
    follow from its type.
    """
    listed, declared = values.json_object(names)[0], values.json_object(metadata)[0]
    data, families = values.get(listed, "data"), values.get(declared, "data")
    if not isinstance(data, list) and not isinstance(families, dict):
        return None
    found = set(values.as_strings(data))
    for family, entries in families.items() if isinstance(families, dict) else []:
        kinds = {values.get(one, "type") for one in entries} if isinstance(entries, list) else set()
        found.add(family)
        if "counter" in kinds and not family.endswith("_total"):
            found.add(f"{family}_total")
        if kinds & {"histogram", "summary"}:
            found.update(f"{family}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
    return sorted(found)


def file_hashes(text: str) -> dict[str, str]:
    """Read lines ``sha256 path``."""
    pairs = [line.split(" ", 1) for line in text.splitlines()]
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and re.match(r"\A[0-9a-f]{64}\Z", pair[0])}


def release_port(document: Optional[dict[str, Any]]) -> Optional[int]:
    """Return the port of a release.json, wherever its version keeps it."""
    for path in (("port",), ("plan", "port"), ("spec", "port"), ("content", "options", "port"), ("content", "port")):
        port = values.as_int(values.get(document, *path))
        if port is not None and 0 < port < 65536:
            return port
    return None
