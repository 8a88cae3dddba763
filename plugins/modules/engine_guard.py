#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_guard
short_description: Put the checks before an engine's start, or the watchdog, on a node
version_added: 0.1.0
description:
  - Writes one executable file made of this collection's own modules, which the engines' unit runs before each
    start, or which watches them while they run. The same version of the collection gives the same bytes.
options:
  tool:
    description: V(guard) for the checks before a start, V(watchdog) for the watch over engines that run.
    type: str
    choices: [guard, watchdog]
    default: guard
  path:
    description: The file.
    type: path
    default: /opt/metalserve/engine-guard.pyz
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Names the file and its hash.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Put the checks before a start on the node
  metal.serve.engine_guard:
"""

RETURN = r"""
path:
  description: The file.
  returned: always
  type: str
"""

import hashlib
import os
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.common import files
from ansible_collections.metal.serve.plugins.module_utils.models import manifest
from ansible_collections.metal.serve.plugins.module_utils.release import guard, tool, watchdog


def read(path: str) -> bytes:
    """Return a file's bytes, none where there is no file."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return b""


def write(path: str, data: bytes) -> None:
    """Replace a file at once; executable for all."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".metalserve-", dir=os.path.dirname(path))
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(temporary, 0o755)
    os.replace(temporary, path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "tool": {"type": "str", "choices": ["guard", "watchdog"], "default": "guard"},
            "path": {"type": "path", "default": "/opt/metalserve/engine-guard.pyz"},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    shared = [files, manifest]
    wanted = (
        tool.archive([*shared, guard], watchdog) if module.params["tool"] == "watchdog" else tool.archive(shared, guard)
    )
    before = read(path)
    changed = before != wanted
    diff = {
        "before_header": path,
        "after_header": path,
        "before": f"sha256 {hashlib.sha256(before).hexdigest()}\n" if before else "",
        "after": f"sha256 {hashlib.sha256(wanted).hexdigest()}\n",
    }
    if changed and not module.check_mode:
        try:
            write(path, wanted)
        except OSError as error:
            module.fail_json(msg=f"{error.filename}: {error.strerror}")
    module.exit_json(changed=changed, path=path, diff=diff if changed else {})


if __name__ == "__main__":
    main()
