# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Docker and the engine containers: API, daemon.json, logs, CDI, device access, image pin, init, stop chain, policy."""

from __future__ import annotations

import json
import re

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.limits import engine_containers
from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import Policy, not_read, version
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    CheckFunction,
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Container, HostFacts
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT

ENGINE = ("engine",)
# Docker's own wait between the stop signal and the kill, where a container sets none.
DEFAULT_STOP_TIMEOUT_S = 10


def needs_engines(function: CheckFunction) -> CheckFunction:
    """Wrap a check of engine containers: not applicable where none runs, unknown where Docker was not read."""

    def checked(facts: HostFacts, policy: Policy) -> Finding:
        containers = engine_containers(facts)
        if containers is None:
            if facts.probe("docker_version").state == ABSENT:
                return not_applicable("no Docker on this host")
            return not_read(facts, "docker_containers")
        if not containers:
            return not_applicable("no engine container runs")
        return function(facts, policy)

    return checked


def running(facts: HostFacts) -> list[Container]:
    """Return the running engine containers; empty where Docker was not read."""
    return engine_containers(facts) or []


@check(
    "container.api_version",
    title="Docker speaks an API version that its clients use",
    severity="critical",
    applies_to=ENGINE,
    why="a client below the daemon's MinAPIVersion is refused: modules and stacks fail although Docker runs",
    remedy="unpin DOCKER_API_VERSION, or update the client; read MinAPIVersion instead of the release number",
    source="reports: Docker 29 raised the minimum to 1.44, later releases lowered it to 1.40",
)
def api_version(facts: HostFacts, policy: Policy) -> Finding:
    docker = facts.docker
    if docker.api_version is None:
        if facts.probe("docker_version").state == ABSENT:
            return not_applicable("no Docker on this host")
        return not_read(facts, "docker_version")
    if docker.min_api_version is None:
        return unknown("the daemon does not say its MinAPIVersion")
    client = docker.client_pinned_api_version or docker.client_api_version
    desired = f"{docker.min_api_version} to {docker.api_version}"
    if not client:
        return unknown("the client's API version is not known", desired)
    if version(client) < version(docker.min_api_version):
        return failed(f"client {client}, daemon takes {desired}", desired)
    return passed(f"client {client}, daemon takes {desired}", desired)


@check(
    "container.daemon_json",
    title="daemon.json is whole, and says what serving needs",
    severity="major",
    applies_to=ENGINE,
    tags=("runtime",),
    why="a malformed file keeps Docker from starting at the next boot; without log limits and live-restore a chatty container "
    "fills the disk and a daemon restart stops every engine",
    remedy="site.yml --tags runtime merges it; a restart of Docker on a serving node is done by maintain.yml",
    source="reports: installers replaced or deleted daemon.json",
)
def daemon_json(facts: HostFacts, policy: Policy) -> Finding:
    docker = facts.docker
    if docker.daemon_json_error:
        return failed(docker.daemon_json_error, "a JSON object")
    if docker.daemon_json is None:
        if facts.probe("docker_version").state == ABSENT:
            return not_applicable("no Docker on this host")
        return not_read(facts, "docker_daemon_json")
    wrong = []
    options = docker.daemon_json.get("log-opts")
    if docker.daemon_json.get("log-driver", "json-file") == "json-file" and not (
        isinstance(options, dict) and options.get("max-size")
    ):
        wrong.append("no log-opts max-size")
    if isinstance(options, dict) and any(not isinstance(value, str) for value in options.values()):
        wrong.append("a log option that is not a string: Docker refuses to start")
    if docker.daemon_json.get("live-restore") is not True:
        wrong.append("live-restore is not on")
    if docker.live_restore is False and docker.daemon_json.get("live-restore") is True:
        wrong.append("live-restore is written, but not in force: restart or reload pending")
    if wrong:
        return failed("; ".join(wrong), "log limits as strings, live-restore")
    return passed("log limits, live-restore", "log limits as strings, live-restore")


@check(
    "container.log_rotation",
    title="Engine containers' logs are bounded",
    severity="major",
    applies_to=ENGINE,
    tags=("engines",),
    why="json-file without max-size has filled disks with hundreds of GB in a week",
    remedy="redeploy with log options max-size and max-file",
    source="reports: 236 GB in a week",
)
@needs_engines
def log_rotation(facts: HostFacts, policy: Policy) -> Finding:
    wrong, dark = [], []
    for one in running(facts):
        if one.log_driver is None or (one.log_driver in ("json-file", "local") and one.log_options is None):
            dark.append(f"{one.name}: log options not known")
        elif one.log_driver == "json-file" and not (one.log_options or {}).get("max-size"):
            wrong.append(f"{one.name}: json-file without max-size")
    if wrong:
        return failed("; ".join(wrong), "max-size set")
    return unknown("; ".join(dark), "max-size set") if dark else passed("bounded", "max-size set")


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
        if facts.probe("cdi_specs").state == ABSENT:
            return not_applicable("no CDI specs on this host")
        return not_read(facts, "cdi_specs")
    specs = [spec for spec in facts.cdi if "nvidia" in (spec.kind or spec.path)]
    if not specs:
        return not_applicable("no CDI spec of NVIDIA devices")
    broken = [f"{spec.path}: {spec.error}" for spec in specs if spec.error]
    if broken:
        return failed("; ".join(broken), "readable specs")
    if not facts.driver.device_majors:
        return not_read(facts, "proc_devices")
    uvm = facts.driver.device_majors.get("nvidia-uvm")
    frontend = facts.driver.device_majors.get("nvidia-frontend", facts.driver.device_majors.get("nvidia", 195))
    wrong = []
    for spec in specs:
        for node in spec.device_nodes:
            wanted = (
                uvm
                if "nvidia-uvm" in node.path
                else frontend
                if re.search(r"/nvidia(\d+|ctl|-modeset)$", node.path)
                else None
            )
            if node.major is not None and wanted is not None and node.major != wanted:
                wrong.append(f"{spec.path}: {node.path} is {node.major}, the kernel has {wanted}")
    if wrong:
        return failed("; ".join(sorted(set(wrong))), "majors of /proc/devices")
    return passed(f"{len(specs)} specs", "majors of /proc/devices")


GPU_DEVICE = re.compile(r"/dev/char/195:(\d+|\*)|char-195|char-nvidia|/dev/nvidia")


@check(
    "container.device_access",
    title="GPU containers keep their devices over a daemon-reload",
    severity="critical",
    applies_to=ENGINE,
    tags=("engines",),
    why="after systemctl daemon-reload systemd re-applies the scope's device list: a list without the NVIDIA nodes takes the "
    "GPU away ('NVML: Unknown Error') until the container is recreated",
    remedy="recreate the container with CDI devices (redeploy.yml); make /dev/char links; avoid needless daemon-reload",
    source="reports: 50-DeviceAllow.conf without 195:* and the nvidia-uvm major",
)
def device_access(facts: HostFacts, policy: Policy) -> Finding:
    if facts.docker.containers is None:
        if facts.probe("docker_version").state == ABSENT:
            return not_applicable("no Docker on this host")
        return not_read(facts, "docker_containers")
    gpu_containers = [one for one in facts.docker.containers if one.state == "running" and one.wants_gpu]
    if not gpu_containers:
        return (
            not_applicable("no running container asks for a GPU")
            if not _cpu_only(facts)
            else passed("CPU containers alone", "device lists with the NVIDIA nodes for GPU containers")
        )
    uvm = facts.driver.device_majors.get("nvidia-uvm")
    lost, dark = [], []
    for one in gpu_containers:
        if one.privileged:
            continue
        if one.device_allow is None:
            if facts.docker.cgroup_driver == "cgroupfs":
                continue
            dark.append(one.name or one.id[:12])
            continue
        text = "\n".join(one.device_allow)
        if not GPU_DEVICE.search(text) or (uvm is not None and f"{uvm}:" not in text and "nvidia-uvm" not in text):
            lost.append(f"{one.name or one.id[:12]}: has lost, or will lose, the GPU; recreate it")
    if lost:
        return failed("; ".join(lost), "a device list with 195:* and the nvidia-uvm major")
    if dark:
        return unknown(f"no device list could be read for {', '.join(dark)}")
    return passed(f"{len(gpu_containers)} GPU containers", "a device list with 195:* and the nvidia-uvm major")


def _cpu_only(facts: HostFacts) -> bool:
    return any(one.state == "running" for one in facts.docker.containers or [])


@check(
    "container.image_pinned",
    title="Engine images are pinned by digest, and run is what was released",
    severity="critical",
    applies_to=ENGINE,
    tags=("engines",),
    why="a tag is pushed again under the same name: fresh nodes then run something else than the old ones",
    remedy="name the image by @sha256 digest in metalserve_pools and redeploy",
    source="reports: a version-looking tag was pushed again and broke fresh nodes",
)
@needs_engines
def image_pinned(facts: HostFacts, policy: Policy) -> Finding:
    wrong, loose, dark = [], [], []
    for one in running(facts):
        image = one.image or ""
        if not image or re.match(r"^(sha256:)?[0-9a-f]{12,64}$", image):
            released = _released_image(facts, one)
            if not (
                released and any(released.rsplit("@", maxsplit=1)[-1] in digest for digest in one.repo_digests or [])
            ):
                dark.append(f"{one.name}: started by image id, its digest is not known")
        elif "@sha256:" in image:
            released = _released_image(facts, one)
            if released and released.rsplit("@", maxsplit=1)[-1] != image.split("@")[-1]:
                wrong.append(
                    f"{one.name}: runs {image.split('@')[-1][:19]}, released {released.rsplit('@', maxsplit=1)[-1][:19]}"
                )
        elif image.endswith(":latest") or ":" not in image.rsplit("/", 1)[-1]:
            wrong.append(f"{one.name}: {image}")
        else:
            loose.append(f"{one.name}: {image}")
    desired = "image@sha256:<64 hex digits>"
    if wrong:
        return failed("; ".join(wrong), desired)
    if dark:
        return unknown("; ".join(dark), desired)
    return warned("; ".join(loose), desired) if loose else passed("by digest", desired)


def _released_image(facts: HostFacts, container: Container) -> str:
    """Return the image of the release that the container belongs to; empty where it is not ours."""
    for engine in facts.metalserve.engines or []:
        if (container.name or "").startswith(f"metalserve-{engine.replica}-"):
            for release in engine.releases:
                if release.hash == engine.current:
                    return str((release.release or {}).get("image") or "")
    return ""


@check(
    "container.init",
    title="An init process reaps the engine's children",
    severity="minor",
    applies_to=ENGINE,
    tags=("engines",),
    why="without it a killed worker stays a zombie under PID 1 and a restart can hang",
    remedy="init: true, redeploy",
    source="reports: zombie PID 1 after docker restart",
)
@needs_engines
def container_init(facts: HostFacts, policy: Policy) -> Finding:
    daemon_default = (facts.docker.daemon_json or {}).get("init") is True
    without = [
        one.name or one.id[:12] for one in running(facts) if not (one.init or (one.init is None and daemon_default))
    ]
    return warned(f"no init: {', '.join(without)}", "init: true") if without else passed("init", "init: true")


def shutdown_timeout(container: Container) -> float:
    """Return the engine's own shutdown bound in seconds, from its command line; 0 where it says none."""
    text = " ".join([*container.entrypoint, *container.command])
    match = re.search(r"--(?:shutdown-timeout|exit-timeout-secs)[ =](\d+(?:\.\d+)?)", text)
    return float(match.group(1)) if match else 0.0


@check(
    "container.stop_timeout",
    title="Docker waits longer than the engine needs to shut down",
    severity="critical",
    applies_to=ENGINE,
    tags=("engines",),
    why="Docker kills after 10 s unless told otherwise: running answers are cut, and the GPU can be left wedged",
    remedy="stop_timeout above the engine's shutdown timeout, as the plan's chain of times gives it; redeploy",
    source="reports: the default 10-s SIGKILL wedged the GPU",
)
@needs_engines
def stop_timeout(facts: HostFacts, policy: Policy) -> Finding:
    short = []
    for one in running(facts):
        wait = DEFAULT_STOP_TIMEOUT_S if one.stop_timeout_s is None else one.stop_timeout_s
        needs = max(shutdown_timeout(one), _configured_shutdown(facts, one))
        if wait <= needs or one.stop_timeout_s is None:
            said = "not set, Docker's 10 s hold" if one.stop_timeout_s is None else f"{wait} s"
            short.append(f"{one.name}: stop timeout {said}; engine shuts down within {needs:g} s")
    desired = "set, and above the engine's shutdown timeout"
    return failed("; ".join(short), desired) if short else passed("as the chain needs", desired)


def _configured_shutdown(facts: HostFacts, container: Container) -> float:
    for engine in facts.metalserve.engines or []:
        if (container.name or "").startswith(f"metalserve-{engine.replica}-"):
            for release in engine.releases:
                value = (release.config or {}).get("shutdown-timeout", (release.config or {}).get("shutdown_timeout"))
                if release.hash == engine.current and isinstance(value, (int, float)):
                    return float(value)
    return 0.0


@check(
    "container.restart_policy",
    title="systemd alone starts engines again",
    severity="major",
    applies_to=ENGINE,
    tags=("engines",),
    why="Docker's own restart policy brings stopped releases back by itself and starts containers before the GPU devices "
    "are there",
    remedy="restart policy 'no' and metalserve-engine@.service; redeploy",
    source="reports: restart: always left containers Exited(255) after a reboot",
)
@needs_engines
def restart_policy(facts: HostFacts, policy: Policy) -> Finding:
    wrong, dark = [], []
    for one in facts.docker.containers or []:
        if not (one.name or "").startswith("metalserve-"):
            continue
        if one.restart_policy is None:
            dark.append(one.name or one.id[:12])
        elif one.restart_policy not in ("no", ""):
            wrong.append(f"{one.name}: {one.restart_policy}")
    if wrong:
        return failed("; ".join(wrong), "no")
    return unknown(f"not known: {', '.join(dark)}", "no") if dark else passed("no", "no")


@check(
    "container.config_is_running",
    title="What runs is what was released",
    severity="major",
    applies_to=ENGINE,
    tags=("engines",),
    why="a release folder that was edited by hand, or a container that is not the current release's, is a surprise at the "
    "next restart",
    remedy="redeploy.yml brings node and release together",
    source="docs/engines.md",
)
def config_is_running(facts: HostFacts, policy: Policy) -> Finding:
    engines = facts.metalserve.engines
    if engines is None:
        return not_read(facts, "engines")
    if not engines:
        return not_applicable("no engine of this bundle on this host")
    if facts.docker.containers is None:
        return not_read(facts, "docker_containers")
    wrong, dark = [], []
    for engine in engines:
        if not engine.current:
            wrong.append(f"{engine.replica}: no current release")
            continue
        found = [
            one
            for one in facts.docker.containers
            if one.state == "running" and (one.name or "").startswith(f"metalserve-{engine.replica}-")
        ]
        if not found:
            wrong.append(f"{engine.replica}: no container runs")
        for one in found:
            if not (one.name or "").endswith(engine.current[:12]):
                wrong.append(f"{engine.replica}: {one.name} runs, current is {engine.current[:12]}")
        release = next((item for item in engine.releases if item.hash == engine.current), None)
        if release is None or release.release is None:
            dark.append(f"{engine.replica}: release.json {release.error if release else 'is missing'}")
    if wrong:
        return failed("; ".join(wrong), "the current release of each replica")
    if dark:
        return unknown("; ".join(dark), "the current release of each replica")
    return passed(
        json.dumps({engine.replica: (engine.current or "")[:12] for engine in engines}), "the current release"
    )
