# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The units of an engine node: its ports are guarded at every moment, its engines start after their GPUs are usable."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]


def test_a_new_table_is_loaded_in_one_step() -> None:
    """A restart would delete the old table first, and for that moment anybody could reach an engine."""
    tasks = yaml.safe_load((ROOT / "roles" / "engine" / "tasks" / "firewall.yml").read_text(encoding="utf-8"))
    loads = [task["ansible.builtin.systemd_service"] for task in tasks if "ansible.builtin.systemd_service" in task]
    assert len(loads) == 1
    assert "reloaded" in loads[0]["state"]
    assert "restarted" not in loads[0]["state"]
    unit = (ROOT / "templates" / "engine" / "host" / "metalserve-firewall.service.j2").read_text(encoding="utf-8")
    assert "ExecReload=/usr/sbin/nft -f /etc/metalserve/firewall.nft\n" in unit
    table = (ROOT / "templates" / "engine" / "host" / "firewall.nft.j2").read_text(encoding="utf-8")
    rules = [line for line in table.splitlines() if line and not line.startswith("#")]
    # nft applies a file as one transaction: declared so that there is one to delete, deleted, written anew.
    assert rules[:3] == ["table inet metalserve", "delete table inet metalserve", "table inet metalserve {"]


def test_an_engine_starts_after_what_makes_its_gpus_usable() -> None:
    """By itself, whatever Docker's own unit waits for: the units that the host roles and the vendor's packages bring."""
    unit = (ROOT / "templates" / "engine" / "host" / "metalserve-engine@.service.j2").read_text(encoding="utf-8")
    after = {name for line in unit.splitlines() if line.startswith("After=") for name in line[6:].split()}
    docker = (ROOT / "roles" / "container_runtime" / "templates" / "docker.service.conf.j2").read_text(encoding="utf-8")
    gpus = {name for line in docker.splitlines() if line.startswith("After=") for name in line[6:].split()}
    assert gpus <= after
    assert {"docker.service", "metalserve-firewall.service"} <= after
