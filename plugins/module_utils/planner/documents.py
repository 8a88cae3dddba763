# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""JSON files that people and models bring: read with a bound, and what cannot be read is one sentence."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

MOST_BYTES = 128 * 1024**2
"""A config.json has some kilobytes; the index of a model with 60,000 tensors has 10 MB."""


def read_json(path: str, name: str) -> Any:
    """Return the content of a JSON file; ``name`` is its place, for messages. Raises PlanError, FileNotFoundError and
    NotADirectoryError.
    """
    try:
        found = os.stat(path)
        if found.st_size > MOST_BYTES and stat.S_ISREG(found.st_mode):
            raise PlanError(f"{name} has {found.st_size} bytes; a JSON file here has {MOST_BYTES} at most.")
        with open(path, encoding="utf-8") as stream:
            return json.loads(stream.read(MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError, PlanError):
        raise
    except OSError as error:
        raise PlanError(f"{name}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name} is no JSON ({str(error)[:120]}).") from None
