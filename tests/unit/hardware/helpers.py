# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to get facts in a test: from files as a snapshot has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts

FIXTURES = Path(__file__).parents[2] / "fixtures" / "hardware"
REPOSITORY = Path(__file__).parents[3]
SMI = "commands/nvidia-smi_-q_-x.txt"


def h200() -> str:
    """Return the recorded answer of nvidia-smi -q -x on an H200."""
    return (FIXTURES / "h200-580.159.04.xml").read_text(encoding="utf-8")


def write(folder: Path, files: dict[str, str], index: Optional[dict[str, Any]] = None) -> Path:
    """Write a snapshot by hand."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    if index is not None:
        (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def facts_of(folder: Path, files: dict[str, str], index: Optional[dict[str, Any]] = None) -> HostFacts:
    """Return the facts of a snapshot made by hand."""
    return collect(str(write(folder, files, index))).facts
