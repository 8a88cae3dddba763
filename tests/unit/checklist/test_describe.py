# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The checks' page is current, and what remedies name is there and mends it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from ansible_collections.metal.serve.plugins.module_utils.checklist.model import SEVERITIES
from ansible_collections.metal.serve.plugins.module_utils.checklist.page import checks_markdown

from .facts_of import ALL

ROOT = Path(__file__).parents[3]
# What a tag of site.yml does about each check that names it: where, and by which words.
MENDS = {
    "driver.packages_held": ("host", "gpu_host", "held"),
    "driver.nouveau": ("host", "gpu_host", "nouveau"),
    "driver.persistence": ("host", "gpu_host", "persistence"),
    "numa.balancing": ("host", "gpu_host", "numa_balancing"),
    "topology.cpu_governor": ("host", "gpu_host", "governor"),
    "limits.session_nofile": ("host", "gpu_host", "limits.d"),
    "limits.service_nofile": ("host", "gpu_host", "system.conf.d"),
    "limits.somaxconn": ("host", "gpu_host", "somaxconn"),
    "limits.dockerd": ("runtime", "container_runtime", "LimitNOFILE"),
    "limits.nginx": ("gateway", "gateway", "worker_rlimit_nofile"),
    "container.daemon_json": ("runtime", "container_runtime", "metal.serve.daemon_json"),
    "container.gpu_runtime": ("runtime", "container_runtime", "nvidia"),
    "container.cdi_majors": ("runtime", "container_runtime", "metalserve-cdi"),
    "container.restart_policy": ("engines", "engine", "restart_policy: strict"),
    "engine.ready": ("engines", "engine", "state: started"),
    "engine.starts_at_boot": ("engines", "engine", "enabled: true"),
    "security.engine_ports": ("engines", "engine", "metalserve-firewall"),
    "monitoring.exporters": ("monitoring", "node_agent", "started"),
    "monitoring.running": ("monitoring", "monitoring", "state: started"),
    "monitoring.alert_thresholds": ("monitoring", "monitoring", "rules"),
}


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    assert page == checks_markdown(), (
        "run python -m ansible_collections.metal.serve.plugins.module_utils.checklist.describe ."
    )


def site_tags() -> set[str]:
    """Return the tags of the plays that site.yml imports."""
    found: set[str] = set()
    for entry in yaml.safe_load((ROOT / "site.yml").read_text(encoding="utf-8")):
        for play in yaml.safe_load((ROOT / entry["ansible.builtin.import_playbook"]).read_text(encoding="utf-8")):
            found.update(play.get("tags", []))
    return found


def test_tags_are_those_of_site_yml_and_mend_it() -> None:
    known = site_tags()
    for one in ALL.values():
        assert set(one.tags) <= known, one.id
        if one.area == "gateway":
            assert one.tags in (("gateway",), ()), one.id  # the role writes the whole tree anew
        elif one.tags:
            tag, role, words = MENDS[one.id]
            assert one.tags == (tag,), one.id
            texts = [
                path.read_text(encoding="utf-8")
                for place in (ROOT / "roles" / role, ROOT / "templates" / role)
                for path in place.rglob("*")
                if path.is_file() and path.suffix in (".yml", ".j2")
            ]
            assert any(words in text for text in texts), one.id
    assert set(MENDS) == {one.id for one in ALL.values() if one.tags and one.area != "gateway"}


def test_tags_that_a_text_names_exist() -> None:
    for one in ALL.values():
        for named in re.findall(r"site\.yml --tags ([\w,]+)", f"{one.remedy} {one.why}"):
            assert set(named.split(",")) <= site_tags(), one.id


def test_playbooks_that_a_remedy_names_exist() -> None:
    there = {path.name for path in (ROOT / "playbooks").glob("*.yml")}
    for one in ALL.values():
        named = set(re.findall(r"playbooks/([\w-]+\.yml)", one.remedy)) | set(
            re.findall(r"\b(maintain\.yml)", one.remedy)
        )
        assert named <= there, one.id


def test_every_check_says_what_a_person_needs() -> None:
    for one in ALL.values():
        assert re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", one.id)
        assert one.severity in SEVERITIES
        for text in (one.title, one.why, one.remedy, one.source):
            assert len(text) > 8, one.id
            assert text == text.strip(), one.id
            assert not text.endswith("."), one.id  # reports add the full stop
        for page in re.findall(r"docs/([\w-]+\.md)", one.source):
            assert (ROOT / "docs" / page).exists(), one.id
