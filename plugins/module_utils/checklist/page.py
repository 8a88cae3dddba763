# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/checks.md, made from the registry and the policy, so that it cannot say anything else than they do.

:mod:`describe` writes it.
"""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.checklist import checks
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import REGISTRY, Check
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import DEFAULT_POLICY, SAYS

_HEAD = """# Checks

What `ansible-playbook playbooks/audit.yml` judges: {count} checks. This page is made from the code.

A check is a function of what was read from a host ([facts.md](facts.md)) and of the policy below. Its verdict is one of

| verdict | means |
| --- | --- |
| `pass` | seen, and as it should be |
| `warn` | serves now, may not tomorrow |
| `fail` | not fit to serve, or wrong in a way that will cost an outage |
| `unknown` | could not be judged, and says why; a value that was not read, or that the driver calls N/A, never passes |
| `not_applicable` | does not concern this host, and says why |

A check concerns hosts of the roles that it names. Ids are stable; the part before the dot is the area that `--tags` selects.
Where `site.yml` mends what a check found, the remedy names its tag; it stops no serving engine.

## Areas

{areas}
"""


def checks_markdown() -> str:
    """Return docs/checks.md, the areas in the order of the alphabet."""
    if not checks.__all__:
        raise ValueError("no check is registered")
    items = REGISTRY.all()
    order = sorted(REGISTRY.areas())
    listed = {area: ", ".join(f"`{one.id}`" for one in items if one.area == area) for area in order}
    areas = "\n".join(f"- [{area}](#{area}): {listed[area]}" for area in order)
    parts = [_HEAD.format(count=len(items), areas=areas)]
    for area in order:
        parts.append(f"## {area}\n\n" + "\n".join(_entry(one) for one in items if one.area == area))
    return "\n".join([*parts, _policy()])


def _entry(one: Check) -> str:
    tags = f" `site.yml --tags {','.join(one.tags)}`." if one.tags else ""
    return (
        f"### {one.id}\n\n{one.title}. {one.severity.capitalize()}; for {', '.join(one.applies_to)}.\n\n"
        f"- Why: {_plain(one.why)}.\n- Remedy: {_plain(one.remedy)}.{tags}\n- Source: {_plain(one.source)}\n"
    )


def _plain(text: str) -> str:
    return text.replace("<", "&lt;")


def _policy() -> str:
    kept = {name: value for name, value in DEFAULT_POLICY.items() if name not in ("expected", "alerts")}
    kept.update({f"expected.{name}": value for name, value in DEFAULT_POLICY["expected"].items()})
    rows = "\n".join(f"| `{name}` | {_value(value)} | {_cell(SAYS[name])} |" for name, value in kept.items())
    alerts = "\n".join(
        f"| {one['what']} | {', '.join(f'`{name}`' for name in one['metrics'])} |" for one in DEFAULT_POLICY["alerts"]
    )
    return (
        "## Policy\n\nThresholds, and what a host is meant to be (the audit fills `expected` from the inventory). A waiver has "
        "`id`, `reason`, an\nend (`until: 2027-01-31`) and, if it is not for all, `hosts`.\n\n"
        f"| key | default | what |\n| --- | --- | --- |\n{rows}\n\n"
        f"`alerts`, what must be loaded with thresholds no looser:\n\n| alert | on one of |\n| --- | --- |\n{alerts}\n"
    )


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _value(value: Any) -> str:
    return f"`{json.dumps(value)}`".replace("|", "\\|") if value not in (None, "") else "not set"
