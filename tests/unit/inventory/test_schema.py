# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The schema is one with the rest of the project: its page, the roles' use of it, and itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from ansible_collections.metal.serve.plugins.module_utils.inventory import knobs, values
from ansible_collections.metal.serve.plugins.module_utils.inventory.documentation import render
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import BY_NAME, UNSET, VARIABLES, Key
from tests.unit.inventory.fork_playbook import ROOT

SOURCES = [
    path
    for folder in ("roles", "playbooks", "inventory", "plugins/filter", "plugins/modules", "plugins/action")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".yml", ".py", ".j2") and "files" not in path.parts
]
EXPRESSION = re.compile(
    r"\{\{(.+?)\}\}|\{%(.+?)%\}|^\s*(?:- )?(?:when|that|until|failed_when|changed_when): (.+)$", re.M | re.S
)
NAME = re.compile(r"(?<![.\w$])metalserve_\w+")
KEY = re.compile(r"^\s*(metalserve_\w+):", re.M)
READ = re.compile(r"""get\(\s*["'](metalserve_\w+)["']""")
DEFAULT = re.compile(r"\b(metalserve_\w+) \| default\((\d+|true|false|\[\]|'[^']*'|\"[^\"]*\")\)")


def every_key(keys: tuple[Key, ...] = VARIABLES) -> Iterator[Key]:
    """Yield each key of the schema at any depth."""
    for key in keys:
        yield key
        yield from every_key(key.keys)
        for variant in (key.variants or {}).values():
            yield from every_key(variant)
        if key.each is not None:
            yield from every_key((key.each,))


def test_page_is_current() -> None:
    """docs/variables.md is what the schema gives."""
    assert (ROOT / "docs" / "variables.md").read_text(encoding="utf-8") == render()
    done = subprocess.run([sys.executable, ROOT / "scripts" / "generate_variable_docs", "--check"], check=False)
    assert done.returncode == 0


def test_keys_are_whole() -> None:
    """Names are unique, types are known, defaults and examples are right by their own rules, patterns have words."""
    assert len(BY_NAME) == len(VARIABLES)
    for key in every_key():
        assert key.type in values._TYPES
        if key.name:
            assert key.description.endswith("."), key.name
        if key.default is not UNSET:
            assert list(values.walk(key, key.default)) == [], key.name
        if key.example and "{{" not in key.example and key.type in ("bool", "int", "number", "list", "mapping", "map"):
            assert list(values.walk(key, yaml.safe_load(key.example))) == [], key.name
        if key.pattern:
            assert key.hint, key.name
            re.compile(key.pattern)
        assert len({inner.name for inner in key.keys}) == len(key.keys)


def test_moved_names_lead_somewhere() -> None:
    """What replaces an old name exists, and no old name is a name of today."""
    pool = BY_NAME["metalserve_pools"].each
    assert pool is not None
    for old, new in knobs.MOVED.items():
        assert old not in BY_NAME
        name, *rest = re.split(r"[ .]", new.replace("metalserve_pools.<pool>.", "metalserve_pools."))
        assert name in BY_NAME, new
        if name == "metalserve_pools":
            assert pool.key(rest[0]) is not None, new


def names_in(path: Path) -> set[str]:
    """Return the variables that a file reads in expressions, sets as YAML keys, or gets by name in Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return set(READ.findall(text))
    found = set(KEY.findall(text)) if path.suffix == ".yml" else set()
    for parts in EXPRESSION.findall(text):
        found |= set(NAME.findall(re.sub(r"'[^']*'|\"[^\"]*\"", "", "".join(parts))))
    return found


def test_every_variable_in_use_is_known() -> None:
    """A metalserve_* variable that somebody reads or sets is in the schema."""
    unknown = {str(path.relative_to(ROOT)): names_in(path) - set(BY_NAME) for path in SOURCES}
    assert {path: names for path, names in unknown.items() if names} == {}
    assert "metalserve_pools" in set().union(*(names_in(path) for path in SOURCES))


def test_defaults_in_roles_are_those_of_the_schema() -> None:
    """``metalserve_x | default(y)`` in a role says what the schema says."""
    wrong = []
    for path in SOURCES:
        for name, text in DEFAULT.findall(path.read_text(encoding="utf-8")):
            key = BY_NAME.get(name)
            if key is not None and key.default is not UNSET and yaml.safe_load(text) != key.default:
                wrong.append(f"{path.relative_to(ROOT)}: {name} default {text}, schema {key.default!r}")
    assert wrong == []
