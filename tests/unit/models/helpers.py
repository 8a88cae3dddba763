# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Small model folders that are right, and the means to break them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def safetensors(values: bytes) -> bytes:
    """Return a safetensors file with one tensor of bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}).encode()
    return struct.pack("<Q", len(header)) + header + values


def model_folder(folder: Path, size: int = 4096) -> Path:
    """Make a complete model of two shards at ``folder``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    for number, name in enumerate(SHARDS):
        (folder / name).write_bytes(safetensors(bytes([number + 1]) * size))
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte and put the modification time back, as a disk or a careless person would."""
    info = os.stat(path)
    path.chmod(0o644)
    with open(path, "r+b") as stream:
        stream.seek(offset)
        old = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([old[0] ^ 0xFF]))
    path.chmod(0o444)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
