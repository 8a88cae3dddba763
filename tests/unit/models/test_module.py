# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The module model_files from its arguments to its result: sources, check mode, a killed run, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.metal.serve.plugins.module_utils.models import store
from ansible_collections.metal.serve.plugins.modules import model_files

from .helpers import SHARDS, flip_byte, model_folder
from .hub import COMMIT, REPO, Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(model_folder(tmp_path / "hub", size=1_000_000)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(**arguments: Any) -> dict[str, Any]:
        given = {"root": str(tmp_path / "root"), "name": "m", "revision": COMMIT, **arguments}
        with patch_module_args(given), pytest.raises(SystemExit):
            model_files.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


def hub_arguments(hub: Hub, **more: Any) -> dict[str, Any]:
    return {"state": "present", "source_type": "huggingface", "endpoint": hub.endpoint, "repo": REPO, **more}


def test_hub_from_check_to_second_run(hub: Hub, run: Any, tmp_path: Path) -> None:
    predicted = run(_ansible_check_mode=True, **hub_arguments(hub))
    assert predicted["changed"]
    assert not (tmp_path / "root").exists()
    done = run(**hub_arguments(hub))
    assert done["changed"]
    assert done["model"]["digest"] == predicted["model"]["digest"]
    assert done["model"]["config"] == predicted["model"]["config"] == {"model_type": "llama"}
    for item in done["model"]["files"]:
        assert f"/{COMMIT}/{item['path']} " in predicted["diff"]["after"]
    asked = len(hub.requests)
    again = run(**hub_arguments(hub))
    assert not again["changed"]
    assert len(hub.requests) == asked


def test_offline_asks_nobody_and_serves_what_is_there(hub: Hub, run: Any) -> None:
    refused = run(**hub_arguments(hub, offline=True))
    assert refused["failed"]
    assert "offline is set" in refused["msg"]
    assert hub.requests == []
    run(**hub_arguments(hub))
    assert not run(**hub_arguments(hub, offline=True))["changed"]


def test_killed_in_the_middle_then_run_again(hub: Hub, run: Any, tmp_path: Path) -> None:
    hub.slow_s = 0.05
    arguments = {"root": str(tmp_path / "root"), "name": "m", "revision": COMMIT, **hub_arguments(hub)}
    process = _start(arguments)
    partial = Path(store.Place(str(tmp_path / "root"), "m", COMMIT).partial)
    deadline = time.monotonic() + 20
    while not any(path.stat().st_size > 100_000 for path in partial.glob("*.incomplete")):
        assert time.monotonic() < deadline, "nothing arrived"
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not run(state="checked")["model"]["sealed"], "a half-arrived model must not count as there"
    hub.slow_s = 0.0
    hub.requests.clear()
    assert run(**hub_arguments(hub))["model"]["sealed"]
    ranges = [headers["Range"] for path, headers in hub.requests if headers.get("Range")]
    assert ranges, "the second run began anew"
    assert store.hashed_source(str(partial).removesuffix(".partial")) == store.hashed_source(str(hub.folder))


def _start(arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
    program = (
        "import json, sys\n"
        "from ansible.module_utils.testing import patch_module_args\n"
        f"from {model_files.__name__} import main\n"
        "with patch_module_args(json.loads(sys.argv[1])):\n"
        "    main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(arguments)], stdout=subprocess.DEVNULL, env=environment
    )


@pytest.mark.parametrize("in_place", [True, False])
def test_shared_mount(run: Any, tmp_path: Path, in_place: bool) -> None:
    source = model_folder(tmp_path / "mount")
    arguments = {"state": "present", "source_type": "shared", "path": str(source), "in_place": in_place}
    predicted = run(_ansible_check_mode=True, **arguments)
    done = run(**arguments)
    assert done["model"]["digest"] == predicted["model"]["digest"]
    assert os.path.islink(done["model"]["path"]) is in_place
    assert not run(state="checked")["changed"]
    missing = run(state="present", revision="r2", source_type="shared", path=str(tmp_path / "none"))
    assert "is the share mounted?" in missing["msg"]


def test_archive_from_an_address(hub: Hub, run: Any, tmp_path: Path) -> None:
    with tarfile.open(hub.folder / "m.tar.gz", "w:gz") as packed:
        packed.add(model_folder(tmp_path / "s"), "m")
    digest = store.hashed_source(str(hub.folder))
    sha256 = next(item.sha256 for item in digest if item.path == "m.tar.gz")
    arguments = {"state": "present", "source_type": "archive", "url": f"{hub.endpoint}/cdn/m.tar.gz"}
    wrong = run(**arguments, sha256="0" * 64)
    assert "source.sha256 says" in wrong["msg"]
    assert not run(state="checked")["model"]["sealed"]
    assert run(**arguments, sha256=sha256)["model"]["sealed"]
    assert sorted(os.listdir(tmp_path / "root" / "models" / "m")) == [COMMIT, f"{COMMIT}.manifest.json"]


def test_push_of_a_folder(run: Any, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "s")
    listed = run(state="listed", path=str(source))["model"]
    receiving = run(state="receiving", expected=listed["files"])
    for item in store.list_source(str(source)):
        Path(receiving["partial"]["path"], item.path).write_bytes((source / item.path).read_bytes())
    done = run(state="sealed", expected=listed["files"])
    assert done["model"]["digest"] == listed["digest"]
    flip_byte(Path(done["model"]["path"]) / SHARDS[0], 77)
    damaged = run(state="checked")
    assert damaged["failed"]
    assert SHARDS[0] in damaged["msg"]
    assert "It is not served" in damaged["msg"]


def test_too_small_a_disk_says_the_sum(run: Any, tmp_path: Path) -> None:
    files = [{"path": "w.safetensors", "size": 10**17, "sha256": ""}]
    refused = run(
        state="receiving", expected=files, images=["r/x@sha256:1"], image_bytes=10**9, docker_root=str(tmp_path)
    )
    assert "does not fit" in refused["msg"]
    assert "953.7 MiB for the engine image and 2 x 90949.5 TiB for the model" in refused["msg"]
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"state": "listed", "path": "/none"}, "'/none' of model m is not a folder on this machine"),
        ({"state": "listed", "path": "/none", "source_type": "archive"}, "is not a file on this machine"),
        ({"state": "present", "source_type": "archive"}, "needs source.path"),
        ({"state": "present", "source_type": "rsync"}, "rsync://host"),
        ({"state": "present", "source_type": "huggingface", "repo": "x y", "revision": "r"}, "is not a repository"),
        ({"state": "sealed", "expected": [{"path": "x"}]}, "list of {path, size, sha256}"),
        ({"state": "checked", "revision": "../x"}, "cannot be a folder name"),
    ],
)
def test_bad_input_is_one_sentence(run: Any, arguments: dict[str, Any], words: str) -> None:
    result = run(**arguments)
    assert result["failed"]
    assert words in result["msg"]
    assert "exception" not in result
