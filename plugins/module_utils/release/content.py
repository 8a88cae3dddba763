# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What a release is: one hash over everything that decides what an engine does, and what two releases differ in."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.files import sha256_text
from ansible_collections.metal.serve.plugins.module_utils.engines.base import RELEASE, image_digest

SHORT = 12
_HIDDEN = "(hidden)"


def significant(text: str) -> str:
    """Return ``text`` without comment lines and empty ones: a reworded explanation is no other release."""
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def fingerprint(secret: str, salt: str) -> str:
    """Return 16 hexadecimal digits that tell whether a secret changed, and no more (salted with the replica's
    name).
    """
    if not secret:
        return ""
    return hmac.new(f"metalserve {salt}".encode(), secret.encode("utf-8"), hashlib.sha256).hexdigest()[:16]


def content(
    spec: Mapping[str, Any], files: Mapping[str, str], model_digest: str, secrets: Mapping[str, str]
) -> dict[str, Any]:
    """Return everything the release's hash covers, as plain JSON values.

    ``spec`` is an engine's Spec as a dict, ``files`` the rendered texts by name, ``model_digest`` the digest of
    the model's manifest, ``secrets`` the secret values by name (fingerprints of them go in, never they
    themselves).
    """
    return {
        "engine": {"kind": spec["kind"], "version": spec["version"]},
        "image": {"digest": image_digest(str(spec["image"])), "name": str(spec["image"]).rsplit("@", 1)[0]},
        "model": {
            "name": spec["model"],
            "revision": spec["revision"],
            "digest": model_digest,
            "path": spec["model_path"],
        },
        "gpus": list(spec["gpus"]),
        "settings": {str(option["name"]).replace("-", "_"): option["value"] for option in spec["options"]},
        "environment": dict(spec["environment"]),
        "command": list(spec["command"]),
        "mounts": [
            f"{mount['source']}:{mount['target']}:{'ro' if mount['read_only'] else 'rw'}" for mount in spec["mounts"]
        ],
        "container": {key: value for key, value in spec["container"].items() if key != "labels"},
        "unit": dict(spec["unit"]),
        "files": {name: sha256_text(significant(text)) for name, text in sorted(files.items())},
        "secrets": {name: fingerprint(value, str(spec["replica"])) for name, value in sorted(secrets.items())},
    }


def release_hash(values: Mapping[str, Any]) -> str:
    """Return the hex SHA-256 over a release's content. The image's name is left out: a mirror serves the same
    bytes.
    """
    counted = {**values, "image": {"digest": values["image"]["digest"]}}
    return hashlib.sha256(
        json.dumps(counted, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    ).hexdigest()


def container_name(replica: str, release: str) -> str:
    """Return the container's name: ``metalserve-<replica>-<first 12 digits of the hash>``."""
    return f"metalserve-{replica}-{release[:SHORT]}"


def placed(value: str, folder: str) -> str:
    """Return a mount's source with the release's folder in its place."""
    return value.replace(RELEASE, folder)


def compare(current: Mapping[str, Any], desired: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ``[{name, current, desired}]``, one entry per dotted key that differs, sorted; empty when nothing does.

    Rendered files count only where no option explains them, and fingerprints of secrets are not shown.
    """
    left, right = flatten(current), flatten(desired)
    names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    explained = any(not name.startswith("files.") for name in names)
    found = []
    for name in names:
        if name.startswith("files.") and explained:
            continue
        if name == "image.name" and left.get("image.digest") == right.get("image.digest"):
            continue
        found.append({"name": name, "current": _shown(name, left.get(name)), "desired": _shown(name, right.get(name))})
    return found


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def _shown(name: str, value: Any) -> Any:
    if name.startswith("secrets.") and value:
        return _HIDDEN
    if name.startswith(("files.", "model.digest", "image.digest")) and isinstance(value, str):
        return value[:SHORT]
    return value


def difference_line(item: Mapping[str, Any]) -> str:
    """Return ``key: current -> desired`` for people."""

    def text(value: Any) -> str:
        return "(not set)" if value is None else value if isinstance(value, str) else json.dumps(value)

    if item["current"] == item["desired"] == _HIDDEN:
        return f"{item['name']}: changed"
    return f"{item['name']}: {text(item['current'])} -> {text(item['desired'])}"
