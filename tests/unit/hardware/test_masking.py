# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Nothing that names a person, a place or a secret leaves in a snapshot; what joins still joins."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware.masking import (
    Masker,
    looks_secret_name,
    mask_assignments,
    mask_json,
    mask_nginx,
    mask_release,
    mask_secrets,
)


@pytest.mark.parametrize(
    ("name", "secret"),
    [("VLLM_API_KEY", True), ("api-key", True), ("HF_TOKEN", True), ("HUGGING_FACE_HUB_TOKEN", True), ("token", True),
     ("password", True), ("MYSQL_ROOT_PASSWORD", True), ("client_secret", True), ("AWS_SECRET_ACCESS_KEY", True),
     ("max-num-batched-tokens", False), ("max_tokens", False), ("tokenizer", False), ("api_key_file", False),
     ("NVIDIA_VISIBLE_DEVICES", False), ("keepalive", False), ("PATH", False), ("monkey", False)],
)  # fmt: skip
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert looks_secret_name(name) is secret


@pytest.mark.parametrize(
    "text",
    ["Authorization: Bearer abcdef123456", "sk-proj-abcdef123456", "hf_abcdefghijkl", "https://u:abcdef123456@host/",
     "-----BEGIN RSA PRIVATE KEY-----\nabcdef123456\n-----END RSA PRIVATE KEY-----", "ghp_abcdef123456abcdef123456"],
)  # fmt: skip
def test_shapes_of_secrets(text: str) -> None:
    masked = mask_secrets(f"before {text} after")
    assert "abcdef" not in masked
    assert masked.startswith("before ")


def test_assignments() -> None:
    text = 'api_key: geheim1\n  - password=geheim2\nmax_tokens: 5\nport: 8100\ntoken: ""\n'
    assert mask_assignments(text) == 'api_key: ***\n  - password=***\nmax_tokens: 5\nport: 8100\ntoken: ""\n'


def test_json() -> None:
    value = {
        "Env": ["A_KEY=geheim", "B=2"],
        "Cmd": ["--api-key", "geheim", "--port", "1"],
        "password": "geheim",
        "n": 3,
    }
    assert mask_json(value) == {
        "Env": ["A_KEY=***", "B=2"],
        "Cmd": ["--api-key", "***", "--port", "1"],
        "password": "***",
        "n": 3,
    }


def test_fingerprints_of_secrets_stay_in_a_release() -> None:
    release = {
        "content": {"secrets": {"api_key": "0123456789abcdef"}, "environment": {"A_KEY": "geheim"}},
        "token": "geheim",
    }
    assert mask_release(release) == {
        "content": {"secrets": {"api_key": "0123456789abcdef"}, "environment": {"A_KEY": "***"}},
        "token": "***",
    }
    assert mask_release({"content": {"secrets": {"api_key": "geheim-and-longer-than-16"}}}) == {
        "content": {"secrets": {"api_key": "***"}}
    }
    assert mask_release([1]) == [1]


NGINX = r"""
map $http_authorization $key_name {
    default "";
    "~^Bearer\ geheim-finance$" finance;
    "Bearer geheim-legal" legal;
}
map $status $x { default 1; }
proxy_set_header Authorization "Bearer geheim-engine";
proxy_set_header Authorization $http_authorization;
proxy_set_header Host $host;
set_by_lua_block $y {
    local api_key = "geheim-lua"
}
"""


def test_nginx() -> None:
    masked = mask_nginx(NGINX)
    assert "geheim" not in masked
    assert "finance" not in masked
    assert 'default "";' in masked
    assert "proxy_set_header Authorization $http_authorization;" in masked
    assert "map $status $x { default 1; }" in masked


def test_identities_are_consistent() -> None:
    masker = Masker(["athena-gpu7.corp.example"], ["mmustermann"])
    text = (
        "athena-gpu7 192.168.7.20 8.8.4.4 192.168.7.20 fd00:1:2::5 a0:36:9f:11:22:33 /home/mmustermann/x "
        "GPU-6f1c2a3b-1111-2222-3333-444455556666 athena-gpu7.corp.example ops@corp.example llm.bank-xyz.com"
    )
    masked = masker.identities(text)
    words = masked.split()
    assert words[0] == "host-1"
    assert words[1] == words[3] == "10.0.0.1"
    assert words[2] == "203.0.113.2"
    assert words[4] == "2001:db8::1"
    assert words[5] == "02:00:00:00:00:01"
    assert words[6] == "/home/user-1/x"
    assert words[7] == "GPU-00000000-0000-0000-0000-000000000001"
    assert words[8] == "host-1.example"
    assert words[9] == "someone@example.com"
    assert words[10].endswith(".example")
    assert masker.identities(text) == masked


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1 0.0.0.0 ::1 :: 255.255.255.0 169.254.169.254", "0000:3b:00.0 00000000:3B:00.0", "12:30:45 1:3 195:255",
     "nvidia.com/gpu=GPU-00000000-0000-0000-0000-000000000000", "docker.io/library/x nginx.org com.docker.compose",
     "sha256:" + "ab" * 32, "580.159.04 1.22.1 550.107.02-0ubuntu0.24.04.1", "docker.service /etc/nginx/nginx.conf",
     "96.00.A5.00.1A", "nvidia-smi.txt config.json libnvidia-ml.so.1 io.containerd.runc.v2"],
)  # fmt: skip
def test_what_stays(text: str) -> None:
    assert Masker(["node", "gpu"], ["ubuntu"]).identities(text) == text


def test_serial_numbers() -> None:
    masker = Masker()
    xml = "<serial>1654321098765</serial><pdi>0x284a43a7226c42d1</pdi><serial>N/A</serial>"
    assert masker.identities(xml) == "<serial>0000000000000</serial><pdi>000000000000000000</pdi><serial>N/A</serial>"
    text = (
        "    Serial Number                 : 1654321098765\n    GPU PDI : 0x284a43a7226c42d1\n    Serial Number : N/A\n"
    )
    masked = masker.identities(text)
    assert "1654321098765" not in masked
    assert "284a43a7" not in masked
    assert "N/A" in masked


def test_versions_that_look_like_addresses_stay_where_versions_stand() -> None:
    masker = Masker()
    assert (
        masker.mask("dpkg", "commands/dpkg-query_-W.txt", "ii libnccl2 2.18.3.1 amd64") == "ii libnccl2 2.18.3.1 amd64"
    )
    assert "2.18.3.1" not in masker.mask("nft", "commands/nft.txt", "ip saddr 2.18.3.1 accept")


def test_proc_net_tcp_keeps_its_joins() -> None:
    masker = Masker()
    line = "   0: 0B00000A:1FA4 00000000:0000 0A\n   1: 0100007F:1F91 00000000:0000 0A\n"
    masked = masker.mask("proc_net_tcp", "files/proc/net/tcp", line)
    stand_in = masker.address("10.0.0.11")
    assert "0B00000A" not in masked
    assert "".join(f"{int(part):02X}" for part in reversed(stand_in.split("."))) in masked
    assert "0100007F:1F91" in masked


def test_names_of_other_hosts_are_learnt() -> None:
    masker = Masker(["athena"])
    masker.learn('engine_up{host="hermes-3",replica="short-0"} 1\nserver_name llm.internal zeus;')
    masked = masker.identities("hermes-3 and zeus")
    assert masked == "host-2 and host-3"


def test_docker_info_loses_what_identifies() -> None:
    info = {"ID": "ABCD:EFGH", "Name": "athena", "HttpProxy": "http://u:p@proxy:3128", "Driver": "overlay2"}
    masked = json.loads(Masker(["athena"]).mask("docker_info", "docker/info.json", json.dumps(info)))
    assert masked == {"Name": "host-1", "Driver": "overlay2"}


def test_access_log() -> None:
    row = '{"client":"93.184.216.34","key":"bank-x","path":"/v1/completions","status":504}'
    masked = json.loads(Masker().mask("access_logs", "files/var/log/metalserve/gateway-access.log", row))
    assert masked == {"client": "203.0.113.1", "key": "client-1", "path": "/v1/completions", "status": 504}


@given(st.text(max_size=200))
@settings(max_examples=100)
def test_soup_never_raises(text: str) -> None:
    masker = Masker(["athena"], ["mm"])
    masker.learn(text)
    for probe, path in (
        ("nginx", "a.txt"),
        ("uname", "b.txt"),
        ("proc_net_tcp", "c"),
        ("x", "d.json"),
        ("access_logs", "e"),
    ):
        masker.mask(probe, path, text)
