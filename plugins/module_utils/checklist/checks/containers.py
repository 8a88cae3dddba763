# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Docker and the engine containers: API, daemon.json, logs, GPUs, memory, image pin, init, stop chain, what is released."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.limits import (
    judge_nofile,
    least_memlock,
    uses_rdma,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    broke,
    by_one,
    content_of,
    current_release,
    desired_out,
    engine_containers,
    engine_of,
    needs_engines,
    needs_replicas,
    no_gpus,
    not_read,
    part,
    replica_of,
    tensor_parallel,
    version,
    worst,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    CheckFunction,
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
)
from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, format_size, parse_size
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import UNLIMITED, Container, Engine, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, OK

ENGINE = ("engine",)
REDEPLOY = "redeploy it (playbooks/redeploy.yml)"
# Docker's own wait between the stop signal and the kill, where a container sets none.
DEFAULT_STOP_TIMEOUT_S = 10
Said = Optional[tuple[str, str]]


def needs_docker(probe: str) -> Callable[[CheckFunction], CheckFunction]:
    """Return a wrapper for checks of Docker: not applicable where there is none, by ``docker_version`` and ``probe``."""

    def wrap(function: CheckFunction) -> CheckFunction:
        def checked(facts: HostFacts, policy: Policy) -> Finding:
            if facts.probe("docker_version").state == ABSENT and facts.probe(probe).state == ABSENT:
                return not_applicable("no Docker on this host")
            return function(facts, policy)

        return checked

    return wrap


def running(facts: HostFacts) -> list[Container]:
    """Return the engine containers; empty where Docker was not read."""
    return engine_containers(facts) or []


def called(container: Container) -> str:
    """Return a container's name, or the beginning of its id."""
    return container.name or container.id[:12]


@check(
    "container.api_version",
    title="Docker speaks an API version that its clients use",
    severity="critical",
    applies_to=ENGINE,
    why="a client below the daemon's MinAPIVersion is refused: modules and stacks fail although Docker runs",
    remedy="unpin DOCKER_API_VERSION, or update the client; read MinAPIVersion instead of the release number",
    source="reports: Docker 29 raised the minimum to 1.44, later releases lowered it to 1.40",
)
@needs_docker("docker_client")
def api_version(facts: HostFacts, policy: Policy) -> Finding:
    docker = facts.docker
    if docker.api_version is None and docker.min_api_version is None:
        return not_read(facts, "docker_version")
    if docker.min_api_version is None:
        return unknown("the daemon does not say its MinAPIVersion")
    desired = (
        f"{docker.min_api_version} to {docker.api_version}" if docker.api_version else f">= {docker.min_api_version}"
    )
    # A pin that nobody may read could be too old; the command's own version was then not asked with it.
    client = docker.client_pinned_api_version or docker.client_api_version
    if not client or (not docker.client_pinned_api_version and broke(facts, "docker_client_environment")):
        return not_read(facts, "docker_client", "docker_client_environment")
    if not version(client) or not version(docker.min_api_version):
        return unknown(f"client {client!r}, daemon {docker.min_api_version!r}: not a version", desired)
    pinned = " (pinned by DOCKER_API_VERSION)" if docker.client_pinned_api_version else ""
    # Without a pin a client that is newer steps down to what the daemon speaks.
    newest = version(docker.api_version or "")
    too_new = bool(docker.client_pinned_api_version and newest) and version(client) > newest
    said = f"client {client}{pinned}, daemon takes {desired}"
    if version(client) < version(docker.min_api_version) or too_new:
        return failed(said, desired)
    return passed(said, desired) if newest else not_read(facts, "docker_version")


def bounds_logs(options: Mapping[str, Any]) -> bool:
    """Tell whether log options bound a json-file: a size above 0 (-1 is Docker's word for no bound)."""
    return bool(re.match(r"\s*0*[1-9]", str(options.get("max-size") or "")))


@check(
    "container.daemon_json",
    title="daemon.json is whole, in force, and says what serving needs",
    severity="major",
    applies_to=ENGINE,
    tags=("runtime",),
    why="a malformed file keeps Docker from starting at the next boot; without log limits and live-restore a chatty container "
    "fills the disk and a daemon restart stops every engine",
    remedy="merge it (never replace it); a restart of Docker on a serving node is done by maintain.yml, drained",
    source="reports: installers replaced or deleted daemon.json",
)
@needs_docker("docker_daemon_json")
def daemon_json(facts: HostFacts, policy: Policy) -> Finding:
    docker, desired = facts.docker, "log limits as strings, live-restore"
    if docker.daemon_json_error:
        return failed(docker.daemon_json_error, "a JSON object")
    if docker.daemon_json is None:
        return not_read(facts, "docker_daemon_json")
    wrong = []
    options = docker.daemon_json.get("log-opts", {})
    if not isinstance(options, dict):
        return failed(f"log-opts is {options!r}", "a mapping of strings")
    if docker.daemon_json.get("log-driver", "json-file") == "json-file" and not bounds_logs(options):
        wrong.append("no log-opts max-size")
    numbers = [f"{key}: {value!r}" for key, value in options.items() if not isinstance(value, str)]
    if numbers:
        wrong.append(f"log option {', '.join(numbers)} is not a string: Docker refuses to start")
    if docker.daemon_json.get("live-restore") is not True:
        wrong.append("live-restore is not on")
    elif docker.live_restore is False:
        wrong.append("live-restore is written, but not in force: restart or reload pending")
    if not wrong and docker.live_restore is None and broke(facts, "docker_info"):
        return not_read(facts, "docker_info")
    return failed("; ".join(wrong), desired) if wrong else passed("log limits, live-restore", desired)


@check(
    "container.gpu_runtime",
    title="Docker can hand GPUs to containers in the way its version takes",
    severity="critical",
    applies_to=ENGINE,
    tags=("runtime",),
    why="Docker below 25 needs the nvidia runtime, 25 to 28.1 the feature cdi, 28.2 and later find CDI specs by themselves: "
    "the wrong way gives containers without GPUs after an upgrade",
    remedy="install the container toolkit and merge what this version needs into daemon.json",
    source="docs/hosts.md: CDI by Docker version",
)
@needs_docker("docker_info")
def gpu_runtime(facts: HostFacts, policy: Policy) -> Finding:
    absence = no_gpus(facts, policy)
    if absence is not None:
        return absence
    docker = facts.docker
    number = version(docker.version or "")[:2]
    if len(number) < 2 or docker.daemon_json is None or facts.probe("docker_info").state != OK:
        return not_read(facts, "docker_version", "docker_info", "docker_daemon_json")
    runtimes = docker.daemon_json.get("runtimes")
    has_runtime = "nvidia" in docker.runtimes or (isinstance(runtimes, dict) and "nvidia" in runtimes)
    features = docker.daemon_json.get("features")
    has_feature = isinstance(features, dict) and features.get("cdi") is True
    if number < (25, 0):
        desired, fine = "runtime nvidia", has_runtime
    elif number < (28, 2):
        desired, fine = "features.cdi, or runtime nvidia", has_feature or has_runtime
    else:
        desired, fine = "CDI folders known to Docker, or runtime nvidia", bool(docker.cdi_spec_dirs) or has_runtime
    shown = f"Docker {docker.version}, runtimes {', '.join(docker.runtimes)}"
    if fine and not has_runtime:
        # CDI is a way to hand out what a spec describes; without a spec it hands out nothing.
        if facts.cdi is None and broke(facts, "cdi_specs"):
            return not_read(facts, "cdi_specs")
        if facts.cdi is not None and not any("nvidia" in (spec.kind or spec.path) for spec in facts.cdi):
            return failed(f"{shown}, no CDI spec of NVIDIA devices", desired)
    return (passed if fine else failed)(shown, desired)


@check(
    "container.log_rotation",
    title="Engine containers' logs are bounded",
    severity="major",
    applies_to=ENGINE,
    why="json-file without max-size has filled disks with hundreds of GB in a week",
    remedy=f"log options max-size and max-file: {REDEPLOY}",
    source="reports: 236 GB in a week",
)
@needs_engines
def log_rotation(facts: HostFacts, policy: Policy) -> Finding:
    def one(container: Container) -> Said:
        driver = container.log_driver or (None if container.log_options is None else "json-file")
        if driver is None or (driver == "json-file" and container.log_options is None):
            return "unknown", f"{called(container)}: log options not known"
        if driver == "json-file" and not bounds_logs(container.log_options or {}):
            return "fail", f"{called(container)}: json-file without max-size"
        return None

    return worst(by_one(running(facts), one), "max-size set", "bounded")


@check(
    "container.memory",
    title="Engine containers have the planned memory and swap limits",
    severity="major",
    applies_to=ENGINE,
    why="an engine without a limit can push the node out of memory; a swap limit that the kernel cannot hold is dropped "
    "silently and looks like a difference for ever",
    remedy=f"the plan's limits (container.memory, container.memory_swap of the pool): {REDEPLOY}",
    source="deployment checklist: --memory=88G --memory-swap=90G",
)
@needs_engines
def container_memory(facts: HostFacts, policy: Policy) -> Finding:
    desired: set[str] = set()

    def one(container: Container) -> Said:
        planned = part(content_of(engine_of(facts, container)), "container")
        memory = _number(planned.get("memory")) or _size(policy["container_memory"])
        swap = _number(planned.get("memory_swap")) or _size(policy["container_memory_swap"])
        desired.add((format_size(memory) if memory else "a limit") + (f" / {format_size(swap)}" if swap else ""))
        limit, both = container.memory_bytes, container.memory_swap_bytes
        if limit is None:
            return "unknown", f"{called(container)}: memory limit not known"
        if limit == 0 or (memory and limit != memory):
            return "fail", f"{called(container)}: memory {format_size(limit) if limit else 'unlimited'}"
        if not swap or facts.cgroup.swap_limit is False or facts.docker.swap_limit is False:
            return ("warn", f"{called(container)}: this kernel cannot limit swap") if swap else None
        if both is None:
            return "unknown", f"{called(container)}: swap limit not known"
        if both != swap:
            return "fail", f"{called(container)}: memory and swap {'unlimited' if both < 0 else format_size(both)}"
        return None

    found = by_one(running(facts), one)
    return worst(found, ", ".join(sorted(desired)), "as planned")


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, str)) and str(value).isdigit() else 0


def _size(text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError:
        return 0


@check(
    "container.shm",
    title="Shared memory is large enough, or the host's, where GPUs work together",
    severity="critical",
    applies_to=ENGINE,
    why="NCCL and the workers' message queue need shared memory: Docker's 64 MiB end in 'ncclShmOpen' errors or hangs",
    remedy=f"ipc: host, or shm_size of at least 1 GiB: {REDEPLOY}",
    source="reports: /dev/shm of 64 MiB with tensor parallelism",
)
@needs_engines
def container_shm(facts: HostFacts, policy: Policy) -> Finding:
    together = [one for one in running(facts) if (tensor_parallel(facts, one, policy) or 2) > 1]
    if not together:
        return not_applicable("no running engine uses more than one GPU")

    def one(container: Container) -> Said:
        if container.ipc_mode == "host":
            return None
        if container.shm_bytes is None or container.ipc_mode is None:
            return "unknown", f"{called(container)}: shared memory not known"
        if container.shm_bytes >= GIB:
            return None
        split = tensor_parallel(facts, container, policy)
        size = format_size(container.shm_bytes)
        if split is None:
            return "unknown", f"{called(container)}: {size}; over how many GPUs it is split is not known"
        return "fail", f"{called(container)}: {size}, ipc {container.ipc_mode}, tensor parallel {split}"

    return worst(by_one(together, one), "ipc host, or >= 1 GiB", f"{len(together)} containers")


@check(
    "container.ulimits",
    title="Limits in force inside engine containers suit serving",
    severity="major",
    applies_to=ENGINE,
    why="what counts is what the engine's first process got: too few open files refuse connections, too many make its tools "
    "slow, and 8 MiB of locked memory turn RDMA into TCP",
    remedy=f"ulimits nofile and memlock of the plan: {REDEPLOY}",
    source="deployment checklist: ulimit -n >= 100000; reports: ibv_reg_mr ENOMEM",
)
@needs_engines
def container_ulimits(facts: HostFacts, policy: Policy) -> Finding:
    rdma = uses_rdma(facts, policy)

    def one(container: Container) -> Said:
        if container.limits is None or container.limits.nofile_soft is None:
            return "unknown", f"{called(container)}: limits in force not read"
        found = judge_nofile(container.limits.nofile_soft, policy, called(container))
        if found.verdict != "pass":
            return found.verdict, str(found.current)
        memlock = least_memlock(container.limits)
        if rdma and container.wants_gpu and memlock is None:
            return "unknown", f"{called(container)}: locked memory not known"
        if rdma and container.wants_gpu and memlock != UNLIMITED:
            return "fail", f"{called(container)}: locked memory {memlock} bytes with RDMA"
        return None

    return worst(by_one(running(facts), one), f"{policy['nofile_minimum']} to {policy['nofile_maximum']}", "as needed")


@check(
    "container.cdi_majors",
    title="CDI specs name the device numbers that the kernel has",
    severity="critical",
    applies_to=ENGINE,
    tags=("runtime",),
    why="a spec with an old major of nvidia-uvm gives containers a device that leads nowhere: cuInit fails with 999",
    remedy="regenerate the spec (nvidia-ctk cdi generate); the refresh unit does it at boot",
    source="reports: spec says 510, the kernel assigned 509",
)
def cdi_majors(facts: HostFacts, policy: Policy) -> Finding:
    if facts.cdi is None:
        return not_read(facts, "cdi_specs")
    specs = [spec for spec in facts.cdi if "nvidia" in (spec.kind or spec.path)]
    if not specs:
        return not_applicable("no CDI spec of NVIDIA devices")
    broken = [f"{spec.path}: {spec.error}" for spec in specs if spec.error]
    if broken:
        return failed("; ".join(broken), "readable specs")
    majors = facts.driver.device_majors
    named = [(spec, node) for spec in specs for node in spec.device_nodes if node.major is not None]
    if named and not majors:
        return not_read(facts, "proc_devices")
    wrong = sorted(
        f"{spec.path}: {node.path} is {node.major}, the kernel has {_kernel_major(node.path, majors)}"
        for spec, node in named
        if _kernel_major(node.path, majors) not in (node.major, None)
    )
    if wrong:
        return failed("; ".join(wrong), "majors of /proc/devices", *wrong)
    blind = sorted({node.path for _spec, node in named if _kernel_major(node.path, majors) is None})
    if blind:
        return unknown(f"the kernel's major of {', '.join(blind)} is not known", "majors of /proc/devices")
    return passed(f"{len(specs)} specs, {len(named)} device numbers", "majors of /proc/devices")


def _kernel_major(path: str, majors: Mapping[str, int]) -> Optional[int]:
    """Return the major that the kernel gave to the driver of a device node; None where it lists none for it."""
    for pattern, names in (
        (r"/nvidia-uvm(-tools)?\Z", ("nvidia-uvm",)),
        (r"/nvidia(\d+|ctl)\Z", ("nvidia-frontend", "nvidia")),
        (r"/nvidia-modeset\Z", ("nvidia-modeset", "nvidia-frontend", "nvidia")),
        (r"/nvidia-nvswitch", ("nvidia-nvswitch",)),
        (r"/nvidia-caps-imex-channels/", ("nvidia-caps-imex-channels",)),
        (r"/nvidia-caps/", ("nvidia-caps",)),
    ):
        if re.search(pattern, path):
            return next((majors[name] for name in names if name in majors), None)
    return None


# A GPU itself, not only the control (255) and mode setting (254) nodes beside it.
GPU_NODE = re.compile(r"/dev/char/195:(?!25[45]\b)(\d+|\*)|\bchar-195\b|\bchar-nvidia(-frontend)?\b|/dev/nvidia\d+\b")
CONTROL_NODE = re.compile(r"/dev/char/195:(255\b|\*)|\bchar-195\b|\bchar-nvidia(-frontend)?\b|/dev/nvidiactl\b")
# The kernel hands out the major of nvidia-uvm; these are the ranges that it takes it from.
DYNAMIC = re.compile(r"(?:/dev/char/|\bchar-)(23[4-9]|24\d|25[0-4]|38[4-9]|39\d|4\d\d|50\d|51[01])\b")


@check(
    "container.device_access",
    title="GPU containers keep their devices over a daemon-reload",
    severity="critical",
    applies_to=ENGINE,
    why="after systemctl daemon-reload systemd re-applies the scope's device list: a list without the NVIDIA nodes takes the "
    "GPU away ('NVML: Unknown Error') until the container is recreated",
    remedy=f"recreate the container with CDI devices: {REDEPLOY}; make /dev/char links; avoid needless daemon-reload",
    source="reports: 50-DeviceAllow.conf without 195:* and the nvidia-uvm major",
)
@needs_docker("docker_containers")
def device_access(facts: HostFacts, policy: Policy) -> Finding:
    desired = "a device list with 195:* and the nvidia-uvm major"
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    alive = [one for one in facts.docker.containers if one.state in ("running", None)]
    mine = [one for one in alive if one.wants_gpu and not one.privileged]
    others = [f"{called(one)}: {_other_gpus(facts, one)}" for one in alive if _other_gpus(facts, one)]
    if others:
        return failed("; ".join(others), "the GPUs of its release")
    if not mine:
        if any(one.wants_gpu for one in alive):
            return not_applicable("privileged containers alone: they have every device")
        return passed("CPU containers alone", desired) if alive else not_applicable("no container runs")
    uvm = facts.driver.device_majors.get("nvidia-uvm")

    def one(container: Container) -> Said:
        if container.device_allow is None:
            if facts.docker.cgroup_driver == "cgroupfs":
                return None
            return "unknown", f"{called(container)}: its device list could not be read"
        # What may not be read and written is as good as not there.
        allowed = [line for line in container.device_allow if {"r", "w"} <= set(line.split()[-1]) or " " not in line]
        text = "\n".join(allowed)
        has_uvm = "nvidia-uvm" in text or (uvm is not None and re.search(rf"\b(?:char/|char-){uvm}\b", text))
        if not GPU_NODE.search(text) or not CONTROL_NODE.search(text) or (uvm is not None and not has_uvm):
            return "fail", f"{called(container)} has lost, or will lose, the GPU; recreate it"
        if not has_uvm and not any(DYNAMIC.search(line.split()[0]) for line in allowed):
            return "fail", f"{called(container)} has lost, or will lose, nvidia-uvm; recreate it"
        return None

    return worst(by_one(mine, one), desired, f"{len(mine)} GPU containers")


def _other_gpus(facts: HostFacts, container: Container) -> str:
    """Return in what the GPUs of a container differ from those of its release; empty where nothing does."""
    planned = content_of(engine_of(facts, container)).get("gpus")
    if not isinstance(planned, list) or not planned or not container.name or not replica_of(container):
        return ""
    if not container.wants_gpu:
        return f"was given no GPU, its release has {len(planned)}"
    given = " ".join([*container.device_ids, container.environment.get("NVIDIA_VISIBLE_DEVICES", "")])
    missing = [str(one) for one in planned if "GPU-" in given and str(one) not in given]
    return f"was not given {', '.join(missing)}" if missing else ""


@check(
    "container.image_pinned",
    title="Engine images are pinned by digest, and run is what was released",
    severity="critical",
    applies_to=ENGINE,
    why="a tag is pushed again under the same name: fresh nodes then run something else than the old ones",
    remedy=f"name the image by @sha256 digest in metalserve_pools: {REDEPLOY}",
    source="reports: a version-looking tag was pushed again and broke fresh nodes",
)
@needs_engines
def image_pinned(facts: HostFacts, policy: Policy) -> Finding:
    def one(container: Container) -> Said:
        image, name = container.image or "", called(container)
        released = str(part(content_of(engine_of(facts, container)), "image").get("digest") or "")
        pinned = re.search(r"@sha256:([0-9a-f]{64})\Z", image)
        by_id = re.match(r"\A(sha256:)?[0-9a-f]{12,64}\Z", image)
        if pinned:
            if released and pinned.group(1) != released:
                return "fail", f"{name}: runs {pinned.group(1)[:12]}, released {released[:12]}"
            planned = str(part(policy["expected"]["releases"], replica_of(container)).get("image") or "")
            other = "@sha256:" in planned and not planned.endswith(pinned.group(1))
            return ("warn", f"{name}: redeploy needed, the inventory plans {planned[-64:][:12]}") if other else None
        if not image or by_id:
            known = [digest for digest in container.repo_digests or [] if released and released in digest]
            return None if known else ("unknown", f"{name}: started by image id, its digest is not known")
        if image.endswith(":latest") or ":" not in image.rsplit("/", 1)[-1]:
            return "fail", f"{name}: {image}"
        return ("fail" if released else "warn"), f"{name}: {image}"

    return worst(by_one(running(facts), one), "image@sha256:<64 hex digits>", "by digest")


@check(
    "container.init",
    title="An init process reaps the engine's children",
    severity="minor",
    applies_to=ENGINE,
    why="without it a killed worker stays a zombie under PID 1 and a restart can hang",
    remedy=f"init: true: {REDEPLOY}",
    source="reports: zombie PID 1 after docker restart",
)
@needs_engines
def container_init(facts: HostFacts, policy: Policy) -> Finding:
    default = (facts.docker.daemon_json or {}).get("init") is True

    def one(container: Container) -> Said:
        if container.init or (container.init is None and default):
            return None
        if container.init is None and facts.docker.daemon_json is None:
            return "unknown", f"{called(container)}: no init of its own, and daemon.json was not read"
        return "warn", f"{called(container)}: no init"

    return worst(by_one(running(facts), one), "init: true", "init")


def shutdown_bound(facts: HostFacts, container: Container) -> float:
    """Return the engine's own shutdown bound in seconds, from its command line or its release; 0 where it says none."""
    words = " ".join([*container.entrypoint, *container.command])
    match = re.search(r"--(?:shutdown-timeout|exit-timeout-secs)[ =](\d+(?:\.\d+)?)", words)
    engine = engine_of(facts, container)
    release = current_release(engine) if engine is not None else None
    settings = {**part(content_of(engine), "settings"), **((release.config or {}) if release is not None else {})}
    said = [settings.get(name) for name in ("shutdown-timeout", "shutdown_timeout")]
    numbers = [float(one) for one in said if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return max([float(match.group(1)) if match else 0.0, *numbers])


@check(
    "container.stop_timeout",
    title="Docker waits longer than the engine needs to shut down",
    severity="critical",
    applies_to=ENGINE,
    why="Docker kills after 10 s unless told otherwise: running answers are cut, and the GPU can be left wedged",
    remedy=f"stop_timeout above the engine's shutdown timeout, as the plan's chain of times gives it: {REDEPLOY}",
    source="reports: the default 10-s SIGKILL wedged the GPU",
)
@needs_engines
def stop_timeout(facts: HostFacts, policy: Policy) -> Finding:
    def one(container: Container) -> Said:
        needs, wait = shutdown_bound(facts, container), container.stop_timeout_s
        if wait is None:
            held = f"Docker's {DEFAULT_STOP_TIMEOUT_S} s hold"
            return "fail", f"{called(container)}: stop timeout not set, {held}; engine shuts down within {needs:g} s"
        planned = part(content_of(engine_of(facts, container)), "container").get("stop_timeout")
        if wait <= needs or (isinstance(planned, int) and wait != planned):
            wanted = f"released {planned} s" if isinstance(planned, int) else f"engine shuts down within {needs:g} s"
            return "fail", f"{called(container)}: stop timeout {wait} s; {wanted}"
        unit = facts.services.get(f"metalserve-engine@{replica_of(container)}.service")
        if unit is not None and unit.timeout_stop_s is not None and unit.timeout_stop_s <= wait:
            return (
                "fail",
                f"{called(container)}: {unit.name} stops after {unit.timeout_stop_s:g} s, Docker after {wait} s",
            )
        return None

    return worst(by_one(running(facts), one), "engine shutdown < container stop < unit stop", "as the chain needs")


@check(
    "container.restart_policy",
    title="systemd alone starts engines again",
    severity="major",
    applies_to=ENGINE,
    tags=("engines",),
    why="Docker's own restart policy brings stopped releases back by itself and starts containers before the GPU devices "
    "are there",
    remedy="restart policy 'no' and metalserve-engine@.service; site.yml and redeploy.yml set it without touching what runs",
    source="reports: restart: always left containers Exited(255) after a reboot",
)
@needs_docker("docker_containers")
def restart_policy(facts: HostFacts, policy: Policy) -> Finding:
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    # Stopped ones too: it is those that would come back.
    mine = [one for one in facts.docker.containers if replica_of(one)]
    if not mine:
        return not_applicable("no container of this bundle on this host")

    def one(container: Container) -> Said:
        if container.restart_policy is None:
            return "unknown", f"{called(container)}: restart policy not known"
        return (
            None
            if container.restart_policy in ("no", "")
            else ("fail", f"{called(container)}: {container.restart_policy}")
        )

    return worst(by_one(mine, one), "no", f"{len(mine)} containers")


@check(
    "container.config_is_running",
    title="What runs is what was released, to the last byte of its configuration",
    severity="major",
    applies_to=ENGINE,
    why="a release folder that was edited by hand, or a container that is not the current release's, is a surprise at the "
    "next restart",
    remedy=f"put the release back, or {REDEPLOY}",
    source="docs/engines.md",
)
@needs_replicas
def config_is_running(facts: HostFacts, policy: Policy) -> Finding:
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    engines = facts.metalserve.engines or []
    alive = [one for one in facts.docker.containers if one.state in ("running", "restarting", "paused")]
    by_replica = {engine.replica: [one for one in alive if replica_of(one) == engine.replica] for engine in engines}
    served = [engine for engine in engines if by_replica[engine.replica] or not desired_out(engine)]

    def one(engine: Engine) -> Said:
        wrong, dark = differences(facts, engine, by_replica[engine.replica])
        if wrong:
            return "fail", f"{engine.replica}: {'; '.join(wrong)}"
        return ("unknown", f"{engine.replica}: {'; '.join(dark)}") if dark else None

    shown = json.dumps({engine.replica: (engine.current or "")[:12] for engine in served})
    return worst(by_one(served, one), "the current release of each replica", shown)


def differences(facts: HostFacts, engine: Engine, containers: list[Container]) -> tuple[list[str], list[str]]:
    """Return in what a replica's containers and files differ from its current release, and what could not be compared.

    Hashes prove sameness only: where names and addresses are stand-ins, other hashes say nothing.
    """
    release, content = current_release(engine), content_of(engine)
    if release is None and engine.current and facts.probe("engines").state == OK:
        return [f"the current release {engine.current[:12]} is not there"], []
    if release is None or release.release is None or not content:
        return [], [f"release {(engine.current or 'current')[:12]} could not be read{_because(release)}"]
    wrong = [
        f"{called(one)} runs, current is {release.hash[:12]}" for one in containers if not _runs(one, release.hash)
    ]
    if len(containers) > 1:
        wrong.append(f"{len(containers)} containers run at once")
    command = [str(word) for word in content.get("command") or []]
    for container in containers:
        words = [*container.entrypoint, *container.command]
        if command and _runs(container, release.hash) and not _same(words, command):
            wrong.append(f"{called(container)} was started with {' '.join(words)[:120]}")
    off = [
        f"{name} was edited"
        for name, digest in part(content, "files").items()
        if release.file_sha256.get(name) not in (digest, None)
    ]
    if release.content_sha256 not in (release.hash, None):
        off.append("release.json was edited")
    unread = [f"{name} was not read" for name in part(content, "files") if name not in release.file_sha256]
    if release.content_sha256 is None:
        unread.append("release.json has no content to hash")
    if off and facts.masked is not False:
        return wrong, ["its hashes cannot be compared: this is a masked snapshot", *unread]
    return wrong + off, unread


def _because(release: Any) -> str:
    return f": {release.error}" if release is not None and release.error else ""


def _runs(container: Container, release: str) -> bool:
    return container.labels.get("metalserve.release", release) == release and (container.name or "").endswith(
        release[:12]
    )


def _same(left: list[str], right: list[str]) -> bool:
    """Tell whether two command lines are the same as far as they are shown: a hidden word is like any other."""
    return len(left) == len(right) and all(a == b or "***" in a or "***" in b for a, b in zip(left, right))
