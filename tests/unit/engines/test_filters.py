# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The role's filters, and the firewall table that they end in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.filter import engine as filters

from .plans import pool_plan, replica_plan

TEMPLATE = Path(__file__).parents[3] / "templates" / "engine" / "host" / "firewall.nft.j2"
FACTS = {"docker": {"version": "28.3.0", "swap_limit": True}, "nofile_limit": 0}
POOLS: dict[str, Any] = {"short": {"env": {"NCCL_DEBUG": "INFO"}}}


def test_specs_join_plan_pool_and_node() -> None:
    found = filters.engine_specs([replica_plan()], [pool_plan()], POOLS, FACTS, "/r", {"user": "5:6"})
    assert found[0]["environment"]["NCCL_DEBUG"] == "INFO"
    assert found[0]["container"]["user"] == "5:6"
    assert found[0]["container"]["device_requests"][0]["driver"] == "cdi"
    assert found[0]["model_path"] == "/r/models/m/r1"
    assert [item["name"] for item in filters.engine_files(found)] == ["config.yaml", "start.sh"]


def test_a_node_gets_its_own_part_of_the_plans() -> None:
    replicas = [{"replica": f"short-{i}", "host": host, "address": "a", "port": 1} for host in "ab" for i in range(2)]
    spread = [{"replica": "long-0", "host": "a", "address": "a", "port": 2}]
    plans = [
        pool_plan(replicas=replicas, node_groups={}),
        pool_plan(pool="long", replicas=spread, node_groups={"a/long-0": [{"host": "a"}, {"host": "c"}]}),
    ]
    assert [(p["pool"], len(p["replicas"])) for p in filters.plans_of_host(plans, "a")] == [("short", 2), ("long", 1)]
    assert [(p["pool"], len(p["replicas"])) for p in filters.plans_of_host(plans, "b")] == [("short", 2)]
    assert filters.plans_of_host(plans, "c")[0]["replicas"] == spread
    assert filters.plans_of_host(plans, "d") == []


def test_node_without_docker_yet_can_be_planned() -> None:
    facts = {"docker": {"version": "", "swap_limit": True}, "nofile_limit": 0}
    assert filters.engine_specs([replica_plan()], [pool_plan()], POOLS, facts, "/r")


def test_error_names_replica_and_variable() -> None:
    plan = replica_plan(settings={"max_tokens_per_batch": 1})
    with pytest.raises(AnsibleFilterError, match=r"short-0: metalserve_pools\.short\.settings\.max_tokens_per_batch"):
        filters.engine_specs([plan], [pool_plan()], POOLS, FACTS, "/r")


def test_tokens_of_sources_are_left_out() -> None:
    models = {"m": {"revision": "r1", "source": {"type": "huggingface", "token": "secret"}}}
    assert filters.model_revisions(models) == {"m": {"revision": "r1"}}


def test_gateways_are_known_whether_or_not_they_take_part() -> None:
    groups = {"gateways": ["g1", "g2"], "monitors": ["g1"], "engines": ["e"]}
    hostvars = {"g1": {"metalserve_address": "10.0.0.2"}, "g2": {"ansible_host": "10.0.0.3"}, "e": {}}
    assert filters.group_addresses(["gateways", "monitors"], groups, hostvars) == {"g1": "10.0.0.2", "g2": "10.0.0.3"}


def allowed(**changes: Any) -> dict[str, list[Any]]:
    given: dict[str, Any] = {
        "pool_plans": [pool_plan()],
        "host": "node-a",
        "addresses": {"g1": "10.0.0.2", "g2": "fd00::2"},
        "extra_ports": [9100],
        "extra_addresses": ["192.0.2.0/24", "10.0.0.2"],
    }
    return filters.engine_firewall(**{**given, **changes})


def test_firewall_has_ports_of_this_node_and_addresses_by_family() -> None:
    assert allowed() == {"ports": [8100, 9100], "ipv4": ["10.0.0.2", "192.0.2.0/24"], "ipv6": ["fd00::2"]}
    assert allowed(host="node-b")["ports"] == [9100]


@pytest.mark.parametrize("value", ["gateway.example.com", "", "10.0.0.300"])
def test_firewall_wants_numbers(value: str) -> None:
    with pytest.raises(AnsibleFilterError, match=r"metalserve_address of g9 is .* needs an IP address"):
        allowed(addresses={"g9": value})


def table(**changes: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text()).render(engine_allowed=allowed(**changes))


def isolated(*argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["unshare", "--net", *argv], check=False, input=text, capture_output=True, text=True)


NEEDS_NET = pytest.mark.skipif(
    shutil.which("nft") is None or isolated("nft", "list", "tables").returncode != 0,
    reason="needs nft and the right to make a network namespace",
)

# In a namespace of its own: the table, a server per port, and a client in a second namespace with two addresses.
PROBE = """
import os, socket, subprocess, sys, time
run = lambda *argv: subprocess.run(argv, check=True)
run("ip", "link", "set", "lo", "up")
run("ip", "link", "add", "name", "ours", "type", "veth", "peer", "name", "theirs")
run("ip", "addr", "add", "10.9.0.1/24", "dev", "ours")
run("ip", "link", "set", "ours", "up")
subprocess.run(["nft", "-f", "-"], input=sys.stdin.read(), text=True, check=True)
child = subprocess.Popen(["unshare", "--net", "sleep", "60"])
while os.readlink(f"/proc/{child.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
    time.sleep(0.01)
inside = ["nsenter", "--net", "--target", str(child.pid)]
run("ip", "link", "set", "theirs", "netns", str(child.pid))
for address in ("10.9.0.2/24", "10.9.0.3/24"):
    run(*inside, "ip", "addr", "add", address, "dev", "theirs")
run(*inside, "ip", "link", "set", "theirs", "up")
servers = [socket.create_server(("10.9.0.1", port)) for port in (8100, 9999)]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("10.9.0.1", 8100))
udp.settimeout(2)
client = "import socket, sys; socket.create_connection(('10.9.0.1', int(sys.argv[2])), 1, (sys.argv[1], 0))"
for source in ("10.9.0.2", "10.9.0.3"):
    for port in ("8100", "9999"):
        done = subprocess.run([*inside, sys.executable, "-c", client, source, port], stderr=subprocess.DEVNULL)
        print(source, port, "open" if done.returncode == 0 else "silent")
run(*inside, sys.executable, "-c",
    "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('10.9.0.3', 0)); "
    "s.sendto(b'x', ('10.9.0.1', 8100))")
print("udp", udp.recv(10).decode())
socket.create_connection(("10.9.0.1", 8100), 1)
print("self open")
child.kill()
"""


@NEEDS_NET
def test_strangers_get_no_answer_on_guarded_ports_and_nothing_else_changes() -> None:
    done = isolated(sys.executable, "-c", PROBE, text=table(addresses={"g": "10.9.0.2"}, extra_addresses=[]))
    assert done.stdout.splitlines() == [
        "10.9.0.2 8100 open",
        "10.9.0.2 9999 open",
        "10.9.0.3 8100 silent",
        "10.9.0.3 9999 open",
        "udp x",
        "self open",
    ], done.stderr


@NEEDS_NET
@pytest.mark.parametrize("changes", [{}, {"addresses": {}, "extra_addresses": []}, {"extra_ports": []}])
def test_nft_accepts_the_table_twice(changes: dict[str, Any]) -> None:
    text = table(**changes)
    done = isolated("sh", "-c", 'printf %s "$0" | nft -f - && printf %s "$0" | nft -f -', text)
    assert done.returncode == 0, done.stderr
