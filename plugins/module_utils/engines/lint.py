# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Judge settings and rendered configurations from the catalogue, without an engine: what validate and tests use.

The same rules run inside the engine's image with what the parser there says (image_lint.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines import features
from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS
from ansible_collections.metal.serve.plugins.module_utils.engines.image_lint import Known, Problem, judge


def _known(words: str) -> dict[str, Known]:
    found = {}
    for word in words.split():
        name, _colon, rest = word.partition(":")
        kind, _equals, choices = rest.partition("=")
        options = tuple(choices.split("|")) if choices else ()
        found[name] = Known("bool", (), False) if kind == "switch" else Known(kind or "any", options)
    return found


def known(kind: str, version: str) -> dict[str, Known]:
    """Return the options of an engine of this version by name; nothing where no catalogue of it is there."""
    return _known(OPTIONS.get(kind, {}).get(version, ""))


def lint(kind: str, version: str, config: Mapping[Any, Any]) -> list[Problem]:
    """Return what is wrong with a rendered configuration (config.yaml, model.json) by the catalogue of this version.

    Nothing where there is no catalogue of it: the image itself judges.
    """
    options = known(kind, version)
    return judge(config, options, dashes=kind != "triton_vllm") if options else []


def lacking(kind: str, version: str, name: str) -> tuple[str, str] | None:
    """Return (problem, what to do) where an engine of this version has no option ``name``, None where it has or nobody knows.

    ``name`` is in the engine's own words, with underscores.
    """
    options = known(kind, version)
    server = kind == "triton_vllm" and name in features.SERVER_ONLY
    if not options or (name in options and not server):
        return None
    title = features.TITLES.get(kind, kind)
    answer = features.instead(kind, version, name)
    if answer:
        return f"is nothing that {title} {version} has", answer
    longer = sorted(option for option in options if option.startswith(name))
    near = longer[:1] or difflib.get_close_matches(name, list(options), 1, 0.6)
    return f"is not an option of {title} {version}", f"did you mean {near[0]}?" if near else "remove it"
