# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The checkout is what it says it is: the collection link, the headers, the plays, the links between documents."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
    "\0"
)[:-1]


def test_the_collection_link_is_committed_and_points_at_the_tree() -> None:
    link = ROOT / "collections" / "ansible_collections" / "metal" / "serve"
    assert os.readlink(link) == "../../.."
    assert link.resolve() == ROOT.resolve()


def test_every_python_file_has_the_licence_header() -> None:
    bare = []
    for name in TRACKED:
        path = ROOT / name
        if name.endswith(".py") and path.is_file() and path.read_text(encoding="utf-8").strip():
            head = path.read_text(encoding="utf-8").splitlines()[:3]
            if "# SPDX-License-Identifier: Apache-2.0" not in head:
                bare.append(name)
    assert not bare


def test_site_is_import_lines_only_and_every_import_exists() -> None:
    plays = yaml.safe_load((ROOT / "site.yml").read_text(encoding="utf-8"))
    for play in plays:
        assert set(play) == {"name", "ansible.builtin.import_playbook"}
        assert (ROOT / play["ansible.builtin.import_playbook"]).is_file()


DOCUMENTS = [name for name in TRACKED if name.endswith(".md")]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_in_documents_lead_somewhere(name: str) -> None:
    path = ROOT / name
    if not path.exists():
        pytest.skip("deleted in the working tree")
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file) if file else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


def anchors(path: Path) -> set[str]:
    """Return the anchors of a Markdown file as GitHub makes them, and the explicit ones."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+\s+(.+?)\s*$", text, flags=re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
