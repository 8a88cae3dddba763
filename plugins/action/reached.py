# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The action of the modules that a redeploy asks; meta/runtime.yml says which."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.plugin_utils.reached import ReachedAction


class ActionModule(ReachedAction):
    """A lost host is a failure, not the end of the host's part in the run."""
