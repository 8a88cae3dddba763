# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""metalserve-agent: what only the node itself knows, as Prometheus metrics.

GPU health, engine readiness and start-up times, memory against the plan. Runs on a node's own Python 3.9 or newer from
one zipapp that carries prometheus_client and pynvml; nothing is installed.
"""
