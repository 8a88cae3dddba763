#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Module metal.serve.nginx_tree: see DOCUMENTATION."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nginx_tree
short_description: Replace a whole nginx configuration at once, after nginx has accepted it
version_added: 0.1.0
description:
  - Writes the main file and every other file of a configuration into a private copy of the tree, lets C(nginx -t) judge
    that copy, and only then turns one link. A tree that nginx refuses changes nothing and fails with nginx's own line.
  - Reloads a running nginx when it does not yet run the wanted release, which it learns from I(status_url), also when
    an earlier run was interrupted between the swap and the reload. It never restarts nginx.
  - If nginx does not take the new release over within I(wait), the previous tree is put back.
author:
  - The Metalserve authors (@metalserve)
options:
  root:
    description: Folder of the main file.
    type: path
    default: /etc/nginx
  main:
    description: Content of C(nginx.conf). It includes files as C(metalserve/current/<name>).
    type: str
    required: true
  files:
    description:
      - Content of the other files by name, below C(metalserve/current).
      - The word C(@metalserve_release@) in them becomes the tree's identity, I(running).
    type: dict
    required: true
  secret_files:
    description: Like I(files), but for root alone (0600) and never shown, in no diff and no message.
    type: dict
    default: {}
  copied_files:
    description: Files of this machine that become part of the tree (0600), name below the tree to absolute path.
    type: dict
    default: {}
  trials:
    description:
      - Files of the tree that are a whole configuration each, which loads what C(nginx -t) does not look at, and ends
        within 10 seconds.
    type: list
    elements: str
    default: []
  made_before:
    description: Files that earlier tasks make; a check names those that are missing.
    type: list
    elements: path
    default: []
  status_url:
    description: Address at which the running nginx answers with the identity of its tree.
    type: str
    required: true
  nginx:
    description: The program that judges the tree.
    type: path
    default: /usr/sbin/nginx
  service:
    description: Unit that is reloaded.
    type: str
    default: nginx
  error_log:
    description: Error log of the running nginx, which says why it did not take a new release over.
    type: path
  keep:
    description: How many releases stay on the disk.
    type: int
    default: 3
  wait:
    description: Seconds until the running nginx must answer with the new release.
    type: int
    default: 15
attributes:
  check_mode:
    description: Names the files that a run would write, and writes nothing.
    support: full
  diff_mode:
    description: One difference per file; secret files are named, not shown.
    support: full
"""

EXAMPLES = r"""
- name: Put a configuration in place
  metal.serve.nginx_tree:
    main: "events {}\nhttp { include metalserve/current/http.conf; }\n"
    files:
      http.conf: |
        server { listen 127.0.0.1:8081; location = /release { return 200 "@metalserve_release@"; } }
    status_url: http://127.0.0.1:8081/release
"""

RETURN = r"""
release:
  description: Hash of the wanted tree, 12 digits.
  type: str
  returned: always
previous:
  description: Hash that was current before; empty where there was none.
  type: str
  returned: always
running:
  description: Identity that the running nginx answers with, the hash and that of copied files; empty without an answer.
  type: str
  returned: always
reloaded:
  description: Whether nginx was reloaded.
  type: bool
  returned: always
written:
  description: Files that differ from what was there.
  type: list
  elements: str
  returned: always
"""

import os
import shutil
import time
import urllib.error
import urllib.request
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.gateway import tree as nginx


def running_release(url: str) -> str:
    """Return what the running nginx answers at ``url``; empty where it does not, or with something else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return str(answer.read(64).decode("ascii", "replace")).strip()
    except (OSError, urllib.error.URLError, ValueError):
        return ""


def read_copied(module: AnsibleModule) -> tuple[dict[str, bytes], list[str]]:
    """Return the content of the copied files and, in check mode, the paths that a real run makes before."""
    found: dict[str, bytes] = {}
    missing = [path for path in module.params["made_before"] if not os.path.exists(path)]
    for name, path in module.params["copied_files"].items():
        try:
            with open(path, "rb") as stream:
                found[name] = stream.read()
        except OSError as error:
            if not module.check_mode:
                module.fail_json(msg=f"{name} of the nginx tree is to be copied from {path}: {error.strerror}.")
            found[name] = b""
            if path not in missing:
                missing.append(path)
    return found, missing


def diff_of(root: str, tree: nginx.Tree, missing: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the files that differ and their differences, named as they will lie on the machine."""
    before = {f"{nginx.FOLDER}/current/{name}": value for name, value in nginx.read_current(root).items()}
    after = {
        f"{nginx.FOLDER}/current/{name}": (tree.content(name, tree.folder(root)), tree.mode(name))
        for name in tree.files
    }
    old_main = nginx.read_main(root)
    if old_main is not None:
        before[nginx.MAIN] = (old_main, nginx.PLAIN_MODE)
    after[nginx.MAIN] = (tree.main, nginx.PLAIN_MODE)
    secret = {f"{nginx.FOLDER}/current/{name}" for name in tree.files if tree.is_private(name)}
    old_release, new_release = nginx.current_release(root), tree.release

    def final(name: str, release: str | None) -> str:
        return os.path.join(root, name.replace("/current/", f"/releases/{release}/", 1))

    names: list[str] = []
    diffs: list[dict[str, str]] = []
    for name in sorted(set(before) | set(after)):
        old, new = before.get(name), after.get(name)
        if old == new and (old_release == new_release or name == nginx.MAIN):
            continue
        if old != new:
            names.append(name)
        entry = {
            "before_header": final(name, old_release) if old else "/dev/null",
            "after_header": final(name, new_release) if new else "/dev/null",
        }
        for side, value in (("before", old), ("after", new)):
            if value is None:
                entry[side] = ""
            elif name in secret or value[1] == nginx.SECRET_MODE:
                entry[side] = f"(secret, {side} the change)\n" if old != new else "(secret)\n"
            else:
                entry[side] = value[0].decode("utf-8", "replace")
        diffs.append(entry)
    if old_release != new_release:
        link = os.path.join(root, nginx.FOLDER, "current")
        names.append(f"{nginx.FOLDER}/current")
        diffs.append(
            {
                "before_header": link,
                "after_header": link,
                "before": f"-> releases/{old_release}\n" if old_release else "",
                "after": f"-> releases/{new_release}\n",
            }
        )
    for path in missing:
        diffs.append({"before_header": "/dev/null", "after_header": path, "before": "", "after": "(made before)\n"})
    return names, diffs


def judge(module: AnsibleModule, root: str, staged: str, tree: nginx.Tree) -> None:
    """Fail with nginx's own words unless it accepts the staged tree and its trials."""
    program = module.params["nginx"]
    commands = [[program, "-t", "-c", os.path.join(staged, nginx.MAIN)]]
    for trial in module.params["trials"]:
        path = os.path.join(staged, nginx.FOLDER, "current", trial)
        commands.append(["timeout", "10", program, "-c", path])
    for command in commands:
        code, out, err = module.run_command(command, environ_update={"LC_ALL": "C"})
        if code == 0:
            continue
        shutil.rmtree(staged, ignore_errors=True)
        reason = nginx.explain(err + out, staged, root, tree)
        module.fail_json(msg=f"nginx refuses the new configuration; nothing was changed: {reason}", rc=code)


def is_active(module: AnsibleModule) -> bool:
    """Return whether the unit runs."""
    code, _out, _err = module.run_command(["systemctl", "is-active", "--quiet", module.params["service"]])
    return bool(code == 0)


def log_size(path: str | None) -> int:
    """Return the size of the error log in bytes; 0 where there is none."""
    try:
        return os.path.getsize(path) if path else 0
    except OSError:
        return 0


def last_alarm(path: str | None, position: int) -> str:
    """Return the first emergency that was written to the error log after ``position``; empty where there is none."""
    try:
        with open(path or "", encoding="utf-8", errors="replace") as stream:
            stream.seek(position)
            return next((line.split(": ", 1)[-1].strip() for line in stream if "[emerg]" in line), "")
    except OSError:
        return ""


def reload_until(module: AnsibleModule, identity: str) -> tuple[bool, str]:
    """Reload the unit and wait until nginx answers with ``identity``; return whether it does, and what was said."""
    position = log_size(module.params["error_log"])
    code, out, err = module.run_command(["systemctl", "reload", module.params["service"]])
    if code != 0:
        return False, (err or out).strip()
    deadline = time.monotonic() + module.params["wait"]
    while time.monotonic() < deadline:
        if running_release(module.params["status_url"]) == identity:
            return True, ""
        time.sleep(0.2)
    answer = running_release(module.params["status_url"]) or "nothing"
    return False, last_alarm(module.params["error_log"], position) or f"it still answers with {answer}"


def put_back(root: str, previous: str | None, old_main: bytes | None) -> None:
    """Undo a swap whose reload failed: the link and the main file as they were."""
    if previous is not None:
        nginx.point_at(root, previous)
    if old_main is not None:
        nginx.write_main(root, old_main)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/etc/nginx"},
            "main": {"type": "str", "required": True},
            "files": {"type": "dict", "required": True},
            "secret_files": {"type": "dict", "default": {}, "no_log": True},
            "copied_files": {"type": "dict", "default": {}},
            "trials": {"type": "list", "elements": "str", "default": []},
            "made_before": {"type": "list", "elements": "path", "default": []},
            "status_url": {"type": "str", "required": True},
            "nginx": {"type": "path", "default": "/usr/sbin/nginx"},
            "service": {"type": "str", "default": "nginx"},
            "error_log": {"type": "path"},
            "keep": {"type": "int", "default": 3},
            "wait": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    params = module.params
    root: str = params["root"]
    copied, missing = read_copied(module)
    files = {name: str(text).encode("utf-8") for name, text in params["files"].items()}
    secrets = {name: str(text).encode("utf-8") for name, text in params["secret_files"].items()}
    try:
        nginx.check_names([*files, *secrets, *copied])
        tree = nginx.Tree(
            main=params["main"].encode("utf-8"),
            files={**files, **secrets, **copied},
            secrets=frozenset(secrets),
            copied=frozenset(copied),
        )
        result: dict[str, Any] = {
            "release": tree.release,
            "previous": nginx.current_release(root) or "",
            "running": running_release(params["status_url"]),
            "reloaded": False,
        }
        names, diffs = diff_of(root, tree, missing)
        result.update(written=names, diff=diffs)
        if module.check_mode:
            module.exit_json(changed=bool(names) or result["running"] not in ("", tree.identity), **result)
        changed = apply(module, root, tree, result)
    except nginx.TreeError as error:
        module.fail_json(msg=f"nginx configuration in {root}: {error}.")
    except OSError as error:
        module.fail_json(msg=f"nginx configuration in {root}: {error.strerror}: {error.filename}.")
    module.exit_json(changed=changed, **result)


def apply(module: AnsibleModule, root: str, tree: nginx.Tree, result: dict[str, Any]) -> bool:
    """Bring the disk and the running nginx to ``tree``; fill ``result`` and return whether anything changed."""
    previous, old_main = nginx.current_release(root), nginx.read_main(root)
    stale = not nginx.is_current(root, tree)
    if stale:
        staged = nginx.stage(root, tree)
        try:
            judge(module, root, staged, tree)
            nginx.swap(root, tree)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    if is_active(module) and (stale or result["running"] != tree.identity):
        taken, said = reload_until(module, tree.identity)
        if not taken:
            if previous != tree.release:
                put_back(root, previous, old_main)
            module.fail_json(
                msg=f"nginx accepted the new configuration but did not take it over ({said}); the previous files are "
                f"back and nginx serves with them. See journalctl -u {module.params['service']} and its error log.",
                **result,
            )
        result.update(reloaded=True, running=tree.identity)
    if stale:
        nginx.prune(root, module.params["keep"])
    return bool(stale or result["reloaded"])


if __name__ == "__main__":
    main()
