# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Command line of scripts/audit. Exit codes: 0 fit, 1 warnings where they count, 2 a failure, a host not judged, bad input."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist import fleet, report
from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import REGISTRY, areas_of, audit, policy_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import moment
from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import EXIT_FAIL
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import PolicyError
from ansible_collections.metal.serve.plugins.module_utils.hardware import yaml_subset

DESCRIPTION = """Judge hosts against the serving checklist. Nothing is changed anywhere.

  scripts/audit --snapshot reports/snapshots/node-a                   one snapshot, without Ansible
  scripts/audit --snapshot DIR --policy policy.json --json            {"host": ..., "verdicts": [...]}
  scripts/audit -i inventory/prod --limit node-a --tags driver,gpu    hosts, over SSH (playbooks/audit.yml)
  scripts/audit --list                                                every check
"""
EPILOG = """Exit codes: 0 nothing that must be mended; 1 warnings or unknowns, only with --strict (metalserve_audit_strict);
2 something fails, a host could not be judged, or the input is wrong. docs/audit.md tells how to read the result."""


class InputError(ValueError):
    """What was given is wrong; the message is one sentence that names it."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and leaves with 2."""

    def error(self, message: str) -> Any:
        """Print the sentence and exit."""
        self.exit(EXIT_FAIL, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = _Parser(
        prog="audit", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--snapshot", metavar="DIR", help="a snapshot's folder (docs/snapshots.md)")
    what.add_argument("-i", "--inventory", metavar="INVENTORY", help="audit the hosts of this inventory")
    what.add_argument("--list", action="store_true", help="print every check: id, severity, title")
    made.add_argument(
        "--policy", metavar="FILE", help="with --snapshot: thresholds, expectations, waivers; JSON or YAML"
    )
    made.add_argument("--host", metavar="NAME", help="with --snapshot: the host's name in the report and in waivers")
    made.add_argument("-l", "--limit", metavar="PATTERN", help="with -i: only these hosts")
    made.add_argument("--tags", metavar="AREAS", help="only these areas of checks, such as driver,gpu")
    made.add_argument(
        "--check", action="store_true", help="with -i: write nothing on the hosts, whatever the inventory says"
    )
    made.add_argument(
        "-e",
        "--extra-vars",
        metavar="VARS",
        action="append",
        default=[],
        help="with -i: variables, as ansible-playbook takes them",
    )
    made.add_argument("--vault-password-file", metavar="FILE", help="with -i: as ansible-playbook takes it")
    made.add_argument("--reports", metavar="DIR", help="with -i: folder of the reports (default: reports/audit)")
    made.add_argument("--strict", action="store_true", help="warnings and unknowns end it with 1")
    made.add_argument("--all", action="store_true", help="with --snapshot: show what passes, too")
    made.add_argument("--json", action="store_true", help="print JSON (schemas/verdicts.json)")
    return made


def main(root: str, arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line in the checkout ``root`` and return the exit code."""
    made = parser()
    given = made.parse_args(arguments)
    try:
        areas = areas_of((given.tags or "").split(",") if given.tags is not None else ())
        _refuse_misplaced(given)
        if given.list:
            return _list(areas, given.json)
        if given.snapshot is not None:
            return _snapshot(given, areas)
        return fleet.run(root, fleet.Request.of(given), sys.stdout, sys.stderr)
    except ValueError as error:
        said = str(error)
        sys.stderr.write(f"audit: {said if said.endswith(('.', '?')) else said + '.'}\n")
        return EXIT_FAIL


ONLY_WITH = {
    "snapshot": ("policy", "host", "all"),
    "inventory": ("limit", "check", "extra_vars", "vault_password_file", "reports"),
}


def _refuse_misplaced(given: argparse.Namespace) -> None:
    """Raise InputError for an option that the chosen way of working would ignore."""
    for way, names in ONLY_WITH.items():
        for name in names:
            if getattr(given, name) and getattr(given, way) is None:
                option = "-e" if name == "extra_vars" else "--" + name.replace("_", "-")
                raise InputError(f"{option} belongs to {'-i' if way == 'inventory' else '--snapshot'}.")


def _list(areas: Sequence[str], as_json: bool) -> int:
    checks = [one for one in REGISTRY.all() if not areas or one.area in areas]
    if as_json:
        keys = ("id", "title", "severity", "applies_to", "why", "remedy", "tags", "source")
        sys.stdout.write(json.dumps([{key: getattr(one, key) for key in keys} for one in checks], indent=2) + "\n")
    else:
        for one in checks:
            sys.stdout.write(f"{one.id:<34} {one.severity:<8} {one.title}\n")
    return 0


def _snapshot(given: argparse.Namespace, areas: Sequence[str]) -> int:
    try:
        policy = policy_of(read_policy(given.policy) if given.policy is not None else None)
    except PolicyError as error:
        raise InputError(f"--policy {given.policy}: {error}.") from None
    name = given.host or ""
    began = time.time()
    done = audit(given.snapshot, policy, name, areas)
    if not name and (done.collected.facts.masked or not done.collected.facts.host.hostname):
        # The name inside is a stand-in; playbooks/snapshot.yml calls the folder by the inventory's name.
        name = os.path.basename(os.path.realpath(given.snapshot))
        done = audit(given.snapshot, policy, name, areas)
    notes = age_notes(done.collected.facts.collected_at, began)
    host = report.host_report(done.host, done.verdicts, strict=given.strict, notes=notes)
    if given.json:
        only = {"host": host["host"], "verdicts": host["verdicts"]}
        sys.stdout.write(json.dumps(only, indent=2, ensure_ascii=False) + "\n")
    else:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
        whole = report.fleet_report([host], started, done.seconds, areas=areas, strict=given.strict)
        sys.stdout.write(report.render_terminal(whole, given.all))
    return int(host["exit_code"])


def age_notes(collected_at: Optional[str], now: float) -> list[str]:
    """Return what is to be said of a snapshot's age at ``now`` (Unix time): nothing where it was read within a day."""
    at = moment(collected_at)
    if at is None:
        return ["When this was read is not said (index.json, collected_at): it may be long ago."]
    days = (now - at.replace(tzinfo=datetime.timezone.utc).timestamp()) / 86400
    if days < -1 / 24:
        return [f"It says that it was read at {collected_at}, which is still to come."]
    return [f"It was read at {collected_at}, {days:.0f} days ago: what changed since is not seen."] if days > 1 else []


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose keys stand once. Raises ValueError for one that stands twice: only the last would count."""
    names = [name for name, _value in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} stands in it twice")
    return dict(pairs)


def read_policy(path: str) -> dict[str, Any]:
    """Return the policy in a JSON or simple YAML file. Raises InputError naming the file and what is wrong."""
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except OSError as error:
        raise InputError(f"--policy {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"--policy {path} is not UTF-8 text.") from None
    problem: Optional[str] = None
    if text.lstrip().startswith(("{", "[")):
        try:
            value: Any = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--policy {path} is not JSON: {error}.") from None
    else:
        value, problem = yaml_subset.load(text)
    if problem:
        raise InputError(f"--policy {path} is {problem}.")
    if not isinstance(value, dict):
        raise InputError(f"--policy {path} holds no mapping of policy keys (schemas/policy.json).")
    return value
