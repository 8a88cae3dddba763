# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Every role keeps its contract: defaults, argument_specs and README say the same things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.exists() else {}


def spec_of(role: Path) -> dict[str, Any]:
    options: dict[str, Any] = load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"].get("options", {})
    return options


@pytest.fixture(params=ROLES, ids=lambda role: role.name)
def role(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_there_are_roles() -> None:
    assert {role.name for role in ROLES} >= {
        "validate",
        "gpu_host",
        "engine",
        "gateway",
        "monitoring",
        "verify",
    }


def test_every_default_is_in_the_spec_with_the_same_value(role: Path) -> None:
    defaults, spec = load(role / "defaults" / "main.yml"), spec_of(role)
    assert set(defaults) <= set(spec), "a default that the argument spec does not describe"
    different = {
        name: (defaults[name], option["default"])
        for name, option in spec.items()
        if "default" in option and name in defaults and option["default"] != defaults[name]
    }
    assert not different, "defaults/main.yml and argument_specs.yml disagree"


def test_every_option_is_required_or_has_a_default(role: Path) -> None:
    defaults = load(role / "defaults" / "main.yml")
    undecided = [name for name, option in spec_of(role).items() if name not in defaults and not option.get("required")]
    undecided = [name for name in undecided if not name.startswith("metalserve_")]
    assert not undecided, "an option that is neither required nor has a default"


def test_every_option_is_described(role: Path) -> None:
    bare = [name for name, option in spec_of(role).items() if not option.get("description")]
    assert not bare


def test_role_variables_carry_the_role_name(role: Path) -> None:
    wrong = [name for name in load(role / "defaults" / "main.yml") if not name.startswith(f"{role.name}_")]
    assert not wrong, "a role's default is prefixed with the role's name"


def test_the_readme_names_every_default(role: Path) -> None:
    readme = (role / "README.md").read_text(encoding="utf-8")
    missing = [name for name in load(role / "defaults" / "main.yml") if name not in readme]
    assert not missing, "a default that README.md does not mention"


def tasks_of(path: Path) -> list[dict[str, Any]]:
    """Return the tasks of a file, those within blocks too."""
    found, todo = [], list(yaml.safe_load(path.read_text(encoding="utf-8")) or [])
    while todo:
        task = todo.pop(0)
        found.append(task)
        todo += [inner for part in ("block", "rescue", "always") for inner in task.get(part, [])]
    return found


def test_what_a_node_fetches_from_elsewhere_goes_through_the_proxy() -> None:
    fetching = {"ansible.builtin.get_url", "ansible.builtin.unarchive"}
    found = [
        (path, task)
        for path in ROOT.glob("roles/*/tasks/**/*.yml")
        for task in tasks_of(path)
        if path.parents[1].name != "lab"
        if fetching & set(task) or task.get("metal.serve.model_files", {}).get("state") == "present"
    ]
    assert len(found) == 2
    for path, task in found:
        assert str(task.get("environment", "")).endswith("_proxy }}"), f"{path}: {task['name']}"


@pytest.mark.parametrize(
    ("role_name", "variable", "loops"),
    [
        ("monitoring", "__monitoring_files", {"monitoring_program": ["prometheus", "prometheus-alertmanager"]}),
        (
            "node_agent",
            "__node_agent_files",
            {"node_agent_exporter.unit": ["prometheus-node-exporter", "prometheus-nginx-exporter", "mtail"]},
        ),
    ],
)
def test_a_run_that_was_cut_off_before_a_restart_is_completed(
    role_name: str, variable: str, loops: dict[str, list[str]]
) -> None:
    """Each file whose change restarts or reloads a unit is compared with the time at which that unit did."""
    compared = load(ROOT / "roles" / role_name / "vars" / "main.yml")[variable]
    wanted: dict[str, set[str]] = {}
    (name, values), *_ = loops.items()
    for path in (ROOT / "roles" / role_name / "tasks").glob("*.yml"):
        for task in tasks_of(path):
            written = [spec["dest"] for spec in task.values() if isinstance(spec, dict) and "dest" in spec]
            for dest in written if "notify" in task else []:
                notified = task["notify"]
                for value in values if name in notified else [""]:
                    unit = notified.replace(f"{{{{ {name} }}}}", value).split(" ", 1)[1]
                    wanted.setdefault(f"{unit}.service", set()).add(dest.replace(f"{{{{ {name} }}}}", value))
    assert {unit: set(files) for unit, files in compared.items()} == wanted
