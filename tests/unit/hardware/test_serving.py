# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What is read of engines and models: progress, rendered files, hashes on request, names that Prometheus knows."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.hardware import parse_services, probes_services
from ansible_collections.metal.serve.plugins.module_utils.hardware.build import build_facts
from ansible_collections.metal.serve.plugins.module_utils.hardware.collect import collect_live
from ansible_collections.metal.serve.plugins.module_utils.hardware.live import LiveHost
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import choose
from ansible_collections.metal.serve.plugins.module_utils.models import manifest

from .helpers import facts_of

NAMES = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "progress": "vllm:it_count"}


@contextmanager
def engine(scrapes: Iterator[str]) -> Iterator[int]:
    """Serve /health, and one of ``scrapes`` after the other at /metrics; give the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (next(scrapes) if self.path == "/metrics" else "fine").encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def node(root: Path, port: int) -> LiveHost:
    """Return a machine below ``root`` that has one replica at ``port``."""
    release = root / "var/lib/metalserve/engines/short-0/releases/abc"
    release.mkdir(parents=True)
    document = {
        "port": port,
        "metrics": NAMES,
        "health": {"live": "/health"},
        "content": {"image": {"digest": "d"}, "files": {"config.yaml": "1", "start.sh": "2", "../../key": "3"}},
    }
    (release / "release.json").write_text(json.dumps(document), encoding="utf-8")
    (release / "config.yaml").write_text("# why\nmodel: /model\n", encoding="utf-8")
    (release / "start.sh").write_text("exec\n", encoding="utf-8")
    (release / "api-key").write_text("secret\n", encoding="utf-8")
    (release.parents[1] / "current").symlink_to("releases/abc")
    tcp = root / "proc/net/tcp"
    tcp.parent.mkdir(parents=True)
    tcp.write_text(f"local_address\n 0: 0100007F:{port:04X} 00000000:0000 0A x\n", encoding="utf-8")
    return LiveHost(root=str(root), search_path="/nowhere")


def scrape(running: int, tokens: int) -> str:
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\nvllm:it_count {tokens}\nother 1\n"


@pytest.mark.parametrize(
    ("scrapes", "later", "asked"),
    [
        ([scrape(0, 7)], None, 1),  # nothing in flight: one look is enough
        ([scrape(1, 7), scrape(1, 9)], 9.0, 2),  # progress at once: no further look
        ([scrape(1, 7)] * 9, 7.0, 4),  # no progress: looked for as long as it is worth
    ],
)
def test_busy_engines_are_scraped_until_they_show_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scrapes: list[str], later: float | None, asked: int
) -> None:
    monkeypatch.setattr(probes_services, "PROGRESS_WAITS_S", (0.0, 0.01, 0.01))
    seen = itertools.count()
    source = (text for text in scrapes if next(seen) >= 0)
    with engine(source) as port:
        results = collect_live(
            choose(["scrapes", "engines", "engine_progress", "engine_health"]), 20, node(tmp_path, port)
        )
    facts = build_facts(results, "live")
    (found,) = facts.metalserve.engines or []
    assert found.health_status == "ok"
    assert parse_services.total(found.samples_later, NAMES["progress"]) == later
    assert (found.progress_interval_s is None) is (later is None)
    assert next(seen) == asked
    assert "other" not in json.dumps(found.samples_later)


def test_rendered_files_are_read_and_hashed_keys_never(tmp_path: Path) -> None:
    results = collect_live(choose(["engines"]), 20, node(tmp_path, 1))
    (found,) = build_facts(results, "live").metalserve.engines or []
    (release,) = found.releases
    text = "model: /model"
    assert release.file_sha256 == {
        "config.yaml": hashlib.sha256(text.encode()).hexdigest(),
        "start.sh": hashlib.sha256(b"exec").hexdigest(),
    }
    assert release.config == {"model": "/model"}
    assert "secret" not in json.dumps([item.text for result in results.values() for item in result.items])


def test_models_are_hashed_on_request_alone(tmp_path: Path) -> None:
    folder = tmp_path / "var/lib/metalserve/models/m/r1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    manifest.save(f"{folder}.manifest.json", manifest.build(str(folder), "m", "r1"))
    host = LiveHost(root=str(tmp_path), search_path="/nowhere")
    (plain,) = build_facts(collect_live(choose(["metalserve"]), 20, host), "live").metalserve.models or []
    assert plain.file_sha256 is None
    (deep,) = build_facts(collect_live(choose(["metalserve", "deep"]), 20, host), "live").metalserve.models or []
    assert deep.file_sha256 == {"config.json": hashlib.sha256(b"{}").hexdigest()}


def test_an_unfinished_download_beside_a_cache_snapshot_is_listed(tmp_path: Path) -> None:
    cache = tmp_path / "hub/models--org--m"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs/ab12.incomplete").write_text("half", encoding="utf-8")
    (cache / "blobs/cd34").write_text("{}", encoding="utf-8")
    (cache / "snapshots/c0").mkdir(parents=True)
    (cache / "snapshots/c0/config.json").symlink_to("../../blobs/cd34")
    models = tmp_path / "var/lib/metalserve/models/m"
    models.mkdir(parents=True)
    (models / "r1").symlink_to(cache / "snapshots/c0")
    host = LiveHost(root=str(tmp_path), search_path="/nowhere")
    (found,) = build_facts(collect_live(choose(["models"]), 20, host), "live").metalserve.models or []
    assert {file.path: file.size for file in found.files or []} == {"config.json": 2, "blobs/ab12.incomplete": 4}


def test_names_of_prometheus_hold_declared_families_too(tmp_path: Path) -> None:
    metadata = {
        "data": {"a_seconds": [{"type": "histogram"}], "b": [{"type": "counter"}], "c": [{"type": "gauge"}], "d": "x"}
    }
    files = {"prometheus/names.json": '{"data": ["up", 3]}', "prometheus/metadata.json": json.dumps(metadata)}
    names = facts_of(tmp_path / "s", files).monitoring.metric_names
    assert names == [
        "a_seconds",
        "a_seconds_bucket",
        "a_seconds_count",
        "a_seconds_sum",
        "b",
        "b_total",
        "c",
        "d",
        "up",
    ]
    assert facts_of(tmp_path / "t", {"prometheus/names.json": "soup"}).monitoring.metric_names is None
