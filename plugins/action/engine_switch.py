# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The action of the module of the same name: a lost host is a failure that the play answers."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.plugin_utils.reached import ReachedAction


class ActionModule(ReachedAction):
    """Ask the module; where the host is lost, ask again for a while, then fail."""
