# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Each variable alone: known ones against the schema, unknown ones with the nearest right name, and scope."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.inventory import knobs, schema, values
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    ERROR,
    WARNING,
    Path,
    Unresolved,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import (
    BY_NAME,
    INVENTORY,
    RUN,
    VARIABLES,
    Key,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import Finding
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    View,
    at,
)

_PREFIX = "metalserve_"
_ALMOST_PREFIX = re.compile(r"\A_*metal[-_ ]?serv(e|er|ice)?s?[-_ ]", re.IGNORECASE)


_ALSO_READ = frozenset({"ansible_host", "ansible_user", *schema.OS_VARIABLES})
_JUDGED_ELSEWHERE = ("metalserve_api_keys", "metalserve_engine_api_key")  # rules_services.py
_OPEN_ENGINE_PREFIXES = ("vllm_", "sglang_", "triton_")


def relevant(name: str, roles: Iterable[str] = ()) -> bool:
    """Tell whether a variable of this name concerns Metalserve; callers may leave the others out."""
    if name.startswith("metalserve_") or name in _ALSO_READ or _ALMOST_PREFIX.match(name):
        return True
    if any(name.startswith(f"{role}_") for role in roles):
        return True
    return _bare_knob(name) is not None or knobs.plain(name) in knobs.WRONG_PLACE


def _bare_knob(name: str) -> knobs.Knob | None:
    """Return the answer for a circulating name as a variable of its own, with or without an engine's prefix."""
    bare = knobs.plain(name)
    for prefix in ("metalserve_", *_OPEN_ENGINE_PREFIXES):
        if bare.startswith(prefix) and bare[len(prefix) :] in knobs.KNOBS:
            bare = bare[len(prefix) :]
            break
    else:
        if bare in knobs.AMBIGUOUS:
            return None
    return None if bare in knobs.ONLY_IN_SETTINGS else knobs.KNOBS.get(bare)


def known_variables(view: View) -> None:
    """Every known variable has the type and form that the schema says."""
    for name, settings in view.settings.items():
        key = BY_NAME.get(name) or _role_key(view, name)
        if key is None:
            continue
        for setting in settings:
            variable = setting.variable
            if key.text_on_command_line and variable.command_line and _truth_text(variable.value):
                continue
            found = list(values.walk(key, variable.value, (), variable.command_line))
            told = {finding.path for finding in found}
            if name not in _JUDGED_ELSEWHERE:
                found += [finding for finding in _open_leaves(variable.value) if finding.path not in told]
            for finding in found:
                view.add_finding(
                    setting, finding, secret=key.secret and not isinstance(at(variable.value, finding.path), Mapping)
                )


def _open_leaves(value: Any, path: Path = ()) -> Iterator[Finding]:
    """Yield what is unresolved or still a placeholder at any depth, also where the schema does not look inside."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _open_leaves(item, (*path, name))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _open_leaves(item, (*path, index))
    elif isinstance(value, Unresolved):
        yield Finding(path, value.problem, value.right, about=value.shown)
    elif isinstance(value, str) and schema.PLACEHOLDER in value:
        yield Finding(path, "is still the placeholder of the example", "write your own value", about=schema.PLACEHOLDER)


def _truth_text(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("true", "false")


def _role_key(view: View, name: str) -> Key | None:
    for role, options in view.roles.items():
        if name.startswith(f"{role}_") and name in options:
            return options[name]
    return None


def unknown_variables(view: View) -> None:
    """Names that nothing reads: circulating ones with the real knob, the others with the nearest right name."""
    for name, settings in view.settings.items():
        if (
            name in BY_NAME
            or _role_key(view, name) is not None
            or (name in _ALSO_READ and not name.startswith("metalserve_"))
        ):
            continue
        answer = _answer(view, name)
        if answer is None:
            continue
        problem, right, severity = answer
        for setting in settings:
            shown = values.SECRET if knobs.SECRET_NAME.search(name) else None
            view.add_at(setting, (), problem, right, shown, severity)


def _answer(view: View, name: str) -> tuple[str, str, str] | None:
    """Return (problem, what is right, severity) for a name that nothing reads; None if it is none of our business."""
    knob = _bare_knob(name)
    bare = knobs.plain(name)
    if knob is not None:
        return knob.why, knob.right(), ERROR
    if bare in knobs.WRONG_PLACE:
        key = knobs.POOL_KEYS_OF_SETTINGS.get(bare) or (
            "max_model_len" if bare == "max_model_len" else f"settings.{bare}"
        )
        return "does nothing as a variable of its own", f"write it in the pool: metalserve_pools.<pool>.{key}", ERROR
    if name in knobs.MOVED:
        return "is not a variable (any more)", f"write {knobs.MOVED[name]}", ERROR
    if name.startswith("metalserve_") or _ALMOST_PREFIX.match(name):
        return "is not a variable of Metalserve", _nearest_variable(_ALMOST_PREFIX.sub("metalserve_", name)), ERROR
    return _role_answer(view, name)


def _nearest_variable(name: str) -> str:
    """Return what is right instead of an unknown ``metalserve_`` name."""
    rest = name[len(_PREFIX) :]
    near = values.nearest(rest, [known[len(_PREFIX) :] for known in BY_NAME], 0.7)
    if near:
        return f"did you mean {_PREFIX}{near}?"
    moved = values.nearest(name, knobs.MOVED, 0.9)
    if moved:
        return f"write {knobs.MOVED[moved]}"
    pool_key = values.nearest(rest, [key.name for key in _pool_keys()], 0.8)
    if pool_key:
        return f"did you mean metalserve_pools.<pool>.{pool_key}?"
    return f"remove it; {values.DOC} lists all variables"


def _role_answer(view: View, name: str) -> tuple[str, str, str] | None:
    """Return the answer for a name with a role's prefix that the role does not have."""
    for role in sorted(view.roles, key=len, reverse=True):
        if not name.startswith(f"{role}_"):
            continue
        near = values.nearest(name, view.roles[role], 0.75)
        if near:
            return f"is not a variable of the role {role}", f"did you mean {near}?", ERROR
        right = f"remove it if it is meant for Metalserve; roles/{role}/README.md lists what there is"
        return f"is not a variable of the role {role}", right, WARNING
    return None


def _pool_keys() -> tuple[Key, ...]:
    each = BY_NAME["metalserve_pools"].each
    return each.keys if each is not None else ()


def scope(view: View) -> None:
    """Inventory-wide variables are the same for, and seen by, all hosts; those for one run are not in the inventory."""
    for key in VARIABLES:
        settings = view.settings.get(key.name, [])
        if not settings:
            continue
        setting = view.setting(key.name)
        if key.scope == INVENTORY:
            seen = {host for found in settings for host in found.hosts}
            blind = [host for host in view.served if host not in seen]
            if len({repr(found.variable.value) for found in settings}) > 1:
                places = "; ".join(f"{found.variable.origin(()) or view.who(found.hosts)}" for found in settings[:4])
                view.add_at(
                    setting,
                    (),
                    f"has different values ({places}), but must be the same for all hosts",
                    "keep one, in group_vars/all.yml",
                    values.SECRET if key.secret else None,
                )
            elif blind:
                view.add_at(
                    setting,
                    (),
                    f"is not seen by {view.who(blind)}",
                    "move it to group_vars/all.yml, so that all hosts see it",
                    "",
                )
        elif key.scope == RUN:
            for found in settings:
                if not found.variable.command_line and found.variable.value is True:
                    view.add_at(
                        found,
                        (),
                        "is meant for one run, but holds for every run from here",
                        f"remove it here and give it when it is needed: -e {key.name}=true",
                        severity=WARNING,
                    )


def required(view: View) -> None:
    """Required variables are there."""
    if not view.inventory.hosts:
        return
    for key in VARIABLES:
        if not key.required or key.name in view.settings:
            continue
        if key.name == "metalserve_api_keys":
            right = (
                'write metalserve_api_keys: [{name: <who>, key: "{{ vault_<who>_key }}"}] in group_vars/all.yml; '
                "make the key with:\n" + schema.MAKE_A_KEY.format(name="vault_<who>_key")
            )
        elif key.name == "metalserve_engine_api_key":
            right = (
                'write metalserve_engine_api_key: "{{ vault_engine_key }}" in group_vars/all.yml; make the key with:\n'
                + schema.MAKE_A_KEY.format(name="vault_engine_key")
            )
        else:
            right = "describe at least one in group_vars/all.yml; inventory/example shows how"
        view.add(key.name, "", "is missing", right, where=view.inventory.source, severity=view.lenient())
