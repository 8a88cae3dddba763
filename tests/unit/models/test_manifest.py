# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A sealed model is compared by stat and hashed where that differs; nothing that changed passes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.models import manifest

from .helpers import SHARDS, flip_byte, model_folder


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, manifest.Manifest]:
    folder = model_folder(tmp_path / "m")
    return folder, manifest.build(str(folder), "m", "r1")


def test_untouched_folder_is_not_read_again(sealed: tuple[Path, manifest.Manifest]) -> None:
    folder, found = sealed
    result = manifest.verify(str(folder), found)
    assert result == manifest.Verification((), (), None)


def test_deep_reads_every_file(sealed: tuple[Path, manifest.Manifest]) -> None:
    folder, found = sealed
    assert len(manifest.verify(str(folder), found, deep=True).hashed) == len(found.files)


def test_flipped_byte_with_restored_mtime_is_found(sealed: tuple[Path, manifest.Manifest]) -> None:
    folder, found = sealed
    flip_byte(folder / SHARDS[0], 200)
    info, entry = os.stat(folder / SHARDS[0]), next(e for e in found.files if e.path == SHARDS[0])
    assert (info.st_size, info.st_mtime_ns, info.st_ino) == (entry.size, entry.mtime_ns, entry.inode)
    result = manifest.verify(str(folder), found)
    assert result.hashed == (SHARDS[0],)
    assert len(result.problems) == 1
    assert result.problems[0].startswith(f"{SHARDS[0]}: its content changed")


def test_touched_file_is_hashed_once_and_remembered(sealed: tuple[Path, manifest.Manifest]) -> None:
    folder, found = sealed
    os.utime(folder / "config.json")
    first = manifest.verify(str(folder), found)
    assert first.problems == ()
    assert first.hashed == ("config.json",)
    assert first.refreshed is not None
    assert first.refreshed.digest == found.digest
    assert manifest.verify(str(folder), first.refreshed).hashed == ()


def test_missing_extra_and_shortened_files_are_named(sealed: tuple[Path, manifest.Manifest]) -> None:
    folder, found = sealed
    (folder / "tokenizer.json").unlink()
    (folder / "new.txt").write_text("x")
    with open(folder / SHARDS[1], "r+b") as stream:
        stream.truncate(10)
    problems = manifest.verify(str(folder), found).problems
    size = next(e.size for e in found.files if e.path == SHARDS[1])
    assert "tokenizer.json is missing" in problems
    assert "new.txt is not in the manifest" in problems
    assert f"{SHARDS[1]} has 10 bytes, its manifest says {size}" in problems


def test_nothing_is_refreshed_beside_a_problem(sealed: tuple[Path, manifest.Manifest]) -> None:
    folder, found = sealed
    os.utime(folder / "config.json")
    (folder / "tokenizer.json").unlink()
    assert manifest.verify(str(folder), found).refreshed is None


def test_folder_that_went_away(sealed: tuple[Path, manifest.Manifest], tmp_path: Path) -> None:
    assert "does not exist" in manifest.verify(str(tmp_path / "gone"), sealed[1]).problems[0]


def test_digest_knows_content_alone(tmp_path: Path) -> None:
    one = manifest.build(str(model_folder(tmp_path / "a")), "m", "r1")
    two = manifest.build(str(model_folder(tmp_path / "b")), "m", "r2")
    assert one.digest == two.digest
    flip_byte(tmp_path / "b" / SHARDS[0], 300)
    assert manifest.build(str(tmp_path / "b"), "m", "r1").digest != one.digest


def test_round_trip_on_disk(sealed: tuple[Path, manifest.Manifest], tmp_path: Path) -> None:
    path = str(tmp_path / "r1.manifest.json")
    manifest.save(path, sealed[1])
    assert manifest.load(path) == sealed[1]
    keys = set(json.loads(Path(path).read_text())["files"][0])
    assert keys == {"path", "size", "sha256", "mtime_ns", "ctime_ns", "inode"}
    assert manifest.load(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": []}, "lists no files"),
        ({"digest": "0" * 64}, "somebody edited it"),
        ({"files": [{"path": "../x", "size": 1, "sha256": "0" * 64}]}, "not a path below"),
        ({"files": [{"path": "x", "size": True, "sha256": "0" * 64}]}, "no whole number as size"),
        ({"files": [{"path": "x", "size": 1, "sha256": "00"}]}, "no sha256"),
        ({"files": ["x"]}, "not a file entry"),
    ],
)
def test_malformed_manifest(sealed: tuple[Path, manifest.Manifest], change: dict[str, object], words: str) -> None:
    data = {**json.loads(manifest.to_json(sealed[1])), **change}
    with pytest.raises(manifest.ManifestError, match=words) as caught:
        manifest.from_json(json.dumps(data), "/m/r1.manifest.json")
    assert "/m/r1.manifest.json" in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_a_manifest_or_a_clear_error(text: str) -> None:
    with pytest.raises(manifest.ManifestError):
        manifest.from_json(text, "x")


@given(st.lists(st.tuples(st.text(min_size=1), st.integers(0), st.sampled_from(["a" * 64, "b" * 64])), max_size=8))
def test_digest_does_not_depend_on_order(files: list[tuple[str, int, str]]) -> None:
    assert manifest.content_digest(files) == manifest.content_digest(reversed(files))
