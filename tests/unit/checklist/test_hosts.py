# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whole hosts: healthy ones are green, and each thing that is broken is seen by exactly the checks that it concerns."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import exit_code, judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Verdict
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import merge_policy
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_services import rules_in_file

from ..gateway.harness import pool, render
from ..monitoring.render import rendered
from .facts_of import ALL, facts
from .hosts import (
    CONTAINER,
    FIREWALL,
    FIXTURES,
    LIMITS,
    ROOT,
    SMI,
    device_allow,
    df,
    engine_node,
    index,
    inspect,
    listing,
    release_folder,
    scrape,
    unit,
    units,
)

ENGINE = {"roles": ["engine"], "accelerator": "nvidia", "gpus": 2, "gateways": ["10.0.0.1"], "monitors": ["10.0.0.2"]}
GATEWAY = {"roles": ["gateway"], "engine_keepalive_s": 180, "longest_silent_prefill_s": 9}


def audit(files: dict[str, Any], expected: dict[str, Any], **policy: Any) -> list[Verdict]:
    host = facts({path: text for path, text in files.items() if text is not None})
    return judge(host, merge_policy({"expected": expected, **policy}), "node-a", checks=ALL.values())


def not_fine(verdicts: list[Verdict]) -> dict[str, str]:
    return {one.id: one.verdict for one in verdicts if one.verdict not in ("pass", "not_applicable")}


def test_a_healthy_engine_node_is_green_and_really_judged() -> None:
    verdicts = audit(engine_node(), ENGINE)
    assert not_fine(verdicts) == {}
    assert exit_code(verdicts, strict=True) == 0
    passed = {one.id for one in verdicts if one.verdict == "pass"}
    judged = {one.id for one in ALL.values() if "engine" in one.applies_to}
    assert judged - passed == {
        "gpu.free_memory", "host.kernel_cmdline", "monitoring.metric_contract", "numa.balancing", "topology.acs",
        "security.selinux", "topology.cpu_governor", "topology.iommu", "topology.transparent_hugepages",
    }  # fmt: skip


DOCKER, INSPECT, UNITS = "files/etc/docker/daemon.json", "docker/containers/engine.json", "commands/systemctl_show.txt"
XID = "commands/dmesg.txt"


def broken(**values: Any) -> dict[str, str]:
    return {INSPECT: json.dumps(inspect(**values))}


def engine_off(**rotation: Any) -> dict[str, Any]:
    """Return the files of a node whose engine was stopped, with a rotation file where there is one."""
    files: dict[str, Any] = {
        **broken(State__Status="exited", State__Pid=0),
        UNITS: units(engine={"ActiveState": "inactive", "SubState": "dead", "Result": "success"}),
        "health/short-0.txt": None,
        "scrapes/short-0.prom": None,
        SMI: re.sub(r"<process_info>.*?</process_info>", "", engine_node()[SMI]),
        "index.json": index(files={"health/short-0.txt": "error", "scrapes/short-0.prom": "absent"}),
    }
    if rotation:
        files[f"{ROOT}/engines/short-0/rotation.json"] = json.dumps(rotation)
    return files


BREAK: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "a driver package moved": (
        {"commands/dpkg_-l.txt": "hi  libnvidia-compute-580 580.200.01-0ubuntu1 amd64\n"},
        {"driver.loaded_matches_installed": "fail"},
    ),
    "a hold was taken off": (
        {"commands/apt-mark_showhold.txt": "libnvidia-compute-580\nnvidia-persistenced\n"},
        {"driver.packages_held": "fail"},
    ),
    "nouveau is no longer blacklisted": (
        {"files/etc/modprobe.d/metalserve-nouveau.conf": "# nothing\n"},
        {"driver.nouveau": "warn"},
    ),
    "an Xid that asks for a reset": (
        {XID: "[ 5.0] NVRM: Xid (PCI:0000:00:06): 79, pid=1, GPU has fallen off the bus.\n"},
        {"driver.xid_history": "fail"},
    ),
    "an Xid of an application": ({XID: "[ 5.0] NVRM: Xid (PCI:0000:00:06): 31, pid=1, MMU Fault\n"}, {}),
    "a remapping that was done": ({XID: "[ 5.0] NVRM: Xid (PCI:0000:00:06): 63, Row Remapper\n"}, {}),
    "persistence ends with the next boot": (
        {UNITS: units(persistenced={"ActiveState": "inactive"})},
        {"driver.persistence": "warn"},
    ),
    "sessions got 1024 files": (
        {"processes/session/limits": LIMITS.replace("1048576", "1024   ")},
        {"limits.session_nofile": "fail"},
    ),
    "services got 524288 files": ({"commands/systemctl_show_defaults.txt": "DefaultLimitNOFILE=524288\n"}, {}),
    "services raise nothing, and begin with 1024": (
        {"commands/systemctl_show_defaults.txt": "DefaultLimitNOFILE=524288\nDefaultLimitNOFILESoft=1024\n"},
        {"limits.service_nofile": "fail"},
    ),
    "services got too few": (
        {"commands/systemctl_show_defaults.txt": "DefaultLimitNOFILE=4096\n"},
        {"limits.service_nofile": "fail"},
    ),
    "short listen queues": ({"files/proc/sys/net/core/somaxconn": "128\n"}, {"limits.somaxconn": "warn"}),
    "daemon.json lost its log options": (
        {DOCKER: '{"live-restore": true}'},
        {"container.daemon_json": "fail"},
    ),
    "daemon.json says that logs have no bound": (
        {DOCKER: '{"live-restore": true, "log-opts": {"max-size": "-1"}}'},
        {"container.daemon_json": "fail"},
    ),
    "an upgrade of the driver broke off": (
        {"commands/dpkg_-l.txt": "hi  libnvidia-compute-580 580.159.04-0ubuntu1 amd64\n"
                                 "iU  nvidia-dkms-580-open 580.200.01-0ubuntu1 amd64\n"},
        {"driver.loaded_matches_installed": "fail"},
    ),
    "an initramfs that may not be looked at": (
        {"index.json": index(initramfs="denied")},
        {"driver.nouveau": "unknown"},
    ),
    "no CDI spec, and no runtime": (
        {"files/etc/cdi/nvidia.yaml": None, "index.json": index(cdi_specs="absent")},
        {"container.gpu_runtime": "fail"},
    ),
    "CDI specs that may not be read": ({"index.json": index(cdi_specs="denied")},
                                       {"container.gpu_runtime": "unknown", "container.cdi_majors": "unknown"}),
    "a client that is pinned above the daemon": (
        {"files/etc/profile.d/docker.sh": "export DOCKER_API_VERSION=1.52\n",
         "index.json": index(docker_client_environment="ok")},
        {"container.api_version": "fail"},
    ),
    "who listens is not shown": (
        {"commands/ss_-Hltnp.txt": "LISTEN 0 4096 10.0.0.11:8100 0.0.0.0:*\n"},
        {"security.docker_tcp": "unknown"},
    ),
    "docker.sock is open": (
        {"stat/docker.sock.txt": "0666 root docker 0 0 socket /run/docker.sock\n"},
        {"security.docker_socket": "fail"},
    ),
    "docker.sock belongs to somebody": (
        {"stat/docker.sock.txt": "0660 ops docker 0 0 socket /run/docker.sock\n"},
        {"security.docker_socket": "fail"},
    ),
    "dockerd listens on TCP": (
        {"commands/ss_-Hltnp.txt": 'LISTEN 0 1 10.0.0.11:8100 *:*\nLISTEN 0 1 *:2375 *:* users:(("dockerd",pid=9,fd=3))\n'},
        {"security.docker_tcp": "fail"},
    ),
    "a key others can read": (
        {"stat/secrets.txt": "0644 root root 9 0 file /etc/metalserve/secrets/engine-key\n"},
        {"security.secret_files": "fail"},
    ),
    "a key in the environment": (
        broken(Config__Env=["VLLM_API_KEY=k-1", "CUDA_VERSION=12.9.1"]),
        {"security.keys_in_inspect": "fail"},
    ),
    "a key among the arguments": (
        broken(Config__Cmd=["serve", "--api-key", "k-1"]),
        {"security.keys_in_inspect": "fail", "container.config_is_running": "fail"},
    ),
    "the firewall is off": (
        {"commands/nft_list_ruleset.txt": "table ip nat {\n}\n"},
        {"security.engine_ports": "fail"},
    ),
    "a port is not in the firewall's set": (
        {"commands/nft_list_ruleset.txt": FIREWALL.replace("8100, 9100", "9100")},
        {"security.engine_ports": "fail"},
    ),
    "the drop is gone": (
        {"commands/nft_list_ruleset.txt": FIREWALL.replace(" drop\n", " accept\n")},
        {"security.engine_ports": "fail"},
    ),
    "everybody is let in": (
        {"commands/nft_list_ruleset.txt": FIREWALL.replace("10.0.0.1, 10.0.0.2", "0.0.0.0/0")},
        {"security.engine_ports": "fail"},
    ),
    "everybody is let in by a rule": (
        {"commands/nft_list_ruleset.txt": FIREWALL.replace('iif "lo" accept', "tcp dport 8100 accept")},
        {"security.engine_ports": "fail"},
    ),
    "the engine listens everywhere": (
        {"commands/ss_-Hltnp.txt": 'LISTEN 0 1 0.0.0.0:8100 *:* users:(("python3",pid=9,fd=3))\n'},
        {"security.engine_ports": "warn"},
    ),
    "memory without a limit": (broken(HostConfig__Memory=0), {"container.memory": "fail"}),
    "other memory than planned": (broken(HostConfig__Memory=88 * 1024**3 - 1), {"container.memory": "fail"}),
    "swap without a limit": (broken(HostConfig__MemorySwap=-1), {"container.memory": "fail"}),
    "shared memory of 64 MiB": (broken(HostConfig__ShmSize=67108864), {"container.shm": "fail"}),
    "no init": (broken(HostConfig__Init=False), {"container.init": "warn"}),
    "Docker's own stop timeout": (broken(Config__StopTimeout=None), {"container.stop_timeout": "fail"}),
    "another stop timeout than planned": (broken(Config__StopTimeout=329), {"container.stop_timeout": "fail"}),
    "the unit kills before Docker does": (
        {UNITS: units(engine={"TimeoutStopUSec": "1min 30s"})},
        {"container.stop_timeout": "fail"},
    ),
    "logs without a bound": (
        broken(HostConfig__LogConfig={"Type": "json-file", "Config": {}}),
        {"container.log_rotation": "fail"},
    ),
    "a restart policy": (broken(HostConfig__RestartPolicy={"Name": "always"}), {"container.restart_policy": "fail"}),
    "another command line": (
        broken(Config__Cmd=["python3", "-m", "vllm.entrypoints.openai.api_server"]),
        {"container.config_is_running": "fail"},
    ),
    "the configuration was edited": (
        {f"{release_folder()}/config.yaml": "model: /model\nmax-num-seqs: 512\n"},
        {"container.config_is_running": "fail"},
    ),
    "the start script was edited": ({f"{release_folder()}/start.sh": "#!/bin/sh\n"}, {"container.config_is_running": "fail"}),
    "a comment was reworded": (
        {f"{release_folder()}/start.sh": '#!/bin/sh\n# another word\nexec "$@"\n'},
        {},
    ),
    "another release is current": (
        {f"{ROOT}/engines/short-0/current": "f" * 64 + "\n"},
        {
            "container.config_is_running": "fail",
            "engine.config_known": "unknown",
            "engine.progress": "unknown",
            "security.engine_ports": "unknown",  # its port stands in the release that is not there
        },
    ),
    "the GPU is about to be lost": (
        {f"files/run/systemd/transient/docker-{CONTAINER}.scope.d/50-DeviceAllow.conf": device_allow("195:", "238:")},
        {"container.device_access": "fail"},
    ),
    "the container has no GPU": (
        broken(HostConfig__DeviceRequests=[]),
        {"container.device_access": "fail"},
    ),
    "the container has another GPU": (
        broken(HostConfig__DeviceRequests=[{"DeviceIDs": ["nvidia.com/gpu=GPU-00000000-0000-0000-0000-000000000009"]}]),
        {"container.device_access": "fail"},
    ),
    "the cpuset is far away": (
        {f"containers/{CONTAINER}/status": "Cpus_allowed_list:\t32-63\n"},
        {"numa.container_cpus": "fail"},
    ),
    "few files inside the container": (
        {f"containers/{CONTAINER}/limits": LIMITS.replace("1048576", "1024   ")},
        {"container.ulimits": "fail"},
    ),
    "the CDI spec is stale": (
        {"files/etc/cdi/nvidia.yaml": engine_node()["files/etc/cdi/nvidia.yaml"].replace("238", "510")},
        {"container.cdi_majors": "fail"},
    ),
    "the clock is free": (
        {"listings/adjtimex.txt": "state=5\nstatus=64\nmaxerror_us=1\nesterror_us=1\n"},
        {"host.time_synchronised": "fail"},
    ),
    "the disk is full": ({"disks/root.txt": df("/", 1024**3)}, {"host.disk_free": "fail"}),
    "a mount does not answer": (
        {"disks/root.txt": None, "index.json": index(disks={"state": "timeout", "error": "df: no answer"})},
        {"host.disk_free": "unknown"},
    ),
    "another system": ({"files/etc/os-release": 'ID=debian\nVERSION_ID="11"\n'}, {"host.supported_os": "fail"}),
    "the exporter is gone": (
        {"scrapes/node.prom": None, "index.json": index(scrapes="error")},
        {"monitoring.exporters": "fail", "engine.progress": "unknown"},
    ),
    "a model file was cut": (
        {"stat/models/m/r1.txt": listing(**{"config.json": "699 1 2 3 config.json"})},
        {"model.manifest": "fail"},
    ),
    "a stranger on a GPU": (
        {SMI: engine_node()[SMI].replace("<pid>4242", "<pid>999", 1), "processes/999/cgroup": "0::/user.slice\n"},
        {"gpu.foreign_processes": "fail"},
    ),
    "one GPU fell off": (
        {SMI: "".join(engine_node()[SMI].partition("</gpu>")[:2]) + "</nvidia_smi_log>"},
        {"gpu.count": "fail"},
    ),
    "rows wait to be remapped": (
        {SMI: engine_node()[SMI].replace("<remapped_row_pending>No", "<remapped_row_pending>Yes", 1)},
        {"gpu.ecc_and_remapping": "fail"},
    ),
    "a field that nobody knows": (
        {SMI: engine_node()[SMI].replace("<gpu_power_readings>", "<gpu_power_readings_v9>", 1).replace(
            "</gpu_power_readings>", "</gpu_power_readings_v9>", 1)},
        {"gpu.fields_understood": "unknown"},
    ),
    "an image of newer CUDA": (
        broken(Config__Env=["CUDA_VERSION=13.2.0"]),
        {"driver.supports_image_cuda": "warn"},
    ),
    "Secure Boot with the module loaded": ({"commands/mokutil_--sb-state.txt": "SecureBoot enabled\n"}, {}),
    "the engine gives no health": (
        {"health/short-0.txt": None, "index.json": index(files={"health/short-0.txt": "error"})},
        {"engine.ready": "fail"},
    ),
    "the unit is not enabled": (
        {UNITS: units(engine={"UnitFileState": "disabled", "TimeoutStopUSec": "5min 45s"})},
        {"engine.starts_at_boot": "fail"},
    ),
    "the engine was stopped": (
        engine_off(),
        {"engine.ready": "fail", "engine.progress": "unknown", "monitoring.exporters": "fail"},
    ),
    "the engine was taken out": (
        engine_off(**{"in": False, "by": "redeploy.yml", "since": "2026-11-30T10:00:00Z"}),
        {"engine.ready": "warn"},
    ),
    "the node was retired": (
        {**engine_off(**{"in": False, "by": "ada@desk", "since": "2026-11-30T10:00:00Z"}),
         UNITS: units(engine={"ActiveState": "inactive", "SubState": "dead", "Result": "success", "UnitFileState": "disabled"})},
        {"engine.ready": "warn", "engine.starts_at_boot": "warn"},
    ),
    "the engine works": (
        {"scrapes/short-0.prom": scrape(2, 1, 100), "progress/short-0.prom": "# interval_s 0.25\n" + scrape(2, 1, 108),
         "index.json": index(engine_progress="ok")},
        {},
    ),
    "one long prefill": (
        {"scrapes/short-0.prom": scrape(1, 0, 100), "progress/short-0.prom": "# interval_s 0.75\n" + scrape(1, 0, 100),
         "index.json": index(engine_progress="ok")},
        {"engine.progress": "unknown"},
    ),
    "nothing runs, and requests wait": (
        {"scrapes/short-0.prom": scrape(0, 9, 100), "progress/short-0.prom": "# interval_s 0.75\n" + scrape(0, 9, 100),
         "index.json": index(engine_progress="ok")},
        {"engine.progress": "fail"},
    ),
    "silent for longer than any prefill": (
        {"scrapes/short-0.prom": scrape(1, 0, 100), "progress/short-0.prom": "# interval_s 15.0\n" + scrape(1, 0, 100),
         "index.json": index(engine_progress="ok")},
        {"engine.progress": "fail"},
    ),
    "busy, and no second look": (
        {"scrapes/short-0.prom": scrape(1, 0, 100)},
        {"engine.progress": "unknown"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAK)
def test_what_is_broken_is_seen_by_exactly_these(name: str) -> None:
    files, expected = BREAK[name]
    assert not_fine(audit({**engine_node(), **files}, ENGINE)) == expected


TOGETHER = (
    "a hold was taken off", "nouveau is no longer blacklisted", "an Xid that asks for a reset", "sessions got 1024 files",
    "services got too few", "short listen queues", "daemon.json lost its log options", "docker.sock is open",
    "a key others can read", "the firewall is off", "the configuration was edited", "logs without a bound",
    "the cpuset is far away", "the clock is free", "the disk is full", "a model file was cut",
)  # fmt: skip


def test_many_at_once_are_the_sum_of_them() -> None:
    files: dict[str, Any] = {}
    wanted: dict[str, str] = {}
    for name in TOGETHER:
        assert not files.keys() & BREAK[name][0].keys(), name
        files.update(BREAK[name][0])
        wanted.update(BREAK[name][1])
    assert not_fine(audit({**engine_node(), **files}, ENGINE)) == wanted
    assert len(wanted) == len(TOGETHER)


def test_a_masked_snapshot_proves_sameness_and_never_a_difference() -> None:
    masked = engine_node()
    assert json.loads(masked["index.json"])["masked"] is False
    masked["index.json"] = index(masked_as=True)
    assert not_fine(audit(masked, ENGINE)) == {}
    masked[f"{release_folder()}/config.yaml"] = "model: /model\nhost: 10.0.0.1\n"
    assert not_fine(audit(masked, ENGINE)) == {"container.config_is_running": "unknown"}


NGINX_LISTENS = 'LISTEN 0 511 0.0.0.0:{} 0.0.0.0:* users:(("nginx",pid=7,fd=6),("nginx",pid=6,fd=6))\n'


@functools.cache
def gateway(lua: bool) -> dict[str, str]:
    """Return the snapshot of a gateway with the role's own configuration."""
    variables = {
        "gateway_pools": [pool("short", [8100, 8101]), pool("long", [8200, 8201])],
        "__gateway_nginx": {"version": "1.22.1", "lua": lua, "lua_fits": lua},
    }
    tree = render(variables)
    text = f"# configuration file /etc/nginx/nginx.conf:\n{tree.main.decode()}\n"
    for name, content in tree.files.items():
        if name.endswith(".conf"):
            text += f"# configuration file /etc/nginx/metalserve/current/{name}:\n{content.decode()}\n"
    return {
        "commands/nginx_-T.txt": text,
        "processes/nginx/limits": LIMITS.replace("1048576", "1024   "),
        "processes/session/limits": LIMITS,
        "commands/systemctl_show_defaults.txt": "DefaultLimitNOFILE=1048576\n",
        "files/proc/sys/net/core/somaxconn": "4096\n",
        "files/var/log/metalserve/gateway-access.log": "",
        "commands/systemctl_show.txt": unit("nginx.service"),
        "commands/ss_-Hltnp.txt": "".join(NGINX_LISTENS.format(port) for port in (80, 443, 8081, 8082)),
        "certificates/etc/nginx/metalserve/current/tls/server.crt.txt": (
            "notBefore=Nov 30 00:00:00 2026 GMT\nnotAfter=Nov 30 00:00:00 2027 GMT\nsubject=CN = x\n"
        ),
        "scrapes/node.prom": "node_cpu_seconds_total 1\n",
        "scrapes/nginx.prom": "nginx_up 1\n",
        "scrapes/gateway_log.prom": "metalserve_gateway_log_lines_total 1\n",
        "stat/secrets.txt": "0640 root www-data 9 0 file /etc/nginx/metalserve/current/keys.conf\n",
        "files/etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
        "commands/systemd-detect-virt.txt": "kvm\n",
        "listings/adjtimex.txt": "state=0\nstatus=1\nmaxerror_us=1\nesterror_us=1\n",
        "disks/root.txt": df("/"),
        "index.json": json.dumps(
            {"collected_at": "2026-12-01T00:00:00Z", "probes": {"error_logs": "absent", "engines": "absent"}}
        ),
    }


@pytest.mark.parametrize("lua", [True, False])
def test_the_gateway_that_this_bundle_writes_is_green(lua: bool) -> None:
    verdicts = audit(gateway(lua), GATEWAY)
    assert not_fine(verdicts) == {}
    passed = {one.id for one in verdicts if one.verdict == "pass"}
    assert {one.id for one in ALL.values() if one.area == "gateway"} <= passed


@pytest.mark.parametrize(
    ("old", "new", "lua", "id", "word"),
    [
        ("proxy_buffering off;", "", True, "gateway.streaming_unbuffered", "fail"),
        ("proxy_http_version 1.1;", "", True, "gateway.upstream_keepalive", "fail"),
        ('proxy_set_header Connection "";', "", True, "gateway.upstream_keepalive", "fail"),
        ('proxy_set_header Connection "";', "proxy_set_header Connection close;", False, "gateway.upstream_keepalive", "fail"),
        ('proxy_set_header Connection "";', "proxy_set_header Connection $http_connection;", False,
         "gateway.upstream_keepalive", "fail"),
        ("keepalive 64;", "", False, None, None),
        ("zone ", "# ", False, "gateway.zone_with_balancing", "fail"),
        ("proxy_read_timeout 60s;", "", False, "gateway.time_chain", "fail"),
        ("proxy_read_timeout 60s;", "proxy_read_timeout 9s;", False, "gateway.time_chain", "fail"),
        ("keepalive_timeout 120s;", "keepalive_timeout 180s;", False, "gateway.time_chain", "fail"),
        ("client_max_body_size", "# ", False, "gateway.body_size", "fail"),
        ("client_max_body_size", "client_max_body_size 512k; # ", False, "gateway.body_size", "fail"),
        ("client_max_body_size", "client_max_body_size 0; # ", False, None, None),
        ("client_max_body_size", "client_max_body_size big; # ", False, "gateway.body_size", "unknown"),
        ("listen 127.0.0.1:8081;", "listen 127.0.0.1:8099;", True, "gateway.running", "fail"),
        ("listen 127.0.0.1:8081;", "listen unix:/run/x.sock;", True, None, None),
        ("fail_timeout=30s", "fail_timeout=10000s", False, "gateway.failure_counting", "fail"),
        ("proxy_next_upstream error timeout;", "proxy_next_upstream error timeout http_503;", True,
         "gateway.failure_counting", "fail"),
        ("proxy_next_upstream error timeout;", "proxy_next_upstream error http_429;", True, "gateway.failure_counting", "fail"),
        ("proxy_next_upstream error timeout;", "proxy_next_upstream error timeout non_idempotent;", True,
         "gateway.retry_on_timeout", "fail"),
        ("proxy_next_upstream error timeout;", "proxy_next_upstream error non_idempotent;", True, None, None),
        ("server 127.0.0.1:8100", "server engine-a:8100", False, "gateway.resolver", "fail"),
        ("listen 443 ssl", "listen 443", True, "gateway.listen", "fail"),
        ("listen 443 ssl", "listen 127.0.0.1:443 ssl", True, "gateway.listen", "fail"),
        ("listen 127.0.0.1:8081;", "listen 8081;", True, "gateway.private_status", "fail"),
        ("listen 127.0.0.1:8081;", "listen 8081; deny all;", False, None, None),
        ("worker_connections ", "worker_connections 512; # ", True, "gateway.worker_connections", "warn"),
        ("worker_rlimit_nofile ", "# ", True, "gateway.worker_connections", "fail"),
    ],
)  # fmt: skip
def test_a_gateway_that_somebody_edited(old: str, new: str, lua: bool, id: str | None, word: str | None) -> None:
    host = dict(gateway(lua))
    text = host["commands/nginx_-T.txt"]
    if id is not None:
        assert old in text, old
    host["commands/nginx_-T.txt"] = text.replace(old, new)
    found = not_fine(audit(host, GATEWAY))
    found.pop("limits.nginx", None)
    assert found == ({id: word} if id is not None else {})


@pytest.mark.parametrize(
    ("end", "word"),
    [("Dec 21 00:00:00 2026", "fail"), ("Dec 22 00:00:00 2026", "pass"), ("Nov 30 23:59:59 2026", "fail"), ("soup", "unknown")],
)  # fmt: skip
def test_certificates(end: str, word: str) -> None:
    path = "certificates/etc/nginx/metalserve/current/tls/server.crt.txt"
    host = {**gateway(True), path: f"notBefore=Nov 30 00:00:00 2026 GMT\nnotAfter={end} GMT\n"}
    verdicts = {one.id: one.verdict for one in audit(host, GATEWAY)}
    assert verdicts["gateway.tls_expiry"] == word


def monitor(inventory: str, **edits: str) -> dict[str, str]:
    """Return the snapshot of a monitor with this bundle's own rules, loaded, and real scrapes of what they ask for."""
    text = rendered(inventory)["rules/metalserve.yml"]
    for old, new in edits.items():
        text = text.replace(old, new)
    rules, error = rules_in_file("r.yml", text)
    assert error is None
    loaded = [
        {
            "name": one.name,
            "type": one.kind,
            "query": one.expr,
            "duration": one.for_s,
            "labels": one.labels,
            "health": "ok",
        }
        for one in rules
    ]
    metrics = FIXTURES / "metrics"
    # Triton's recording is of a server without the vLLM backend's own metrics.
    scraped = "".join((metrics / name).read_text(encoding="utf-8") for name in (
        "agent-h200-580.159.04.prom", "vllm-0.32.0-cpu.prom", "triton-2.51-native.prom"))  # fmt: skip
    names = {line.split("{")[0].split(" ")[0] for line in scraped.splitlines() if line and not line.startswith("#")}
    names |= {line.split(" ")[2] for line in scraped.splitlines() if line.startswith("# TYPE")}
    names |= {"nginx_up", "nginx_http_requests_total", "prometheus_rule_evaluation_failures_total",
              "alertmanager_notifications_failed_total", "node_cpu_seconds_total", "node_filesystem_avail_bytes",
              "metalserve_gpu_memory_unplanned_ratio", "metalserve_replica_max_num_seqs", "metalserve_replica_ready",
              "metalserve_replica_gpu_memory_used_bytes", "metalserve_replica_gpu_memory_total_bytes", "http_requests_total",
              "metalserve_replica_start_timestamp_seconds", "metalserve_replica_container_running",
              "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ROW_REMAP_FAILURE"}  # fmt: skip
    names.add("vllm:time_per_output_token_seconds_bucket")
    sglang = set(re.findall(r"sglang:\w+", text))
    return {
        "prometheus/rules.json": json.dumps({"data": {"groups": [{"file": "r", "rules": loaded}]}}),
        "prometheus/names.json": json.dumps({"data": sorted(names | sglang)}),
        "prometheus/targets.json": json.dumps(
            {"data": {"activeTargets": [{"labels": {"job": "node"}, "health": "up"}]}}
        ),
        "files/etc/prometheus/rules/metalserve.yml": text,
        "commands/systemctl_show.txt": unit("prometheus.service") + unit("prometheus-alertmanager.service"),
        "scrapes/node.prom": "node_cpu_seconds_total 1\nnode_filesystem_avail_bytes 1\n",
    }


@pytest.mark.parametrize(("inventory", "accelerator"), [("gpu", "nvidia"), ("cpu", "cpu"), ("gpu", ""), ("cpu", "")])
def test_the_rules_of_this_bundle_are_green(inventory: str, accelerator: str) -> None:
    expected = {"roles": ["monitor"], "accelerator": accelerator}
    verdicts = {one.id: one for one in audit(monitor(inventory), expected) if one.id.startswith("monitoring.")}
    assert {id: one.verdict for id, one in verdicts.items()} == dict.fromkeys(verdicts, "pass"), verdicts


def rule(name: str, expr: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "alerting", "query": expr, "duration": 300, "health": "ok", **more}


def loaded(*rules: dict[str, Any]) -> dict[str, str]:
    return {"prometheus/rules.json": json.dumps({"data": {"groups": [{"file": "r", "rules": list(rules)}]}})}


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (rule("A", "vllm:kv_cache_usage_perc > 0.9"), "pass"),
        (rule("A", "vllm:kv_cache_usage_perc > 90"), "fail"),
        (rule("A", "metalserve_gpu_utilization_ratio > 90"), "fail"),
        (rule("A", 'absent(x{l="v"}) and absent(y)'), "fail"),
        (rule("A", "absent(x) and absent(y)"), "pass"),
        (rule("A", 'absent(x{l="v"}) and on () absent(y)'), "pass"),
        (rule("A", "sum(rate(x[5m)"), "fail"),
        (rule("A", "x > 1", health="err", lastError="many-to-many matching"), "fail"),
        (rule("A", 'vllm:num_requests_running{model_name="m"} > 3'), "pass"),
        (rule("A", 'vllm:num_requests_running{modelname="m"} > 3'), "fail"),
        (rule("A", 'vllm:num_requests_running{pool="m",kind="vllm"} > 3'), "pass"),
    ],
)
def test_rules_that_can_never_fire(found: dict[str, Any], word: str) -> None:
    host = {**loaded(found), "scrapes/short-0.prom": 'vllm:num_requests_running{model_name="m",engine="0"} 1\n'}
    verdicts = {one.id: one.verdict for one in audit(host, {"roles": ["monitor"]})}
    assert verdicts["monitoring.rules_can_fire"] == word


@pytest.mark.parametrize(
    ("expr", "seconds", "word"),
    [
        ("metalserve_gpu_utilization_ratio > 0.9", 300, "pass"),
        ("metalserve_gpu_utilization_ratio > 0.8", 60, "pass"),
        ("metalserve_gpu_utilization_ratio > 0.95", 300, "fail"),
        ("metalserve_gpu_utilization_ratio > 0.9", 600, "fail"),
        ("DCGM_FI_DEV_GPU_UTIL > 90", 300, "pass"),
        ("DCGM_FI_DEV_GPU_UTIL > 95", 300, "fail"),
        ("metalserve_gpu_utilization_ratio < 0.9", 300, "fail"),
        ("other > 0.9", 300, "fail"),
        ("metalserve_gpu_utilization_ratio > 0.99 and other > 0.1", 300, "fail"),
        ("metalserve_gpu_utilization_ratio > 0.9 and other > 5", 300, "pass"),
    ],
)
def test_thresholds_of_the_checklist(expr: str, seconds: float, word: str) -> None:
    alert = {
        "what": "gpu_util",
        "metrics": ["metalserve_gpu_utilization_ratio", "DCGM_FI_DEV_GPU_UTIL"],
        "above": 0.9,
        "for_s": 300,
    }
    verdicts = audit(loaded(rule("A", expr, duration=seconds)), {"roles": ["monitor"]}, alerts=[alert])
    assert {one.id: one.verdict for one in verdicts}["monitoring.alert_thresholds"] == word


def test_rules_that_only_lie_in_files_are_not_loaded() -> None:
    host = {"files/etc/prometheus/rules/r.yml": rendered("cpu")["rules/metalserve.yml"]}
    verdicts = {one.id: one.verdict for one in audit(host, {"roles": ["monitor"], "accelerator": "cpu"})}
    assert verdicts["monitoring.alert_thresholds"] == "unknown"
    assert {one.id: one.verdict for one in audit({}, {"roles": ["monitor"]})}[
        "monitoring.alert_thresholds"
    ] == "unknown"
    none = {"prometheus/rules.json": '{"data": {"groups": []}}'}
    assert {one.id: one.verdict for one in audit(none, {"roles": ["monitor"]})}["monitoring.alert_thresholds"] == "fail"


def test_a_target_that_is_down_is_named() -> None:
    targets = {"prometheus/targets.json": json.dumps({"data": {"activeTargets": [
        {"labels": {"job": "engines", "instance": "10.0.0.11:8100"}, "health": "down", "lastError": "refused"}]}})}  # fmt: skip
    verdicts = {one.id: one for one in audit({**monitor("cpu"), **targets}, {"roles": ["monitor"]})}
    assert verdicts["monitoring.exporters"].verdict == "fail"
    assert "10.0.0.11:8100: refused" in str(verdicts["monitoring.exporters"].current)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({"commands/systemctl_show.txt": unit("nginx.service", ActiveState="failed", Result="exit-code")}, "fail"),
        ({"commands/systemctl_show.txt": unit("nginx.service", ActiveState="inactive")}, "fail"),
        ({"commands/systemctl_show.txt": None}, "pass"),
        ({"commands/ss_-Hltnp.txt": None}, "unknown"),
        ({"commands/ss_-Hltnp.txt": NGINX_LISTENS.format(80)}, "fail"),
        ({"commands/ss_-Hltnp.txt": "LISTEN 0 5 *:443 *:*\nLISTEN 0 5 *:80 *:*\nLISTEN 0 5 *:8081 *:*\nLISTEN 0 5 *:8082 *:*\n"},
         "pass"),
        ({"commands/ss_-Hltnp.txt": gateway(True)["commands/ss_-Hltnp.txt"].replace('443 0.0.0.0:* users:(("nginx"',
                                                                                     '443 0.0.0.0:* users:(("caddy"')}, "fail"),
    ],
)  # fmt: skip
def test_a_gateway_that_is_down_is_not_green(found: dict[str, Any], word: str) -> None:
    verdicts = {one.id: one.verdict for one in audit({**gateway(True), **found}, GATEWAY)}
    assert verdicts["gateway.running"] == word


def test_certificates_that_could_not_be_read_are_not_none() -> None:
    states = {"error_logs": "absent", "engines": "absent", "certificates": "timeout"}
    files = {path: text for path, text in gateway(True).items() if not path.startswith("certificates/")}
    files["index.json"] = json.dumps({"collected_at": "2026-12-01T00:00:00Z", "probes": states})
    assert {one.id: one.verdict for one in audit(files, GATEWAY)}["gateway.tls_expiry"] == "unknown"


def test_a_host_without_nginx_is_no_gateway() -> None:
    files = {"index.json": json.dumps({"probes": {"nginx": "absent"}})}
    assert {one.id: one.verdict for one in audit(files, GATEWAY)}["gateway.running"] == "fail"
    assert {one.id: one.verdict for one in audit(files, {})}["gateway.running"] == "not_applicable"


ACTIVE = unit("prometheus.service") + unit("prometheus-alertmanager.service")


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({}, "pass"),
        ({"commands/systemctl_show.txt": ACTIVE.replace("ActiveState=active", "ActiveState=failed", 1)}, "fail"),
        ({"commands/systemctl_show.txt": unit("prometheus.service")}, "unknown"),
        ({"commands/systemctl_show.txt": unit("prometheus.service"), "commands/ss_-Hltnp.txt": ""}, "fail"),
        ({"commands/systemctl_show.txt": unit("prometheus.service"), "commands/ss_-Hltnp.txt": "LISTEN 0 9 *:9093 *:*\n"},
         "pass"),
        ({"commands/systemctl_show.txt": None}, "unknown"),
        ({"index.json": json.dumps({"probes": {"prometheus": {"state": "error", "error": "nothing listens"}}})}, "fail"),
    ],
)  # fmt: skip
def test_a_monitor_that_is_down_is_not_green(found: dict[str, Any], word: str) -> None:
    verdicts = {one.id: one.verdict for one in audit({**monitor("cpu"), **found}, {"roles": ["monitor"]})}
    assert verdicts["monitoring.running"] == word


NESTED = """# configuration file /etc/nginx/nginx.conf:
events {{ worker_connections 4096; }}
http {{
  client_max_body_size 32m;
  server {{
    listen 443 ssl;
    location / {{
      proxy_pass http://127.0.0.1:9; proxy_buffering off; proxy_read_timeout {read};
      location /v1/ {{ proxy_pass http://127.0.0.1:8; proxy_buffering {buffering}; }}
    }}
  }}
}}
"""


@pytest.mark.parametrize(("buffering", "word"), [("on", "fail"), ("off", "pass")])
def test_a_location_inside_another_is_seen(buffering: str, word: str) -> None:
    host = {"commands/nginx_-T.txt": NESTED.format(buffering=buffering, read="300s")}
    assert {one.id: one.verdict for one in audit(host, {})}["gateway.streaming_unbuffered"] == word


@pytest.mark.parametrize(("read", "word"), [("300s", "pass"), ("30s", "fail"), ("soon", "unknown")])
def test_a_read_timeout_below_the_default_is_no_better_than_the_default(read: str, word: str) -> None:
    host = {"commands/nginx_-T.txt": NESTED.format(buffering="off", read=read)}
    assert {one.id: one.verdict for one in audit(host, {})}["gateway.time_chain"] == word


@pytest.mark.parametrize(("limit", "word"), [(1 << 20, "pass"), (64 << 20, "fail")])
def test_the_longest_prompts_of_the_pools_must_fit(limit: int, word: str) -> None:
    verdicts = audit(gateway(False), {**GATEWAY, "body_limit_bytes": limit})
    assert {one.id: one.verdict for one in verdicts}["gateway.body_size"] == word


@pytest.mark.parametrize(
    ("peer", "word"),
    [("pool_$name", "pass"), ("${kind}_short", "pass"), ("$peer", "pass"), ("other_$name", "fail"), ("pool_short.a", "fail")],
)  # fmt: skip
def test_a_peer_with_a_variable_is_an_upstream_where_one_has_such_a_name(peer: str, word: str) -> None:
    text = NESTED.format(buffering="off", read="300s").replace("127.0.0.1:9", peer)
    text = text.replace("  server {", "  upstream pool_short { server 10.0.0.1:80; keepalive 8; }\n  server {", 1)
    assert {one.id: one.verdict for one in audit({"commands/nginx_-T.txt": text}, {})}["gateway.resolver"] == word
