# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""See the package above."""
