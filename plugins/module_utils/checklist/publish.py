# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a host's verdicts where the node exporter reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.checklist.report import render_textfile
from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic


def publish(path: str, host: Mapping[str, Any], finished: float) -> str:
    """Write the metrics of ``host`` (with ``verdicts``) to ``path`` as a whole; ``finished`` is Unix time in seconds.

    Returns an empty text, or a sentence on why nothing was written: the old file then still stands, and the alert on its
    age will say so too.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"Not published: {folder} is not there; site.yml --tags monitoring installs the node exporter that reads it."
    try:
        write_atomic(path, render_textfile(host, finished))
    except OSError as error:
        return f"Not published: {path} could not be written: {error.strerror or error}."
    return ""
