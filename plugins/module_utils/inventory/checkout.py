# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The checkout that runs: is it the collection that Ansible loads, with the settings that it brings along?"""

from __future__ import annotations

from dataclasses import dataclass

from ansible_collections.metal.serve.plugins.module_utils.inventory.model import ERROR, WARNING, Problem

LINK = "collections/ansible_collections/metal/serve"


@dataclass(frozen=True)
class Checkout:
    """What was found on the controller.

    ``root`` is the tree that the running code belongs to, ``playbook_root`` the one of the playbook (empty: it stands
    in no tree of this collection), ``config_file`` the ansible.cfg in force. ``installed``: the tree was installed as
    a collection.
    """

    root: str
    playbook_root: str
    installed: bool
    link_good: bool
    world_writable: bool
    config_file: str


def problems_of(state: Checkout) -> list[Problem]:
    """Return what is wrong with the checkout; nothing for an installed collection."""
    found = []
    tree = state.playbook_root or state.root
    if state.playbook_root and state.playbook_root != state.root:
        found.append(
            Problem(
                "collection metal.serve",
                state.root,
                f"the playbook stands in {state.playbook_root}, but Ansible runs another copy of the collection",
                "run it from its own tree, or run the installed one by name: ansible-playbook metal.serve.site",
                where=tree,
                severity=WARNING,
            )
        )
    if state.installed:
        return found
    if not state.link_good:
        found.append(
            Problem(
                LINK,
                "",
                "the link did not survive (a zip or a checkout without symbolic links does that)",
                f"make it again in {state.root}: ln -sfn ../../.. {LINK}",
                where=state.root,
            )
        )
    own = f"{state.root}/ansible.cfg"
    if state.world_writable:
        used = state.config_file == own
        found.append(
            Problem(
                "checkout",
                "writable for everybody",
                "anybody on this machine can change what runs as root on all hosts"
                if used
                else "Ansible ignores ansible.cfg in a folder that everybody may write to: its settings do not hold",
                f"chmod o-w {state.root}",
                where=state.root,
                severity=WARNING if used else ERROR,
            )
        )
    return found
