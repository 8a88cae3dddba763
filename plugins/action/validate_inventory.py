# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Checks inventory and variables on the controller. No host is asked: there is no module, and no connection is used."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleError
from ansible.module_utils.common.yaml import yaml_load  # in C where PyYAML has it, ten times as quick
from ansible.plugins.action import ActionBase

from ansible_collections.metal.serve.plugins.module_utils.inventory import checkout, report
from ansible_collections.metal.serve.plugins.module_utils.inventory.checks import check
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    ERROR,
    Inventory,
    Path,
    Unresolved,
    Variable,
    VariableFile,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.roles import options_of
from ansible_collections.metal.serve.plugins.module_utils.inventory.rules_variables import relevant
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import BY_NAME, HOST, VARIABLE_FOLDERS, Key
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import nearest
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import PURPOSES

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

REFERENCE = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")

try:  # where a value was written; not a public interface, so do without where it has gone
    from ansible._internal._datatag._tags import Origin
except ImportError:
    Origin = None


def _origin(*values: Any) -> str:
    """Return ``file:line`` (relative to the current folder) of the first value that knows, or an empty text."""
    for value in values:
        tag = Origin.get_tag(value) if Origin is not None else None
        if tag is not None and tag.path:
            path = os.path.relpath(tag.path)
            path = tag.path if path.startswith(os.path.join("..", "..")) else path
            return f"{path}:{tag.line_num}" if tag.line_num else path
    return ""


def _origins(name: str, value: Any, raw: Mapping[str, Any]) -> dict[Path, str]:
    """Return where each place inside a value was written; a mere reference leads to what it refers to."""
    found: dict[Path, str] = {}

    def visit(path: Path, item: Any, key: Any) -> None:
        refers = REFERENCE.fullmatch(item) if isinstance(item, str) else None
        place = _origin(raw.get(refers.group(1)) if refers else None, item, key)
        if place:
            found[path] = place
        if isinstance(item, Mapping):
            for inner, below in item.items():
                visit((*path, inner), below, inner)
        elif isinstance(item, (list, tuple)):
            for index, below in enumerate(item):
                visit((*path, index), below, None)

    visit((), value, name)
    return found


class _Reader:
    """Reads the variables of all hosts as they are written and resolves templates one by one."""

    def __init__(self, hostvars: Any, templar: Any, roles: Mapping[str, Mapping[str, Key]]) -> None:
        self._hostvars = hostvars
        self._templar = templar
        self._roles = roles
        self._wanted: dict[str, bool] = {}
        self._known: dict[tuple[str, int], tuple[Any, Variable]] = {}
        self._command_line = set(getattr(getattr(hostvars, "_variable_manager", None), "extra_vars", {}))

    def variables(self, host: str) -> dict[str, Variable]:
        """Return the variables of one host that concern Metalserve."""
        raw = self._hostvars.raw_get(host)
        found: dict[str, Variable] = {}
        for name, value in raw.items():
            if name not in self._wanted:
                self._wanted[name] = relevant(name, self._roles)
            if self._wanted[name]:
                found[str(name)] = self._variable(str(name), name, value, raw)
        return found

    def _variable(self, name: str, tagged: str, value: Any, raw: Mapping[str, Any]) -> Variable:
        """Return one variable. Values that hosts share are resolved once, unless they may differ from host to host."""
        known = self._known.get((name, id(value)))
        if known is not None:
            return known[1]
        key = BY_NAME.get(name)
        here = Variable(name, self._resolve(name, value, raw), _origins(tagged, value, raw), name in self._command_line)
        if (key is not None and key.scope != HOST) or not self._templar.is_template(value):
            self._known[(name, id(value))] = (value, here)  # holding the value keeps its id taken
        return here

    def _resolve(self, name: str, value: Any, raw: Mapping[str, Any]) -> Any:
        """Return a value without templates; what cannot be resolved becomes ``Unresolved`` where it stands."""
        if isinstance(value, Mapping):
            return {
                str(key) if isinstance(key, str) else key: self._resolve(name, item, raw) for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._resolve(name, item, raw) for item in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return self._leaf(value, raw)

    def _leaf(self, value: Any, raw: Mapping[str, Any]) -> Any:
        """Resolve one text or encrypted value."""
        if isinstance(value, str):
            refers = REFERENCE.fullmatch(value)
            plain = raw.get(refers.group(1)) if refers else value  # most templates only name another variable
            if isinstance(plain, str) and not self._templar.is_possibly_template(plain):
                return str(plain)
        encrypted = type(value).__name__ == "EncryptedString"
        try:
            templar = self._templar.copy_with_new_env(available_variables={**raw, "hostvars": self._hostvars})
            resolved = templar.template(value)
            return str(resolved) if isinstance(resolved, str) else resolved
        except Exception as error:  # whatever a template does wrong is the writer's to know, in one sentence
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if encrypted or "vault secret" in reason.lower() or "decrypt" in reason.lower():
                return Unresolved(
                    "(encrypted)" if encrypted else str(value),
                    "is encrypted and cannot be decrypted: no password, or not the right one, was given",
                    "give it: --ask-vault-pass, --vault-password-file FILE or --vault-id NAME@FILE",
                )
            if "is undefined" in reason or "has no attribute" in reason:
                return Unresolved(
                    str(value),
                    f"refers to what is not there: {reason.rstrip('.')}",
                    "define that variable (a secret: in a vault file of this inventory), or correct the name",
                )
            reason = reason.partition(" Use -v")[0].rstrip(".")
            right = (
                "make that file, or correct the template" if "not found" in reason.lower() else "correct the template"
            )
            return Unresolved(str(value), f"is a template that fails: {reason}", right)


class ActionModule(ActionBase):
    """``metal.serve.validate_inventory``: one report of all problems, then one failure."""

    BYPASS_HOST_LOOP = True  # once for the whole play, on whichever host comes first
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the outcome; failing when there is at least one error."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        _result, args = self.validate_argument_spec(
            argument_spec={"purpose": {"type": "str", "default": PURPOSES[0], "choices": list(PURPOSES)}}
        )
        roles = _role_options()
        inventory = self._inventory(task_vars, roles)
        problems = check(inventory, args["purpose"], os.path.exists, roles)
        problems = checkout.problems_of(_checkout(str(task_vars.get("playbook_dir", "")))) + problems
        problems.sort(key=lambda problem: problem.severity != ERROR)
        errors = [problem for problem in problems if problem.severity == ERROR]
        if not problems:
            self._display.display(f"\n{report.summary(problems)}\n", color=C.COLOR_OK)
        else:
            self._display.display(f"\n{report.render(problems)}\n", color=C.COLOR_ERROR if errors else C.COLOR_WARN)
        if errors:
            raise AnsibleError(report.summary(problems))
        return {
            "changed": False,
            "msg": report.summary(problems),
            "hosts": len(inventory.hosts),
            "warnings_found": [problem.as_dict() for problem in problems],
        }

    def _inventory(self, task_vars: Mapping[str, Any], roles: Mapping[str, Mapping[str, Key]]) -> Inventory:
        """Return the whole inventory, whatever --limit says."""
        hostvars = task_vars["hostvars"]
        manager = hostvars._inventory
        reader = _Reader(hostvars, self._templar, roles)
        groups = {str(name): [host.name for host in group.get_hosts()] for name, group in manager.groups.items()}
        children = {str(name): [child.name for child in group.child_groups] for name, group in manager.groups.items()}
        sources = [os.path.relpath(source) if os.path.exists(source) else source for source in manager._sources]
        return Inventory(
            groups,
            children,
            {str(host): reader.variables(host) for host in manager.hosts},
            ", ".join(sources),
            [file for source in manager._sources for file in _variable_files(source)],
        )


def _variable_files(source: str) -> list[VariableFile]:
    """Return the variable files beside an inventory (a file or a folder), and folders that are nearly called like theirs."""
    beside = source if os.path.isdir(source) else os.path.dirname(source)
    folders = [
        os.path.basename(path)
        for path in sorted(glob.glob(os.path.join(glob.escape(beside), "*")))
        if os.path.isdir(path)
    ]
    found = [
        VariableFile(name, "", os.path.relpath(os.path.join(beside, name)))
        for name in folders
        if name not in VARIABLE_FOLDERS and nearest(name, VARIABLE_FOLDERS, 0.8)
    ]
    for folder in VARIABLE_FOLDERS:
        for path in sorted(glob.glob(os.path.join(glob.escape(beside), folder, "*"))):
            name, ending = os.path.splitext(os.path.basename(path))
            if os.path.isdir(path):
                name, ending = name + ending, ""
            if ending in ("", ".yml", ".yaml", ".json"):
                found.append(VariableFile(folder, name, os.path.relpath(path)))
    return found


def _role_options() -> dict[str, dict[str, Key]]:
    """Return the variables of every role of this collection, from its argument_specs."""
    found = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "roles", "*", "meta", "argument_specs.yml"))):
        role = os.path.basename(os.path.dirname(os.path.dirname(path)))
        with open(path, encoding="utf-8") as stream:
            found[role] = options_of(role, yaml_load(stream))
    return found


def _checkout(playbook_dir: str) -> checkout.Checkout:
    """Look at the tree that runs."""
    root = os.path.realpath(ROOT)
    above = os.path.realpath(os.path.join(playbook_dir, "..")) if playbook_dir else ""
    candidates = [above, os.path.realpath(playbook_dir)] if playbook_dir else []
    playbook_root = next((path for path in candidates if os.path.exists(os.path.join(path, "roles", "validate"))), "")
    link = os.path.join(root, checkout.LINK)
    return checkout.Checkout(
        root=root,
        playbook_root=playbook_root,
        installed=root.endswith(os.path.join("ansible_collections", "metal", "serve")),
        link_good=os.path.isdir(link) and os.path.realpath(link) == root,
        world_writable=bool(os.stat(root).st_mode & stat.S_IWOTH),
        config_file=os.path.realpath(C.CONFIG_FILE) if C.CONFIG_FILE else "",
    )
