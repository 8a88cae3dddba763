# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A model arrives whole or is not there; an interrupted arrival is continued; a sealed one is never edited."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from ansible_collections.metal.serve.plugins.module_utils.models import faults, manifest, store

from .helpers import SHARDS, flip_byte, model_folder

GIB = 1024**3


@pytest.fixture
def place(tmp_path: Path) -> store.Place:
    return store.Place(str(tmp_path / "root"), "m", "r1")


def arrive(place: store.Place, source: Path) -> None:
    store.open_partial(place)
    for item in store.list_source(str(source)):
        shutil.copy(source / item.path, os.path.join(place.partial, item.path))


def test_seal_names_protects_and_writes_the_manifest(place: store.Place, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "s")
    arrive(place, source)
    sealed = store.seal(place, store.hashed_source(str(source)))
    assert not os.path.exists(place.partial)
    assert manifest.load(place.manifest) == sealed
    assert stat.S_IMODE(os.stat(place.final).st_mode) == 0o555
    assert stat.S_IMODE(os.stat(os.path.join(place.final, SHARDS[0])).st_mode) == 0o444
    assert manifest.verify(place.final, sealed).hashed == ()


def test_sealed_revision_is_never_opened_again(place: store.Place, tmp_path: Path) -> None:
    arrive(place, model_folder(tmp_path / "s"))
    store.seal(place)
    with pytest.raises(store.StoreError, match="give the new files a new revision"):
        store.open_partial(place)


def test_damage_on_the_way_is_refused_and_the_file_fetched_again(place: store.Place, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "s")
    arrive(place, source)
    flip_byte(Path(place.partial) / SHARDS[0], 150)
    with pytest.raises(store.StoreError, match=rf"arrived damaged: {SHARDS[0]} "):
        store.seal(place, store.hashed_source(str(source)))
    assert not os.path.exists(place.manifest)
    assert not os.path.exists(place.final)
    assert not os.path.exists(os.path.join(place.partial, SHARDS[0]))
    arrive(place, source)
    store.seal(place, store.hashed_source(str(source)))


@pytest.mark.parametrize("missing", [SHARDS[1], "tokenizer.json"])
def test_incomplete_arrival_is_refused_with_names(place: store.Place, tmp_path: Path, missing: str) -> None:
    source = model_folder(tmp_path / "s")
    arrive(place, source)
    os.unlink(os.path.join(place.partial, missing))
    with pytest.raises(store.StoreError, match=missing):
        store.seal(place, store.hashed_source(str(source)))
    assert os.path.isdir(place.partial)
    assert not os.path.exists(place.manifest)


def test_crash_between_name_and_manifest_is_taken_up_again(place: store.Place, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "s")
    arrive(place, source)
    store.set_modes(place.partial, 0o555, 0o444)
    os.rename(place.partial, place.final)
    assert manifest.load(place.manifest) is None
    store.open_partial(place)
    assert not os.path.exists(place.final)
    store.seal(place, store.hashed_source(str(source)))


def test_shared_folder_is_used_where_it_is(place: store.Place, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "mount")
    sealed = store.adopt(place, str(source))
    assert os.readlink(place.final) == str(source)
    assert manifest.verify(place.final, sealed).problems == ()
    flip_byte(source / SHARDS[1], 100)
    assert "content changed" in manifest.verify(place.final, sealed).problems[0]


def test_source_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = model_folder(tmp_path / "s"), str(tmp_path / "cache")
    first = store.hashed_source(str(source), cache)
    read: list[str] = []
    real = manifest.sha256_file

    def counted(path: str) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(manifest, "sha256_file", counted)
    assert store.hashed_source(str(source), cache) == first
    assert read == []
    flip_byte(source / SHARDS[0], 90)
    changed = store.hashed_source(str(source), cache)
    assert [os.path.basename(path) for path in read] == [SHARDS[0]]
    assert store.expected_digest(changed) != store.expected_digest(first)


def test_digest_is_unknown_where_a_hash_is(tmp_path: Path) -> None:
    assert store.expected_digest(store.list_source(str(model_folder(tmp_path / "s")))) == ""
    assert store.expected_digest([]) == ""


@pytest.mark.parametrize(
    ("name", "revision"), [("..", "r1"), ("a/b", "r1"), ("m", ""), ("m", "r1.partial"), ("m", "-x")]
)
def test_names_that_would_leave_the_store(name: str, revision: str) -> None:
    with pytest.raises(store.StoreError, match="cannot be a folder name"):
        store.Place("/r", name, revision)


def test_disk_on_one_file_system_adds_image_and_models() -> None:
    disk = store.Volume("/var/lib/metalserve", 70 * GIB, 1)
    docker = store.Volume("/var/lib/docker", 70 * GIB, 1)
    assert store.disk_problems(disk, docker, 10 * GIB, 30 * GIB, 0) == []
    problem = store.disk_problems(disk, docker, 11 * GIB, 30 * GIB, 0)
    assert problem == [
        "/var/lib/metalserve has 70.0 GiB free, but needs 71.0 GiB: 11.0 GiB for the engine image and "
        "2 x 30.0 GiB for the model and its next revision"
    ]


def test_disk_on_two_file_systems_is_judged_apart() -> None:
    disk, docker = store.Volume("/m", 70 * GIB, 1), store.Volume("/d", 5 * GIB, 2)
    problems = store.disk_problems(disk, docker, 11 * GIB, 30 * GIB, 0)
    assert len(problems) == 1
    assert problems[0].startswith("/d has 5.0 GiB free")


def test_what_is_there_already_counts() -> None:
    disk = store.Volume("/m", 35 * GIB, 1)
    assert store.disk_problems(disk, disk, 0, 30 * GIB, 30 * GIB) == []
    assert store.disk_problems(disk, disk, 0, 30 * GIB, 10 * GIB) != []
    assert store.disk_problems(disk, disk, 0, 30 * GIB, 500 * GIB) == []


def test_image_that_docker_has(tmp_path: Path) -> None:
    index = tmp_path / "image" / "overlay2"
    index.mkdir(parents=True)
    (index / "repositories.json").write_text('{"Repositories": {"r/a": {"r/a@sha256:1": "sha256:2"}}}')
    assert store.image_present(str(tmp_path), "r/a@sha256:1")
    assert not store.image_present(str(tmp_path), "r/a@sha256:9")
    assert not store.image_present(str(tmp_path / "none"), "r/a@sha256:1")


# -- faults of a folder (case I23) --------------------------------------------------------------------------------


def test_whole_folder_has_no_fault(tmp_path: Path) -> None:
    assert faults.folder_faults(str(model_folder(tmp_path / "m"))) == []


def test_cache_with_one_of_two_shards_and_an_unfinished_blob(tmp_path: Path) -> None:
    cache = tmp_path / "models--o--m"
    snapshot = model_folder(cache / "snapshots" / "abc")
    (cache / "blobs").mkdir()
    (snapshot / SHARDS[1]).unlink()
    (cache / "blobs" / "0123.incomplete").write_bytes(b"x")
    resolved = faults.resolve_cache(str(cache))
    assert resolved == str(snapshot)
    assert faults.folder_faults(resolved) == [
        "blobs/0123.incomplete is an unfinished download",
        f"model.safetensors.index.json lists 2 shards, missing: {SHARDS[1]}",
    ]


def test_cache_with_several_snapshots_must_be_told_which(tmp_path: Path) -> None:
    for commit in ("abc", "def"):
        model_folder(tmp_path / "c" / "snapshots" / commit)
    (tmp_path / "c" / "blobs").mkdir()
    assert faults.resolve_cache(str(tmp_path / "c"), "def").endswith("def")
    with pytest.raises(ValueError, match="abc, def"):
        faults.resolve_cache(str(tmp_path / "c"))


def test_overwritten_blob_is_larger_than_its_header_says(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    with open(folder / SHARDS[0], "ab") as stream:
        stream.write(b"more")
    size = (folder / SHARDS[0]).stat().st_size
    assert faults.folder_faults(str(folder)) == [f"{SHARDS[0]} has {size} bytes, its own header says {size - 4}"]


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{]"])
def test_things_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / SHARDS[0]).write_bytes(content)
    assert len(faults.folder_faults(str(folder))) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'])
def test_things_that_are_no_index(tmp_path: Path, text: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    assert "is not a weight index" in faults.folder_faults(str(folder))[0]


def test_folder_without_weights_is_only_for_those_who_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "there are no weights" in faults.folder_faults(str(folder))[0]
    assert faults.folder_faults(str(folder), require_weights=False) == []
    (folder / "config.json").unlink()
    assert "not a model folder" in faults.folder_faults(str(folder), require_weights=False)[0]


def test_link_to_nothing_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to("../../blobs/gone")
    assert f"{SHARDS[0]} is a link to nothing, or not a file" in faults.folder_faults(str(folder))
    with pytest.raises(store.StoreError, match="link to nothing"):
        store.list_source(str(folder))
