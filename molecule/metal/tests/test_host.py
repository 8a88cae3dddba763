# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What the host part did to a real kernel. A command costs an emulated machine a second: few commands, many checks."""

from __future__ import annotations

import json
import shlex

import pytest
from testinfra.host import Host

NOFILE = 1048576
TINY = "metal-tiny:1"
UNIT = "metalserve-engine@metal-0.service"
ASK = """
import json, sys, time, urllib.request
body = json.dumps({"model": "standin", "prompt": "What is the capital of France?", "max_tokens": 16}).encode()
headers = {"Authorization": "Bearer metal-key-that-guards-a-stand-in-engine", "Content-Type": "application/json"}
for _ in range(90):
    try:
        answer = urllib.request.urlopen(urllib.request.Request("http://10.0.2.15:8100/v1/completions", body, headers), timeout=20)
        sys.exit(print(json.load(answer)["choices"][0]["text"]))
    except OSError:
        time.sleep(2)
sys.exit("nobody answers")
"""


def kernel(host: Host, *keys: str) -> list[str]:
    output: str = host.check_output("cat " + " ".join("/proc/sys/" + key.replace(".", "/") for key in keys))
    return [" ".join(line.split()) for line in output.splitlines()]


def test_kernel_settings_are_in_force(host: Host) -> None:
    names = ("kernel.numa_balancing", "net.core.somaxconn", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse")
    assert kernel(host, *names) == ["0", "65535", "10240 65535", "1"]
    assert int(kernel(host, "fs.file-max")[0]) >= 2097152


def test_a_new_login_has_the_limits(host: Host) -> None:
    # Through sshd's PAM, as root; and as somebody else through su's.
    script = "ulimit -n; ulimit -Hn; ulimit -l; su -s /bin/sh -c 'ulimit -n; ulimit -l' daemon"
    assert host.check_output(script).split() == [str(NOFILE), str(NOFILE), "unlimited", str(NOFILE), "unlimited"]


def test_a_new_service_has_the_limits(host: Host) -> None:
    output = host.check_output("systemd-run --quiet --wait --pipe /bin/sh -c 'ulimit -n; ulimit -Hn; ulimit -l'")
    assert output.split() == [str(NOFILE), str(NOFILE), "unlimited"]


@pytest.fixture(scope="module")
def tiny(host: Host) -> str:
    """Make an image of nothing but a shell, where there is none yet."""
    files = "/bin/dash /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2"
    host.check_output(
        f"docker image inspect {TINY} >/dev/null 2>&1 || tar -chP {files} --transform 's,^/,,' | docker import - {TINY}"
    )
    return TINY


def test_a_new_container_has_the_limits(host: Host, tiny: str) -> None:
    output = host.check_output(f"docker run --rm --network none {tiny} /bin/dash -c 'ulimit -n; ulimit -Hn; ulimit -l'")
    assert output.split() == [str(NOFILE), str(NOFILE), "unlimited"]


def test_docker_uses_its_configuration(host: Host) -> None:
    info = json.loads(host.check_output("docker info --format '{{json .}}'"))
    assert info["LiveRestoreEnabled"] is True
    assert info["LoggingDriver"] == "json-file"
    limits = host.check_output("cat /proc/$(cat /run/docker.pid)/limits")
    assert f"Max open files            {NOFILE}" in limits
    settings = host.check_output("systemctl show docker.service --property=TimeoutStopUSec,LimitNOFILE,UnitFileState")
    # Docker is given the time that the replica's longest stream may take, and some more.
    assert settings.splitlines() == ["TimeoutStopUSec=6min 45s", f"LimitNOFILE={NOFILE}", "UnitFileState=enabled"]


def test_the_packages_of_the_runtime_are_held(host: Host) -> None:
    assert host.check_output("apt-mark showhold").split() == ["containerd", "docker.io", "runc"]


def test_a_replica_serves(host: Host) -> None:
    # Runs before and after the reboot: what answers afterwards came back without a person.
    assert host.check_output(f"python3 -c {shlex.quote(ASK)}").strip() == "The capital of France is Paris."
    shown = host.check_output(f"systemctl show {UNIT} --property=ActiveState,UnitFileState")
    assert sorted(shown.splitlines()) == ["ActiveState=active", "UnitFileState=enabled"]


def test_the_replica_has_the_limits(host: Host) -> None:
    name = host.check_output("docker ps --filter name=metalserve --format '{{.Names}}'")
    limits = host.check_output(f"cat /proc/$(docker inspect --format '{{{{.State.Pid}}}}' {name})/limits")
    assert f"Max open files            {NOFILE}" in limits


def test_nothing_of_a_gpu_is_on_a_cpu_node(host: Host) -> None:
    absent = (
        "/etc/modprobe.d/metalserve-nouveau.conf",
        "/etc/apt/apt.conf.d/51-metalserve",
        "/etc/systemd/system/metalserve-cdi.service",
    )
    assert host.run("ls " + " ".join(absent)).stdout == ""


def test_the_machine_is_healthy(host: Host) -> None:
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
