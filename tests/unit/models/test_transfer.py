# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Downloads against a small server that behaves like a model hub: listing in pages, redirects, ranges, faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.models import store, transfer

from .helpers import SHARDS, model_folder
from .hub import COMMIT, REPO, Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(model_folder(tmp_path / "hub", size=300_000)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


HTTP = transfer.Http(token="secret-token", timeout=5, pause=0.001)


def fetch(hub: Hub, place: store.Place, http: transfer.Http = HTTP) -> None:
    files = transfer.hub_tree(http, hub.endpoint, REPO, COMMIT, transfer.EXCLUDE)
    store.open_partial(place)
    transfer.hub_download(http, hub.endpoint, REPO, COMMIT, files, place.partial)
    store.seal(place, files)


@pytest.fixture
def place(tmp_path: Path) -> store.Place:
    return store.Place(str(tmp_path / "root"), "m", COMMIT)


def test_fetches_all_pages_and_seals(hub: Hub, place: store.Place) -> None:
    fetch(hub, place)
    assert store.hashed_source(place.final) == store.hashed_source(str(hub.folder))
    assert all(headers["Authorization"] == "Bearer secret-token" for _path, headers in hub.requests)


def test_broken_download_goes_on_where_it_stopped(hub: Hub, place: store.Place) -> None:
    hub.break_after[SHARDS[0]] = 100_000
    fetch(hub, place)
    ranges = [headers.get("Range") for path, headers in hub.requests if path.endswith(SHARDS[0])]
    assert ranges == [None, "bytes=100000-"]
    assert store.hashed_source(place.final) == store.hashed_source(str(hub.folder))


def test_killed_run_is_continued_by_the_next(hub: Hub, place: store.Place) -> None:
    store.open_partial(place)
    whole = (hub.folder / SHARDS[1]).read_bytes()
    Path(place.partial, f"{SHARDS[1]}.incomplete").write_bytes(whole[:123_456])
    Path(place.partial, SHARDS[0]).write_bytes((hub.folder / SHARDS[0]).read_bytes())
    fetch(hub, place)
    asked = {path.rsplit("/", 1)[1]: headers.get("Range") for path, headers in hub.requests if "/resolve/" in path}
    assert asked[SHARDS[1]] == "bytes=123456-"
    assert SHARDS[0] not in asked


def test_server_without_ranges_begins_again(hub: Hub, place: store.Place) -> None:
    hub.ignore_ranges = True
    hub.break_after[SHARDS[0]] = 100_000
    fetch(hub, place)
    assert store.hashed_source(place.final) == store.hashed_source(str(hub.folder))


def test_leftover_that_is_too_long_is_dropped(hub: Hub, place: store.Place) -> None:
    store.open_partial(place)
    Path(place.partial, f"{SHARDS[0]}.incomplete").write_bytes(b"x" * 900_000)
    fetch(hub, place)
    assert store.hashed_source(place.final) == store.hashed_source(str(hub.folder))


def test_wrong_bytes_of_an_earlier_run_are_refused(hub: Hub, place: store.Place) -> None:
    store.open_partial(place)
    size = (hub.folder / SHARDS[0]).stat().st_size
    Path(place.partial, SHARDS[0]).write_bytes((hub.folder / SHARDS[0]).read_bytes()[:-1] + b"!")
    assert os.path.getsize(os.path.join(place.partial, SHARDS[0])) == size
    with pytest.raises(store.StoreError, match=f"arrived damaged: {SHARDS[0]}"):
        fetch(hub, place)
    fetch(hub, place)


def test_small_file_with_another_git_id_is_refused(hub: Hub, place: store.Place) -> None:
    files = transfer.hub_tree(HTTP, hub.endpoint, REPO, COMMIT, transfer.EXCLUDE)
    (hub.folder / "tokenizer.json").write_text("[]")  # same size, other content than listed
    store.open_partial(place)
    transfer.hub_download(HTTP, hub.endpoint, REPO, COMMIT, files, place.partial)
    with pytest.raises(store.StoreError, match=r"arrived damaged: tokenizer\.json"):
        store.seal(place, files)


def test_token_stays_with_its_host(hub: Hub, place: store.Place, tmp_path: Path) -> None:
    with Hub(hub.folder) as cdn:
        threading.Thread(target=cdn.serve_forever, args=(0.01,), daemon=True).start()
        hub.elsewhere = cdn.endpoint
        fetch(hub, place)
        cdn.shutdown()
    assert len(cdn.requests) == len(SHARDS)
    assert all("Authorization" not in headers for _path, headers in cdn.requests)


def test_busy_server_is_asked_again(hub: Hub) -> None:
    path = f"/api/models/{REPO}/tree/{COMMIT}?recursive=true"
    hub.fail_first[path] = 2
    assert transfer.hub_tree(HTTP, hub.endpoint, REPO, COMMIT, ()) != []
    assert [asked for asked, _headers in hub.requests].count(path) == 3


def test_pickled_weights_are_left_out_beside_safetensors(hub: Hub) -> None:
    (hub.folder / "pytorch_model.bin").write_bytes(b"x")
    names = [item.path for item in transfer.hub_tree(HTTP, hub.endpoint, REPO, COMMIT, transfer.EXCLUDE)]
    assert "pytorch_model.bin" not in names
    assert SHARDS[0] in names


@pytest.mark.parametrize(
    ("repo", "commit", "words"),
    [
        (REPO, "main", "may move; write the 40"),
        ("../x", COMMIT, "is not a repository"),
        ("owner/other", COMMIT, "HTTP 404 .*check the repository"),
    ],
)
def test_clear_refusals(hub: Hub, repo: str, commit: str, words: str) -> None:
    with pytest.raises(store.StoreError, match=words):
        transfer.hub_tree(HTTP, hub.endpoint, repo, commit, ())


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(store.StoreError, match="refused"):
        transfer.hub_tree(transfer.Http(tries=2, pause=0.001), "http://127.0.0.1:9", REPO, COMMIT, ())


def test_only_http(hub: Hub) -> None:
    with pytest.raises(store.StoreError, match="not an http"):
        transfer.Http().get_bytes("file:///etc/passwd", 10)


def test_copy_continues_and_hashes_what_it_read(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "s")
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{SHARDS[0]}.incomplete").write_bytes(b"half")
    done = transfer.copy_tree(str(source), store.list_source(str(source)), str(out))
    assert done == store.hashed_source(str(source))
    assert store.hashed_source(str(out)) == done
