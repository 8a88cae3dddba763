# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Render the role's own templates and variables as Ansible does it: a line of variables in, a line of files out, in JSON.

A process of its own, because Ansible's finder of collections must come before anything else has imported one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar

ROOT = Path(__file__).parents[3]
ROLE = ROOT / "roles" / "gateway"


def main() -> None:
    """Answer each line of variables with ``{"files": {...}, "secret_files": {...}}`` or ``{"error": "..."}``."""
    init_plugin_loader([str(ROOT / "collections")])
    loader = DataLoader()
    loader.set_basedir(str(ROLE))
    known: dict[str, Any] = {"role_path": str(ROLE)}
    for part in ("defaults", "vars"):
        known.update(loader.load_from_file(str(ROLE / part / "main.yml"), trusted_as_template=True))
    names = {"files": "__gateway_files", "secret_files": "__gateway_secret_files"}
    for line in sys.stdin:
        templar = Templar(loader=loader, variables={**known, **json.loads(line)})
        try:
            answer = {name: templar.template(known[variable]) for name, variable in names.items()}
        except AnsibleError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
