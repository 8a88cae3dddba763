# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The replicas of this bundle: configuration known to the pinned version, ready, progressing, back after a reboot."""

from __future__ import annotations

from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    by_one,
    content_of,
    current_release,
    desired_out,
    moment,
    needs_replicas,
    not_read,
    part,
    replica_of,
    unread,
    worst,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Finding, check, not_applicable
from ansible_collections.metal.serve.plugins.module_utils.engines.lint import known, lint
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Engine, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_services import progress_names, total

ENGINE = ("engine",)
Said = Optional[tuple[str, str]]


@check(
    "engine.config_known",
    title="Every configuration key is an option of the pinned engine version",
    severity="critical",
    applies_to=ENGINE,
    why="a key that this version does not have (renamed, removed, abbreviated) ends the engine at its next start",
    remedy="take the key out of the pool's settings, or pin a version that has it; redeploy (playbooks/redeploy.yml)",
    source="reports: --disable-log-requests and swap_space removed; argparse takes abbreviations",
)
@needs_replicas
def config_known(facts: HostFacts, policy: Policy) -> Finding:
    def one(engine: Engine) -> Said:
        release, pinned = current_release(engine), part(content_of(engine), "engine")
        kind, version = str(pinned.get("kind") or ""), str(pinned.get("version") or "")
        if release is None or not kind or not version:
            return "unknown", f"{engine.replica}: its release does not say kind and version of the engine"
        chosen = {**part(content_of(engine), "settings"), **(release.config or {})}
        settings = {str(key).lstrip("-").replace("-", "_"): value for key, value in chosen.items()}
        if not settings:
            return "unknown", f"{engine.replica}: no configuration key could be read"
        if not known(kind, version):
            # The engine refuses keys that it does not know: one that serves with them has taken them.
            taken = engine.health_status == "ok"
            return None if taken else ("unknown", f"{engine.replica}: no catalogue of options of {kind} {version}")
        odd = [
            f"{one.option}: {one.problem}{f' ({one.right})' if one.right else ''}"
            for one in lint(kind, version, settings)
        ]
        return ("fail", f"{engine.replica}: {kind} {version}: {'; '.join(odd)}") if odd else None

    return worst(by_one(facts.metalserve.engines or [], one), "options of the pinned version", "all known")


@check(
    "engine.ready",
    title="Every replica that is wanted in rotation runs and is ready",
    severity="critical",
    applies_to=ENGINE,
    tags=("engines",),
    why="a container that is up though its engine died, or a unit that gave up, is capacity that is only there on paper",
    remedy="journalctl -u metalserve-engine@<replica>, docker logs; a stopped one is started again",
    source="reports: containers stayed up after the engine core died at its start",
)
def ready(facts: HostFacts, policy: Policy) -> Finding:
    if facts.metalserve.engines is None:
        return not_read(facts, "engines")
    here = {engine.replica: engine for engine in facts.metalserve.engines}
    replicas = sorted({*here, *policy["expected"]["releases"]})
    if not replicas:
        return not_applicable("no engine of this bundle on this host, and none is planned")

    def one(replica: str) -> Said:
        engine = here.get(replica)
        if engine is None:
            return "fail", f"{replica}: planned for this host, and not there"
        out = desired_out(engine)
        if out:
            return "warn", f"{engine.replica}: {out}"
        if not engine.current:
            return "fail", f"{engine.replica}: no current release"
        unit = facts.services.get(f"metalserve-engine@{engine.replica}.service")
        if unit is not None and unit.active_state in ("failed", "inactive"):
            return "fail", f"{engine.replica}: its unit is {unit.active_state} ({unit.result or '?'})"
        if engine.health_status == "ok":
            return None
        if engine.health_status in ("error", "timeout", "absent"):
            age = started_ago(facts, engine)
            if age is not None and age < policy["engine_start_seconds_maximum"]:
                return "warn", f"{engine.replica}: starting since {age:.0f} s"
            return (
                "fail",
                f"{engine.replica}: health {engine.health_status} ({facts.probe('engine_health').error or '?'})",
            )
        return "unknown", f"{engine.replica}: health was {engine.health_status or 'not asked'}"

    return worst(by_one(replicas, one), "running, health 200", f"{len(replicas)} replicas")


def started_ago(facts: HostFacts, engine: Engine) -> Optional[float]:
    """Return for how many seconds the replica's container runs; None where it does not, or the times are not known."""
    for container in facts.docker.containers or []:
        if replica_of(container) == engine.replica and container.state == "running":
            begun, seen = moment(container.started_at), moment(facts.collected_at)
            return (seen - begun).total_seconds() if begun is not None and seen is not None else None
    return None


@check(
    "engine.progress",
    title="Engines with work make progress",
    severity="critical",
    applies_to=ENGINE,
    why="health answers lie both ways: a dead core answers 200, a busy engine misses a probe. Work in flight and no token, "
    "or requests that wait while nothing runs, is what a wedged engine looks like",
    remedy="take it out of rotation and restart its unit; look for Xid lines and 99 % utilisation without tokens",
    source="reports: waiting > 0, running 0, KV 0 % behind a 200; restarts of busy nodes by short probes",
)
@needs_replicas
def progress(facts: HostFacts, policy: Policy) -> Finding:
    wanted = [one for one in facts.metalserve.engines or [] if not desired_out(one) and not _silent(one)]
    if not wanted:
        return not_applicable(
            "every replica is desired out of rotation, or of a kind that does not say what is in flight"
        )

    def one(engine: Engine) -> Said:
        release, name = current_release(engine), engine.replica
        scrape = next((item for item in facts.monitoring.scrapes if item.name == name), None)
        if scrape is None or scrape.metrics is None:
            state = f"{scrape.state} {scrape.error}".strip() if scrape is not None else "not collected"
            return "unknown", f"{name}: its metrics were not read ({state})"
        names = progress_names(release.release if release is not None else None)
        running, waiting = (total(scrape.samples, names[one]) for one in ("running", "waiting"))
        if not names["progress"] or (running is None and waiting is None):
            return "unknown", f"{name}: its metrics do not say what is in flight"
        if not (running or 0) + (waiting or 0):
            return None
        before, after = total(scrape.samples, names["progress"]), total(engine.samples_later, names["progress"])
        work = f"{running or 0:g} run, {waiting or 0:g} wait"
        if after is None or before is None or engine.progress_interval_s is None:
            return "unknown", f"{name}: {work}; no second scrape to compare with"
        if after != before:
            return None
        still = f"{name}: {work}, no progress in {engine.progress_interval_s:.1f} s"
        stuck = not running and not total(engine.samples_later, names["running"])
        bound = part((release.release or {}) if release is not None else {}, "plan").get("times", {})
        limit = bound.get("wedged_after_s") if isinstance(bound, dict) else None
        if stuck or (isinstance(limit, (int, float)) and engine.progress_interval_s > limit):
            return "fail", still
        # One long prefill is silent too: so short a look cannot tell it from a wedged engine.
        return "unknown", f"{still}: a long prefill looks the same"

    return worst(by_one(wanted, one), "progress, or nothing in flight", f"{len(wanted)} replicas")


def _silent(engine: Engine) -> bool:
    """Tell whether the replica's release says that its kind has no metric of what is in flight (Triton has none)."""
    release = current_release(engine)
    names = (release.release or {}).get("metrics") if release is not None else None
    return isinstance(names, dict) and not names.get("running") and not names.get("waiting")


@check(
    "engine.starts_at_boot",
    title="A reboot brings every replica back",
    severity="major",
    applies_to=ENGINE,
    tags=("engines",),
    why="a replica that somebody started by hand is gone after the next reboot",
    remedy="enable metalserve-engine@<replica>.service and let it be the one that runs the container",
    source="docs/engines.md",
)
@needs_replicas
def starts_at_boot(facts: HostFacts, policy: Policy) -> Finding:
    if unread(facts, "systemd_units"):
        return not_read(facts, "systemd_units")

    def one(engine: Engine) -> Said:
        unit = facts.services.get(f"metalserve-engine@{engine.replica}.service")
        if unit is None or unit.unit_file_state is None:
            return "unknown", f"{engine.replica}: its unit is not loaded, so systemd did not show it"
        if unit.unit_file_state in ("enabled", "enabled-runtime"):
            return None
        # remove_node.yml drains a node and disables its units on purpose.
        out = desired_out(engine)
        state = f"{engine.replica}: {unit.name} is {unit.unit_file_state}"
        return ("warn", f"{state}, {out}") if out else ("fail", state)

    return worst(by_one(facts.metalserve.engines or [], one), "enabled", "enabled")
