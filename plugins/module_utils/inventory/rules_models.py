# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Models, images and containers of the pools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, format_size, parse_size
from ansible_collections.metal.serve.plugins.module_utils.inventory import knobs, values
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import WARNING
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import COMMIT
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import did_you_mean, listed, show
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    View,
    at,
    text,
    whole,
)

SMALLEST_ENGINE = GIB // 2
"""Bytes; an engine's Python alone takes more, so less is a forgotten unit (``memory: 88``)."""

FIND_DIGEST = "docker pull {image} && docker inspect --format '{{{{ index .RepoDigests 0 }}}}' {image}"


def models(view: View) -> None:
    """Pools name models that exist; revisions cannot change under their name."""
    setting = view.setting("metalserve_pools")
    for pool, spec in view.pools.items():
        model = text(spec.get("model"))
        if model and view.wide("metalserve_models") is not None and model not in view.models:
            view.add_at(
                setting,
                (pool, "model"),
                "is not a key of metalserve_models",
                did_you_mean(model, view.models, f"models are {listed(view.models, 'and') or 'none'}"),
            )
    used = {text(spec.get("model")) for spec in view.pools.values()}
    for name, spec in view.models.items():
        where = view.setting("metalserve_models")
        if name not in used and view.pools:
            view.add_at(where, (name,), "is used by no pool", "name it in a pool, or remove it", "", WARNING)
        revision = text(spec.get("revision")).lower()
        path, kind = text(at(spec, ("source", "path"))), at(spec, ("source", "type"))
        if revision in ("latest", "main", "master", "head", "current", "stable"):
            view.add_at(
                where,
                (name, "revision"),
                "names what can change, so nodes may differ and a rollback may not be one",
                "write what never changes: a commit, a date or a version",
                severity=WARNING,
            )
        if revision.endswith((".partial", ".manifest.json")):
            view.add_at(where, (name, "revision"), "ends like a file beside it", "choose another ending")
        if kind == "huggingface" and revision and "commit" not in spec["source"] and not re.fullmatch(COMMIT, revision):
            view.add_at(
                where,
                (name, "source", "commit"),
                f"is missing, and the revision ({show(spec['revision'])}) is no commit: all else in a repository moves",
                "write the 40 hexadecimal digits of the commit that you tested, here or as revision",
                "",
            )
        here = kind in ("local", "archive", "rsync") and path.startswith("/")
        if here and view.exists is not None and not view.exists(path):
            view.add_at(
                where,
                (name, "source", "path"),
                "does not exist on this machine",
                "write the path of what is to be copied from here to the nodes",
                severity=view.lenient(),
            )


def calibrations(view: View) -> None:
    """The files that scripts/plan --calibrate wrote are there."""
    for pool, spec in view.pools.items():
        path = text(spec.get("calibration"))
        if path.startswith("/") and view.exists is not None and not view.exists(path):
            view.add_at(
                view.setting("metalserve_pools"),
                (pool, "calibration"),
                "does not exist on this machine",
                "write the path of what scripts/plan --calibrate wrote, or remove the line",
                severity=view.lenient(),
            )


FIRST_CONTAINER = 18
"""Triton's images are called after year and month since 18.xx; no vLLM has such a version."""


def images(view: View) -> None:
    """Images are named by digest, and look like the engine that they are for."""
    setting = view.setting("metalserve_pools")
    versions: dict[str, tuple[str, str, str]] = {}
    for pool, spec in view.pools.items():
        image = text(spec.get("image")).strip()
        if not image:
            continue
        judged = judge_image(image)
        if judged is not None:
            view.add_at(setting, (pool, "image"), judged[0], judged[1])
            continue
        engine, version = text(spec.get("engine")), text(spec.get("engine_version"))
        first = versions.setdefault(image, (pool, engine, version))
        if version and first[2] and version != first[2] and engine == first[1]:
            view.add_at(
                setting,
                (pool, "engine_version"),
                f"differs from {first[2]} of the pool {first[0]}, which has the same image",
                "write the version that the image really holds in both",
            )
        major = version.partition(".")[0]
        if engine == "triton_vllm" and major.isascii() and major.isdigit() and int(major) >= FIRST_CONTAINER:
            view.add_at(
                setting,
                (pool, "engine_version"),
                "is a version of Triton's image, not of the vLLM in it",
                'write what python3 -c "import vllm; print(vllm.__version__)" says in the image',
            )
        other = {"vllm": "sglang", "sglang": "vllm"}.get(engine, "")
        if other and other in image.lower() and engine not in image.lower():
            view.add_at(
                setting,
                (pool, "image"),
                f"looks like an image of {other}, but the engine is {engine}",
                "check engine and image",
                severity=WARNING,
            )


def judge_image(image: str) -> tuple[str, str] | None:
    """Return (problem, what is right) for an image that is not named by digest, or None. Any tag alone is refused."""
    if re.search(r"\s|://", image):
        return "is not the name of an image", "write registry/name@sha256:<64 hexadecimal digits>, without a scheme"
    name, has_digest, digest = image.partition("@")
    base, _unused, tag = name.rpartition(":") if ":" in name.rsplit("/", 1)[-1] else (name, "", "")
    form = f"write {base or name}@sha256:<64 hexadecimal digits>"
    if has_digest:
        if re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            return None
        return (
            "has a digest that is not sha256: and 64 hexadecimal digits",
            f"{form}; find it with:\n{FIND_DIGEST.format(image=name)}",
        )
    find = f"{form}; find it with:\n{FIND_DIGEST.format(image=image)}"
    if not tag:
        return "has no digest, and without a tag it means :latest, whatever was pushed last", find
    if tag == "latest":
        return "has no digest: :latest is whatever was pushed last, so nodes may differ and there is no way back", find
    return f"has no digest: the tag {tag} can be pushed again, so nodes may differ", find


def containers(view: View) -> None:
    """Swap limit above the memory limit; shared memory for more than one GPU; environment without secrets."""
    setting = view.setting("metalserve_pools")
    for pool, spec in view.pools.items():
        container = spec.get("container")
        if isinstance(container, Mapping):
            memory, swap, shm = (_size(container.get(name)) for name in ("memory", "memory_swap", "shm"))
            if swap is not None and "memory" not in container:
                view.add_at(
                    setting,
                    (pool, "container", "memory"),
                    "is missing, but memory_swap is given",
                    "give both: memory_swap is memory plus swap",
                    "",
                )
            elif memory is not None and swap is not None and swap < memory:
                view.add_at(
                    setting,
                    (pool, "container", "memory_swap"),
                    f"is below memory ({show(container['memory'])}): it is memory plus swap, not swap alone",
                    f"write at least {show(container['memory'])}; the same means no swap",
                )
            if memory is not None and 0 < memory < SMALLEST_ENGINE:
                view.add_at(
                    setting,
                    (pool, "container", "memory"),
                    f"is only {format_size(memory)}: no engine starts in that",
                    "write a size with its unit, such as 88G",
                )
            if shm is not None and memory is not None and shm > memory:
                view.add_at(
                    setting,
                    (pool, "container", "shm"),
                    f"is more than memory ({show(container['memory'])}), which it counts towards",
                    "write less than memory",
                )
            several = (whole(spec.get("tensor_parallel"), 1) or 1) * (whole(spec.get("pipeline_parallel"), 1) or 1) > 1
            if shm is not None and several and shm < GIB:
                view.add_at(
                    setting,
                    (pool, "container", "shm"),
                    f"is only {format_size(shm)} for a replica with several GPUs, which talk through it",
                    "write at least 1G",
                )
        env = spec.get("env")
        for name, value in env.items() if isinstance(env, Mapping) else ():
            if not isinstance(name, str):
                continue
            if name in knobs.OWNED_ENV:
                view.add_at(
                    setting,
                    (pool, "env", name),
                    f"is not yours to set: {knobs.OWNED_ENV[name]}",
                    "remove it",
                    values.SECRET if knobs.SECRET_NAME.search(name) else None,
                )
            elif knobs.plain(name) in knobs.KNOBS:
                knob = knobs.KNOBS[knobs.plain(name)]
                view.add_at(setting, (pool, "env", name), knob.why, knob.right())
            elif knobs.SECRET_NAME.search(name) and text(value):
                view.add_at(
                    setting,
                    (pool, "env", name),
                    "looks like a secret, and everybody who may run docker inspect can read it here",
                    "take it out of env",
                    values.SECRET,
                )


def _size(value: Any) -> int | None:
    try:
        return parse_size(value)
    except ValueError:
        return None
