# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Archives are unpacked without trusting the names in them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Literal

import pytest

from ansible_collections.metal.serve.plugins.module_utils.models import archive, store

from .helpers import model_folder


@pytest.mark.parametrize("top", ["", "deep/"])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_unpacks_with_and_without_a_top_folder(tmp_path: Path, top: str, mode: Literal["w", "w:gz"]) -> None:
    source = model_folder(tmp_path / "s")
    path = str(tmp_path / "m.tar")
    with tarfile.open(path, mode) as packed:
        for item in store.list_source(str(source)):
            packed.add(source / item.path, f"{top}{item.path}")
    expected = store.hashed_source(str(source))
    assert sorted(archive.list_archive(path, hashed=True), key=lambda item: item.path) == expected
    assert sorted(archive.unpack(path, str(tmp_path / "out")), key=lambda item: item.path) == expected
    assert store.hashed_source(str(tmp_path / "out")) == expected


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../evil"])
def test_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "m.tar")
    with tarfile.open(path, "w") as packed:
        info = tarfile.TarInfo(name)
        info.size = 1
        packed.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(store.StoreError, match="points outside"):
        archive.unpack(path, str(tmp_path / "out"))
    assert not (tmp_path / "evil").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "m.tar")
    with tarfile.open(path, "w") as packed:
        info = tarfile.TarInfo("weights")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(info)
    with pytest.raises(store.StoreError, match="link or a device"):
        archive.list_archive(path)


def test_cut_off_and_foreign_files(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "s", size=100_000)
    path = tmp_path / "m.tar"
    with tarfile.open(path, "w") as packed:
        packed.add(source, "m")
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(store.StoreError, match="cannot be read to its end"):
        archive.unpack(str(path), str(tmp_path / "out"))
    path.write_text("no tar")
    with pytest.raises(store.StoreError, match="not a tar archive"):
        archive.list_archive(str(path))
