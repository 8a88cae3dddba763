# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduled audit, from one file without Ansible: ``node`` judges this host, ``fleet`` asks every host to judge itself.

The monitor's timer runs ``fleet``. It reaches each host over SSH with a key that can do one thing there: run ``node``, which
reads, publishes its textfile and answers with its verdicts. No inventory, vault or other right is on the monitor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist import report as reports
from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import audit, policy_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Verdict
from ansible_collections.metal.serve.plugins.module_utils.checklist.publish import publish
from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import LiveSource
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost

NODE_SETTINGS = "/etc/metalserve/audit.json"
FLEET_SETTINGS = "/etc/metalserve/audit-fleet.json"
BASELINE = "baseline.json"
CONNECT_S, ANSWER_S = 10, 120
AT_ONCE = 16
BAD_INPUT = 64
"""Exit code for settings that cannot be used (EX_USAGE): not one that an audit has."""


def main(words: Sequence[str]) -> int:
    """Run ``node`` or ``fleet``, with the path of its settings where they lie elsewhere; return the exit code."""
    ways = {"node": (node, NODE_SETTINGS), "fleet": (fleet, FLEET_SETTINGS)}
    if not 1 <= len(words) <= 2 or words[0] not in ways:
        sys.stderr.write("usage: metalserve-audit.pyz node|fleet [SETTINGS]\n")
        return BAD_INPUT
    run, path = ways[words[0]][0], words[1] if len(words) > 1 else ways[words[0]][1]
    try:
        with open(path, encoding="utf-8") as stream:
            return run(json.load(stream))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"metalserve-audit: {path}: {type(error).__name__}: {error}\n")
        return BAD_INPUT


def node(settings: Mapping[str, Any]) -> int:
    """Judge this host, publish, and print {host, verdicts, notes} as JSON; 0 whatever the verdicts are.

    ``settings``: host, policy, root and textfile (empty: none). Raises ValueError where the policy is wrong.
    """
    source = LiveSource(LiveHost(metalserve_root=settings["root"]))
    done = audit(source, policy_of(settings["policy"]), settings["host"])
    answer: dict[str, Any] = {"host": done.host, "verdicts": [one.as_dict() for one in done.verdicts], "notes": []}
    if settings["textfile"]:
        problem = publish(settings["textfile"], answer, time.time())
        answer["notes"] += [problem] if problem else []
    json.dump(answer, sys.stdout)
    return 0


def fleet(settings: Mapping[str, Any]) -> int:
    """Ask every host, write the reports and print the table; return the audit's exit code.

    ``settings``: hosts (a list of {host, address, port, strict}), user, key and known_hosts (paths), reports (a folder).
    """
    began = time.time()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        hosts = list(pool.map(lambda one: ask(one, settings), settings["hosts"]))
    folder = settings["reports"]
    baseline = _baseline(os.path.join(folder, BASELINE))
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
    strict = any(one["strict"] for one in settings["hosts"])
    report = reports.fleet_report(hosts, started, time.time() - began, baseline, strict=strict)
    text = reports.render_terminal(report)
    sys.stdout.write(text)
    for name, content in {
        "audit.txt": text,
        "audit.json": canonical_json(report),
        "junit.xml": reports.render_junit(report),
        BASELINE: canonical_json(reports.baseline_after(baseline, report)),
    }.items():
        write_atomic(os.path.join(folder, name), content)
    return int(report["exit_code"])


def ssh_command(one: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the command that asks one host; what is run there is fixed by the host itself, not here."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_S),
        "IdentitiesOnly": "yes",
        "IdentityFile": settings["key"],
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": settings["known_hosts"],
        "GlobalKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", *words, "-p", str(one["port"]), f"{settings['user']}@{one['address']}"]


def ask(one: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return one host's report; a host that does not answer, or not with verdicts, is not judged and says why."""
    name = str(one["host"])
    try:
        done = subprocess.run(  # pylint: disable=ansible-bad-function
            ssh_command(one, settings), stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return reports.host_report(name, [], f"no answer in {ANSWER_S} s")
    except OSError as error:
        return reports.host_report(name, [], f"ssh: {error.strerror or error}")
    said = " ".join(done.stderr.decode("utf-8", "replace").split())[-300:]
    if done.returncode:
        what = "unreachable" if done.returncode == 255 else f"its audit ended with {done.returncode}"
        return reports.host_report(name, [], f"{what}: {said}" if said else what)
    try:
        answer = json.loads(done.stdout)
        verdicts = [Verdict(**item) for item in answer["verdicts"]]
        notes = [str(note) for note in answer["notes"]]
    except (ValueError, KeyError, TypeError) as error:
        return reports.host_report(name, [], f"its answer holds no verdicts ({type(error).__name__})")
    return reports.host_report(name, verdicts, strict=bool(one["strict"]), notes=notes)


def _baseline(path: str) -> Optional[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as stream:
            return reports.baseline_from(json.load(stream))
    except (OSError, ValueError):
        return None
