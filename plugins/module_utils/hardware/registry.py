# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""All probes, and the subsets by which they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_docker import DOCKER_PROBES
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_gpu import GPU_PROBES
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_host import HOST_PROBES
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_services import SERVICE_PROBES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import Probe

PROBES: tuple[Probe, ...] = (*GPU_PROBES, *SERVICE_PROBES, *DOCKER_PROBES, *HOST_PROBES)
"""Every probe. The slow ones stand first, so that they overlap with the rest."""

USUAL: tuple[Probe, ...] = tuple(probe for probe in PROBES if not probe.on_request)
"""What is read where nothing else is said: all but what takes minutes (hashing every file of a model)."""

GROUPS: tuple[str, ...] = tuple(sorted({probe.group for probe in PROBES}))
"""Names of the groups."""

BASE = ("cgroup", "cpu", "driver", "gpu", "kernel", "limits", "memory", "numa", "os", "pci", "sysctl")
"""The groups that ``base`` stands for: what a plan and the preparation of a host need, quick to read."""


def choose(subset: Iterable[str]) -> tuple[Probe, ...]:
    """Return the probes of the groups in ``subset``: names of groups, ``base``, ``all``, or the name of one probe.

    ``all`` leaves out ``deep``, which hashes models and takes minutes.

    Raises ValueError that names an unknown word and what there is.
    """
    wanted: set[str] = set()
    names = {probe.name for probe in PROBES}
    single: set[str] = set()
    for word in subset:
        if word == "all":
            wanted.update(probe.group for probe in USUAL)
        elif word == "base":
            wanted.update(BASE)
        elif word in GROUPS:
            wanted.add(word)
        elif word in names:
            single.add(word)
        else:
            raise ValueError(f"subset: {word!r} is no group of facts; there are: all, base, {', '.join(GROUPS)}")
    return tuple(probe for probe in PROBES if probe.group in wanted or probe.name in single)
