# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What playbooks/validate.yml must know before Ansible reads variable files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

try:  # not a public interface, so do without where it has gone: Ansible's own, shorter error comes then
    from ansible.parsing.vault import VaultSecretsContext
except ImportError:
    VaultSecretsContext = None

HEADER = b"$ANSIBLE_VAULT;"


def _files(sources: Iterable[Any]) -> Iterator[str]:
    """Yield the inventories that are files, and all variable files beside inventories."""
    for source in sources:
        path = str(source)
        if not os.path.exists(path):
            continue
        beside = path if os.path.isdir(path) else os.path.dirname(path)
        if os.path.isfile(path):
            yield path
        for folder in ("group_vars", "host_vars"):
            for above, _folders, names in os.walk(os.path.join(beside, folder)):
                yield from (os.path.join(above, name) for name in sorted(names))


def _encrypted(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(len(HEADER)) == HEADER
    except OSError:
        return False


def unless_locked(value: Any, sources: Iterable[Any]) -> Any:
    """Return ``value``; raise AnsibleFilterError where a file of these inventories is encrypted without a password.

    Ansible would stop there too, but without a word on which file it is or what to do.
    """
    current = VaultSecretsContext.current(optional=True) if VaultSecretsContext is not None else None
    if current is None or current.secrets:
        return value
    locked = [os.path.relpath(path) for path in _files(sources) if _encrypted(path)]
    if locked:
        raise AnsibleFilterError(
            f"{', '.join(locked)} is encrypted, and no vault password was given. Give it with --ask-vault-pass, "
            "--vault-password-file FILE or --vault-id NAME@FILE. No host was touched."
        )
    return value


class FilterModule:
    """Filters of the collection ``metal.serve``."""

    def filters(self) -> Mapping[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"unless_locked": unless_locked}
