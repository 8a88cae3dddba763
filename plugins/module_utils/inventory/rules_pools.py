# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What pools ask of engines: settings, lengths, load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines import lint, registry
from ansible_collections.metal.serve.plugins.module_utils.inventory import knobs, values
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    WARNING,
    Setting,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import (
    Key,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import Finding, show
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    View,
    at,
    setting_or,
    text,
    whole,
)


def pool_settings(view: View) -> None:
    """Settings are options that this engine has, in the neutral names, of the right type."""
    setting = view.setting("metalserve_pools")
    for pool, spec in view.pools.items():
        settings = spec.get("settings")
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            if isinstance(name, str):
                for finding in _option(spec, name, value):
                    secret = bool(knobs.SECRET_NAME.search(name)) and "token" not in name
                    view.add_finding(
                        setting_or(setting),
                        Finding(
                            (pool, "settings", name, *finding.path),
                            finding.problem,
                            finding.right,
                            finding.about,
                            secret,
                            finding.severity,
                        ),
                    )
        if isinstance(settings, Mapping):
            _combined(view, setting, pool, spec, settings)


def _option(spec: Mapping[str, Any], name: str, value: Any) -> Iterator[Finding]:
    """Yield what is wrong with one engine option."""
    bare = knobs.plain(name)
    engine, version = text(spec.get("engine")), knobs.version(spec.get("engine_version"))
    knob = knobs.KNOBS.get(bare)
    if knob is not None and not knob.real(version if engine != "sglang" else ()):
        yield Finding((), knob.why, knob.right(engine))
        return
    if bare in knobs.POOL_KEYS_OF_SETTINGS:
        yield Finding(
            (), "has a key of its own in the pool", f"write {knobs.POOL_KEYS_OF_SETTINGS[bare]} in the pool instead"
        )
        return
    if bare in knobs.OWNED:
        yield Finding((), f"is not yours to set: {knobs.OWNED[bare]}", "remove it")
        return
    if name != bare:
        yield Finding((), "is not written like an option here", f"write {bare}")
        return
    option = knobs.SETTINGS.get(bare)
    found = list(values.walk(Key(name, option.type, "", low=option.low, high=option.high), value)) if option else []
    lack = None if found else registry.lacks(engine, ".".join(map(str, version)), bare, value)
    if found:
        yield from found
    elif lack:
        yield Finding((), *lack)
    elif option is None and not lint.known(engine, ".".join(map(str, version))):
        near = values.nearest(bare, knobs.SETTINGS, 0.88)
        if near:
            yield Finding((), "is not an option that is known here", f"did you mean {near}?")


def _combined(
    view: View, setting: Setting | None, pool: str, spec: Mapping[str, Any], settings: Mapping[Any, Any]
) -> None:
    """Note options that contradict each other."""
    tokens, sequences = whole(settings.get("max_num_batched_tokens")), whole(settings.get("max_num_seqs"))
    length = whole(settings.get("max_model_len", spec.get("max_model_len")))
    if tokens and sequences and sequences > tokens:
        view.add_at(
            setting,
            (pool, "settings", "max_num_batched_tokens"),
            f"is below max_num_seqs ({sequences}): every running sequence takes one token a step",
            f"write at least {sequences}",
        )
    if settings.get("enable_chunked_prefill") is False and tokens and length and tokens < length:
        view.add_at(
            setting,
            (pool, "settings", "max_num_batched_tokens"),
            f"is below max_model_len ({length}), which needs chunked prefill",
            f"write at least {length}, or leave enable_chunked_prefill on",
        )
    one, other = whole(settings.get("max_model_len")), whole(spec.get("max_model_len"))
    if one and other and one != other:
        view.add_at(
            setting,
            (pool, "settings", "max_model_len"),
            f"differs from max_model_len of the pool ({other})",
            "keep the one in the pool",
        )


def lengths(view: View) -> None:
    """Context length and workload fit together; no two pools claim the same requests."""
    setting = view.setting("metalserve_pools")
    claims: dict[tuple[str, int | None], str] = {}
    served: dict[str, tuple[str, str]] = {}
    for pool, spec in view.pools.items():
        context = whole(at(spec, ("settings", "max_model_len")), whole(spec.get("max_model_len")))
        _workload(view, setting, pool, spec, context)
        model = text(spec.get("model"))
        name = text(spec.get("served_name")) or model
        if not name:
            continue
        first = served.setdefault(name, (pool, model))
        if model and first[1] and first[1] != model:
            view.add_at(
                setting,
                (pool, "served_name" if spec.get("served_name") else "model"),
                f"would be served under the same name as another model ({first[1]}, pool {first[0]})",
                "give one of the pools another served_name",
                show(name),
            )
        other = claims.setdefault((name, context), pool)
        if other != pool:
            view.add_at(
                setting,
                (pool,),
                f"claims the same requests as the pool {other} (same model and max_model_len): it gets them only while "
                "that one has no replica left",
                "give them different max_model_len, unless it is meant to stand in",
                "",
                WARNING,
            )


def _workload(view: View, setting: Setting | None, pool: str, spec: Mapping[str, Any], context: int | None) -> None:
    p95: dict[str, float] = {}
    for part in ("prompt_tokens", "output_tokens"):
        given = at(spec, ("workload", part))
        mean = _number(given.get("mean") if isinstance(given, Mapping) else given)
        upper = _number(given.get("p95") if isinstance(given, Mapping) else given) or mean
        if mean is not None and upper is not None and upper < mean:
            view.add_at(
                setting,
                (pool, "workload", part, "p95"),
                f"is below the mean ({mean:.15g})",
                f"write at least {mean:.15g}",
                severity=WARNING,
            )
        if upper is not None:
            p95[part] = upper
    prompt, answer = p95.get("prompt_tokens", 0), p95.get("output_tokens", 0)
    if context is not None and prompt + answer > context:
        view.add_at(
            setting,
            (pool, "workload"),
            f"has 95th percentiles ({prompt:.15g} + {answer:.15g}) that do not fit in max_model_len ({context})",
            "raise max_model_len, or describe another load",
            "",
            WARNING,
        )


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
