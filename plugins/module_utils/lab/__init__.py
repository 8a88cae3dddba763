# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the lab computes: the options of its nodes, the names of its images, the networks that collide."""
