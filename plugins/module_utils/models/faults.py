# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Faults that a model folder can have before anyone hashed it: unfinished downloads, missing shards, cut-off files."""

from __future__ import annotations

import fnmatch
import json
import os
import struct
from collections.abc import Iterable

from ansible_collections.metal.serve.plugins.module_utils.models.manifest import walk_files

UNFINISHED = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download", ".tmp")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_DESCRIPTIONS = ("config.json", "params.json", "config.pbtxt")
_HEADER_LIMIT = 100 * 1024 * 1024


def folder_faults(folder: str, require_weights: bool = True) -> list[str]:
    """Return what is wrong with the model folder, a sentence each, naming files; empty when nothing is.

    ``require_weights`` False accepts a folder of config and tokenizer alone (engines that load dummy weights).
    Raises OSError where the folder itself cannot be read.
    """
    paths = walk_files(folder)
    faults = unfinished(paths) + cache_faults(folder)
    names = {os.path.basename(path) for path in paths}
    if not names.intersection(_DESCRIPTIONS) and not any(fnmatch.fnmatch(name, "*.gguf") for name in names):
        faults.append("there is no config.json: this is not a model folder")
    if require_weights and not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in WEIGHTS):
        faults.append(f"there are no weights ({', '.join(WEIGHTS)})")
    for path in paths:
        full = os.path.join(folder, path)
        if not os.path.isfile(full):
            faults.append(f"{path} is a link to nothing, or not a file")
        elif path.endswith(".index.json"):
            faults.extend(index_faults(path, full, paths))
        elif path.endswith(".safetensors"):
            fault = safetensors_fault(path, full)
            if fault:
                faults.append(fault)
    return faults


def unfinished(paths: Iterable[str]) -> list[str]:
    """Return a fault per path whose name says that a download did not end."""
    return [f"{path} is an unfinished download" for path in paths if path.endswith(UNFINISHED)]


def index_faults(path: str, full: str, present: Iterable[str]) -> list[str]:
    """Return a fault for the shards that the index at ``path`` lists and ``present`` lacks, or for a broken index."""
    try:
        with open(full, encoding="utf-8") as stream:
            data = json.load(stream)
        shards = set(data["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{path} is not a weight index ({type(error).__name__})"]
    if not all(isinstance(shard, str) for shard in shards):
        return [f"{path} is not a weight index (a shard is not a file name)"]
    folder = os.path.dirname(path)
    have = set(present)
    missing = sorted(shard for shard in shards if os.path.join(folder, shard) not in have)
    if not missing:
        return []
    return [f"{path} lists {len(shards)} shards, missing: {', '.join(missing)}"]


def safetensors_fault(path: str, full: str) -> str | None:
    """Return a fault when the file is shorter or longer than its own header says; None when it fits.

    The format: 8 bytes little-endian header length, JSON header with ``data_offsets`` per tensor, then the data.
    """
    size = os.path.getsize(full)
    try:
        with open(full, "rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > min(size, _HEADER_LIMIT):
                return f"{path} is cut off or not a safetensors file: {size} bytes, header of {length}"
            header = json.loads(stream.read(length))
        ends = [item["data_offsets"][1] for key, item in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError):
        return f"{path} has no readable safetensors header"
    if size != expected:
        return f"{path} has {size} bytes, its own header says {expected}"
    return None


def cache_faults(folder: str) -> list[str]:
    """Return faults of a Hugging Face cache around ``folder`` (``…/snapshots/<commit>`` with ``…/blobs`` beside
    it).
    """
    blobs = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(folder))), "blobs")
    if os.path.basename(os.path.dirname(os.path.abspath(folder))) != "snapshots" or not os.path.isdir(blobs):
        return []
    return [f"blobs/{fault}" for fault in unfinished(sorted(os.listdir(blobs)))]


def resolve_cache(folder: str, commit: str = "") -> str:
    """Return the snapshot to read where ``folder`` is a Hugging Face cache entry (``models--…``), else ``folder``.

    Raises ValueError where the cache holds several snapshots and ``commit`` names none of them.
    """
    snapshots = os.path.join(folder, "snapshots")
    if not os.path.isdir(snapshots) or not os.path.isdir(os.path.join(folder, "blobs")):
        return folder
    found = sorted(os.listdir(snapshots))
    if commit in found:
        return os.path.join(snapshots, commit)
    if len(found) == 1 and not commit:
        return os.path.join(snapshots, found[0])
    raise ValueError(
        f"{folder} is a download cache with the snapshots {', '.join(found) or '(none)'}; "
        f"name one of them as commit{f', not {commit}' if commit else ''}"
    )
