# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the agent; the build puts the hash of what it packed here."""

from __future__ import annotations

VERSION = "source"
