#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Put, seal and check the files of a model on a node
version_added: 0.1.0
description:
  - A model lies in C(<root>/models/<name>/<revision>/), read-only, with C(<revision>.manifest.json) beside it.
  - It arrives in C(<revision>.partial). Only a complete, hashed folder gets its name and its manifest, so that an
    interrupted transfer is continued or begun again, and never served.
  - A sealed revision is compared with its manifest by size, mtime, ctime and inode; only a file that differs is
    hashed again.
options:
  root:
    description: Folder of everything this bundle keeps on a node.
    type: path
    default: /var/lib/metalserve
  name:
    description: The model's name, also its folder.
    type: str
    required: true
  revision:
    description: The revision's folder name. A sealed revision is never edited.
    type: str
    required: true
  state:
    description:
      - V(checked) compares the sealed folder with its manifest and fails when they differ. A model that is not
        there is no failure.
      - V(listed) reads a source folder or archive on this machine and returns its files with their hashes. It
        writes nothing but I(cache).
      - V(receiving) checks the disk and makes the folder that a push from the controller fills.
      - V(sealed) checks, hashes, protects and names what was pushed.
      - V(present) fetches the model from O(source_type) on this node and seals it.
    type: str
    choices: [checked, listed, receiving, sealed, present]
    required: true
  source_type:
    description: Where the model comes from.
    type: str
    choices: [local, archive, rsync, shared, huggingface]
    default: local
  path:
    description: Source folder or archive on the machine that runs the module.
    type: path
    default: ''
  url:
    description: >-
      Address of an archive (http, https), or what rsync reads (C(rsync://host/module/path) or
      C(user@host:/path)).
    type: str
    default: ''
  repo:
    description: Repository of a hub, C(owner/name).
    type: str
    default: ''
  commit:
    description: The 40 hexadecimal digits of the commit; for a download cache as a source, the snapshot to read.
    type: str
    default: ''
  endpoint:
    description: Address of the hub.
    type: str
    default: https://huggingface.co
  token:
    description: Token for the hub.
    type: str
    default: ''
  sha256:
    description: Content hash of the archive; empty skips that comparison.
    type: str
    default: ''
  in_place:
    description: Use a shared folder where it is instead of copying it.
    type: bool
    default: false
  exclude:
    description: Patterns of hub files that are not fetched, beside the formats that no engine reads.
    type: list
    elements: str
    default: []
  require_weights:
    description: Refuse a model without weights.
    type: bool
    default: true
  offline:
    description: Never open a connection to another machine.
    type: bool
    default: false
  expected:
    description: Files of the source, as O(state=listed) returns them.
    type: list
    elements: dict
    default: []
  config:
    description: The model's config.json, as O(state=listed) returns it, for the result in check mode.
    type: dict
    default: {}
  cache:
    description: Folder where hashes of a source are kept for the next run.
    type: path
    default: ''
  deep:
    description: Hash every file of a sealed revision, not only those whose stat differs.
    type: bool
    default: false
  images:
    description: Engine images that this node will pull, C(name@sha256:…).
    type: list
    elements: str
    default: []
  image_bytes:
    description: Estimated size in bytes of one image on the disk.
    type: int
    default: 0
  docker_root:
    description: Docker's data folder.
    type: path
    default: /var/lib/docker
author: The Metalserve authors (@metalserve)
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: full
"""

EXAMPLES = r"""
- name: Fetch a model from a hub
  metal.serve.model_files:
    state: present
    name: deepseek-v2-lite
    revision: 604d5664dddd88a0433dbae533b7fe9472482de0
    source_type: huggingface
    repo: deepseek-ai/DeepSeek-V2-Lite
    commit: 604d5664dddd88a0433dbae533b7fe9472482de0
    token: "{{ vault_hub_token }}"

- name: Compare a model with its manifest
  metal.serve.model_files:
    state: checked
    name: deepseek-v2-lite
    revision: "604d5664"
"""

RETURN = r"""
model:
  description: The model as it is, or as it will be in check mode.
  returned: always
  type: dict
  contains:
    name:
      description: The model's name.
      type: str
    revision:
      description: The revision.
      type: str
    path:
      description: The sealed folder.
      type: str
    sealed:
      description: Whether the folder and its manifest are in place.
      type: bool
    digest:
      description: Hash over paths, sizes and contents; empty where it is not known yet.
      type: str
    total_bytes:
      description: Sum of the file sizes.
      type: int
    config:
      description: The model's config.json.
      type: dict
    files:
      description: Path, size and sha256 of each file.
      type: list
hashed:
  description: Files that were read because their stat differed, or because of O(deep).
  returned: when O(state=checked)
  type: list
  elements: str
partial:
  description: The folder that a push fills, and whether it is there.
  returned: when O(state=receiving)
  type: dict
"""

import hashlib
import json
import os
import tarfile
import urllib.parse
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.models import (
    archive,
    faults,
    manifest,
    store,
    transfer,
)
from ansible_collections.metal.serve.plugins.module_utils.models.store import Expected, Place, StoreError

_SMALL = 64 * 1024 * 1024

ARGUMENTS: dict[str, dict[str, Any]] = {
    "root": {"type": "path", "default": "/var/lib/metalserve"},
    "name": {"type": "str", "required": True},
    "revision": {"type": "str", "required": True},
    "state": {
        "type": "str",
        "required": True,
        "choices": ["checked", "listed", "receiving", "sealed", "present"],
    },
    "source_type": {
        "type": "str",
        "default": "local",
        "choices": ["local", "archive", "rsync", "shared", "huggingface"],
    },
    "path": {"type": "path", "default": ""},
    "url": {"type": "str", "default": ""},
    "repo": {"type": "str", "default": ""},
    "commit": {"type": "str", "default": ""},
    "endpoint": {"type": "str", "default": "https://huggingface.co"},
    "token": {"type": "str", "default": "", "no_log": True},
    "sha256": {"type": "str", "default": ""},
    "in_place": {"type": "bool", "default": False},
    "exclude": {"type": "list", "elements": "str", "default": []},
    "require_weights": {"type": "bool", "default": True},
    "offline": {"type": "bool", "default": False},
    "expected": {"type": "list", "elements": "dict", "default": []},
    "config": {"type": "dict", "default": {}},
    "cache": {"type": "path", "default": ""},
    "deep": {"type": "bool", "default": False},
    "images": {"type": "list", "elements": "str", "default": []},
    "image_bytes": {"type": "int", "default": 0},
    "docker_root": {"type": "path", "default": "/var/lib/docker"},
}


class Run:
    """One call of the module: the place it works on, its parameters, and what it found."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.place = Place(self.p["root"], self.p["name"], self.p["revision"])
        self.http = transfer.Http(token=self.p["token"])

    # -- results ---------------------------------------------------------------------------------------------------

    def described(
        self, files: list[Expected], config: dict[str, Any], sealed: bool, digest: str = ""
    ) -> dict[str, Any]:
        """Return the ``model`` of the result."""
        return {
            "name": self.place.name,
            "revision": self.place.revision,
            "path": self.place.final,
            "sealed": sealed,
            "digest": digest or store.expected_digest(files),
            "total_bytes": sum(item.size for item in files),
            "config": config,
            "files": [{"path": item.path, "size": item.size, "sha256": item.sha256} for item in files],
        }

    def sealed_model(self, sealed: manifest.Manifest) -> dict[str, Any]:
        """Return the ``model`` of a sealed revision."""
        files = [Expected(entry.path, entry.size, entry.sha256) for entry in sealed.files]
        return self.described(files, store.read_config(self.place.final), True, sealed.digest)

    def arrival_diff(self, files: list[Expected]) -> dict[str, str]:
        """Return the diff that names every file of an arriving model."""
        lines = [f"{self.place.final}/{item.path} {item.size} bytes\n" for item in files]
        if self.p["in_place"]:
            lines = [f"{self.place.final} -> {self.p['path']}\n"]
        return {
            "before_header": self.place.final,
            "after_header": self.place.final,
            "before": "",
            "after": "".join([*lines, f"{self.place.manifest}\n"]),
        }

    # -- states ----------------------------------------------------------------------------------------------------

    def checked(self) -> dict[str, Any]:
        """Compare the sealed revision with its manifest."""
        sealed = manifest.load(self.place.manifest)
        if sealed is None:
            return {"changed": False, "model": self.described([], {}, False), "hashed": []}
        found = manifest.verify(self.place.final, sealed, deep=self.p["deep"])
        if found.problems:
            raise StoreError(
                f"{self.place.final} is not what arrived: {'; '.join(found.problems)}. "
                f"It is not served. Move the folder and its manifest away and run again to have it put there anew"
            )
        if found.refreshed is not None and not self.module.check_mode:
            manifest.save(self.place.manifest, found.refreshed)
        return {
            "changed": found.refreshed is not None,
            "model": self.sealed_model(sealed),
            "hashed": list(found.hashed),
        }

    def listed(self) -> dict[str, Any]:
        """List a source folder or archive on this machine, with hashes."""
        path = self.p["path"]
        if self.p["source_type"] == "archive":
            if not os.path.isfile(path):
                raise StoreError(f"source.path {path!r} of model {self.place.name} is not a file on this machine")
            self._check_archive(path)
            files = archive.list_archive(path, hashed=True)
            config = _archive_config(path)
        else:
            if not os.path.isdir(path):
                raise StoreError(f"source.path {path!r} of model {self.place.name} is not a folder on this machine")
            path = faults.resolve_cache(path, self.p["commit"])
            problems = faults.folder_faults(path, self.p["require_weights"])
            if problems:
                raise StoreError(f"{path} is not complete: {'; '.join(problems)}")
            files = store.hashed_source(path, self.p["cache"])
            config = store.read_config(path)
        return {"changed": False, "model": self.described(files, config, False), "source_path": path}

    def receiving(self) -> dict[str, Any]:
        """Check the disk and make the folder that a push fills."""
        files = self._expected()
        self._preflight(files)
        folder = self.place.partial
        there = os.path.isdir(folder)
        if not self.module.check_mode:
            store.open_partial(self.place)
            there = True
        return {
            "changed": True,
            "model": self.described(files, {}, False),
            "partial": {"path": folder, "archive": self.place.archive, "exists": there},
            "diff": self.arrival_diff(files),
        }

    def sealed(self) -> dict[str, Any]:
        """Seal what was pushed; an archive is unpacked first."""
        files = self._expected()
        if self.module.check_mode:
            return {"changed": True, "model": self.described(files, self.p["config"], False)}
        if self.p["source_type"] == "archive":
            self._unpack(self.place.archive)
        done = store.seal(self.place, files, self.p["require_weights"])
        return {"changed": True, "model": self.sealed_model(done)}

    def present(self) -> dict[str, Any]:
        """Fetch the model on this node and seal it."""
        sealed = manifest.load(self.place.manifest)
        if sealed is not None:
            return self.checked()
        fetch = {
            "huggingface": self._fetch_hub,
            "shared": self._fetch_shared,
            "archive": self._fetch_archive,
            "rsync": self._fetch_rsync,
            "local": self._fetch_shared,
        }[self.p["source_type"]]
        return fetch()

    # -- sources on the node ---------------------------------------------------------------------------------------

    def _fetch_hub(self) -> dict[str, Any]:
        self._online(self.p["endpoint"])
        endpoint, repo = self.p["endpoint"], self.p["repo"]
        commit = self.p["commit"] or self.place.revision
        patterns = [*transfer.EXCLUDE, *self.p["exclude"]]
        files = transfer.hub_tree(self.http, endpoint, repo, commit, patterns)
        self._preflight(files)
        if self.module.check_mode:
            return self._predicted(*self._hub_survey(files, endpoint, repo, commit))
        for attempt in (1, 2):
            store.open_partial(self.place)
            self._drop_strangers(files)
            transfer.hub_download(self.http, endpoint, repo, commit, files, self.place.partial)
            try:
                return self._finish(files)
            except StoreError as error:
                if attempt == 2 or "arrived damaged" not in str(error):
                    raise
        raise AssertionError("unreachable")

    def _hub_survey(
        self, files: list[Expected], endpoint: str, repo: str, commit: str
    ) -> tuple[list[Expected], dict[str, Any]]:
        """Complete the hashes of small files, so that a check can say which release the real run will write."""
        known: list[Expected] = []
        config: dict[str, Any] = {}
        for item in files:
            if item.sha256 or item.size > _SMALL:
                known.append(item)
                continue
            body = self.http.get_bytes(transfer.hub_url(endpoint, repo, commit, item.path), _SMALL)
            known.append(Expected(item.path, item.size, hashlib.sha256(body).hexdigest()))
            if item.path == "config.json":
                config = json.loads(body)
        return known, config

    def _fetch_shared(self) -> dict[str, Any]:
        path = self.p["path"]
        if not os.path.isdir(path):
            raise StoreError(f"source.path {path!r} is not a folder on this node: is the share mounted?")
        path = faults.resolve_cache(path, self.p["commit"])
        files = store.list_source(path)
        if self.p["in_place"]:
            if self.module.check_mode:
                return self._predicted(store.hashed_source(path), store.read_config(path))
            done = store.adopt(self.place, path, self.p["require_weights"])
            return {"changed": True, "model": self.sealed_model(done), "diff": self.arrival_diff(files)}
        self._preflight(files)
        if self.module.check_mode:
            return self._predicted(store.hashed_source(path), store.read_config(path))
        store.open_partial(self.place)
        self._drop_strangers(files)
        return self._finish(transfer.copy_tree(path, files, self.place.partial))

    def _fetch_archive(self) -> dict[str, Any]:
        if not self.p["url"]:
            raise StoreError(f"model {self.place.name}: an archive needs source.path")
        self._online(self.p["url"])
        if self.module.check_mode:
            return self._predicted([Expected("(what the archive holds)", 0)], {})
        store.open_partial(self.place)
        self.http.download(self.p["url"], self.place.archive, None)
        self._check_archive(self.place.archive)
        self._preflight(archive.list_archive(self.place.archive))
        return self._finish(self._unpack(self.place.archive))

    def _fetch_rsync(self) -> dict[str, Any]:
        url = self.p["url"].rstrip("/")
        if not url:
            raise StoreError(
                f"model {self.place.name}: rsync needs source.path (rsync://host/module/path or user@host:/path)"
            )
        self._online(url)
        base = [
            "rsync",
            "--recursive",
            "--times",
            "--copy-links",
            "--timeout=120",
            "--exclude=.git",
            "--exclude=.cache",
        ]
        if not url.startswith("rsync://"):
            base += ["--rsh", "ssh -o BatchMode=yes"]
        rc, out, err = self.module.run_command([*base, "--list-only", f"{url}/"])
        if rc != 0:
            raise StoreError(
                f"rsync cannot list {url}: {err.strip().splitlines()[-1] if err.strip() else f'code {rc}'}"
            )
        files = _rsync_listing(out)
        if not files:
            raise StoreError(f"{url} is empty")
        self._preflight(files)
        if self.module.check_mode:
            return self._predicted(files, {})
        store.open_partial(self.place)
        rc, _out, err = self.module.run_command(
            [*base, "--partial", "--delete", "--chmod=D755,F644", f"{url}/", f"{self.place.partial}/"]
        )
        if rc != 0:
            raise StoreError(f"rsync from {url} broke off: {err.strip().splitlines()[-1]}; run again to continue")
        return self._finish(files)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _predicted(self, files: list[Expected], config: dict[str, Any]) -> dict[str, Any]:
        return {
            "changed": True,
            "model": self.described(files, config, False),
            "diff": self.arrival_diff(files),
        }

    def _finish(self, files: list[Expected]) -> dict[str, Any]:
        done = store.seal(self.place, files, self.p["require_weights"])
        return {"changed": True, "model": self.sealed_model(done), "diff": self.arrival_diff(files)}

    def _drop_strangers(self, files: list[Expected]) -> None:
        """Remove what an earlier, interrupted arrival of another selection left."""
        wanted = {item.path for item in files}
        for path in manifest.walk_files(self.place.partial):
            if path.removesuffix(".incomplete") not in wanted:
                os.unlink(os.path.join(self.place.partial, path))

    def _unpack(self, path: str) -> list[Expected]:
        store.remove_tree(self.place.partial)
        store.open_partial(self.place)
        files = archive.unpack(path, self.place.partial)
        os.unlink(path)
        return files

    def _check_archive(self, path: str) -> None:
        wanted = self.p["sha256"].lower()
        if not wanted:
            return
        found = manifest.sha256_file(path)
        if found != wanted:
            if path == self.place.archive:
                os.unlink(path)
            raise StoreError(f"{path} has the sha256 {found}, source.sha256 says {wanted}")

    def _expected(self) -> list[Expected]:
        try:
            return [
                Expected(str(item["path"]), int(item["size"]), str(item.get("sha256", "")))
                for item in self.p["expected"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError("expected takes a list of {path, size, sha256}") from error

    def _online(self, what: str) -> None:
        if self.p["offline"]:
            host = urllib.parse.urlsplit(what).netloc or what
            raise StoreError(
                f"model {self.place.name} {self.place.revision} is not on this node and {host} may not be asked: "
                f"offline is set; bring the model as a folder or an archive (source.type local or archive)"
            )

    def _preflight(self, files: list[Expected]) -> None:
        place = self.place
        others = [place.partial, place.archive]
        if os.path.isdir(place.folder):
            others = [os.path.join(place.folder, name) for name in os.listdir(place.folder)]
        present = sum(store.bytes_below(path) for path in others)
        missing = [image for image in self.p["images"] if not store.image_present(self.p["docker_root"], image)]
        problems = store.disk_problems(
            store.volume_of(place.root),
            store.volume_of(self.p["docker_root"]),
            self.p["image_bytes"] * len(missing),
            sum(item.size for item in files),
            present,
        )
        if problems:
            raise StoreError(f"model {place.name} {place.revision} does not fit: {'; '.join(problems)}")


def _archive_config(path: str) -> dict[str, Any]:
    with tarfile.open(path, "r:*") as opened:
        for member in opened:
            if os.path.basename(member.name) == "config.json" and member.name.count("/") <= 2 and member.isfile():
                stream = opened.extractfile(member)
                data = json.loads(stream.read()) if stream else {}
                return data if isinstance(data, dict) else {}
    return {}


def _rsync_listing(text: str) -> list[Expected]:
    """Read ``rsync --list-only``: mode, size with commas, date, time, path; folders are left out."""
    files = []
    for line in text.splitlines():
        parts = line.split(None, 4)
        if len(parts) == 5 and parts[0].startswith("-"):
            files.append(Expected(parts[4], int(parts[1].replace(",", "").replace(".", ""))))
    return files


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    try:
        run = Run(module)
        result = getattr(run, module.params["state"])()
    except (ValueError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        module.fail_json(msg=text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
