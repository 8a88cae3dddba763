# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Real scrapes: captures of engines, and exporters that are run here, once each."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from ansible_collections.metal.serve.plugins.module_utils.telemetry.contract import metric_names
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import Scrape, parse_scrape
from tests.unit.agent import helpers as agent_helpers

from . import render

FIXTURES = render.ROOT / "tests" / "fixtures" / "metrics"
DASHBOARD = render.ROOT / "templates" / "monitoring" / "dashboards" / "metalserve.json"
TARGET_LABELS = ("node", "pool", "replica", "kind", "job", "instance")

# Prometheus' and Alertmanager's own, which need both running; the lab's verification sees them.
PROMETHEUS_SELF = {"prometheus_rule_evaluation_failures_total", "alertmanager_notifications_failed_total"}

# Named by their sources only, since neither a GPU's DCGM nor SGLang runs here. DCGM: the exporter's default counters
# and DCGM's field list; SGLang 0.5.23: observability/metrics_collector.py; Triton's vLLM families: those that it has
# with REPORT_CUSTOM_METRICS.
NOT_SCRAPED = {
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:time_to_first_token_seconds_count",
    "sglang:inter_token_latency_seconds_bucket",
    "sglang:queue_time_seconds_bucket",
    "sglang:generation_tokens_total",
    "sglang:num_retracted_requests_total",
    "sglang:prefill_effective_tokens_total",
    "sglang:http_responses_total",
    "sglang:num_aborted_requests_total",
    "sglang:num_requests_total",
    "vllm:time_per_output_token_seconds_bucket",
}


def vllm() -> Scrape:
    """Return the scrape of vLLM 0.32.0."""
    return parse_scrape((FIXTURES / "vllm-0.32.0-cpu.prom").read_text(encoding="utf-8"))


def triton() -> Scrape:
    """Return the scrape of tritonserver 2.51."""
    return parse_scrape((FIXTURES / "triton-2.51-native.prom").read_text(encoding="utf-8"))


@functools.cache
def agent() -> Scrape:
    """Return what the agent says on a CPU node with one engine that runs and serves."""
    log = agent_helpers.FIXTURES / "engine-logs" / "vllm-0.26.0-h200-run1.log"
    lines = [
        f"2026-11-30T14:16:{n % 60:02d}Z {line}" for n, line in enumerate(log.read_text(encoding="utf-8").splitlines())
    ]
    container = [{"Id": "abc", "State": "running"}]
    docker = {
        "/containers/json": (200, json.dumps(container).encode()),
        "/containers/abc/json": (200, b'{"State": {"StartedAt": "2026-11-30T14:15:59Z"}}'),
        "/containers/abc/logs": (200, agent_helpers.frames(*lines)),
    }
    serving = {"/health": (200, b""), "/v1/models": (200, b'{"data":[{"id":"m"}]}')}
    return _agent_scrape("cpu", [], docker, serving, "")


@functools.cache
def gpu_agent() -> Scrape:
    """Return what the agent says on a node with a GPU, over the stand-in for NVML."""
    gpu = agent_helpers.h200()
    return _agent_scrape("nvidia", [gpu["uuid"]], {}, {}, agent_helpers.state(gpu))


def _agent_scrape(accelerator: str, gpus: list[str], docker: Any, serving: Any, nvml: str) -> Scrape:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        current = folder / "short-0" / "current"
        current.mkdir(parents=True)
        plan = {
            "gpus": gpus,
            "settings": {"max_num_seqs": 8, "max_num_batched_tokens": 2048},
            "memory": {"planned_gpu_bytes": 10**9},
        }
        (current / "release.json").write_text(json.dumps({"release": "cafe", "plan": plan}), encoding="utf-8")
        with (
            agent_helpers.served(docker, str(folder / "docker.sock")),
            agent_helpers.served(serving) as port,
        ):
            replica = {
                "replica": "short-0",
                "pool": "short",
                "kind": "vllm",
                "address": "127.0.0.1",
                "port": port,
            }
            return agent_helpers.scrape(
                folder,
                nvml,
                accelerator=accelerator,
                replicas=[replica],
                engines_dir=str(folder),
                docker_socket=str(folder / "docker.sock"),
            )


@functools.cache
def mtail(log: str = "") -> Scrape:
    """Return what mtail makes of ``log`` (default: some lines of each kind), with the program as it is shipped."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gateway.mtail").write_text(render.rendered("cpu")["gateway.mtail"], encoding="utf-8")
        (folder / "access.log").write_text(log or "\n".join(LOG_LINES) + "\n", encoding="utf-8")
        result = subprocess.run(
            [
                "mtail",
                "--one_shot",
                "--one_shot_format=prometheus",
                "--emit_prog_label=false",
                "--logtostderr",
                "--address=127.0.0.1",
                "--port=0",
                f"--progs={folder}/gateway.mtail",
                f"--logs={folder}/access.log",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    return parse_scrape(result.stdout)


def log_line(status: int, **fields: Any) -> str:
    """Return a line of the gateway's access log, an answer of one engine where ``fields`` do not say otherwise."""
    line = {
        "time": "2026-11-30T15:00:00+00:00",
        "msec": "1796050800.123",
        "id": "0123456789abcdef",
        "client": "10.0.0.9",
        "method": "POST",
        "path": "/v1/chat/completions",
        "protocol": "HTTP/2.0",
        "status": status,
        "pool": "short",
        "key": "finance",
        "rt": 0.42,
        "uct": "0.001",
        "uht": "0.100",
        "urt": "0.419",
        "upstream": "10.0.0.11:8100",
        "upstream_status": str(status),
        "request_bytes": 500,
        "bytes": 1200,
        "body_bytes": 900,
        "complete": "OK",
        "connection": 3,
        "connection_requests": 1,
        "tls_reused": ".",
        **fields,
    }
    return json.dumps(line, separators=(",", ":"))


OWN = {"pool": "", "upstream": "", "upstream_status": "", "uct": "", "uht": "", "urt": "", "rt": 0.0}
LOG_LINES = [log_line(200), log_line(200), log_line(504, urt="60.001", uht="-"), log_line(429, **OWN)]


def _served_by(command: list[str], port: int) -> str:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    return str(answer.read().decode())
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise AssertionError(f"{command[0]} does not answer")
    finally:
        process.terminate()
        process.wait(10)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@functools.cache
def node() -> Scrape:
    """Return a scrape of the node exporter with the arguments as they are shipped."""
    port = free_port()
    arguments = render.rendered("cpu")["node-exporter.default"].split('ARGS="', 1)[1].rsplit('"', 1)[0]
    words = arguments.replace("\\\n", " ").split()
    with tempfile.TemporaryDirectory() as folder:
        kept = [word for word in words if "listen-address" not in word and "textfile.directory" not in word]
        own = [f"--web.listen-address=127.0.0.1:{port}", f"--collector.textfile.directory={folder}"]
        return parse_scrape(_served_by(["prometheus-node-exporter", *kept, *own], port))


@functools.cache
def nginx() -> Scrape:
    """Return a scrape of the nginx exporter in front of a status page."""
    page = b"Active connections: 2 \nserver accepts handled requests\n 10 10 31 \nReading: 0 Writing: 1 Waiting: 1 \n"
    port = free_port()
    with agent_helpers.served({"/stub_status": (200, page)}) as status_port:
        command = [
            "prometheus-nginx-exporter",
            f"--nginx.scrape-uri=http://127.0.0.1:{status_port}/stub_status",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        return parse_scrape(_served_by(command, port))


def audit_textfile() -> Scrape:
    """Return what an audit publishes on a node."""
    from ansible_collections.metal.serve.plugins.module_utils.checklist.report import (  # noqa: PLC0415
        render_textfile,
    )

    verdicts = [{"id": "numa.balancing", "verdict": "fail", "waiver": None}]
    return parse_scrape(render_textfile({"host": "node-a", "verdicts": verdicts}, 1796050800.0))


def rotation_textfile() -> Scrape:
    """Return what a change of the rotation leaves on a gateway."""
    from ansible_collections.metal.serve.plugins.module_utils.release.rotation import textfile  # noqa: PLC0415

    out = {"replica": "node-a/short-0", "pool": "short", "run": "redeploy-1", "by": 'ada "x"@desk', "in": False}
    return parse_scrape(textfile([out, {**out, "replica": "node-b/short-0", "in": True}]))


def _rules(inventory: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load(render.rendered(inventory)["rules/metalserve.yml"])["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions(inventory: str) -> list[str]:
    """Return every expression of the rendered rules."""
    return [str(rule["expr"]) for rule in _rules(inventory)]


def recorded(inventory: str) -> list[str]:
    """Return the names that the recording rules make."""
    return [rule["record"] for rule in _rules(inventory) if "record" in rule]


def dashboard_expressions() -> list[str]:
    """Return every expression of the dashboard."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def used_by_the_dashboard() -> set[str]:
    """Return the metrics that the dashboard asks for."""
    return {name for expression in dashboard_expressions() for name in metric_names(expression)}


def dcgm_counters() -> set[str]:
    """Return the fields that the DCGM exporter is asked for."""
    text = (render.TEMPLATES / "dcgm-counters.csv.j2").read_text(encoding="utf-8")
    return {line.split(",")[0].strip() for line in text.splitlines() if line and not line.startswith("#")}
