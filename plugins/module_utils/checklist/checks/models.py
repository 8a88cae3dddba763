# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Model files against their manifest, and against their own index."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    by_one,
    content_of,
    not_read,
    part,
    worst,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import Finding, check, not_applicable
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts, Model, ModelFile
from ansible_collections.metal.serve.plugins.module_utils.models.faults import unfinished
from ansible_collections.metal.serve.plugins.module_utils.models.manifest import content_digest

STAT = ("size", "mtime_ns", "ctime_ns", "inode")


@check(
    "model.manifest",
    title="Model files are those that arrived",
    severity="critical",
    applies_to=("engine",),
    why="an overwritten, cut-off or half downloaded file gives garbage while health is green; size, times and inode show that "
    "a file was touched, SHA-256 (policy model_deep) whether its content changed",
    remedy="a revision is never edited: take the node out, remove the revision and its manifest, and let it arrive again "
    "(site.yml --tags models brings what is missing and stops at what differs)",
    source="reports: a blob of 7.1 GB under the name of one of 3.1 GB; an interrupted download reused",
)
def model_manifest(facts: HostFacts, policy: Policy) -> Finding:
    if facts.metalserve.models is None:
        return not_read(facts, "models")
    served = {
        (str(model.get("name")), str(model.get("revision")))
        for model in (part(content_of(engine), "model") for engine in facts.metalserve.engines or [])
        if model
    }
    # What is still arriving is nobody's to serve.
    models = [one for one in facts.metalserve.models if not one.revision.endswith(".partial")]
    missing = sorted(served - {(one.name, one.revision) for one in models})
    if not models and not missing:
        return not_applicable("no model on this host")

    def one(model: Model) -> Optional[tuple[str, str]]:
        wrong, dark = faults(model, (model.name, model.revision) in served, bool(policy["model_deep"]))
        said = "; ".join((wrong or dark)[:4]) + (" ..." if len(wrong or dark) > 4 else "")
        return (("fail" if wrong else "unknown"), f"{model.name}/{model.revision}: {said}") if said else None

    failures, warnings, unknowns = by_one(models, one)
    failures += [f"{name}/{revision}: an engine serves it, and it is not there" for name, revision in missing]
    shown = [f"{one.name}/{one.revision}: {len(one.files or [])} files" for one in models]
    return worst((failures, warnings, unknowns), "as in the manifest", shown)


def faults(model: Model, served: bool, deep: bool) -> tuple[list[str], list[str]]:
    """Return what is wrong with one revision, and what could not be seen of it."""
    if model.manifest_error is not None:
        return [f"its manifest cannot be read: {model.manifest_error}"], []
    if model.files is None:
        return [], ["its files were not listed"]
    wrong = unfinished(file.path for file in model.files)
    wrong += [f"{file.path} is a link to nothing" for file in model.files if file.size is None]
    names = {file.path for file in model.files} | {os.path.basename(file.path) for file in model.files}
    gone = [name for name in model.index_files or [] if name not in names]
    if gone:
        wrong.append(f"its index lists {len(model.index_files or [])} shards, missing: {', '.join(gone[:4])}")
    entries = (model.manifest or {}).get("files")
    if model.manifest is None:
        unsealed = "it has no manifest: it was never sealed"
        return ([*wrong, unsealed], []) if served else (wrong, [unsealed])
    known = (
        {one["path"]: one for one in entries if isinstance(one, Mapping) and isinstance(one.get("path"), str)}
        if (isinstance(entries, list))
        else {}
    )
    if not known:
        return [*wrong, "its manifest lists no files"], []
    if model.manifest.get("digest") not in (None, _digest(known)):
        wrong.append("the manifest's digest is not that of its own list: somebody edited it")
    more, dark = _compared(model, known, deep)
    return wrong + more, dark


def _compared(model: Model, known: Mapping[str, Mapping[str, Any]], deep: bool) -> tuple[list[str], list[str]]:
    files = {file.path: file for file in model.files or []}
    wrong = [f"{path} is missing" for path in sorted(known.keys() - files.keys())]
    wrong += [f"{path} is not in the manifest" for path in sorted(files.keys() - known.keys())]
    dark = []
    for path in sorted(known.keys() & files.keys()):
        entry, file, hashed = known[path], files[path], (model.file_sha256 or {}).get(path)
        if file.size is not None and file.size != entry.get("size"):
            wrong.append(f"{path} has {file.size} bytes, its manifest says {entry.get('size')}")
        elif hashed is not None:
            if hashed != entry.get("sha256"):
                wrong.append(f"{path}: its content changed")
        elif deep:
            dark.append(f"{path} was not hashed (policy model_deep)")
        elif not _untouched(file, entry):
            dark.append(f"{path} was touched since it was hashed, or its times are not known (policy model_deep tells)")
    return wrong, dark


def _untouched(file: ModelFile, entry: Mapping[str, Any]) -> bool:
    """Tell whether size, times and inode are those at hashing: then nobody wrote to the file."""
    return all(getattr(file, name) is not None and getattr(file, name) == entry.get(name) for name in STAT)


def _digest(known: Mapping[str, Mapping[str, Any]]) -> Optional[str]:
    try:
        return content_digest((path, int(one["size"]), str(one["sha256"])) for path, one in known.items())
    except (KeyError, TypeError, ValueError):
        return None
