#!/usr/bin/python
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_gate
short_description: Show that an engine may get traffic
version_added: 0.1.0
description:
  - Runs on the node and asks the engine itself, which gets no other requests meanwhile. First streamed warm-up prompts of
    several lengths, then the golden prompts, then a short load; then KV cache and log.
options:
  root:
    description: Folder of everything this bundle keeps on a node.
    type: path
    default: /var/lib/metalserve
  state:
    description: V(measured) runs the load alone and judges nothing; V(judged) does all of it and fails where it is not good.
    type: str
    choices: [measured, judged]
    default: judged
  replicas:
    description: Names of replicas.
    type: list
    elements: str
    required: true
  api_key:
    description: The engines' API key.
    type: str
    default: ''
  golden:
    description: Prompts with C(prompt), C(expect) (a regular expression), and optionally C(max_tokens) and C(pool).
    type: list
    elements: dict
    default: []
  policy:
    description: Thresholds; see docs/operations.md.
    type: dict
    default: {}
  warm_up:
    description: Lengths of the warm-up prompts, as shares of the longest context.
    type: list
    elements: float
    default: [0.01, 0.25, 0.75]
  requests:
    description: Requests of the load.
    type: int
    default: 24
  concurrency:
    description: Requests of the load at a time.
    type: int
    default: 4
  prompt_tokens:
    description: Length of their prompts, in tokens, about.
    type: int
    default: 128
  max_tokens:
    description: Length of their answers, in tokens.
    type: int
    default: 16
  previous:
    description: What an earlier call measured, by replica.
    type: dict
    default: {}
  run:
    description: Id of the run that asks.
    type: str
    default: ''
  phase:
    description: Phase to write into the lock of this run, whose heartbeat is renewed.
    type: str
    default: ''
attributes:
  check_mode:
    description: Asks nothing in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
  action:
    description: A node that cannot be reached fails the task.
    support: full
author: The Metalserve authors (@metalserve)
"""

EXAMPLES = r"""
- name: Let the new engine show that it is good
  metal.serve.engine_gate:
    replicas: [short-0]
    api_key: "{{ metalserve_engine_api_key }}"
    golden: [{prompt: The capital of France is, expect: Paris}]
"""

RETURN = r"""
measured:
  description: Figures by replica, to be given as O(previous) to the next call.
  returned: always
  type: dict
findings:
  description: Every judgement, with replica, name, good, current and desired.
  returned: always
  type: list
  elements: dict
"""

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.metal.serve.plugins.module_utils.engines import ready
from ansible_collections.metal.serve.plugins.module_utils.release import content, gate, lock, state
from ansible_collections.metal.serve.plugins.module_utils.telemetry.completions import (
    CompletionError,
    Target,
    body_of,
    complete,
    stream,
)
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import Scrape, ScrapeError, parse_scrape

WORD = "word "
"""About one token for every tokenizer."""

LOG_LINES = "4000"


def prompt_of(tokens: int) -> str:
    """Return a prompt of about ``tokens`` tokens that no prefix cache knows."""
    return f"{uuid.uuid4().hex[:8]} {WORD * max(1, tokens - 6)}"


def kv_tokens(scrape: Scrape, kind: str) -> float | None:
    """Return how many tokens the engine's KV cache holds, None where it does not say."""
    if kind == "sglang":
        found = scrape.select("sglang:max_total_num_tokens")
        return found[0].value if found else None
    for sample in scrape.select("vllm:cache_config_info"):
        labels = sample.labels
        tokens = labels.get("kv_cache_size_tokens", "")
        if tokens.replace(".", "", 1).isdigit():
            return float(tokens)
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if blocks.isdigit() and size.isdigit():
            return float(blocks) * float(size)
    return None


class Probe:
    """The probe of one replica."""

    def __init__(self, module: AnsibleModule, name: str) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.rules = gate.policy(self.p["policy"])
        self.replica = state.Replica(self.p["root"], name)
        current = state.read_current(self.replica)
        if current is None:
            raise ValueError(f"{name} has no release on this node")
        self.release, self.document = current.release, current.document
        address = str(self.document["address"])
        host = f"[{address}]" if ":" in address else address
        self.target = Target(f"http://{host}:{self.document['port']}", self.p["api_key"])
        self.model = str(self.document["served_name"])
        plan = self.document.get("plan") or {}
        self.longest = int((plan.get("settings") or {}).get("max_model_len") or 2048)
        self.planned_kv = (plan.get("memory") or {}).get("kv_cache_tokens")

    def golden(self) -> tuple[gate.Golden, ...]:
        """Return the golden prompts of this replica's pool."""
        return tuple(
            gate.Golden(str(item["prompt"]), str(item["expect"]), int(item.get("max_tokens", 8)))
            for item in self.p["golden"]
            if item.get("pool", self.document["pool"]) == self.document["pool"]
        )

    def warm_up(self) -> str:
        """Stream an answer to a prompt of each length; return what went wrong first."""
        for share in self.p["warm_up"]:
            tokens = max(8, min(int(self.longest * share * 0.8), self.longest - 64))
            body = body_of(self.model, prompt_of(tokens), 8, True, {})
            try:
                stream(self.target, body, self.rules["answer_s"])
            except CompletionError as error:
                return f"a prompt of about {tokens} tokens: {error}"
        return ""

    def answer(self, golden: gate.Golden) -> str:
        """Return the answer to a golden prompt, or why there is none."""
        body = body_of(self.model, golden.prompt, golden.max_tokens, False, {})
        try:
            return complete(self.target, body, self.rules["answer_s"]).text
        except CompletionError as error:
            return f"{gate.PROBLEM}{error}"

    def one(self, _number: int) -> tuple[float, float, str]:
        """Return seconds to the first token, seconds in all, and what went wrong, of one request of the load."""
        body = body_of(self.model, prompt_of(self.p["prompt_tokens"]), self.p["max_tokens"], True, {})
        try:
            found = stream(self.target, body, self.rules["answer_s"])
        except CompletionError as error:
            return 0.0, 0.0, str(error)
        first = found.ttft_ms / 1000
        return first, first + found.itl_ms * max(0, found.tokens - 1) / 1000, ""

    def load(self) -> gate.Measured:
        """Run the load."""
        with ThreadPoolExecutor(max_workers=max(1, self.p["concurrency"])) as pool:
            found = list(pool.map(self.one, range(self.p["requests"])))
        good = [item for item in found if not item[2]]
        failed = [item[2] for item in found if item[2]]
        return gate.Measured(
            requests=len(found),
            failed=len(failed),
            first_failure=failed[0] if failed else "",
            ttft_p99_s=gate.quantile([item[0] for item in good], 0.99),
            p99_s=gate.quantile([item[1] for item in good], 0.99),
        )

    def kv(self) -> float | None:
        """Return the size of the KV cache in tokens."""
        health = self.document["health"]
        answer = ready.ask(str(self.document["address"]), int(health["metrics_port"]), str(health["metrics"]))
        try:
            kind = str(self.document["content"]["engine"]["kind"])
            return kv_tokens(parse_scrape(answer.body), kind) if answer.status == 200 else None
        except ScrapeError:
            return None

    def log(self, release: str, earlier: bool = False) -> tuple[str, ...]:
        """Return the log of a release's container since its last start, or (``earlier``) before it."""
        if not release:
            return ()
        name = content.container_name(self.replica.name, release)
        code, out, _err = self.module.run_command(
            ["docker", "container", "inspect", "--format", "{{.State.StartedAt}}", name]
        )
        if code != 0:
            return ()
        which = "--until" if earlier else "--since"
        code, out, err = self.module.run_command(["docker", "logs", which, out.strip(), "--tail", LOG_LINES, name])
        return tuple(f"{out}\n{err}".splitlines()) if code == 0 else ()

    def judged(self) -> tuple[gate.Measured, list[gate.Finding]]:
        """Do all of it."""
        trouble = self.warm_up()
        if trouble:
            return gate.Measured(), [gate.Finding("warm-up", False, trouble, "an answer")]
        golden = self.golden()
        answers = []
        for item in golden:
            answers.append(self.answer(item))
            if answers[-1].startswith(gate.PROBLEM):
                # An engine that does not answer would only make the load wait as well.
                measured = gate.Measured(answers=tuple(answers))
                rest = gate.judge(measured, gate.Expected(golden=golden[: len(answers)]), self.rules)
                return measured, [finding for finding in rest if finding.name.startswith("golden")]
        measured = replace(self.load(), answers=tuple(answers), kv_tokens=self.kv(), log=self.log(self.release))
        expected = gate.Expected(
            golden=golden,
            previous=self.p["previous"].get(self.replica.name) or {},
            kv_tokens=float(self.planned_kv) if self.planned_kv else None,
            log=self.log(self.fallback()) + self.log(self.release, earlier=True),
        )
        return measured, gate.judge(measured, expected, self.rules)

    def fallback(self) -> str:
        """Return the release whose log counts as known."""
        record = state.read_json(self.replica.record) or {}
        before = str(record.get("from", ""))
        return before if before != self.release else ""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/metalserve"},
            "state": {"type": "str", "choices": ["measured", "judged"], "default": "judged"},
            "replicas": {"type": "list", "elements": "str", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "golden": {"type": "list", "elements": "dict", "default": []},
            "policy": {"type": "dict", "default": {}},
            "warm_up": {"type": "list", "elements": "float", "default": [0.01, 0.25, 0.75]},
            "requests": {"type": "int", "default": 24},
            "concurrency": {"type": "int", "default": 4},
            "prompt_tokens": {"type": "int", "default": 128, "no_log": False},
            "max_tokens": {"type": "int", "default": 16, "no_log": False},
            "previous": {"type": "dict", "default": {}},
            "run": {"type": "str", "default": ""},
            "phase": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    measured: dict[str, Any] = {}
    findings: list[dict[str, Any]] = []
    wrong: list[str] = []
    try:
        if p["phase"] and not module.check_mode:
            lock.renew(os.path.join(p["root"], lock.NAME), p["run"], p["phase"], time.time())
        probes = [] if module.check_mode else [Probe(module, name) for name in p["replicas"]]
        for probe in probes:
            name = probe.replica.name
            if probe.document.get("headless"):
                continue
            if p["state"] == "measured":
                measured[name] = probe.load().to_dict()
                continue
            seen, found = probe.judged()
            measured[name] = seen.to_dict()
            findings.extend({"replica": name, **asdict(item)} for item in found)
            wrong.extend(f"{name}: {words}" for words in gate.failures(found))
            if wrong:
                log = ready.tail("\n".join(probe.log(probe.release)))
                wrong.extend(["the end of its log:", *log] if log else [])
                break
    except (ValueError, KeyError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    if wrong:
        module.fail_json(msg="the gate is shut: " + "\n".join(wrong), measured=measured, findings=findings)
    module.exit_json(changed=False, measured=measured, findings=findings)


if __name__ == "__main__":
    main()
