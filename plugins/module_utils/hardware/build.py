# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the raw texts of the probes into facts. Pure: the same texts give the same facts, live or from a snapshot."""

from __future__ import annotations

import os
import re
from typing import Any, Callable, Optional

from ansible_collections.metal.serve.plugins.module_utils.common.files import sha256_text
from ansible_collections.metal.serve.plugins.module_utils.hardware import (
    parse_docker,
    parse_kernel_log,
    parse_nginx,
    parse_nvidia,
    parse_packages,
    parse_pci,
    parse_services,
    parse_system,
    values,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import (
    CdiSpec,
    Certificate,
    Container,
    Disk,
    Engine,
    HostFacts,
    Model,
    NumaNode,
    Package,
    ProbeState,
    Release,
    Scrape,
    find_directives,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.masking import (
    mask_assignments,
    mask_release,
    mask_secrets,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import (
    ABSENT,
    ERROR,
    NOT_COLLECTED,
    OK,
    ProbeResult,
    command_path,
    not_collected,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.probes_services import EXPORTERS
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES
from ansible_collections.metal.serve.plugins.module_utils.hardware.yaml_subset import load
from ansible_collections.metal.serve.plugins.module_utils.release.content import release_hash, significant


class Raw:
    """The results of the probes, with the few questions that the builders ask."""

    def __init__(self, results: dict[str, ProbeResult]) -> None:
        """Keep ``results`` by probe name."""
        self.results = results

    def result(self, name: str) -> ProbeResult:
        """Return the result of a probe; not_collected where there is none."""
        return self.results.get(name) or not_collected(name)

    def state(self, name: str) -> str:
        """Return the state of a probe."""
        return self.result(name).state

    def text(self, name: str) -> Optional[str]:
        """Return the (first) text that a probe read, or None."""
        return self.result(name).text()

    def line(self, name: str) -> Optional[str]:
        """Return that text without surrounding blanks, or None."""
        text = self.text(name)
        return None if text is None else text.strip()

    def texts(self, name: str) -> dict[str, str]:
        """Return snapshot path -> text of all that a probe read."""
        return self.result(name).texts()

    def complete(self, *names: str) -> bool:
        """Tell whether each of these probes either read all there is or saw that there is nothing."""
        return all(self.state(name) in (OK, ABSENT) for name in names)


def build_facts(
    results: dict[str, ProbeResult], source: str, collected_at: Optional[str] = None, as_root: Optional[bool] = None
) -> HostFacts:
    """Return the facts that ``results`` support. Never raises: a part that cannot be understood is named in
    ``problems``.
    """
    facts = HostFacts(source=source)
    facts.collected_at, facts.collected_as_root = collected_at, as_root
    raw = Raw(results)
    for probe in PROBES:
        result = raw.result(probe.name)
        facts.probes[probe.name] = ProbeState(probe.name, result.state, result.error[:300], result.seconds)
    for name, builder in BUILDERS:
        try:
            builder(raw, facts)
        except Exception as error:
            facts.problems.append(f"{name}: could not be understood ({type(error).__name__}: {error})"[:300])
    return facts


def _host(raw: Raw, facts: HostFacts) -> None:
    words = (raw.text("uname") or "").split()
    if len(words) >= 5:
        facts.host.hostname, facts.host.kernel_release = words[1], words[2]
        rest = [word for word in words[3:] if word != "GNU/Linux"]
        facts.host.architecture = next(
            (word for word in reversed(rest) if re.match(r"\A(?:x86_64|aarch64|ppc64le|\w+64\w*)\Z", word)), None
        )
        facts.host.kernel_version = " ".join(word for word in rest if word != facts.host.architecture) or None
    uptime = (raw.text("uptime") or "").split()
    facts.host.uptime_s = values.quantity(uptime[0], "") if uptime else None
    facts.host.virtualization = raw.line("virtualization") or None
    text = raw.text("os_release")
    if text is not None:
        facts.os = parse_system.parse_os_release(text)


def _kernel(raw: Raw, facts: HostFacts) -> None:
    kernel = facts.kernel
    kernel.cmdline = raw.line("cmdline")
    kernel.arguments = parse_system.parse_cmdline(kernel.cmdline or "")
    modules = raw.text("modules")
    if modules is not None:
        kernel.modules = parse_system.parse_modules(modules)
        kernel.nouveau_loaded = "nouveau" in kernel.modules
    _nouveau(raw, facts)
    state = (raw.text("secure_boot") or "").lower()
    if "secureboot enabled" in state:
        kernel.secure_boot = True
    elif "secureboot disabled" in state or "not supported on this system" in state:
        kernel.secure_boot = False
    kernel.lockdown = values.selected(raw.text("lockdown"))
    if raw.state("iommu_groups") == ABSENT:
        kernel.iommu_groups = 0
    elif raw.text("iommu_groups") is not None:
        kernel.iommu_groups = len((raw.text("iommu_groups") or "").split())
    kernel.taint = values.integer(raw.text("tainted"))


def _nouveau(raw: Raw, facts: HostFacts) -> None:
    kernel = facts.kernel
    if raw.complete("modprobe_d"):
        files: list[str] = []
        options: list[str] = []
        for path, text in sorted(raw.texts("modprobe_d").items()):
            for line in text.splitlines():
                words = line.split("#", 1)[0].split()
                if words[:2] == ["blacklist", "nouveau"] or words[:3] in (
                    ["install", "nouveau", "/bin/false"],
                    ["install", "nouveau", "/bin/true"],
                ):
                    files.append(origin(path))
                if len(words) > 1 and any("nvidia" in word or "nouveau" in word for word in words):
                    options.append(" ".join(words)[:300])
        for name in ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist"):
            if "nouveau" in kernel.arguments.get(name, "").split(","):
                files.append("/proc/cmdline")
        kernel.nouveau_blacklisted_in = sorted(set(files))
        kernel.modprobe_options = options
    times = dict(_stat_times(raw.text("modprobe_times")))
    images = [mtime for _path, mtime in _stat_times(raw.text("initramfs"))]
    written = [times[path] for path in kernel.nouveau_blacklisted_in or [] if path in times]
    if images and written:
        kernel.nouveau_blacklist_in_initramfs = max(images) >= min(written)


def _stat_times(text: Optional[str]) -> list[tuple[str, int]]:
    found = []
    for line in (text or "").splitlines():
        words = line.split(" ", 6)
        if len(words) == 7 and re.match(r"\A\d{1,20}\Z", words[4]):
            found.append((words[6], int(words[4])))
    return found


def origin(path: str) -> str:
    """Return the path on the machine of a file in a snapshot (``files/proc/meminfo`` -> ``/proc/meminfo``)."""
    return path[len("files") :] if path.startswith("files/") else path


def _cpu_and_memory(raw: Raw, facts: HostFacts) -> None:
    text = raw.text("cpuinfo")
    if text is not None:
        facts.cpu = parse_system.parse_cpuinfo(text)
    facts.cpu.online = raw.line("cpu_online")
    online = values.cpu_list(facts.cpu.online)
    facts.cpu.logical = len(online) if online else facts.cpu.logical
    if raw.complete("cpu_governors"):
        governors: dict[str, int] = {}
        for word in raw.texts("cpu_governors").values():
            governors[word.strip()] = governors.get(word.strip(), 0) + 1
        facts.cpu.governors = governors
    choice = raw.text("cpu_available_governors")
    facts.cpu.available_governors = choice.split() if choice is not None else None
    text = raw.text("meminfo")
    if text is not None:
        facts.memory = parse_system.parse_meminfo(text)
    facts.memory.transparent_hugepages = values.selected(raw.text("thp_enabled"))
    facts.memory.transparent_hugepages_defrag = values.selected(raw.text("thp_defrag"))


def _numa(raw: Raw, facts: HostFacts) -> None:
    nodes: dict[int, NumaNode] = {}
    for item in raw.result("numa_nodes").items:
        # One that could not be read is there all the same: without it a machine of two would be one of one.
        number_of = re.search(r"/node(\d{1,6})/", item.path)
        if number_of is not None and item.state != ABSENT:
            nodes.setdefault(int(number_of.group(1)), NumaNode(int(number_of.group(1))))
    for path, text in raw.texts("numa_nodes").items():
        match = re.search(r"/node(\d{1,6})/(cpulist|distance|meminfo)\Z", path)
        if match is None:
            continue
        number = int(match.group(1))
        node = nodes.setdefault(number, NumaNode(number))
        if match.group(2) == "cpulist":
            node.cpu_list = text.strip() if values.cpu_list(text) is not None else None
        elif match.group(2) == "distance":
            distances = [values.integer(word) for word in text.split()]
            node.distances = [one for one in distances if one is not None] if None not in distances else None
        else:
            node.memory_total_kib = parse_system.parse_node_meminfo(text)
    if nodes and (len(nodes) > 1 or raw.complete("numa_nodes")):
        facts.numa.nodes = [nodes[number] for number in sorted(nodes)]
    elif raw.state("numa_nodes") == ABSENT:
        facts.numa.nodes = []
    facts.numa.balancing = values.integer(raw.text("numa_balancing"))


def _cgroup(raw: Raw, facts: HostFacts) -> None:
    cgroup = facts.cgroup
    mounts = raw.text("mounts")
    controllers: list[str] = []
    if mounts is not None:
        cgroup.version, controllers = parse_system.parse_mounted_cgroups(mounts)
    unified = raw.text("cgroup_controllers")
    if unified is not None and cgroup.version in (None, 2):
        cgroup.version, controllers = 2, unified.split()
    said = cgroup.version == 1 or unified is not None  # mounts name the controllers of version 1 alone
    cgroup.controllers = sorted(controllers) if said else None
    if cgroup.controllers is not None:
        cgroup.memory_limit = "memory" in cgroup.controllers
    if raw.state("cgroup_swap") == OK:
        cgroup.swap_limit = True
    elif raw.state("cgroup_swap") == ABSENT:
        cgroup.swap_limit = False


def _limits(raw: Raw, facts: HostFacts) -> None:
    limits = facts.limits
    for name in ("process_limits", "session_limits"):
        texts = raw.texts(name)
        for path, text in texts.items():
            match = re.match(r"\Aprocesses/([\w.-]+)/limits\Z", path)
            if match:
                found = parse_system.parse_process_limits(text)
                found.pid = values.integer(texts.get(f"processes/{match.group(1)}/pid"))
                limits.processes[match.group(1)] = found
    limits.session_outdated = parse_system.parse_session_times(
        raw.texts("session_limits").get("processes/session/times", "")
    )
    if raw.complete("session_pam"):
        texts = {origin(path): text for path, text in raw.texts("session_pam").items()}
        limits.sessions_read_limits = parse_system.parse_session_pam(texts)
    if raw.complete("limits_conf"):
        limits.entries = []
        texts = raw.texts("limits_conf")
        for path in sorted(texts, key=lambda one: (not one.endswith("/limits.conf"), one)):
            limits.entries += parse_system.parse_limits_conf(origin(path), texts[path])
    defaults = parse_system.key_values(raw.text("systemd_defaults") or "")
    limits.systemd_default_nofile = values.limit(defaults.get("DefaultLimitNOFILE"))
    limits.systemd_default_nofile_soft = values.limit(defaults.get("DefaultLimitNOFILESoft"))
    limits.systemd_default_memlock = values.limit(defaults.get("DefaultLimitMEMLOCK"))
    for name, result in raw.results.items():
        if name.startswith("sysctl.") and result.text() is not None:
            facts.sysctl[name[len("sysctl.") :]] = " ".join((result.text() or "").split())


def _driver(raw: Raw, facts: HostFacts) -> None:
    driver = facts.driver
    text = raw.text("nvidia_version")
    if text is not None:
        driver.version_loaded, driver.kernel_module_type = parse_nvidia.parse_module_version(text)
        if driver.version_loaded is None:
            facts.problems.append("nvidia_version: no driver version in /proc/driver/nvidia/version")
    text = raw.text("nvidia_params")
    if text is not None:
        driver.module_parameters = parse_system.key_values(text, ":")
    module = parse_system.key_values(raw.text("modinfo_nvidia") or "", ":")
    driver.version_on_disk = module.get("version")
    if module:
        driver.module_signer = module.get("signer", "")
    majors = parse_system.parse_devices(raw.text("proc_devices") or "")
    driver.device_majors = {name: major for name, major in majors.items() if name.startswith("nvidia")}
    if raw.complete("nvidia_device_nodes"):
        lines = (raw.text("nvidia_device_nodes") or "").splitlines()
        driver.device_nodes = [line for line in lines if line and " -> " not in line]
        driver.char_links = [line for line in lines if " -> " in line]


def _gpus(raw: Raw, facts: HostFacts) -> None:
    result = raw.result("nvidia_smi")
    if result.state == ABSENT and raw.state("pci_devices") == ABSENT:
        facts.gpus = []  # no GPU on the bus: without the second reading a missing program would hide the GPUs
    for item in result.items:
        if item.state not in (OK, ABSENT):
            said = (item.text.strip().splitlines() or [""])[0]
            facts.driver.nvidia_smi_error = (said or item.error)[:300]
    text = result.text()
    if text is None:
        return
    facts.driver.nvidia_smi_seconds = result.seconds or None
    try:
        log = parse_nvidia.parse_smi(text)
    except parse_nvidia.BadXml as error:
        facts.problems.append(f"nvidia_smi: {error}")
        return
    facts.driver.version_nvml, facts.driver.cuda_version = log.driver_version, log.cuda_version
    facts.driver.attached_gpus = log.attached_gpus
    facts.gpus = log.gpus
    facts.unknown_fields = log.unknown_fields
    facts.problems += [f"nvidia_smi: {problem}" for problem in log.problems]
    _gpu_processes(raw, facts)


def _gpu_processes(raw: Raw, facts: HostFacts) -> None:
    texts = raw.texts("gpu_processes")
    for gpu in facts.gpus or []:
        for process in gpu.processes or []:
            comm = texts.get(f"processes/{process.pid}/comm")
            cgroup = texts.get(f"processes/{process.pid}/cgroup")
            if process.name is None and comm is not None:
                process.name = comm.strip() or None
            if cgroup is not None:
                match = re.search(r"(?:docker[-/])([0-9a-f]{64})", cgroup)
                process.container_id = match.group(1) if match else ""


def _pci(raw: Raw, facts: HostFacts) -> None:
    devices = parse_pci.parse_sysfs(raw.texts("pci_devices"))
    listed = raw.text("lspci")
    if raw.complete("pci_devices"):
        facts.pci.gpus = [device for device in devices if parse_pci.is_gpu(device)]
        facts.pci.nvswitches = [device for device in devices if parse_pci.is_nvswitch(device)]
    elif listed is not None:
        found = parse_pci.parse_lspci(listed)
        if found or not listed.strip():
            facts.pci.gpus = [device for device in found if parse_pci.is_gpu(device)]
            facts.pci.nvswitches = [device for device in found if parse_pci.is_nvswitch(device)]
    by_address = {device.address: device for device in devices}
    for gpu in facts.gpus or []:
        near = by_address.get(gpu.pci_bus_id or "")
        if near is not None:
            gpu.numa_node, gpu.local_cpus = near.numa_node, near.local_cpus
    text = raw.text("pci_bridges")
    if text is not None:
        facts.pci.bridges = parse_pci.parse_bridges(text)
    if raw.complete("rdma_devices"):
        facts.pci.rdma_devices = (raw.text("rdma_devices") or "").split()


def _topology(raw: Raw, facts: HostFacts) -> None:
    text = raw.text("nvidia_topology")
    if text is not None:
        found = parse_nvidia.parse_topology(text)
        facts.topology.matrix, facts.topology.cpu_affinity, facts.topology.numa_affinity = found
        if facts.topology.matrix is None:
            facts.problems.append("nvidia_topology: no matrix in what nvidia-smi topo -m printed")
    text = raw.text("nvidia_nvlink")
    if text is not None:
        links = parse_nvidia.parse_nvlink(text)
        for gpu in facts.gpus or []:
            # A virtual machine with one card of a larger board prints nothing at all: no link is there for it.
            if gpu.uuid in links or not text.strip():
                gpu.nvlink_active, gpu.nvlink_inactive = links.get(gpu.uuid or "", (0, 0))


def _packages(raw: Raw, facts: HostFacts) -> None:
    packages = facts.packages
    dpkg, rpm = raw.texts("dpkg"), raw.text("rpm")
    if dpkg:
        packages.manager, packages.items = "dpkg", parse_packages.parse_dpkg("\n".join(dpkg.values()))
    elif rpm is not None:
        packages.manager, packages.items = "rpm", parse_packages.parse_rpm(rpm)
    _holds(raw, facts)
    installed = [item for item in packages.items or [] if parse_packages.lies_on_disk(item)]
    core = sorted(
        {
            parse_packages.upstream_version(item.version)
            for item in installed
            if parse_packages.is_driver_core(item.name)
        }
    )
    facts.driver.versions_installed = core
    facts.driver.version_installed = core[0] if len(core) == 1 else None
    if (raw.complete("apt_history") and raw.state("apt_history") != ABSENT) or raw.texts("apt_history"):
        texts = raw.texts("apt_history")
        # history.log.2 is older than history.log.1, which is older than history.log
        order = sorted(texts, key=lambda path: -(values.integer(path.rpartition(".")[2]) or 0))
        packages.events = [event for path in order for event in parse_packages.parse_apt_history(texts[path])]
    elif raw.state("apt_history") == ABSENT:
        packages.events = []


def _holds(raw: Raw, facts: HostFacts) -> None:
    packages = facts.packages
    names: set[str] = set()
    known = False
    if raw.text("apt_holds") is not None:
        known = True
        names.update(parse_packages.parse_holds(raw.text("apt_holds") or ""))
    if packages.manager == "dpkg":
        marked = [item.name for item in packages.items or [] if item.held]
        known = known or bool(marked) or raw.state("apt_holds") == ABSENT
        names.update(marked)
    if packages.manager == "rpm" and raw.complete("dnf_versionlock"):
        known = True
        for text in raw.texts("dnf_versionlock").values():
            names.update(parse_packages.parse_versionlock(text))
    if known:
        packages.holds = sorted(names)
        for item in packages.items or []:
            item.held = item.name in names
    _unattended(raw, facts)


def _unattended(raw: Raw, facts: HostFacts) -> None:
    packages = facts.packages
    text = raw.text("apt_config")
    if text is not None:
        config = parse_packages.parse_apt_config(text)
        packages.unattended_blacklist = config.get("unattended-upgrade::package-blacklist", [])
        packages.unattended_origins = [
            *config.get("unattended-upgrade::allowed-origins", []),
            *config.get("unattended-upgrade::origins-pattern", []),
        ]
        on = (config.get("apt::periodic::unattended-upgrade") or ["0"])[-1] not in ("0", "")
        have: Optional[Package] = packages.find("unattended-upgrades")
        packages.unattended_enabled = on if packages.items is None else on and have is not None
    elif packages.manager == "rpm" and raw.complete("dnf_automatic"):
        settings = parse_system.key_values(raw.text("dnf_automatic") or "")
        packages.unattended_enabled = settings.get("apply_updates", "no").lower() in ("yes", "true", "1")
        excluded = parse_system.key_values(raw.text("dnf_conf") or "")
        packages.unattended_blacklist = (
            re.split(r"[\s,]+", excluded.get("excludepkgs", excluded.get("exclude", ""))) if excluded else []
        )


def _services(raw: Raw, facts: HostFacts) -> None:
    for unit in parse_system.parse_units(raw.text("systemd_units") or ""):
        facts.services[unit.name] = unit


def _kernel_log(raw: Raw, facts: HostFacts) -> None:
    texts = raw.texts("kernel_log")
    if texts:
        source = "journal" if any("journalctl" in path for path in texts) else "dmesg"
        facts.kernel_log = parse_kernel_log.parse_kernel_log("\n".join(texts.values()), source)
    text = raw.text("fabric_manager_log")
    if text is not None or raw.state("fabric_manager_log") == ABSENT:
        facts.kernel_log.fabric_manager = [line for line in (text or "").splitlines() if line.strip()][-50:]


def _docker(raw: Raw, facts: HostFacts) -> None:
    text = raw.text("docker_version")
    docker = parse_docker.parse_version(text) if text is not None else facts.docker
    text = raw.text("docker_client")
    if text is not None:
        client = parse_docker.parse_client(text)
        docker.client_version, docker.client_api_version = client.client_version, client.client_api_version
        docker.version = docker.version or client.version
        docker.api_version = docker.api_version or client.api_version
        docker.min_api_version = docker.min_api_version or client.min_api_version
    facts.docker = docker
    parse_docker.read_info(docker, raw.text("docker_info") or "")
    if raw.complete("docker_client_environment"):
        docker.client_pinned_api_version = ""
        for text in raw.texts("docker_client_environment").values():
            match = re.search(r"^\s*(?:export\s+)?DOCKER_API_VERSION=[\"']?([\d.]+)", text, re.MULTILINE)
            if match:
                docker.client_pinned_api_version = match.group(1)
    text = raw.text("docker_daemon_json")
    if text is not None:
        docker.daemon_json, docker.daemon_json_error = values.json_object(text) if text.strip() else ({}, None)
    elif raw.state("docker_daemon_json") == ABSENT:
        docker.daemon_json = {}
    words = (raw.text("docker_socket") or "").split()
    if len(words) >= 7:
        docker.socket_mode, docker.socket_owner = words[0], f"{words[1]}:{words[2]}"
    _containers(raw, facts)


def _containers(raw: Raw, facts: HostFacts) -> None:
    result = raw.result("docker_containers")
    if result.state == ABSENT:
        facts.docker.containers = []
        return
    texts = result.texts()
    digests: dict[str, Optional[list[str]]] = {}
    for path, text in texts.items():
        if path.startswith("docker/images/"):
            digests.update(parse_docker.image_digests(text))
    allowed = parse_docker.parse_device_allow(raw.texts("docker_device_allow"))
    containers: list[Container] = []
    for path, text in texts.items():
        if not path.startswith("docker/containers/"):
            continue
        found = parse_docker.parse_containers(text)
        if found is None:
            facts.problems.append(f"docker_containers: {path} is not what the Docker API gives for a container")
            continue
        for container in found:
            container.repo_digests = digests.get(container.image_id or "")
            container.device_allow = allowed.get(container.id)
        containers += found
    listing, _error = values.json_value(texts.get("docker/containers.json"))
    listed = {values.as_str(values.get(one, "Id")) for one in listing} if isinstance(listing, list) else set()
    missing = listed - {one.id for one in containers} - {None}
    if missing:
        facts.problems.append(
            f"docker_containers: {len(missing)} of {len(listed)} containers are listed but not described"
        )
    if containers or (listing == [] and not missing):
        facts.docker.containers = sorted(containers, key=lambda one: (one.name or "", one.id))


def _container_processes(raw: Raw, facts: HostFacts) -> None:
    texts = raw.texts("container_processes")
    for container in facts.docker.containers or []:
        limits = texts.get(f"containers/{container.id}/limits")
        if limits is not None:
            container.limits = parse_system.parse_process_limits(limits)
            container.limits.pid = container.pid
        status = parse_system.key_values(texts.get(f"containers/{container.id}/status", ""), ":")
        container.cpus_allowed, container.mems_allowed = (
            status.get("Cpus_allowed_list"),
            status.get("Mems_allowed_list"),
        )


def _cdi(raw: Raw, facts: HostFacts) -> None:
    if raw.complete("cdi_specs"):
        specs: list[CdiSpec] = [
            parse_docker.parse_cdi(origin(path), text) for path, text in sorted(raw.texts("cdi_specs").items())
        ]
        facts.cdi = specs


def _nginx(raw: Raw, facts: HostFacts) -> None:
    nginx = facts.nginx
    text = raw.text("nginx_version")
    if text is not None:
        nginx.version, nginx.modules = parse_nginx.parse_version(text)
    result = raw.result("nginx")
    texts = result.texts()
    dump = texts.get(command_path(["nginx", "-T"]))
    files = parse_nginx.split_dump(dump) if dump is not None else {origin(path): one for path, one in texts.items()}
    main = "/etc/nginx/nginx.conf" if dump is None and "/etc/nginx/nginx.conf" in files else None
    if files:
        try:
            nginx.config = parse_nginx.parse_config(files, main)
        except parse_nginx.BadConfig as error:
            nginx.config_error = str(error)[:300]
            facts.problems.append(f"nginx: {error}"[:300])
    elif result.state == ERROR and result.items:
        nginx.config_error = result.error[:300]
    loaded = [one.args[0] for one in find_directives(nginx.config or [], "load_module") if one.args]
    names = [re.sub(r"\A(?:ngx_)?|_module\Z", "", os.path.basename(path).partition(".")[0]) for path in loaded]
    nginx.modules = sorted({*nginx.modules, *names})
    if raw.complete("access_logs"):
        lines = [
            line for _path, text in sorted(raw.texts("access_logs").items()) for line in parse_nginx.failures(text, 500)
        ]
        nginx.access_log = lines[-500:]
    if raw.complete("error_logs"):
        lines = [line for _path, text in sorted(raw.texts("error_logs").items()) for line in text.splitlines()]
        nginx.error_log = lines[-200:]
    _certificates(raw, facts)


def _certificates(raw: Raw, facts: HostFacts) -> None:
    result = raw.result("certificates")
    if result.state == NOT_COLLECTED:
        return
    facts.certificates = []
    for item in result.items:
        path = re.sub(r"\Acertificates|\.txt\Z", "", item.path)
        if item.state == OK:
            facts.certificates.append(parse_services.certificate(path, item.text))
        elif path:
            facts.certificates.append(Certificate(path, error=(item.error or item.state)[:300]))


def _monitoring(raw: Raw, facts: HostFacts) -> None:
    monitoring = facts.monitoring
    texts = raw.texts("prometheus")
    if "prometheus/rules.json" in texts:
        monitoring.rules = parse_services.loaded_rules(texts["prometheus/rules.json"])
    if "prometheus/targets.json" in texts:
        monitoring.targets = parse_services.targets(texts["prometheus/targets.json"])
    build, _error = values.json_object(texts.get("prometheus/buildinfo.json"))
    monitoring.version = values.as_str(values.get(build, "data", "version"))
    monitoring.metric_names = parse_services.metric_names(
        texts.get("prometheus/names.json"), texts.get("prometheus/metadata.json")
    )
    if raw.complete("prometheus_files"):
        monitoring.rules_in_files = []
        for path, text in sorted(raw.texts("prometheus_files").items()):
            if not re.search(r"^groups:", text, re.MULTILINE):
                continue
            rules, error = parse_services.rules_in_file(origin(path), text)
            monitoring.rule_files.append(origin(path))
            monitoring.rules_in_files += rules
            if error is not None:
                facts.problems.append(f"{origin(path)}: {error}"[:300])
    for path, text in sorted(raw.texts("dashboards").items()):
        value, _error = values.json_value(text)
        monitoring.dashboards[origin(path)] = parse_services.expressions(value)
    for item in raw.result("scrapes").items:
        match = re.match(r"\Ascrapes/(.+)\.prom\Z", item.path)
        if match:
            scrape = Scrape(match.group(1), EXPORTERS.get(match.group(1)), item.state, item.error[:300])
            if item.state == OK:
                parse_services.read_scrape(scrape, item.text)
            monitoring.scrapes.append(scrape)


def _metalserve(raw: Raw, facts: HostFacts) -> None:
    if raw.complete("engines"):
        facts.metalserve.engines = _engines(raw)
        for scrape in facts.monitoring.scrapes:
            engine = next((one for one in facts.metalserve.engines if one.replica == scrape.name), None)
            scrape.port = engine.port if engine is not None else scrape.port
    if raw.complete("models"):
        facts.metalserve.models = _models(raw)
    text = raw.text("secrets")
    if text is not None:
        facts.metalserve.secrets = parse_services.file_modes(text)
    elif raw.state("secrets") == ABSENT:
        facts.metalserve.secrets = []


def _engines(raw: Raw) -> list[Engine]:
    engines: dict[str, Engine] = {}
    releases: dict[tuple[str, str], Release] = {}
    for path, text in raw.texts("engines").items():
        match = re.search(
            r"/engines/([^/]+)/(current|previous|rotation\.json|releases/([^/]+)/(.+))\Z",
            path,
        )
        if match is None:
            continue
        name, what, number, file = match.groups()
        engine = engines.setdefault(name, Engine(name))
        if what == "current":
            engine.current = text.strip()
        elif what == "previous":
            engine.previous = text.strip()
        elif what == "rotation.json":
            engine.rotation = values.json_object(text)[0]
        else:
            release = releases.setdefault((name, number), Release(number))
            if file == "release.json":
                document, release.error = values.json_object(text)
                release.release = mask_release(document)
                release.content_sha256 = _content_hash(document)
                continue
            release.file_sha256[file] = sha256_text(significant(text))
            if file == "config.yaml":
                release.config_text = mask_secrets(mask_assignments(text))
                config, _error = load(release.config_text)
                release.config = config if isinstance(config, dict) else None
    for (name, _number), release in sorted(releases.items()):
        engines[name].releases.append(release)
    health = {item.path: item.state for item in raw.result("engine_health").items}
    for name, engine in engines.items():
        current = next((one for one in engine.releases if one.hash == engine.current), None)
        engine.port = parse_services.release_port(current.release) if current is not None else None
        engine.health_status = health.get(f"health/{name}.txt")
        later = raw.texts("engine_progress").get(f"progress/{name}.prom")
        if later is not None and current is not None:
            names = parse_services.progress_names(current.release)
            engine.progress_interval_s = parse_services.interval(later)
            engine.samples_later = parse_services.selected_samples(later, names.values())
    return [engines[name] for name in sorted(engines)]


def _content_hash(document: Optional[dict[str, Any]]) -> Optional[str]:
    content = values.get(document, "content")
    if not isinstance(content, dict) or not isinstance(values.get(content, "image", "digest"), str):
        return None
    return release_hash(content)


def _models(raw: Raw) -> list[Model]:
    models: dict[tuple[str, str], Model] = {}
    for path, text in raw.texts("models").items():
        manifest = re.search(r"/models/([^/]+)/([^/]+)\.manifest\.json\Z", path)
        listing = re.match(r"\Astat/models/([^/]+)/([^/]+)\.txt\Z", path)
        index = re.search(r"/models/([^/]+)/([^/]+)/(?:.+/)?[^/]+\.index\.json\Z", path)
        match = manifest or listing or index
        if match is None:
            continue
        name, revision = match.groups()
        model = models.setdefault((name, revision), Model(name, revision))
        if manifest:
            model.manifest, model.manifest_error = values.json_object(text)
        elif listing:
            model.files = parse_services.model_files(text)
        else:
            model.index_files = parse_services.index_files(text)
    for path, text in raw.texts("model_hashes").items():
        match = re.match(r"\Ahashes/models/([^/]+)/([^/]+)\.txt\Z", path)
        if match and match.groups() in models:
            models[match.group(1), match.group(2)].file_sha256 = parse_services.file_hashes(text)
    return [models[key] for key in sorted(models)]


def _network_and_time(raw: Raw, facts: HostFacts) -> None:
    text = raw.text("sockets")
    if text is not None:
        facts.network.listeners = parse_services.sockets(text)
    elif raw.texts("proc_net_tcp"):
        found = [one for part in raw.texts("proc_net_tcp").values() for one in parse_system.parse_proc_net_tcp(part)]
        facts.network.listeners = found
    ports = facts.network.listeners or []
    facts.docker.tcp_listeners = [f"{one.address}:{one.port}" for one in ports if one.process == "dockerd"]
    text = raw.text("nft")
    if text is not None:
        facts.network.nft_ruleset = text
        facts.network.nft_tables = re.findall(r"^table (\w+ [\w.-]+)", text, re.MULTILINE)
    states = {name: unit.active_state for name, unit in facts.services.items()}
    facts.time = parse_services.time_sync(raw.text("clock"), raw.text("chrony"), states)


def _disks_and_security(raw: Raw, facts: HostFacts) -> None:
    result = raw.result("disks")
    if result.state != NOT_COLLECTED and result.items:
        facts.disks = []
        for item in result.items:
            path = re.sub(r"\Adisks|\.txt\Z", "", item.path)
            path = "/" if path == "/root" else path
            if item.state == OK:
                facts.disks.append(parse_services.disk(path, item.text))
            elif item.state != ABSENT:
                facts.disks.append(Disk(path, error=(item.error or item.state)[:300]))
    enforce = raw.line("selinux")
    if enforce is not None:
        facts.security.selinux = {"1": "enforcing", "0": "permissive"}.get(enforce)
    elif raw.state("selinux") == ABSENT:
        facts.security.selinux = "disabled"
    armor = raw.line("apparmor")
    facts.security.apparmor = {"Y": True, "N": False}.get(
        armor or "", False if raw.state("apparmor") == ABSENT else None
    )


BUILDERS: tuple[tuple[str, Callable[[Raw, HostFacts], None]], ...] = (
    ("host", _host),
    ("kernel", _kernel),
    ("cpu and memory", _cpu_and_memory),
    ("numa", _numa),
    ("cgroup", _cgroup),
    ("limits", _limits),
    ("driver", _driver),
    ("gpus", _gpus),
    ("pci", _pci),
    ("topology", _topology),
    ("packages", _packages),
    ("services", _services),
    ("kernel log", _kernel_log),
    ("docker", _docker),
    ("container processes", _container_processes),
    ("cdi", _cdi),
    ("nginx", _nginx),
    ("monitoring", _monitoring),
    ("metalserve", _metalserve),
    ("network and time", _network_and_time),
    ("disks and security", _disks_and_security),
)
