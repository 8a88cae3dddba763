# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Facts for the checks' tests, from the texts that a host would give: through the same snapshots that people make."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.checklist import checks
from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import REGISTRY, Verdict
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import merge_policy
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts

ALL = {item.id: item for item in REGISTRY.all()}
assert checks.__all__


def facts(files: Mapping[str, str]) -> HostFacts:
    """Return the facts of a folder made of ``path -> text``, without an index: what is missing was not collected."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return collect(folder).facts


def verdict_of(id: str, host: HostFacts, **policy: Any) -> Verdict:
    """Return the verdict of one check; ``policy`` overrides the default policy."""
    (only,) = judge(host, merge_policy(policy), "node-a", checks=[ALL[id]])
    return only
