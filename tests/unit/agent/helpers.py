# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The agent as it is shipped (one file), with a stand-in for NVML and a small fake of Docker."""

from __future__ import annotations

import atexit
import functools
import http.server
import json
import os
import shutil
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ansible_collections.metal.serve.plugins.action.agent_bundle import members
from ansible_collections.metal.serve.plugins.module_utils.telemetry.bundle import bundle
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import Scrape, parse_scrape

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "roles" / "node_agent" / "files"
FIXTURES = ROOT / "tests" / "fixtures"
MIB = 1024**2


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="metalserve-agent-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def agent_file() -> Path:
    """Return the agent, built once."""
    path = _folder() / "agent.pyz"
    path.write_bytes(bundle(members(str(SOURCE / "metalserve_agent")))[0])
    return path


@functools.cache
def unpacked() -> Path:
    """Return the agent's content as a folder, which runs as the file does but keeps its bytecode between runs."""
    folder = _folder() / "agent"
    with zipfile.ZipFile(agent_file()) as archive:
        archive.extractall(folder)
    return folder


@functools.cache
def nvml_folder(old_driver: bool) -> Path:
    """Return a folder with the stand-in as libnvidia-ml.so.1."""
    folder = _folder() / ("old" if old_driver else "new")
    folder.mkdir()
    flags = ["-DOLD_DRIVER"] if old_driver else []
    source = str(FIXTURES / "nvml" / "stand_in_nvml.c")
    command = ["cc", *flags, "-shared", "-fPIC", "-O1", "-o", str(folder / "libnvidia-ml.so.1"), source]
    subprocess.run(command, check=True)
    return folder


def _mib(text: str | None) -> int:
    return int((text or "").split()[0]) * MIB


@functools.cache
def h200() -> dict[str, Any]:
    """Return the values of one H200 as nvidia-smi said them, by the stand-in's keys."""
    gpu = ElementTree.parse(FIXTURES / "hardware" / "h200-580.159.04.xml").getroot().find("gpu")
    assert gpu is not None

    def text(path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    ecc = "ecc_errors/aggregate/"
    return {
        "name": text("product_name"),
        "uuid": text("uuid"),
        "bus_id": gpu.get("id"),
        "temperature": text("temperature/gpu_temp").split()[0],
        "memory.total": _mib(text("fb_memory_usage/total")),
        "memory.reserved": _mib(text("fb_memory_usage/reserved")),
        "memory.used": _mib(text("fb_memory_usage/used")),
        "memory.free": _mib(text("fb_memory_usage/free")),
        "bar1.total": _mib(text("bar1_memory_usage/total")),
        "bar1.used": _mib(text("bar1_memory_usage/used")),
        "bar1.free": _mib(text("bar1_memory_usage/free")),
        "utilization.gpu": text("utilization/gpu_util").split()[0],
        "utilization.memory": text("utilization/memory_util").split()[0],
        "throttle": 1 if text("clocks_event_reasons/clocks_event_reason_gpu_idle") == "Active" else 0,
        "power": round(float(text("gpu_power_readings/instant_power_draw").split()[0]) * 1000),
        "power_limit": round(float(text("gpu_power_readings/current_power_limit").split()[0]) * 1000),
        "energy": 123_456_000,
        "pcie_replays": text("pci/replay_counter"),
        "ecc.mode": 1 if text("ecc_mode/current_ecc") == "Enabled" else 0,
        "ecc.0.0": text("ecc_errors/volatile/dram_correctable"),
        "ecc.1.0": text("ecc_errors/volatile/dram_uncorrectable"),
        "ecc.0.1": text(ecc + "dram_correctable"),
        "ecc.1.1": text(ecc + "dram_uncorrectable"),
        "remap.correctable": text("remapped_rows/remapped_row_corr"),
        "remap.uncorrectable": text("remapped_rows/remapped_row_unc"),
        "remap.pending": 0 if text("remapped_rows/remapped_row_pending") == "No" else 1,
        "remap.failed": 0 if text("remapped_rows/remapped_row_failure") == "No" else 1,
    }


def state(*gpus: dict[str, Any], **more: Any) -> str:
    """Return the stand-in's file for ``gpus``; a value None is left out, which makes that read unsupported."""
    lines = [f"gpus {len(gpus)}", "driver 580.159.04"]
    lines += [f"{key.replace('__', '.')} {value}" for key, value in more.items()]
    for index, gpu in enumerate(gpus):
        lines += [f"{index}.{key} {value}" for key, value in gpu.items() if value is not None]
    return "\n".join(lines) + "\n"


def settings(**changes: Any) -> dict[str, Any]:
    """Return settings of the agent on a GPU node with no replica."""
    return {
        "listen": {"address": "127.0.0.1", "port": 0},
        "accelerator": "nvidia",
        "expected_gpus": 8,
        "probe_interval_s": 5,
        "probe_timeout_s": 2,
        "engines_dir": str(_folder() / "no-engines"),
        "docker_socket": str(_folder() / "no-docker.sock"),
        "replicas": [],
        **changes,
    }


def scrape(
    folder: Path,
    nvml: str,
    *,
    old_driver: bool = False,
    python: str = sys.executable,
    agent: Path | None = None,
    **changes: Any,
) -> Scrape:
    """Return one scrape of the shipped agent with the stand-in answering ``nvml``; ``agent`` is the file or its content."""
    (folder / "nvml").write_text(nvml, encoding="utf-8")
    (folder / "agent.json").write_text(json.dumps(settings(**changes)), encoding="utf-8")
    result = subprocess.run(
        [python, "-I", str(agent or unpacked()), "--config", str(folder / "agent.json"), "--once"],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(nvml_folder(old_driver)),
            "METALSERVE_STAND_IN_NVML": str(folder / "nvml"),
        },
    )
    return parse_scrape(result.stdout)


class _Handler(http.server.BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]]

    def do_GET(self) -> None:
        """Answer from the table, by path without query."""
        status, body = self.answers.get(self.path.partition("?")[0], (404, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        """Return a name: a Unix socket's peer has none."""
        return "peer"


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class _TcpServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


def frames(*lines: str, stream: int = 1) -> bytes:
    """Return ``lines`` as Docker's log stream."""
    payloads = [(line + "\n").encode() for line in lines]
    return b"".join(struct.pack(">BxxxI", stream, len(payload)) + payload for payload in payloads)


@contextmanager
def served(answers: dict[str, tuple[int, bytes]], socket_path: str = "") -> Iterator[int]:
    """Serve ``answers`` by path, over TCP or a Unix socket; yields the TCP port."""
    handler = type("Handler", (_Handler,), {"answers": answers})
    server: Any = _UnixServer(socket_path, handler) if socket_path else _TcpServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield 0 if socket_path else server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
