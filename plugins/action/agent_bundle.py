# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Build a program for nodes on the controller and copy it where it differs. See plugins/modules/agent_bundle.py."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.metal.serve.plugins.module_utils.telemetry import engine_log
from ansible_collections.metal.serve.plugins.module_utils.telemetry.bundle import bundle, read_tree

# What prometheus_client brings beside its core and the agent does not use.
SKIP = ("aiohttp", "bridge", "django", "twisted")
AUDIT_TREE = "ansible_collections/metal/serve/plugins/module_utils"
AUDIT_VERSION = "metalserve_audit_version.py"
AUDIT_MAIN = b"""import sys

from ansible_collections.metal.serve.plugins.module_utils.checklist.scheduled import main

sys.exit(main(sys.argv[1:]))
"""
ENGINE_LOG = "ansible_collections/metal/serve/plugins/module_utils/telemetry/engine_log.py"


class ActionModule(ActionBase):  # ansible-core ships no types
    """Compute the archive, compare, copy; in check mode only say what would change."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return changed, dest, version, sha256 and a diff that names the file."""
        super().run(tmp, task_vars)
        _validation, arguments = self.validate_argument_spec(
            {
                "program": {"type": "str", "default": "agent", "choices": ["agent", "audit"]},
                "src": {"type": "path"},
                "dest": {"type": "path", "required": True},
            },
            required_if=[("program", "agent", ["src"])],
        )
        dest = arguments["dest"]
        if arguments["program"] == "agent":
            archive, version = bundle(members(arguments["src"]))
        else:
            archive, version = bundle(audit_members(), AUDIT_MAIN, AUDIT_VERSION)
        copied = self._copy(archive, dest, task_vars)
        result: dict[str, Any] = {**copied, "dest": dest, "version": version, "sha256": _sha256(archive)}
        result.pop("invocation", None)
        result["diff"] = []
        if result.get("changed") and self._task.diff:
            after = f"{arguments['program']} {version}, sha256 {_sha256(archive)}\n"
            result["diff"] = [{"before_header": dest, "after_header": dest, "before": "", "after": after}]
        return result

    def _copy(self, archive: bytes, dest: str, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        handle, path = tempfile.mkstemp(prefix="metalserve-agent-", suffix=".pyz")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(archive)
            task = self._task.copy()
            task.diff = False  # two archives have no readable difference
            task.args = {"src": path, "dest": dest, "owner": "root", "group": "root", "mode": "0644"}
            copy = self._shared_loader_obj.action_loader.get(
                "ansible.builtin.copy",
                task=task,
                connection=self._connection,
                play_context=self._play_context,
                loader=self._loader,
                templar=self._templar,
                shared_loader_obj=self._shared_loader_obj,
            )
            copied: dict[str, Any] = copy.run(task_vars=task_vars)
            return copied
        finally:
            os.unlink(path)


def members(source: str) -> dict[str, bytes]:
    """Return what goes into the archive. Raises AnsibleActionFail for a library that the controller lacks."""
    found = read_tree(source, "metalserve_agent")
    found.update(read_tree(_package("prometheus_client"), "prometheus_client", SKIP))
    with open(_origin("pynvml"), "rb") as stream:
        found["pynvml.py"] = stream.read()
    with open(str(engine_log.__file__), "rb") as stream:
        found[ENGINE_LOG] = stream.read()
    return found


def audit_members() -> dict[str, bytes]:
    """Return what the scheduled audit needs: this collection's module_utils, which use the standard library alone."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(str(engine_log.__file__))))
    return read_tree(folder, AUDIT_TREE)


def _origin(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise AnsibleActionFail(
            f"the Python library {name} is not installed beside Ansible; install requirements.lock into its environment"
        )
    return spec.origin


def _package(name: str) -> str:
    return os.path.dirname(_origin(name))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
