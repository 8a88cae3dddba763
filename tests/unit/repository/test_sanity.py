# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""ansible-test may ignore one rule alone: that modules be GPL."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
RULE = "validate-modules:missing-gplv3-license"


def test_only_the_licence_rule_is_ignored_once_for_each_module() -> None:
    lines = (ROOT / "tests" / "sanity" / "ignore-2.21.txt").read_text(encoding="utf-8").splitlines()
    ignored = {line.split(" # ")[0] for line in lines}
    modules = {path.name for path in (ROOT / "plugins" / "modules").glob("*.py")}
    assert ignored == {f"plugins/modules/{name} {RULE}" for name in modules}
