# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Makes schemas/policy.json, schemas/verdicts.json and docs/checks.md from the code.

With ``collections/`` on the path, run this file as a module with the repository's root as its argument to write them; a
test compares.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import REGISTRY
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import SEVERITIES, VERDICTS
from ansible_collections.metal.serve.plugins.module_utils.checklist.page import checks_markdown
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import DEFAULT_POLICY, SAYS
from ansible_collections.metal.serve.plugins.module_utils.checklist.report import WAIVED
from ansible_collections.metal.serve.plugins.module_utils.checklist.shapes import told
from ansible_collections.metal.serve.plugins.module_utils.common.files import canonical_json, write_atomic

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
DAY = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}


def _object(properties: dict[str, Any], required: Optional[list[str]] = None, **more: Any) -> dict[str, Any]:
    """Return the schema of an object that has these keys and no others; all are required unless some are named."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": sorted(properties) if required is None else required,
        "properties": properties,
        **more,
    }


def _key(name: str, default: Any) -> dict[str, Any]:
    """Return the schema of a policy key."""
    return {**told(name, default)[0], "description": SAYS[name], "default": default}


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy: every key may be left out."""
    expected = {name: _key(f"expected.{name}", value) for name, value in DEFAULT_POLICY["expected"].items()}
    keys = {name: _key(name, value) for name, value in DEFAULT_POLICY.items() if name not in ("expected", "waivers")}
    waiver = _object(
        {
            "id": {"enum": sorted(check.id for check in REGISTRY.all()), "description": "the check"},
            "hosts": {
                "type": "array",
                "items": TEXT,
                "description": "hosts it is waived on, or patterns such as node-*; left out or []: all",
            },
            "reason": {"type": "string", "minLength": 1, "description": "why, for whoever reads the report"},
            "until": {**DAY, "description": "the last day on which it counts"},
        },
        ["id", "reason", "until"],
    )
    keys["expected"] = _object(expected, [], description=SAYS["expected"])
    keys["waivers"] = {"type": "array", "items": waiver, "description": SAYS["waivers"]}
    return {"$schema": DRAFT, "title": "Policy of the audit (metalserve_audit_policy)", **_object(keys, [])}


def verdicts_schema() -> dict[str, Any]:
    """Return the JSON Schema of what an audit says: of one host, or of a fleet."""
    verdict = {"enum": list(VERDICTS)}
    state = {"enum": [*VERDICTS, WAIVED]}
    waiver = {"anyOf": [{"type": "null"}, _object({"reason": TEXT, "until": DAY})]}
    texts = {"type": "array", "items": TEXT}
    definitions = {
        "Verdict": _object(
            {
                "id": {"type": "string", "pattern": r"^[a-z]+\.[a-z0-9_]+$", "description": "area.name, stable"},
                "title": {**TEXT, "description": "what holds where it passes"},
                "severity": {"enum": list(SEVERITIES)},
                "verdict": verdict,
                "current": {"description": "what was found; of unknown and not_applicable the reason"},
                "desired": {"description": "what should be; null where there is nothing to compare with"},
                "evidence": {**texts, "description": "lines that prove it"},
                "why": {**TEXT, "description": "why it matters"},
                "remedy": TEXT,
                "tags": {**texts, "description": "site.yml --tags that apply the remedy; [] where none does"},
                "source": {**TEXT, "description": "where the rule comes from"},
                "waiver": {**waiver, "description": "the waiver that covers it today"},
                "ended_waiver": {**waiver, "description": "a waiver that covered it and has ended: it counts again"},
                "unread": {**texts, "description": "readings that failed and that this unknown rests on"},
            }
        ),
        "HostVerdicts": _object(
            {"host": TEXT, "verdicts": {"type": "array", "items": {"$ref": "#/$defs/Verdict"}}},
            description="one host, as scripts/audit --snapshot --json prints it",
        ),
        "HostReport": _object(
            {
                "host": TEXT,
                "error": {**TEXT, "description": "why the host was not judged; empty where it was"},
                "notes": texts,
                "exit_code": {"enum": [0, 1, 2]},
                "counts": _object(dict.fromkeys((*VERDICTS, WAIVED), COUNT)),
                "verdicts": {"type": "array", "items": {"$ref": "#/$defs/Verdict"}},
            }
        ),
        "Change": _object({"host": TEXT, "id": TEXT, "before": {"enum": ["", *VERDICTS, WAIVED]}, "now": state}),
        "Difference": _object(
            {
                "since": {**TEXT, "description": "time of the oldest audit that was compared with, UTC"},
                **{
                    name: {"type": "array", "items": {"$ref": "#/$defs/Change"}}
                    for name in ("new", "mended", "dropped")
                },
                "unchanged": COUNT,
            }
        ),
        "FleetReport": _object(
            {
                "schema_version": {"const": 1},
                "started": {**TEXT, "description": "UTC, as 2027-01-31T03:00:00Z"},
                "seconds": {"type": "number", "minimum": 0},
                "areas": {**texts, "description": "areas that were judged; [] for all"},
                "strict": {"type": "boolean"},
                "exit_code": {"enum": [0, 1, 2]},
                "hosts": {"type": "array", "items": {"$ref": "#/$defs/HostReport"}},
                "difference": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Difference"}]},
            },
            description="all hosts of a run, as playbooks/audit.yml writes it to audit.json",
        ),
    }
    return {
        "$schema": DRAFT,
        "title": "Verdicts of the audit",
        "anyOf": [{"$ref": "#/$defs/HostVerdicts"}, {"$ref": "#/$defs/FleetReport"}],
        "$defs": definitions,
    }


def main(arguments: Optional[list[str]] = None) -> int:
    """Write the files below the repository root that is named."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or not os.path.isdir(words[0]):
        sys.stderr.write("usage: describe ROOT, where ROOT is the repository\n")
        return 2
    write_atomic(os.path.join(words[0], "docs", "checks.md"), checks_markdown())
    write_atomic(os.path.join(words[0], "schemas", "policy.json"), canonical_json(policy_schema()))
    write_atomic(os.path.join(words[0], "schemas", "verdicts.json"), canonical_json(verdicts_schema()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
