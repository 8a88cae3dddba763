#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Check engines' configurations inside the images that will run them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_config_lint
short_description: Check engines' configurations inside the images that will run them
version_added: 0.1.0
description:
  - Starts each image once more, without GPU, network, capabilities or weights, and asks the engine in it what it thinks of
    the rendered configuration - exact option names (an abbreviation, which its parser would take, is refused), types, its own
    parser, and its own configuration object built from the model's C(config.json).
  - Also compares the version that the pool says with the one in the image.
  - Fails when anything is wrong, so that it can stand before a drain.
  - Replicas that differ in address and port alone are judged once.
  - What was found right is remembered below O(root), so that the same release is not judged twice.
options:
  replicas:
    description: Spec and rendered files of each replica, as P(metal.serve.engine_replicas#filter) makes them.
    type: list
    elements: dict
    required: true
  root:
    description: Folder of everything this bundle keeps on a node.
    type: path
    default: /var/lib/metalserve
  timeout:
    description: Seconds that one image may take.
    type: int
    default: 600
  memory:
    description: Memory limit of the container that judges.
    type: str
    default: 6g
attributes:
  check_mode:
    description: Judges in check mode too; an image that is not on the node yet is reported as unknown.
    support: full
  diff_mode:
    description: There is nothing to compare, since nothing is changed.
    support: none
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Check the configurations in the images that will run them
  metal.serve.engine_config_lint:
    replicas: "{{ __engine_replicas }}"
"""

RETURN = r"""
results:
  description: One entry for each configuration that was judged.
  returned: always
  type: list
  elements: dict
  contains:
    replicas:
      description: The replicas that have it.
      type: list
    status:
      description: One of ok, known (judged before), wrong and unknown.
      type: str
    version:
      description: The engine's version in the image.
      type: str
    problems:
      description: What is wrong, as option, value, step, problem and right.
      type: list
    checked:
      description: The steps that were taken.
      type: list
    skipped:
      description: What could not be judged in this image without a GPU, and why.
      type: list
"""

import json
import os
import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.common.files import write_atomic
from ansible_collections.metal.serve.plugins.module_utils.engines import image_lint, in_image
from ansible_collections.metal.serve.plugins.module_utils.release.tool import source_of

NO_SUCH_IMAGE = 125
"""What docker run leaves with when it could not even create the container."""


def judge(module: AnsibleModule, job: in_image.Job, script: bytes) -> dict[str, Any]:
    """Run one image and return the result. Fails the module when Docker cannot run it."""
    with tempfile.TemporaryDirectory(dir=module.tmpdir) as folder:
        # The engine's process may be another user than root.
        os.chmod(folder, 0o755)
        write_atomic(os.path.join(folder, "image_lint.py"), script.decode("utf-8"))
        write_atomic(os.path.join(folder, job.file), job.text)
        name = f"metalserve-lint-{os.path.basename(folder).replace('_', '-')}"
        limit = str(module.params["timeout"])
        argv = in_image.command(job, folder, name, module.params["memory"])
        code, out, err = module.run_command(["timeout", "--kill-after=10", limit, *argv])
        if code in (124, 137):
            module.run_command(["docker", "rm", "--force", name])
            return in_image.unknown(job, f"the image did not answer within {limit} s")
    if code == NO_SUCH_IMAGE:
        text = err.strip().splitlines()[-1:] or ["docker run failed"]
        if module.check_mode:
            return in_image.unknown(job, f"the image is not on the node yet ({text[0]})")
        module.fail_json(msg=f"{', '.join(job.replicas)}: {job.image} cannot be run: {text[0]}", results=[])
    return in_image.result(job, code, out, err)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "replicas": {"type": "list", "elements": "dict", "required": True},
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "timeout": {"type": "int", "default": 600},
            "memory": {"type": "str", "default": "6g"},
        },
        supports_check_mode=True,
    )
    script = source_of(image_lint)
    results: list[dict[str, Any]] = []
    for job in in_image.jobs(module.params["replicas"]):
        memo = os.path.join(job.folder(module.params["root"]), job.key(script))
        if os.path.exists(memo):
            results.append({**in_image.unknown(job, ""), "status": "known", "skipped": []})
            continue
        found = judge(module, job, script)
        results.append(found)
        if found["status"] == "ok" and not module.check_mode:
            os.makedirs(os.path.dirname(memo), mode=0o700, exist_ok=True)
            write_atomic(memo, json.dumps(found, sort_keys=True) + "\n", mode=0o600)
    for found in results:
        for note in found["skipped"]:
            if found["status"] == "unknown":
                module.warn(f"{', '.join(found['replicas'])}: the configuration was not judged in its image: {note}")
    wrong = [line for found in results for line in in_image.lines(found)]
    if wrong:
        module.fail_json(msg="\n".join(wrong), results=results)
    module.exit_json(changed=False, results=results)


if __name__ == "__main__":
    main()
