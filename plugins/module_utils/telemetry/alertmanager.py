# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Why a configuration of Alertmanager was not taken, without what stands in it: receivers hold secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def refusal(result: Mapping[str, Any]) -> str:
    """Return the reason as one line, from the failed result of a task that wrote the file with ``amtool check-config``.

    Where amtool did not come to judge it, that is the task's own message. Quoted values are replaced in both.
    """
    said = re.search(r"FAILED: (.*?)(?:\namtool: |\Z)", str(result.get("stdout") or ""), re.DOTALL)
    words = " ".join((said.group(1) if said else str(result.get("msg") or "it gave no reason")).split())
    return re.sub(r"`[^`]*`|\"[^\"]*\"", "…", words)
