# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a person to type is let through."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ansible.parsing.vault import VaultLib, VaultSecret

from ansible_collections.metal.serve.plugins.module_utils.inventory import schema
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

DOCUMENTED = next(
    line.strip()
    for line in (ROOT / "docs" / "inventory.md").read_text(encoding="utf-8").splitlines()
    if "ansible-vault encrypt_string" in line
)

ROLES = {
    path.parents[1].name: options_of(path.parents[1].name, yaml.safe_load(path.read_text(encoding="utf-8")))
    for path in ROOT.glob("roles/*/meta/argument_specs.yml")
}


@pytest.mark.parametrize("command", [schema.MAKE_A_KEY.format(name="vault_key"), DOCUMENTED])
def test_the_command_that_makes_a_key_makes_one_that_passes(command: str, tmp_path: Path) -> None:
    """The command that validate and inventory.md give, as a shell runs it."""
    password = tmp_path / "password"
    password.write_text(secrets.token_hex(16))
    environment = {
        **os.environ,
        "ANSIBLE_VAULT_PASSWORD_FILE": str(password),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    made = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True).stdout
    encrypted = made.partition(": !vault |")[2]
    text = "\n".join(line.strip() for line in encrypted.strip().splitlines())
    key = VaultLib([("default", VaultSecret(password.read_bytes()))]).decrypt(text).decode()
    small = Small()
    small.wide["metalserve_engine_api_key"] = key
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert small.problems() == []


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
