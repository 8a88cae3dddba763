# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The families of a vLLM server's /metrics, written by hand: names, types and labels are in families.json."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import time
from collections.abc import Iterable
from typing import Any

Labels = tuple[tuple[str, str], ...]

TOKEN_COUNT_FAMILIES = frozenset(
    f"vllm:request_{name}"
    for name in (
        "prompt_tokens",
        "generation_tokens",
        "max_num_generation_tokens",
        "params_max_tokens",
        "prefill_kv_computed_tokens",
    )
)
"""Histograms whose buckets follow 1, 2, 5, 10 … up to the longest context."""


def token_buckets(limit: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 … up to ``limit``."""
    found: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return found
            found.append(float(step * power))
        power *= 10


def _text(value: float) -> str:
    """Return ``value`` as Prometheus clients write it."""
    return "+Inf" if value == float("inf") else repr(float(value))


class Family:
    """One metric family: its values by label set."""

    def __init__(self, spec: dict[str, Any], model: str, max_model_len: int) -> None:
        """Take the family's description from families.json."""
        self.name: str = spec["name"]
        self.help: str = spec["help"]
        self.kind: str = spec["type"]
        self.has_created: bool = spec["created"]
        self.constant: Labels = (("model_name", model),) if spec["model"] else ()
        self.buckets: list[float] = spec.get("buckets", [])
        if self.name in TOKEN_COUNT_FAMILIES:
            self.buckets = token_buckets(max_model_len)
        self.values: dict[Labels, float] = {}
        self.counts: dict[Labels, list[int]] = {}
        self.created: dict[Labels, float] = {}
        for series in spec.get("series", []):
            self._touch(tuple(sorted(series.items())))
        if spec.get("labels") == []:
            self._touch(())

    def _touch(self, labels: Labels) -> None:
        if labels not in self.values:
            self.values[labels] = 0.0
            self.created[labels] = time.time()
            self.counts[labels] = [0] * (len(self.buckets) + 1)

    def set(self, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.values[tuple(sorted(labels.items()))] = value

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Count ``amount`` on a counter."""
        key = tuple(sorted(labels.items()))
        self._touch(key)
        self.values[key] += amount

    def observe(self, value: float, **labels: str) -> None:
        """Note one value in a histogram or summary."""
        key = tuple(sorted(labels.items()))
        self._touch(key)
        self.values[key] += value
        counts = self.counts[key]
        for index, bound in enumerate(self.buckets):
            if value <= bound:
                counts[index] += 1
        counts[-1] += 1

    def render(self) -> Iterable[str]:
        """Yield the family's lines in the text format."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.values.items():
            if self.kind == "histogram":
                for bound, count in zip([*self.buckets, float("inf")], self.counts[labels]):
                    yield self._line("_bucket", labels, count, ("le", _text(bound)))
            if self.kind in ("histogram", "summary"):
                yield self._line("_count", labels, self.counts[labels][-1])
                yield self._line("_sum", labels, value)
            else:
                yield self._line("", labels, value)
        if self.has_created:
            base = self.name[: -len("_total")] if self.kind == "counter" else self.name
            yield f"# HELP {base}_created {self.help}"
            yield f"# TYPE {base}_created gauge"
            for labels in self.values:
                yield self._line("", labels, self.created[labels], name=f"{base}_created")

    def _line(self, suffix: str, labels: Labels, value: float, *extra: tuple[str, str], name: str = "") -> str:
        pairs = sorted([*labels, *self.constant, *extra])
        inside = ",".join(f'{key}="{text}"' for key, text in pairs)
        return f"{name or self.name + suffix}{'{' + inside + '}' if inside else ''} {_text(value)}"


class Metrics:
    """All families of one engine; ``metrics["name"]`` is one of them."""

    def __init__(self, model: str, max_model_len: int, cache_config: dict[str, str]) -> None:
        """Label everything with ``model``; ``cache_config`` replaces labels of vllm:cache_config_info."""
        with open(
            os.path.join(os.path.dirname(os.path.abspath(__file__)), "families.json"), encoding="utf-8"
        ) as stream:
            specs = json.load(stream)
        for spec in specs:
            if spec["name"] == "vllm:cache_config_info":
                spec["series"] = [{**spec["series"][0], **cache_config}]
            elif spec["name"] == "python_info":
                version = platform.python_version()
                numbers = dict(zip(("major", "minor", "patchlevel"), version.split(".")))
                spec["series"] = [{"implementation": "CPython", "version": version, **numbers}]
        self.families = {spec["name"]: Family(spec, model, max_model_len) for spec in specs}
        self.started = time.time()
        for name in ("vllm:cache_config_info", "python_info"):
            for labels in self.families[name].values:
                self.families[name].values[labels] = 1.0
        self["vllm:engine_sleep_state"].set(1.0, engine="0", sleep_state="awake")

    def __getitem__(self, name: str) -> Family:
        """Return the family called ``name``."""
        return self.families[name]

    def render(self) -> bytes:
        """Return the whole page."""
        self._process()
        lines = [line for family in self.families.values() for line in family.render()]
        return ("\n".join(lines) + "\n").encode("utf-8")

    def _process(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        for generation, stats in enumerate(gc.get_stats()):
            for name, key in (
                ("python_gc_objects_collected_total", "collected"),
                ("python_gc_objects_uncollectable_total", "uncollectable"),
                ("python_gc_collections_total", "collections"),
            ):
                self[name].set(stats[key], generation=str(generation))
        with open("/proc/self/statm", encoding="ascii") as stream:
            pages = stream.read().split()
        size = os.sysconf("SC_PAGE_SIZE")
        self["process_virtual_memory_bytes"].set(int(pages[0]) * size)
        self["process_resident_memory_bytes"].set(int(pages[1]) * size)
        self["process_start_time_seconds"].set(self.started)
        self["process_cpu_seconds_total"].set(usage.ru_utime + usage.ru_stime)
        self["process_open_fds"].set(len(os.listdir("/proc/self/fd")))
        self["process_max_fds"].set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
