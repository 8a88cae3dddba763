# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The YAML reader against the real one: what it reads it reads alike, what it does not know it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware.yaml_subset import load

DOCUMENTS = [
    "",
    "---\n",
    "a: 1\nb: two\nc: [1, two, 3.5]\nd: {x: 1, y: [a, b]}\n",
    "groups:\n  - name: a\n    rules:\n      - alert: X\n        expr: |\n          up\n            and vector(1)\n"
    "        for: 5m\n        labels: {severity: page}\n",
    "- 1\n-\n  - 2\n  - 3\n- - 4\n  - 5\n- a: 1\n  b: 2\n",
    "a:\n- 1\n- 2\nb:\n  - 3\n",
    "a: >\n  folded text\n  goes on\n\n  new paragraph\n   more indented\n  back\nb: 1\n",
    "a: >-\n  folded\n  text\n\nb: |+\n  kept\n\n\nc: 1\n",
    "a: 'it''s'\nb: \"tab\\t \\u00e9 \\x41\"\n\"quoted key\": 1\n",
    "a: yes\nb: no\nc: on\nd: ~\ne: null\nf: True\ng: 0x1f\nh: 010\ni: -5\nj: 1_000\nk: 1.5e+3\nl: 1e3\nm: .5\n",
    "a: b # comment\n# whole\nc: 'd # not' # yes\ne: f#g\n",
    "url: http://x:8100/y\ntime: 12:30:45\nversion: 0.5.0\n",
    "a: long plain\n  scalar over\n  lines\nb: 1\n",
    "a: [1,\n  2,\n  {b: c}]\n",
    "a: {b: 'x, y', c: \"d: e\"}\n",
    'expr: sum(rate(x{a="b"}[5m])) by (c) > 0.9\n',
    "a:\n  b:\n    c: 1\n  d: 2\n",
    "a: |2\n    two more\n  base\n",
    "empty:\nnext: 1\n",
    "model: /models/x\nmax-model-len: 2048\nenforce-eager: true\nserved-model-name: [a]\n",
]


@pytest.mark.parametrize("text", DOCUMENTS)
def test_same_as_the_real_reader(text: str) -> None:
    value, error = load(text)
    assert error is None
    expected = yaml.safe_load(text)
    # Times in base 60 are the one thing of YAML 1.1 that nobody means.
    if isinstance(expected, dict) and "time" in expected:
        expected["time"] = "12:30:45"
    assert value == expected


@pytest.mark.parametrize(
    "text",
    ["a: &b c\n", "a: *b\n", "a: !!str 1\n", "<<: {a: 1}\n", "? a\n: b\n", "a: 1\na: 2\n", "a:\n\tb: 1\n", "a: 'x\n",
     "a: [1, 2\n", "a: 1\n b: 2\n", "a: {x: 1, x: 2}\n", "--- a\n", "a: [b: c]\n", "a\nb: c\n", "a: |x\n  b\n",
     "a: [1] 2\n", 'a: ["b\n c"]\n', 'a: "b\\\n  c"\n',
     "[" * 500, "a: " + "[" * 500],
)  # fmt: skip
def test_what_is_not_read_is_refused(text: str) -> None:
    value, error = load(text)
    assert value is None
    assert error


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.text(alphabet="abc XYZ09:#-_'\"{}[],&*!|>%@~.=/\\é\n", max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(alphabet="abcxyz_-", min_size=1, max_size=5), inner, max_size=4),
    ),
    max_leaves=10,
)


@given(VALUES, st.booleans())
@settings(max_examples=60)
def test_what_the_real_writer_writes_is_read_back_or_refused(value: Any, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    found, error = load(text)
    if error is None:
        expected = yaml.safe_load(text)
        assert found == expected or (isinstance(found, float) and math.isclose(found, expected))


@given(st.text(alphabet="ab: -\n'\"[]{},#|>&*!1", max_size=60))
@settings(max_examples=100)
def test_soup_is_read_or_refused(text: str) -> None:
    value, error = load(text)
    assert error is None or value is None
