# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The facts of whole machines, their JSON form, their schema and their documentation."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ansible_collections.metal.serve.plugins.module_utils.hardware import describe
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES

from .helpers import FIXTURES, REPOSITORY, SMI, facts_of, h200


def schema() -> dict[str, Any]:
    """Return the committed schema of the facts."""
    found: dict[str, Any] = json.loads((REPOSITORY / "schemas" / "facts.json").read_text(encoding="utf-8"))
    return found


def test_schemas_and_documentation_are_those_of_the_code() -> None:
    docs, schemas = REPOSITORY / "docs", REPOSITORY / "schemas"
    assert (docs / "facts.md").read_text(encoding="utf-8") == describe.facts_markdown()
    text = (docs / "snapshots.md").read_text(encoding="utf-8")
    assert text == describe.with_table(text)
    assert schema() == describe.facts_schema()
    assert json.loads((schemas / "snapshot.json").read_text(encoding="utf-8")) == describe.snapshot_schema()
    for name in ("facts.json", "snapshot.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads((schemas / name).read_text(encoding="utf-8")))


def test_every_probe_says_what_it_is() -> None:
    for probe in PROBES:
        assert probe.says, probe.name
        assert 0 < probe.timeout <= (3600 if probe.on_request else 30), probe.name
        assert probe.paths, probe.name


def test_json_form_is_valid_and_reads_back(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "s", {SMI: h200(), "files/proc/meminfo": "MemTotal:  1056 kB\n"})
    plain = json.loads(json.dumps(facts.to_dict()))
    jsonschema.validate(plain, schema())
    assert HostFacts.from_dict(plain) == facts


@pytest.mark.parametrize(
    "value", [None, [], "x", {"gpus": 3}, {"gpus": [3, {"index": "x"}]}, {"numa": {"balancing": True}}]
)
def test_wrong_json_becomes_unknown(value: Any) -> None:
    facts = HostFacts.from_dict(value)
    assert facts.numa.balancing is None
    assert facts.gpus is None or facts.gpus == [] or facts.gpus[0].index == 0


PCI = "files/sys/bus/pci/devices/0000:00:06.0"

MACHINE = {
    SMI: h200(),
    "commands/uname_-a.txt": "Linux node-a 6.8.0-45-generic #45-Ubuntu SMP x86_64 x86_64 x86_64 GNU/Linux\n",
    "files/etc/os-release": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
    "files/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  x\n",
    "commands/dpkg_-l.txt": "ii  libnvidia-compute-550:amd64 550.107.02-0ubuntu0.24.04.1 amd64 x\n"
    "ii  nvidia-container-toolkit 1.17.8-1 amd64 x\n",
    "commands/apt-mark_showhold.txt": "libnvidia-compute-550\n",
    "commands/modinfo_nvidia.txt": "filename: /lib/x/nvidia.ko\nversion:        550.107.02\nsigner:         DKMS\n",
    "files/proc/modules": "nouveau 123 0 - Live 0x0\n",
    "files/etc/modprobe.d/b.conf": "blacklist nouveau\noptions nvidia NVreg_PreserveVideoMemoryAllocations=1\n",
    "stat/modprobe.d.txt": "0644 root root 10 2000 file /etc/modprobe.d/b.conf\n",
    "stat/initramfs.txt": "0644 root root 10 1000 file /boot/initrd.img-6.8.0\n",
    f"{PCI}/vendor": "0x10de\n",
    f"{PCI}/class": "0x030200\n",
    f"{PCI}/numa_node": "1\n",
    f"{PCI}/local_cpulist": "32-63\n",
    "files/sys/devices/system/node/node0/cpulist": "0-31\n",
    "files/sys/devices/system/node/node1/cpulist": "32-63\n",
    "files/sys/devices/system/node/node1/distance": "21 10\n",
    "files/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       65536 kB\n",
    "files/proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
    "files/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
    "files/sys/fs/cgroup/system.slice/memory.swap.max": "max\n",
    "processes/dockerd/limits": "Max open files            1073741816           1073741816           files     \n",
    "processes/dockerd/pid": "77\n",
    "files/proc/sys/net/core/somaxconn": "4096\n",
    "files/proc/sys/net/ipv4/ip_local_port_range": "1024\t65535\n",
    "stat/docker.sock.txt": "0666 root docker 0 0 socket /run/docker.sock\n",
    "files/etc/docker/daemon.json": '{"live-restore": true}',
    "docker/version.json": '{"Version": "28.2.2", "ApiVersion": "1.50", "MinAPIVersion": "1.24"}',
    "docker/info.json": '{"Driver": "overlay2", "SwapLimit": true, "CDISpecDirs": ["/etc/cdi"]}',
    "commands/systemctl_show.txt": "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=active\n",
    "commands/nft_list_ruleset.txt": "table inet metalserve {\n}\n",
    "listings/adjtimex.txt": "state=0\nstatus=1\n",
    "disks/root.txt": "F 1-blocks Used Available Capacity Mounted\n/dev/x 100 40 60 40% /\n",
    "files/sys/fs/selinux/enforce": "1",
    "stat/secrets.txt": "0600 root root 32 1 file /etc/metalserve/secrets/engine-api-key\n",
    "files/var/lib/metalserve/models/m/r1.manifest.json": '{"files": [{"path": "a", "size": 3}]}',
    "stat/models/m/r1.txt": "3 1 2 77 a\n? ? ? ? model-00002.safetensors\n",
    "files/var/lib/metalserve/models/m/r1/model.safetensors.index.json": '{"weight_map": {"x": "b", "y": "a"}}',
    "prometheus/rules.json": json.dumps(
        {"data": {"groups": [{"file": "/r.yml", "rules": [
            {"type": "alerting", "name": "A", "query": "up == 0", "duration": 300, "health": "ok", "lastError": ""}]}]}}
    ),
    "prometheus/targets.json": '{"data": {"activeTargets": [{"labels": {"job": "node"}, "health": "down"}]}}',
    "files/etc/prometheus/rules/m.yml": "groups:\n- name: g\n  rules:\n  - alert: B\n    expr: x > 1\n    for: 5m\n",
    "scrapes/short-0.prom": '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 2\n'
    'h_bucket{le="1"} 3\n',
    "certificates/etc/nginx/tls/c.pem.txt": "notBefore=Nov 30 15:35:00 2025 GMT\nnotAfter=Nov 30 15:35:00 2027 GMT\n"
    "subject=CN = llm\nX509v3 Subject Alternative Name: \n    DNS:llm.example, IP Address:10.0.0.1\n",
    "files/var/log/metalserve/gateway-access.log": '{"status": 200}\n{"status": 504, "urt": "60.001"}\n',
}  # fmt: skip


def test_a_whole_machine(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "s", MACHINE)
    jsonschema.validate(facts.to_dict(), schema())
    assert facts.problems == []
    assert (facts.host.hostname, facts.host.kernel_release, facts.host.architecture) == (
        "node-a",
        "6.8.0-45-generic",
        "x86_64",
    )
    assert facts.os.family == "debian"
    driver = facts.driver
    assert (driver.version_loaded, driver.version_installed, driver.version_on_disk) == (
        "550.90.07",
        "550.107.02",
        "550.107.02",
    )
    assert (driver.version_nvml, driver.module_signer, driver.kernel_module_type) == (
        "580.159.04",
        "DKMS",
        "proprietary",
    )
    assert facts.packages.holds == ["libnvidia-compute-550"]
    assert {item.name: item.held for item in facts.packages.items or []} == {
        "libnvidia-compute-550": True,
        "nvidia-container-toolkit": False,
    }
    assert facts.kernel.nouveau_loaded is True
    assert facts.kernel.nouveau_blacklisted_in == ["/etc/modprobe.d/b.conf"]
    assert facts.kernel.nouveau_blacklist_in_initramfs is False
    gpu = (facts.gpus or [])[0]
    assert (gpu.numa_node, gpu.local_cpus) == (1, "32-63")
    assert [device.address for device in facts.pci.gpus or []] == ["0000:00:06.0"]
    assert facts.pci.nvswitches == []
    node = (facts.numa.nodes or [])[1]
    assert (node.id, node.cpu_list, node.distances, node.memory_total_kib) == (1, "32-63", [21, 10], 65536)
    assert (facts.cgroup.version, facts.cgroup.swap_limit, facts.cgroup.memory_limit) == (2, True, True)
    assert facts.limits.processes["dockerd"].nofile_soft == 1073741816
    assert facts.limits.processes["dockerd"].pid == 77
    assert facts.sysctl == {"net.core.somaxconn": "4096", "net.ipv4.ip_local_port_range": "1024 65535"}
    docker = facts.docker
    assert (docker.version, docker.min_api_version, docker.storage_driver) == ("28.2.2", "1.24", "overlay2")
    assert (docker.socket_mode, docker.socket_owner, docker.daemon_json) == (
        "0666",
        "root:docker",
        {"live-restore": True},
    )
    assert (docker.cdi_spec_dirs, docker.containers) == (["/etc/cdi"], None)
    assert facts.services["nvidia-persistenced.service"].active_state == "active"
    assert facts.network.nft_tables == ["inet metalserve"]
    assert facts.time.synchronized is True
    assert [(disk.path, disk.free_bytes) for disk in facts.disks or []] == [("/", 60)]
    assert facts.security.selinux == "enforcing"
    assert [(one.path, one.mode) for one in facts.metalserve.secrets or []] == [
        ("/etc/metalserve/secrets/engine-api-key", "0600")
    ]
    (model,) = facts.metalserve.models or []
    assert [(one.path, one.size) for one in model.files or []] == [("a", 3), ("model-00002.safetensors", None)]
    assert model.index_files == ["a", "b"]
    assert [(rule.name, rule.for_s) for rule in facts.monitoring.rules or []] == [("A", 300.0)]
    assert [(rule.name, rule.for_s, rule.expr) for rule in facts.monitoring.rules_in_files or []] == [
        ("B", 300.0, "x > 1")
    ]
    assert [(one.job, one.health) for one in facts.monitoring.targets or []] == [("node", "down")]
    (scrape,) = facts.monitoring.scrapes
    assert scrape.samples == {'vllm:num_requests_running{engine="0"}': 2.0}
    (certificate,) = facts.certificates or []
    assert (certificate.path, certificate.not_after) == ("/etc/nginx/tls/c.pem", "2027-11-30T15:35:00Z")
    assert certificate.names == ["llm.example", "10.0.0.1"]
    assert facts.nginx.access_log == ['{"status": 504, "urt": "60.001"}']


def test_each_file_alone_gives_no_more_than_with_the_others(tmp_path: Path) -> None:
    """A fact must not come out of a missing reading: what one file alone gives, it gives beside all the others too."""
    whole = facts_of(tmp_path / "all", MACHINE)
    for number, path in enumerate(MACHINE):
        alone = facts_of(tmp_path / str(number), {path: MACHINE[path]})
        states = {name for name, probe in alone.probes.items() if probe.state != "not_collected"}
        assert states, path
        assert states <= {name for name, probe in whole.probes.items() if probe.state != "not_collected"}


def test_packages_that_disagree_are_no_version(tmp_path: Path) -> None:
    text = "ii libnvidia-compute-550 550.107.02-0 amd64\nii nvidia-utils-550 550.90.07-0 amd64\n"
    driver = facts_of(tmp_path / "s", {"commands/dpkg_-l.txt": text}).driver
    assert driver.version_installed is None
    assert driver.versions_installed == ["550.107.02", "550.90.07"]


def test_rpm_machine(tmp_path: Path) -> None:
    files = {
        "files/etc/os-release": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n',
        "commands/rpm_-qa.txt": "kmod-nvidia-open-dkms 3:570.124.06-1.el9 noarch\ndocker-ce 3:28.2.2-1.el9 x86_64\n",
        "files/etc/dnf/plugins/versionlock.list": "kmod-nvidia-open-dkms-3:570.124.06-1.el9.*\n",
        "files/etc/dnf/automatic.conf": "[commands]\napply_updates = yes\n",
        "files/etc/dnf/dnf.conf": "[main]\nexcludepkgs=nvidia*, kmod-nvidia*\n",
        "files/sys/fs/selinux/enforce": "0",
    }
    facts = facts_of(tmp_path / "s", files)
    assert (facts.os.family, facts.packages.manager, facts.driver.version_installed) == ("redhat", "rpm", "570.124.06")
    assert facts.packages.holds == ["kmod-nvidia-open-dkms"]
    assert facts.packages.unattended_enabled is True
    assert facts.packages.unattended_blacklist == ["nvidia*", "kmod-nvidia*"]
    assert facts.security.selinux == "permissive"


def test_absent_is_seen_to_be_absent(tmp_path: Path) -> None:
    absent = ["pci_devices", "iommu_groups", "cgroup_swap", "selinux", "cpu_governors", "docker_daemon_json",
              "nvidia_smi",
              "rdma_devices", "docker_containers", "cdi_specs", "apt_history"]  # fmt: skip
    facts = facts_of(tmp_path / "s", {"files/proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"},
                     {"probes": dict.fromkeys(absent, "absent")})  # fmt: skip
    assert facts.pci.gpus == []
    assert facts.pci.rdma_devices == []
    assert facts.gpus == []
    assert facts.kernel.iommu_groups == 0
    assert facts.cgroup.swap_limit is False
    assert facts.cpu.governors == {}
    assert facts.security.selinux == "disabled"
    assert facts.docker.daemon_json == {}
    assert facts.docker.containers == []
    assert facts.cdi == []
    assert facts.packages.events == []


@pytest.mark.parametrize("state", ["denied", "timeout", "error", "not_collected"])
def test_what_was_not_seen_is_not_absent(tmp_path: Path, state: str) -> None:
    names = [probe.name for probe in PROBES]
    facts = facts_of(tmp_path / "s", {}, {"probes": dict.fromkeys(names, state)})
    found = {key: value for key, value in facts.to_dict().items() if key not in ("probes", "schema_version", "source")}

    def nothing(value: Any) -> bool:
        return all(nothing(one) for one in value.values()) if isinstance(value, dict) else value in (None, [])

    assert {key for key, value in found.items() if not nothing(value)} == set()


def test_containers_that_are_only_listed_are_not_none(tmp_path: Path) -> None:
    listed = facts_of(tmp_path / "a", {"docker/containers.json": '[{"Id": "abc"}]'})
    assert listed.docker.containers is None
    assert listed.problems == ["docker_containers: 1 of 1 containers are listed but not described"]
    assert facts_of(tmp_path / "b", {"docker/containers.json": "[]"}).docker.containers == []
    assert facts_of(tmp_path / "c", {"docker/containers.json": "{}"}).docker.containers is None


def test_malformed_parts_are_named(tmp_path: Path) -> None:
    files = {
        SMI: "<nvidia_smi_log>",
        "files/etc/docker/daemon.json": "{",
        "commands/nginx_-T.txt": "# configuration file /etc/nginx/nginx.conf:\nhttp {\n",
        "files/proc/driver/nvidia/version": "garbage",
        "commands/nvidia-smi_topo_-m.txt": "garbage",
        "files/etc/prometheus/rules/m.yml": "groups:\n- &x a\n",
    }
    facts = facts_of(tmp_path / "s", files)
    assert facts.gpus is None
    assert facts.docker.daemon_json is None
    assert facts.docker.daemon_json_error
    assert facts.nginx.config is None
    assert "/etc/nginx/nginx.conf:" in (facts.nginx.config_error or "")
    assert len(facts.problems) == 5


def test_nvidia_smi_that_failed_is_quoted(tmp_path: Path) -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.107\n"
    index = {"probes": {"nvidia_smi": {"state": "error", "error": "nvidia-smi -q -x: exit code 18"}}}
    facts = facts_of(tmp_path / "s", {SMI: text}, index)
    assert facts.gpus is None
    assert facts.driver.nvidia_smi_error == "Failed to initialize NVML: Driver/library version mismatch"


def test_processes_on_a_gpu_are_joined_with_their_containers(tmp_path: Path) -> None:
    smi = h200().replace(
        "<processes>",
        "<processes><process_info><pid>4242</pid><type>C</type><process_name>[Not Found]</process_name>"
        "<used_memory>100 MiB</used_memory></process_info>",
    )
    files = {
        SMI: smi,
        "processes/4242/comm": "VLLM::EngineCor\n",
        "processes/4242/cgroup": "0::/system.slice/docker-" + "ab" * 32 + ".scope\n",
    }
    gpu = (facts_of(tmp_path / "s", files).gpus or [])[0]
    (process,) = gpu.processes or []
    assert (process.pid, process.name, process.container_id) == (4242, "VLLM::EngineCor", "ab" * 32)


def test_two_h200_joined_by_nvlink(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "h200-x2.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    facts = collect(str(tmp_path / "h200-x2")).facts
    assert facts.problems == []
    assert facts.unknown_fields == []
    first, second = facts.gpus or []
    assert (first.uuid, second.uuid) == tuple(f"GPU-00000000-0000-0000-0000-{n:012d}" for n in (1, 2))
    assert facts.topology.matrix == {
        "GPU0": {"GPU0": "X", "GPU1": "NV18"},
        "GPU1": {"GPU0": "NV18", "GPU1": "X"},
    }
    for gpu in (first, second):
        assert (gpu.nvlink_active, gpu.nvlink_inactive) == (18, 0)
        assert (gpu.fabric_state, gpu.fabric_status) == ("Completed", "Success")
        assert (gpu.numa_node, gpu.local_cpus) == (None, "0-31")
        assert gpu.memory_total_mib == 143771
    assert [device.bar_sizes[2] for device in facts.pci.gpus or []] == [256 * 2**30] * 2
    assert facts.pci.nvswitches == []
    assert (facts.driver.version_loaded, facts.driver.kernel_module_type) == ("580.159.04", "open")
    assert facts.driver.device_majors["nvidia-uvm"] == 238
