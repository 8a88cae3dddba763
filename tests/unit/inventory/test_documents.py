# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a person to type is let through."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import yaml

from ansible_collections.metal.serve.plugins.module_utils.inventory.checks import check
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import Variable
from ansible_collections.metal.serve.plugins.module_utils.inventory.roles import options_of
from tests.unit.inventory.fork_playbook import ROOT
from tests.unit.inventory.small import Small

DOCUMENTS = [
    ROOT / "README.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("roles/*/README.md"),
    *ROOT.glob("playbooks/*.yml"),
]
PAIR = re.compile(r"-e ([a-z]\w+)=([^\s`,;:)]*[^\s`,;:).])")
MAPPING = re.compile(r"-e '(\{.+?\})'")
NOT_ADVICE = {"metalserve_expected_gpus=8", "name=true"}
"""Examples of what does not work, and of the form."""

ROLES = {
    path.parents[1].name: options_of(path.parents[1].name, yaml.safe_load(path.read_text(encoding="utf-8")))
    for path in ROOT.glob("roles/*/meta/argument_specs.yml")
}


def test_command_lines_in_documents_pass() -> None:
    """Each ``-e`` that a document shows, given as shown, is no problem."""
    refused = {}
    shown = 0
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        given = [{name: value} for name, value in PAIR.findall(text) if f"{name}={value}" not in NOT_ADVICE]
        given += [json.loads(mapping) for mapping in MAPPING.findall(text)]
        for variables in given:
            shown += 1
            inventory = Small().inventory()
            extra = {name: Variable(name, value, command_line=True) for name, value in variables.items()}
            hosts = {host: {**known, **extra} for host, known in inventory.variables.items()}
            problems = check(replace(inventory, variables=hosts), roles=ROLES)
            if problems:
                refused[f"{path.relative_to(ROOT)}: {variables}"] = [problem.as_dict() for problem in problems]
    assert refused == {}
    assert shown > 10
