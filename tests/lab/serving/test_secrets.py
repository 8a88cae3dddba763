# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""No secret in a process list, in docker inspect, in a log, or in a file that others can read."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request

import pytest

from tests.lab.lab import ENGINES, GATEWAY, NODES, ROOT, address, on

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
            "find /etc /opt /var/lib/metalserve /var/log -xdev -type f -perm -o+r -size -4M -exec cat {} + || true",
        ),
    }
    if node in ENGINES:
        places["docker inspect"] = on(node, "docker inspect $(docker ps -aq)")
        places["container logs"] = on(node, "for id in $(docker ps -aq); do docker logs $id 2>&1; done")
    for secret in secrets():
        for place, text in places.items():
            assert secret not in text, f"{node}: a secret ({secret[:4]}...) stands in the {place}"


def test_no_log_of_the_gateway_has_a_prompt() -> None:
    word = "zebrafinch"
    body = json.dumps({"model": "no-such-model", "messages": [{"role": "user", "content": word}]}).encode()
    key = (ROOT / ".lab/secrets/api_key").read_text(encoding="utf-8").strip()
    before = on(GATEWAY, "cat /var/log/metalserve/gateway-access.log | wc -l")
    for authorization in (f"Bearer {key}", "Bearer wrong"):
        request = urllib.request.Request(
            f"https://{address(GATEWAY)}/v1/chat/completions",
            data=body,
            headers={"Authorization": authorization, "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30, context=ssl._create_unverified_context())
    # A worker writes its rows together, at the latest after gateway_log_flush_s.
    ends = time.monotonic() + 15
    while int(on(GATEWAY, "cat /var/log/metalserve/gateway-access.log | wc -l")) < int(before) + 2:
        assert time.monotonic() < ends, "the requests are not in the log"
        time.sleep(0.5)
    assert word not in on(GATEWAY, "cat /var/log/metalserve/* /var/log/nginx/* 2>/dev/null || true")
