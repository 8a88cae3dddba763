# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Which nodes are redeployed together: per pool a canary first, then larger batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEFAULT: tuple[int | str, ...] = (1, "25%")


def size(step: int | str, hosts: int) -> int:
    """Return how many of ``hosts`` one entry of ``serial`` means, one at least. Raises ValueError.

    As in Ansible: a number, or a share such as ``25%``, rounded down.
    """
    text = str(step).strip()
    share = text.endswith("%")
    try:
        number = float(text[:-1]) if share else int(text)
    except ValueError:
        raise ValueError(f"release_serial has {step!r}; it must be a number of nodes, or a share such as 25%") from None
    if number <= 0 or (share and number > 100):
        raise ValueError(f"release_serial has {step!r}; it must be at least 1, a share at most 100%")
    return max(1, int(hosts * number / 100) if share else int(number))


def split(hosts: Sequence[str], serial: Sequence[int | str] = DEFAULT) -> list[list[str]]:
    """Return the batches of one pool; the last entry of ``serial`` counts for all that is left."""
    if not serial:
        raise ValueError("release_serial is empty; it must be a list such as [1, 25%]")
    found, rest = [], list(hosts)
    for step in [*serial[:-1], *[serial[-1]] * len(rest)]:
        if not rest:
            break
        count = size(step, len(hosts))
        found.append(rest[:count])
        rest = rest[count:]
    return found


def batches(
    pools: Mapping[str, Sequence[str]],
    hosts: Sequence[str],
    serial: Sequence[int | str] = DEFAULT,
    idle: Sequence[str] = (),
) -> list[list[str]]:
    """Return the batches over all pools, pool after pool; a node of two pools is done with the first one.

    ``pools`` maps a pool to its nodes in order, ``hosts`` are those with something to do. Those of them that serve
    nobody (``idle``) come first, one by one: they can only add to the headroom.
    """
    done = {host for host in hosts if host in set(idle)}
    found = [[host] for host in hosts if host in done]
    for members in pools.values():
        mine = [host for host in members if host in hosts and host not in done]
        done.update(mine)
        found.extend(split(mine, serial))
    found.extend([host] for host in hosts if host not in done)
    return found
