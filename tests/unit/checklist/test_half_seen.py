# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What was seen in part: a node, a certificate, a replica or a clock reason that was not read is never as good as none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import exit_code, judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import merge_policy
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect

from .facts_of import ALL, facts, verdict_of
from .hosts import CONTAINER, FIREWALL, ROOT, device_allow, engine_node, inspect, release_folder
from .test_cases import ACCESS, ENGINE, judged
from .test_checks import NUMA, dump

NODE = "files/sys/devices/system/node/node{}/cpulist"


def indexed(texts: dict[str, str], **index: Any) -> dict[str, str]:
    """Return a snapshot with an index."""
    return {**texts, "index.json": json.dumps(index)}


@pytest.mark.parametrize(
    ("files", "states", "word"),
    [
        ({NODE.format(0): "0-7\n"}, {}, "not_applicable"),
        ({NODE.format(0): "0-7\n"}, {NODE.format(1): "denied"}, "fail"),
        ({NODE.format(0): "0-7\n"}, {NODE.format(1): "absent"}, "not_applicable"),
        ({}, {NODE.format(0): "timeout"}, "unknown"),
    ],
)
def test_a_numa_node_that_could_not_be_read_is_there(files: dict[str, str], states: dict[str, str], word: str) -> None:
    assert judged("numa.balancing", indexed({NUMA: "1\n", **files}, files=states)).verdict == word


def test_clock_reasons_that_say_nothing_of_the_hardware() -> None:
    whole = dump()
    assert judged("gpu.throttling", whole).verdict == "pass"
    (path, text), *_rest = whole.items()
    for word in ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "hw_power_brake"):
        text = text.replace(f"clocks_event_reason_{word}>", f"other_{word}>")
    assert judged("gpu.throttling", {path: text}).verdict == "unknown"


def certificates(*names: str) -> dict[str, str]:
    """Return what nginx names; a server for each certificate."""
    servers = "".join(f"server {{ listen 443 ssl; ssl_certificate {name}; }}\n" for name in names)
    return {"commands/nginx_-T.txt": f"# configuration file /etc/nginx/nginx.conf:\nhttp {{\n{servers}}}\n"}


def valid(until: str) -> str:
    return f"notBefore=Nov 30 00:00:00 2025 GMT\nnotAfter={until} 00:00:00 2099 GMT\n"


@pytest.mark.parametrize(
    ("named", "word"),
    [
        (("/etc/a.pem",), "pass"),
        (("/etc/a.pem", "/etc/b.pem"), "unknown"),
        (("/etc/a.pem", "tls/b.pem"), "unknown"),
        (("/etc/a.pem", "$cert", "data:$pem"), "pass"),
    ],
)
def test_a_certificate_that_nginx_names_and_nobody_read(named: tuple[str, ...], word: str) -> None:
    files = {**certificates(*named), "certificates/etc/a.pem.txt": valid("Dec 31")}
    assert judged("gateway.tls_expiry", files).verdict == word


def test_a_snapshot_without_a_date_is_judged_by_today() -> None:
    files = certificates("/etc/a.pem")
    old = valid("Dec 31").replace("2099", "2026").replace("Dec 31", "Jan 31")
    assert judged("gateway.tls_expiry", {**files, "certificates/etc/a.pem.txt": old}).verdict == "fail"
    dated = indexed({**files, "certificates/etc/a.pem.txt": valid("Dec 31")}, collected_at="yesterday")
    assert judged("gateway.tls_expiry", dated).verdict == "unknown"  # a date that is none is no date of today


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("ip saddr @allowed4", "ip saddr @allowed4", "pass"),
        ("ip saddr @allowed4", "ip saddr @gone", "unknown"),
        ("ip saddr @allowed4", "ip saddr != 10.0.0.1", "fail"),
        ("10.0.0.1, 10.0.0.2", "1.0.0.0-223.255.255.255", "fail"),
        ("10.0.0.1, 10.0.0.2", "10.0.0.1-10.0.0.2", "pass"),
    ],
)
def test_whom_the_firewall_lets_in(old: str, new: str, word: str) -> None:
    host = {**engine_node(), "commands/nft_list_ruleset.txt": FIREWALL.replace(old, new)}
    assert verdict_of("security.engine_ports", facts(host)).verdict == word


def test_a_replica_whose_port_is_not_known() -> None:
    host = engine_node()
    host[f"{ROOT}/engines/short-0/current"] = ""
    assert verdict_of("security.engine_ports", facts(host)).verdict == "unknown"
    known = {"engine_ports": [8100]}  # as the inventory says it
    assert verdict_of("security.engine_ports", facts(host), expected=known).verdict == "pass"


def test_engines_that_could_not_be_listed_have_exporters_too() -> None:
    host = engine_node()
    index = json.loads(host["index.json"])
    index["files"][f"{release_folder()}/release.json"] = "denied"
    seen = verdict_of(
        "monitoring.exporters", facts({**host, "index.json": json.dumps(index)}), expected={"roles": ["engine"]}
    )
    assert seen.verdict == "unknown"
    assert "engines" in str(seen.current)


def test_devices_that_may_not_be_written_are_as_good_as_lost() -> None:
    drop_in = f"files/run/systemd/transient/docker-{CONTAINER}.scope.d/50-DeviceAllow.conf"
    files = {
        ENGINE: json.dumps(inspect()),
        drop_in: device_allow().replace("195:0 rw", "195:0 r"),
    }
    assert judged("container.device_access", files).verdict == "fail"


def test_the_soft_limit_of_locked_memory_is_what_holds() -> None:
    limits = (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         8388608              unlimited            bytes\n"
        "Max open files            1048576              1048576              files\n"
    )
    host = facts({"processes/dockerd/limits": limits})
    assert verdict_of("limits.dockerd", host, expected={"rdma": True}).verdict == "fail"
    inside = {**engine_node(), f"containers/{CONTAINER}/limits": limits}
    assert verdict_of("container.ulimits", facts(inside), expected={"rdma": True}).verdict == "fail"


def test_what_a_refused_client_prints_tells_both_versions() -> None:
    text = (
        "Client:\n Version:           20.10.5\n API version:       1.41\nError response from daemon: client version 1.41 is too "
        "old. Minimum supported API version is 1.44, please upgrade your client to a newer version\n"
    )
    found = judged("container.api_version", {"commands/docker_version.txt": text})
    assert (found.verdict, found.desired) == ("fail", ">= 1.44")
    newer = text.replace("1.41", "1.45")  # it says no word of what the daemon takes at most
    assert judged("container.api_version", {"commands/docker_version.txt": newer}).verdict == "unknown"


def somebody_s(*command: str, gpus: int = 2, **config: Any) -> dict[str, str]:
    """Return a container of somebody else with small shared memory."""
    ids = [f"nvidia.com/gpu={number}" for number in range(gpus)]
    answer = {
        "Id": "f" * 64,
        "Name": "/llm",
        "State": {"Status": "running"},
        "Config": {"Image": "vllm/vllm-openai@sha256:" + "a" * 64, "Cmd": list(command) or None},
        "HostConfig": {
            "ShmSize": 67108864,
            "IpcMode": "private",
            "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ids}],
        },
        **config,
    }
    return {ENGINE: json.dumps(answer)}


@pytest.mark.parametrize(
    ("files", "word"),
    [
        (somebody_s("--config", "/engine.yaml"), "unknown"),
        (somebody_s("--config", "/engine.yaml", gpus=1), "not_applicable"),
        (somebody_s("tritonserver", "--model-repository=/models"), "unknown"),
        (somebody_s("--model", "/m"), "not_applicable"),  # one GPU is the engine's own default
        (somebody_s(Path="vllm", Args=["serve", "/m", "--tensor-parallel-size", "2"]), "fail"),
    ],
)
def test_over_how_many_gpus_somebody_else_s_engine_is_split(files: dict[str, str], word: str) -> None:
    assert judged("container.shm", files).verdict == word


def test_a_row_may_say_its_error_itself() -> None:
    row = {"status": 502, "uct": "0.000", "urt": "0.001", "error": "upstream prematurely closed connection"}
    assert judged("gateway.access_log_causes", {ACCESS: json.dumps(row) + "\n"}).current == {"keepalive_race": 1}


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "-1", "1e400", "NaN", '"soon"', "true", "[]"])
def test_a_time_in_the_index_that_is_none_ends_nothing(tmp_path: Any, seconds: str) -> None:
    (tmp_path / "index.json").write_text(
        f'{{"probes": {{"numa_balancing": {{"state": "ok", "seconds": {seconds}}}}}}}', encoding="utf-8"
    )
    verdicts = judge(collect(str(tmp_path)).facts, merge_policy(None), "n", checks=ALL.values())
    assert exit_code(verdicts) == 2


@pytest.mark.parametrize(
    ("hosts", "waived"), [(["*"], True), (["node-*"], True), (["node-b"], False), (["gw-*"], False)]
)
def test_a_waiver_may_name_hosts_by_a_pattern(hosts: list[str], waived: bool) -> None:
    waiver = {"id": "numa.balancing", "hosts": hosts, "reason": "r", "until": "2099-01-01"}
    found = verdict_of(
        "numa.balancing", facts({NUMA: "1\n", NODE.format(0): "0", NODE.format(1): "1"}), waivers=[waiver]
    )
    assert (found.verdict, found.waiver is not None) == ("fail", waived)
