# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The first play as it is run: limits, check mode, tags, many hosts, any connection settings, before other plays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.inventory.fork_playbook import ROOT, Runner
from tests.unit.inventory.reports import entries

FOLDER = ROOT / "tests" / "fixtures" / "inventories"
BROKEN = FOLDER / "broken" / "quoted_number.yml"
GOOD = FOLDER / "good" / "one_pool.yml"
EMPTY = FOLDER / "broken" / "no_hosts.yml"


@pytest.fixture
def two_plays(tmp_path: Path) -> Path:
    """Return a playbook like site.yml: validate, then a play that reaches the hosts."""
    book = tmp_path / "two.yml"
    book.write_text(
        f"- ansible.builtin.import_playbook: {ROOT}/playbooks/validate.yml\n"
        "- name: Second play\n"
        "  hosts: all\n"
        "  gather_facts: false\n"
        "  tasks:\n"
        "    - ansible.builtin.ping:\n"
    )
    return book


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--limit", "gate-a"),
        ("--limit", "engines:!node-a:gateways"),
        ("--check", "--diff"),
        ("--tags", "nothing_has_this_tag"),
        ("-e", "ansible_connection=ssh"),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_stops_the_whole_run(ansible: Runner, two_plays: Path, options: tuple[str, ...]) -> None:
    """A problem on any host stops everything, whatever part of the run was asked for."""
    outcome = ansible.run(two_plays, "-i", BROKEN, *options)
    assert outcome.status == 2, outcome.output
    assert [entry.variable for entry in entries(outcome.output)] == ["metalserve_pools.short.replicas_per_node"]
    assert "Second play" not in outcome.output
    assert outcome.connections == []


def test_wild_connection_on_the_command_line(ansible: Runner, two_plays: Path) -> None:
    """-e wins over all else, so Ansible itself refuses an unknown plugin there; nothing is reached all the same."""
    outcome = ansible.run(two_plays, "-i", BROKEN, "-e", "ansible_connection=no.such.plugin")
    assert outcome.status == 2
    assert "no.such.plugin" in outcome.output
    assert "Second play" not in outcome.output
    assert outcome.connections == []


def test_a_right_inventory_goes_on_to_the_hosts(ansible: Runner, two_plays: Path) -> None:
    """The later play starts, and the stand-ins see its connections: so they would have seen those of validate."""
    outcome = ansible.run(two_plays, "-i", GOOD)
    assert "Second play" in outcome.output
    assert any("192.0.2.11" in line for line in outcome.connections)


@pytest.mark.parametrize(
    ("inventory", "options", "says"),
    [
        (EMPTY, (), "has no hosts"),
        (EMPTY, ("--limit", "node-a"), "The inventory has no hosts, so --limit node-a matches none."),
        (GOOD, ("--limit", "node-z"), "leaves us with no hosts to target"),
    ],
)
def test_no_host_is_a_failure(ansible: Runner, inventory: Path, options: tuple[str, ...], says: str) -> None:
    """Nothing to do is no success."""
    outcome = ansible.run("playbooks/validate.yml", "-i", inventory, *options)
    assert outcome.status != 0
    assert says in outcome.output
    assert "Traceback" not in outcome.output


def test_whatever_the_connection_settings_are(ansible: Runner, tmp_path: Path) -> None:
    """Settings that would fail before a connection (unknown plugins, undefined templates) do not matter to validate."""
    text = GOOD.read_text()
    wild = tmp_path / "wild.yml"
    wild.write_text(
        text.replace(
            "  vars:\n",
            "  vars:\n    ansible_connection: no.such.plugin\n    ansible_user: '{{ nobody_defined_this }}'\n"
            "    ansible_become: true\n    ansible_become_method: no.such.method\n",
            1,
        )
    )
    for options in ((), ("--limit", "node-a")):
        outcome = ansible.run("playbooks/validate.yml", "-i", wild, *options)
        assert outcome.status == 0, outcome.output


def test_vault_password(ansible: Runner, tmp_path: Path) -> None:
    """With the password an encrypted value is judged like any other."""
    password = tmp_path / "password"
    password.write_text("correct-horse\n")
    inventory = FOLDER / "broken" / "vault_without_password.yml"
    outcome = ansible.run("playbooks/validate.yml", "-i", inventory, "--vault-password-file", password)
    assert outcome.status == 0, outcome.output


def test_encrypted_file_without_password(ansible: Runner, tmp_path: Path) -> None:
    """A whole file that is encrypted, as the example advises: the error names file and remedy."""
    inventory = tmp_path / "prod"
    vault = inventory / "group_vars" / "all" / "vault.yml"
    vault.parent.mkdir(parents=True)
    shutil.copy(GOOD, inventory / "hosts.yml")
    vault.write_text("vault_engine_key: 0c7d1e9f4b2a836517\n")
    password = tmp_path / "password"
    password.write_text("correct-horse\n")
    program = Path(sys.executable).with_name("ansible-vault")
    subprocess.run([program, "encrypt", "--vault-password-file", password, vault], check=True, capture_output=True)
    outcome = ansible.run("playbooks/validate.yml", "-i", inventory)
    assert outcome.status != 0
    assert "group_vars/all/vault.yml is encrypted, and no vault password was given" in outcome.output
    assert "--ask-vault-pass" in outcome.output
    assert ansible.run("playbooks/validate.yml", "-i", inventory, "--vault-password-file", password).status == 0


def test_command_line_values(ansible: Runner) -> None:
    """-e name=value is text: accepted for the switches that are meant for one run, else explained."""
    good = ansible.run(
        "playbooks/validate.yml", "-i", GOOD, "-e", "metalserve_allow_outage=true", "-e", "metalserve_emergency=true"
    )
    assert good.status == 0, good.output
    assert entries(good.output) == []
    bad = ansible.run("playbooks/validate.yml", "-i", GOOD, "-e", "metalserve_expected_gpus=8")
    assert bad.status == 2
    (entry,) = entries(bad.output)
    assert entry.where == "the command line (-e)"
    assert "-e '{\"metalserve_expected_gpus\": 8}'" in entry.right
    unclear = ansible.run("playbooks/validate.yml", "-i", GOOD, "-e", "metalserve_allow_outage=maybe")
    assert unclear.status == 2


def test_purpose_audit(ansible: Runner) -> None:
    """An audit changes nothing, so it lets through what only a set-up needs."""
    for name in ("unsupported_os.yml", "secrets_missing.yml", "empty_main_group.yml"):
        inventory = FOLDER / "broken" / name
        assert ansible.run("playbooks/validate.yml", "-i", inventory, "-e", "validate_purpose=audit").status == 0
    wrong = ansible.run("playbooks/validate.yml", "-i", GOOD, "-e", "validate_purpose=party")
    assert wrong.status == 2
    assert "site, plan, redeploy, audit" in wrong.output


def test_where_a_value_was_written(ansible: Runner, tmp_path: Path) -> None:
    """The report leads to file and line, also for a secret that is only referred to."""
    folder = tmp_path / "inventory"
    (folder / "group_vars" / "all").mkdir(parents=True)
    (folder / "host_vars").mkdir()
    text = GOOD.read_text().replace("0c7d1e9f4b2a836517", '"{{ vault_engine_key }}"')
    (folder / "hosts.yml").write_text(text)
    (folder / "group_vars" / "all" / "vault.yml").write_text("---\n# secrets\nvault_engine_key: short\n")
    (folder / "host_vars" / "node-a.yml").write_text('---\nmetalserve_expected_gpus: "8"\n')
    outcome = ansible.run("playbooks/validate.yml", "-i", folder)
    found = {entry.variable: entry for entry in entries(outcome.output)}
    assert found["metalserve_engine_api_key"].where.endswith("group_vars/all/vault.yml:3")
    assert found["metalserve_expected_gpus"].where.endswith("host_vars/node-a.yml:2 (host node-a)")


def test_five_hundred_hosts(ansible: Runner, tmp_path: Path) -> None:
    """500 nodes, each with an address from a template, take less than 5 s of processor time, in one task."""
    hosts = "".join(
        f"            node-{index}: {{ansible_host: 10.0.{index // 250}.{index % 250 + 1}, "
        'metalserve_address: "{{ ansible_host }}"}\n'
        for index in range(500)
    )
    inventory = tmp_path / "many.yml"
    inventory.write_text(GOOD.read_text().replace("            node-a: {ansible_host: 192.0.2.11}\n", hosts))
    outcome = ansible.run("playbooks/validate.yml", "-i", inventory)
    assert outcome.status == 0, outcome.output
    assert outcome.cpu_s < 5
    assert outcome.output.count("TASK [") == 1
    assert outcome.connections == []


MARK = "CHANGE_ME"


def _filled(line: str, number: int) -> str:
    """Return a line of the example as a new user fills it."""
    if "ansible_host" in line:
        return line.replace(MARK, f"192.0.2.{number}")
    for key, value in (
        ("ansible_user", "ops"),
        ("address:", "192.0.2.5:5000"),
        ("names:", "llm.example.com"),
        ("path:", "/srv/models/chat"),
        ("revision:", "604d5664"),
        ("image:", "3f" * 32),
        ("finance_key", "5f2c9e1b7a3d4f60a1c2"),
        ("engine_key", "0c7d1e9f4b2a836517f0"),
    ):
        if key in line:
            return line.replace(MARK, value)
    raise AssertionError(f"nobody says how to fill: {line}")


def test_example(ansible: Runner, tmp_path: Path) -> None:
    """As it is, the report names exactly the marked lines, at most 15; once these are filled, it passes."""
    folder = tmp_path / "prod"
    shutil.copytree(ROOT / "inventory" / "example", folder)
    marked = []
    for path in sorted(folder.rglob("*.yml")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if MARK in line and not line.lstrip().startswith("#"):
                marked.append((path, number))
    assert 0 < len(marked) <= 15

    outcome = ansible.run("playbooks/validate.yml", "-i", folder)
    assert outcome.status == 2
    named = set()
    for entry in entries(outcome.output):
        if entry.severity == "error":
            file, numbers = entry.where.split(" (")[0].rsplit(".yml:", 1)
            named |= {(Path(f"{file}.yml"), int(number)) for number in re.findall(r"\d+", numbers)}
    assert named == set(marked)

    for path, number in marked:
        lines = path.read_text().splitlines(keepends=True)
        lines[number - 1] = _filled(lines[number - 1], number)
        path.write_text("".join(lines))
    outcome = ansible.run("playbooks/validate.yml", "-i", folder)
    assert outcome.status == 0, outcome.output
    assert [entry.variable for entry in entries(outcome.output)] == ["metalserve_alert_receivers"]


PARTS = (
    "plugins/module_utils",
    "ansible.cfg",
    "galaxy.yml",
    "meta",
    "playbooks/validate.yml",
    "roles/validate",
    "plugins/action/validate_inventory.py",
    "plugins/filter/inventory.py",
    "plugins/modules/validate_inventory.py",
)


@pytest.mark.parametrize("name", ["five_faults.yml", "no_hosts.yml", "unsupported_os.yml"])
def test_site(ansible: Runner, name: str) -> None:
    """The whole site.yml stops after its first play: one report, no connection, no further play."""
    outcome = ansible.run("site.yml", "-i", FOLDER / "broken" / name)
    assert outcome.status == 2
    assert outcome.output.count("PLAY [") == 1
    assert outcome.output.count("What validate found:") == 1
    assert outcome.connections == []
    if name == "five_faults.yml":
        assert len(entries(outcome.output)) == 5


def test_imported_for_another_purpose(ansible: Runner, tmp_path: Path) -> None:
    """Other playbooks import the same first play and say what for."""
    book = tmp_path / "audit.yml"
    book.write_text(f"- import_playbook: {ROOT}/playbooks/validate.yml\n  vars: {{validate_purpose: audit}}\n")
    outcome = ansible.run(book, "-i", FOLDER / "broken" / "unsupported_os.yml")
    assert outcome.status == 0, outcome.output


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with as much as validate needs."""
    tree = tmp_path / "metalserve"
    for part in PARTS:
        source, target = ROOT / part, tree / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    link = tree / "collections" / "ansible_collections" / "metal" / "serve"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../..")
    return tree


def _in(tree: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the playbook of another checkout, as a person does there who has not installed the collection as well."""
    program = Path(sys.executable).with_name("ansible-playbook")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    return subprocess.run(
        [program, "playbooks/validate.yml", "-i", GOOD],
        cwd=tree,
        env={**clean, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(tree / ".home"), **more},
        capture_output=True,
        text=True,
        check=False,
    )


def test_link_did_not_survive(checkout: Path) -> None:
    """A zip turns the link into a small file; the error says how to make it again."""
    link = checkout / "collections" / "ansible_collections" / "metal" / "serve"
    link.unlink()
    link.write_text("../../..")
    outcome = _in(checkout)
    assert outcome.returncode != 0
    assert "ln -sfn ../../.. collections/ansible_collections/metal/serve" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_folder_that_everybody_may_write_to(checkout: Path) -> None:
    """Ansible then ignores ansible.cfg; the error says so, and where the file is forced the report warns."""
    checkout.chmod(0o777)
    outcome = _in(checkout)
    assert outcome.returncode != 0
    assert f"chmod o-w {checkout}" in outcome.stderr
    forced = _in(checkout, ANSIBLE_CONFIG=str(checkout / "ansible.cfg"))
    assert forced.returncode == 0, forced.stdout + forced.stderr
    assert [entry.variable for entry in entries(forced.stdout)] == ["checkout"]
