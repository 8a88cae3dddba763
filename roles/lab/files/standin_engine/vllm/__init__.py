# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""So that the command that starts the real engine starts this one: python3 -m vllm.entrypoints.openai.api_server."""

__version__ = "0.32.0"
