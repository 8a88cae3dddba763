# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Makes one report of all hosts' audits on the controller. See plugins/modules/audit_report.py."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

from ansible_collections.metal.serve.plugins.filter.reports import audit_html
from ansible_collections.metal.serve.plugins.module_utils.checklist import report as reports
from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import EXIT_FAIL
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Verdict
from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic

BASELINE = "baseline.json"
COLOURS = {"FAIL": C.COLOR_ERROR, "????": C.COLOR_ERROR, "warn": C.COLOR_WARN, "waived": C.COLOR_SKIP}


class ActionModule(ActionBase):
    """``metal.serve.audit_report``: once for the play, on whichever host comes first; no connection is used."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = False
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Print, write, and fail where the exit code is 2."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _result, given = self.validate_argument_spec(
            argument_spec={
                "variable": {"type": "str", "required": True},
                "dest": {"type": "path", "required": True},
                "started": {"type": "str", "required": True},
                "areas": {"type": "list", "elements": "str", "default": []},
            }
        )
        dest = os.path.abspath(given["dest"])
        baseline, note = read_baseline(os.path.join(dest, BASELINE))
        hosts = [
            host_of(str(name), variables["hostvars"][name], given["variable"])
            for name in variables["ansible_play_hosts_all"]
        ]
        began = datetime.strptime(given["started"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        report = reports.fleet_report(
            hosts, given["started"], time.time() - began.timestamp(), baseline, given["areas"]
        )
        text = reports.render_terminal(report)
        self._print(text)
        files = {
            "audit.txt": text,
            "audit.json": canonical_json(report),
            "junit.xml": reports.render_junit(report),
            "audit.html": audit_html(report),
            BASELINE: canonical_json(reports.baseline_after(baseline, report)),
        }
        write_all(dest, files)
        self._display.display(
            f"Reports: {os.path.relpath(dest)}/ ({', '.join(name for name in files if name != BASELINE)})"
        )
        if note:
            self._display.warning(note)
        code = report["exit_code"]
        return {
            "changed": False,
            "failed": code == EXIT_FAIL,
            "msg": reports.verdict_line(report),
            "exit_code": code,
            "files": [os.path.join(dest, name) for name in sorted(files)],
        }

    def _print(self, text: str) -> None:
        for line in text.splitlines():
            self._display.display(line, color=COLOURS.get(line[:6].strip()))


def host_of(name: str, variables: Mapping[str, Any], registered: str) -> dict[str, Any]:
    """Return one host's report; a result without verdicts says why there are none."""
    result = variables.get(registered)
    strict = boolean(variables.get("metalserve_audit_strict") or False, strict=False)
    if not isinstance(result, Mapping):
        return reports.host_report(name, [], "the run ended before this host was audited")
    verdicts = result.get("verdicts")
    if isinstance(verdicts, list):
        return reports.host_report(
            name, [Verdict(**item) for item in verdicts], strict=strict, notes=result.get("notes", [])
        )
    said = str(result.get("msg") or result.get("module_stderr") or "its audit returned nothing")
    said = " ".join(re.sub(r"@{3,}|Task failed:", " ", said).split())[:300]
    return reports.host_report(name, [], f"unreachable: {said}" if result.get("unreachable") else said)


def read_baseline(path: str) -> tuple[dict[str, Any] | None, str]:
    """Return the previous verdicts, and a sentence where there is a file that holds none."""
    try:
        with open(path, encoding="utf-8") as stream:
            found = reports.baseline_from(json.load(stream))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError) as error:
        return None, f"{path} could not be read ({error}), so there is nothing to compare with; it is written anew."
    return (
        found,
        "" if found else f"{path} holds no earlier audit, so there is nothing to compare with; it is written anew.",
    )


def write_all(folder: str, files: Mapping[str, str]) -> None:
    """Write ``files`` (name -> text) into ``folder``. Raises AnsibleActionFail with a sentence."""
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in files.items():
            write_atomic(os.path.join(folder, name), text)
    except OSError as error:
        raise AnsibleActionFail(f"The reports could not be written to {folder}: {error.strerror or error}.") from None
