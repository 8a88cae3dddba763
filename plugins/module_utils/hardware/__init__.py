# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a machine once, live or from a snapshot folder, and says what is there: see docs/facts.md."""
