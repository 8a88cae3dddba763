# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Units of the agent and of the DCGM exporter."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.metal.serve.plugins.filter.telemetry import all_gpus_options

from . import render


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("20.10.24", "--runtime=nvidia --env=NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=all"),
        ("25.0.3", "--device=nvidia.com/gpu=all --env=NVIDIA_VISIBLE_DEVICES=void"),
        ("28.3.0", "--device=nvidia.com/gpu=all --env=NVIDIA_VISIBLE_DEVICES=void"),
    ],
)
def test_gpus_are_given_as_this_docker_takes_them(version: str, options: str) -> None:
    assert all_gpus_options(version) == options


def test_a_version_that_is_none_is_named() -> None:
    with pytest.raises(AnsibleFilterError, match="'new'"):
        all_gpus_options("new")


def test_the_dcgm_exporter_runs_by_digest_on_the_private_address_and_is_no_engine() -> None:
    unit = render.rendered("gpu")["metalserve-dcgm.service"]
    assert "@sha256:" + "0" * 64 in unit
    assert "-a 10.0.0.5:9400" in unit
    assert "--name=dcgm-exporter" in unit
    assert "--device=nvidia.com/gpu=all" in unit
    assert "privileged" not in unit


@pytest.mark.parametrize("name", ["metalserve-agent.service", "metalserve-dcgm.service"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    text = render.rendered("gpu")[name].replace("/usr/bin/docker", "/bin/true").replace("Requires=docker.service\n", "")
    (tmp_path / name).write_text(text, encoding="utf-8")
    result = subprocess.run([analyze, "verify", str(tmp_path / name)], capture_output=True, text=True, check=False)
    assert name not in result.stderr, result.stderr
