# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Docker's answers, CDI specs and device drop-ins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware import parse_docker
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import Container, Docker

ID = "ab" * 32


def inspect(**changes: Any) -> str:
    """Return an inspect answer; Config and HostConfig are merged."""
    answer: dict[str, Any] = {
        "Id": ID,
        "Name": "/metalserve-short-0-0123456789ab",
        "Image": "sha256:" + "cd" * 32,
        "State": {"Status": "running", "Pid": 4242, "ExitCode": 0, "OOMKilled": False},
        "Config": {"Image": "registry:5000/vllm@sha256:" + "ef" * 32, "Cmd": [], "Env": [], "StopTimeout": None},
        "HostConfig": {
            "ShmSize": 67108864,
            "IpcMode": "private",
            "Init": False,
            "LogConfig": {"Type": "json-file", "Config": {}},
            "Memory": 94489280512,
            "MemorySwap": 96636764160,
            "Ulimits": [{"Name": "nofile", "Soft": 1048576, "Hard": 1048576}],
            "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
            "Runtime": "runc",
        },
    }
    for key, value in changes.items():
        if isinstance(answer.get(key), dict):
            answer[key].update(value)
        else:
            answer[key] = value
    return json.dumps(answer)


def container(**changes: Any) -> Container:
    """Return the container of such an answer."""
    found = parse_docker.parse_containers(inspect(**changes))
    assert found is not None
    return found[0]


def test_container() -> None:
    found = container(Config={"Cmd": ["--tensor-parallel-size", "2"]})
    assert (found.name, found.state, found.pid) == ("metalserve-short-0-0123456789ab", "running", 4242)
    assert (found.shm_bytes, found.ipc_mode, found.command) == (67108864, "private", ["--tensor-parallel-size", "2"])
    assert (found.stop_timeout_s, found.init, found.log_options) == (None, False, {})
    assert (found.memory_bytes, found.memory_swap_bytes) == (94489280512, 96636764160)
    assert found.ulimits == {"nofile": [1048576, 1048576]}
    assert found.restart_policy == "no"
    assert found.wants_gpu is False


def test_what_docker_inspect_prints_is_taken_too() -> None:
    found = parse_docker.parse_containers(f"[{inspect()}, {inspect(Name='/other')}]") or []
    assert [one.name for one in found] == ["metalserve-short-0-0123456789ab", "other"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Id": 3}', "[{}, {}]", "null", "x"])
def test_no_container(text: str) -> None:
    assert parse_docker.parse_containers(text) is None


@pytest.mark.parametrize(
    "host",
    [
        {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-1"]}]},
        {"DeviceRequests": [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]]}]},
        {"Devices": [{"PathOnHost": "/dev/nvidia0"}]},
    ],
)
def test_containers_with_a_gpu(host: dict[str, Any]) -> None:
    assert container(HostConfig=host).wants_gpu is True


def test_runtime_nvidia_needs_visible_devices() -> None:
    visible = {"Env": ["NVIDIA_VISIBLE_DEVICES=GPU-1"]}
    assert container(HostConfig={"Runtime": "nvidia"}, Config=visible).wants_gpu is True
    assert (
        container(HostConfig={"Runtime": "nvidia"}, Config={"Env": ["NVIDIA_VISIBLE_DEVICES=void"]}).wants_gpu is False
    )
    assert container(Config=visible).wants_gpu is False


SECRET = "b7f1c9d2e5"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["--api-key", SECRET], ["--api-key"]),
        (["--api-key", SECRET, SECRET + "2", "--port", "8100"], ["--api-key"]),
        ([f"--api-key={SECRET}"], ["--api-key"]),
        (["--header", f"Authorization: Bearer {SECRET}"], ["(argument)"]),
        (["--url", f"https://user:{SECRET}@host/x"], ["(argument)"]),
        (["--hf-token", "hf_" + SECRET], ["--hf-token"]),
    ],
)
def test_secrets_in_a_command_are_named_and_hidden(command: list[str], options: list[str]) -> None:
    found = container(Config={"Cmd": command})
    assert SECRET not in json.dumps(found.command)
    assert found.secrets_in_arguments == options


def test_secrets_in_the_environment_are_named_and_hidden() -> None:
    env = [
        f"VLLM_API_KEY={SECRET}",
        f"HF_TOKEN={SECRET}",
        f"DB_PASSWORD={SECRET}",
        "EMPTY_API_KEY=",
        "MAX_NUM_BATCHED_TOKENS=8192",
        "VLLM_API_KEY_FILE=/run/secrets/key",
        f"NOTE=Bearer {SECRET}",
    ]
    found = container(Config={"Env": env})
    assert SECRET not in json.dumps(found.environment)
    assert found.secrets_in_environment == ["VLLM_API_KEY", "HF_TOKEN", "DB_PASSWORD", "NOTE"]
    assert found.environment["MAX_NUM_BATCHED_TOKENS"] == "8192"
    assert found.environment["VLLM_API_KEY_FILE"] == "/run/secrets/key"


def test_image_digests() -> None:
    one = {"Id": "sha256:a", "RepoDigests": ["r/x@sha256:b"]}
    assert parse_docker.image_digests(json.dumps(one)) == {"sha256:a": ["r/x@sha256:b"]}
    assert parse_docker.image_digests(json.dumps([one, {"Id": "sha256:c"}, 3])) == {
        "sha256:a": ["r/x@sha256:b"],
        "sha256:c": None,
    }


def test_versions_from_the_api_and_the_command() -> None:
    api = parse_docker.parse_version('{"Version": "29.0.0", "ApiVersion": "1.52", "MinAPIVersion": "1.44"}')
    assert (api.version, api.api_version, api.min_api_version) == ("29.0.0", "1.52", "1.44")
    text = (
        "Client: Docker Engine - Community\n Version:           28.0.0\n"
        " API version:       1.43 (downgraded from 1.48)\n\n"
        "Server: Docker Engine - Community\n Engine:\n  Version:          29.0.0\n"
        "  API version:      1.52 (minimum version 1.44)\n containerd:\n  Version:          v2.1.5\n"
    )
    command = parse_docker.parse_client(text)
    assert (command.client_version, command.client_api_version) == ("28.0.0", "1.43")
    assert (command.version, command.api_version, command.min_api_version) == ("29.0.0", "1.52", "1.44")
    as_json = json.dumps(
        {
            "Client": {"Version": "28.0.0", "ApiVersion": "1.43"},
            "Server": {"Version": "29.0.0", "MinAPIVersion": "1.44"},
        }
    )
    assert parse_docker.parse_client(as_json).client_api_version == "1.43"
    assert parse_docker.parse_version(as_json).min_api_version == "1.44"


def test_device_allow() -> None:
    good = "[Scope]\nDeviceAllow=\nDeviceAllow=/dev/char/195:0 rwm\nDeviceAllow=/dev/char/509:0 rwm\n"
    good += "DeviceAllow=char-136 rwm\n"
    path = f"files/run/systemd/transient/docker-{ID}.scope.d/50-DeviceAllow.conf"
    assert parse_docker.parse_device_allow({path: good}) == {
        ID: ["/dev/char/195:0 rwm", "/dev/char/509:0 rwm", "char-136 rwm"]
    }


CDI_YAML = """cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  - path: /dev/nvidia-uvm
    major: 510
    minor: 0
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      major: 195
      minor: 0
  name: GPU-1
- name: "0"
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
kind: nvidia.com/gpu
"""


def test_cdi() -> None:
    spec = parse_docker.parse_cdi("/etc/cdi/nvidia.yaml", CDI_YAML)
    assert (spec.kind, spec.version, spec.devices, spec.error) == ("nvidia.com/gpu", "0.5.0", ["GPU-1", "0"], None)
    majors = {node.path: node.major for node in spec.device_nodes}
    assert majors == {"/dev/nvidiactl": None, "/dev/nvidia-uvm": 510, "/dev/nvidia0": 195}
    assert parse_docker.parse_cdi("/etc/cdi/x.json", '{"kind": "a/b", "cdiVersion": "0.6.0"}').kind == "a/b"
    assert parse_docker.parse_cdi("/etc/cdi/x.yaml", "a: &b c").error


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["State", "Config", "HostConfig", "Name", "Image", "Mounts", "Env", "Cmd", "Entrypoint", "Labels", "LogConfig",
     "Ulimits",
     "DeviceRequests", "Devices", "PortBindings", "RestartPolicy", "Health", "Pid", "ShmSize", "CapAdd", "StopTimeout"]
)  # fmt: skip


@given(st.dictionaries(KEYS, st.one_of(JSON, st.dictionaries(KEYS, JSON, max_size=6)), max_size=8))
@settings(max_examples=20)
def test_wrong_types_never_raise(answer: dict[str, Any]) -> None:
    parse_docker.parse_containers(json.dumps({"Id": ID, **answer}))


@given(JSON)
@settings(max_examples=40)
def test_any_json_never_raises(value: Any) -> None:
    text = json.dumps(value)
    parse_docker.parse_containers(text)
    parse_docker.parse_version(text)
    parse_docker.parse_client(text)
    parse_docker.image_digests(text)
    parse_docker.parse_cdi("/x", text)
    parse_docker.read_info(Docker(), text)
