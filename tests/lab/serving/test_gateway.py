# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The lab's gateway: what others reach of it, what its files allow, and that a hand-broken or bad configuration is met."""

from __future__ import annotations

import re
import shlex
import socket
import ssl
import warnings
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.lab.lab import ENGINES, GATEWAY, ROOT, address, code_on, on, playbook

pytestmark = pytest.mark.lab

CURRENT = "/etc/nginx/metalserve/current"
NGINX_PIDS = "cat /run/nginx.pid; pgrep -P $(cat /run/nginx.pid) | sort"


@pytest.fixture(scope="module")
def host() -> str:
    return address(GATEWAY)


ASK = """
import http.client, ssl, sys
scheme, host, port, path, body, key = sys.argv[1:]
kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[scheme]
more = {"context": ssl._create_unverified_context()} if scheme == "https" else {}
client = kind(host, int(port), timeout=5, **more)
try:
    headers = {"Authorization": key} if key else {}
    client.request("POST" if body else "GET", path, body=body or None, headers=headers)
    print(client.getresponse().status)
except OSError:
    print(0)
"""


def status(node: str, url: str, body: str = "", key: str = "") -> int:
    """Return the status that a node gets at ``url``; 0 where nothing answers."""
    parts = urlsplit(url)
    words = [
        parts.scheme,
        parts.hostname,
        parts.port or {"http": 80, "https": 443}[parts.scheme],
        parts.path,
        body,
        key,
    ]
    return int(on(node, " ".join(shlex.quote(str(word)) for word in ["python3", "-c", ASK, *words])))


def test_the_only_doors_are_443_and_80(host: str) -> None:
    engine = ENGINES[0]
    assert status(engine, f"https://{host}/healthz") == 200
    assert status(engine, f"http://{host}/v1/models") == 308
    for path in ("healthz", "stub_status", "state", "rotation"):
        assert status(engine, f"http://{host}:8081/{path}") == 0, "the admin port answers others"


@pytest.mark.parametrize(
    "path", ["metrics", "load", "invocations", "tokenize", "health", "version", "pool/short/metrics"]
)
def test_engine_paths_are_closed(host: str, path: str) -> None:
    assert status(ENGINES[0], f"https://{host}/{path}") == 404


def test_no_key_no_answer(host: str) -> None:
    assert status(ENGINES[0], f"https://{host}/v1/models") == 401
    assert status(ENGINES[0], f"https://{host}/v1/completions", "{}") == 401
    assert status(ENGINES[0], f"https://{host}/v1/completions", "{}", "Bearer nobody-at-all") == 401


@pytest.mark.parametrize(("version", "works"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
def test_old_tls_is_refused(host: str, version: str, works: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    warnings.simplefilter("ignore", DeprecationWarning)  # naming the old version is the point
    context.minimum_version = context.maximum_version = getattr(ssl.TLSVersion, version)
    # The authority that the role brought to the controller is all that a client needs.
    context.load_verify_locations(ROOT / ".lab" / "tls" / f"{GATEWAY}.crt")
    with socket.create_connection((host, 443), 5) as plain:
        if works:
            with context.wrap_socket(plain, server_hostname=GATEWAY) as client:
                assert client.version() == version.replace("_", ".")
        else:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(plain, server_hostname=GATEWAY)


def test_secret_files_are_for_root_alone() -> None:
    listing = on(
        GATEWAY, f"find -L {CURRENT} /etc/metalserve/tls -name '*.key' -o -name 'keys.*' -o -name 'engine_auth.conf'"
    )
    assert len(listing.split()) >= 4
    modes = on(GATEWAY, f"stat -L -c '%a %U' {' '.join(listing.split())}")
    assert set(modes.splitlines()) == {"600 root"}


def test_a_configuration_broken_by_hand_is_put_right() -> None:
    master = on(GATEWAY, "cat /run/nginx.pid")
    on(GATEWAY, "echo 'broken {' >> /etc/nginx/nginx.conf")
    assert code_on(GATEWAY, "nginx -t") != 0
    run = playbook("playbooks/gateways.yml")
    assert run.code == 0, run.end
    assert code_on(GATEWAY, "nginx -t") == 0
    assert on(GATEWAY, "cat /run/nginx.pid") == master, "nginx was restarted"


def test_a_bad_configuration_changes_nothing_and_is_quoted() -> None:
    digest = "find /etc/nginx -type f -exec sha256sum {} + | sort; readlink /etc/nginx/metalserve/current"
    before: Any = on(GATEWAY, digest), on(GATEWAY, NGINX_PIDS)
    run = playbook("playbooks/gateways.yml", "-e", '{"gateway_endpoints": ["/v1/x; bogus_directive on"]}')
    assert run.code != 0
    assert "nginx refuses the new configuration; nothing was changed" in run.output
    assert re.search(r"/etc/nginx/metalserve/current/\S+\.conf:\d+", run.output), run.end
    assert "bogus_directive" in run.output
    assert "Traceback" not in run.output
    assert (on(GATEWAY, digest), on(GATEWAY, NGINX_PIDS)) == before
