# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""No secret in a process list, in docker inspect, in a log, or in a file that others can read."""

from __future__ import annotations

import pytest

from tests.lab.lab import ENGINES, GATEWAY, NODES, ROOT, on

pytestmark = pytest.mark.lab


def secrets() -> list[str]:
    """Return every generated secret of the lab, by reading what the lab wrote for itself."""
    found = []
    for path in (ROOT / ".lab").rglob("*"):
        if path.is_file() and ("key" in path.name or "secret" in path.name or "password" in path.name):
            for word in path.read_text(encoding="utf-8", errors="replace").replace('"', " ").replace("'", " ").split():
                if len(word) >= 24 and word.replace("-", "").replace("_", "").isalnum():
                    found.append(word)
    return sorted(set(found))


def test_the_lab_has_secrets_to_look_for() -> None:
    assert len(secrets()) >= 2


@pytest.mark.parametrize("node", NODES)
def test_no_secret_is_where_others_can_read_it(node: str) -> None:
    places = {
        "process list": on(node, "ps axww -o args"),
        "journal": on(node, "journalctl --no-pager -q"),
        "world-readable files": on(
            node,
            "find /etc /opt /var/lib/metalserve /var/log -xdev -type f -perm -o+r -size -4M -exec cat {} + 2>/dev/null",
        ),
    }
    if node in ENGINES:
        places["docker inspect"] = on(node, "docker inspect $(docker ps -aq)")
        places["container logs"] = on(node, "for id in $(docker ps -aq); do docker logs $id 2>&1; done")
    for secret in secrets():
        for place, text in places.items():
            assert secret not in text, f"{node}: a secret ({secret[:4]}...) stands in the {place}"


def test_the_access_log_has_no_prompt() -> None:
    word = "zebrafinch"
    on(GATEWAY, f'curl -ks https://127.0.0.1/v1/completions -d \'{{"prompt":"{word}"}}\' >/dev/null || true')
    assert word not in on(GATEWAY, "cat /var/log/nginx/*.log /var/log/nginx/*/*.log 2>/dev/null || true")
