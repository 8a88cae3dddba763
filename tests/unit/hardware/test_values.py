# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Small values: what is not understood is None."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import UNLIMITED


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", [0, 1, 2, 3, 8]), ("0-6:2", [0, 2, 4, 6]), ("", []), ("\n", []), ("3-1", None), ("a", None),
     ("0-99999", None), ("0,,1", None), (None, None)],
)  # fmt: skip
def test_cpu_lists(text: Any, cpus: Any) -> None:
    assert values.cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("text", "limit"),
    [("1048576", 1048576), ("unlimited", UNLIMITED), ("infinity", UNLIMITED), ("-1", UNLIMITED),
     ("18446744073709551615", UNLIMITED), ("99999999999999999999", None), ("-2", None), ("", None), ("soon", None)],
)  # fmt: skip
def test_limits(text: str, limit: Any) -> None:
    assert values.limit(text) == limit


@pytest.mark.parametrize("text", ["N/A", "[N/A]", "[ N/A ]", " n/a ", "Unknown Error", "Not Supported", "ERR!", ""])
def test_words_for_not_known(text: str) -> None:
    assert values.known(text) is None
    assert values.integer(text) is None
    assert values.switch(text) is None
    assert values.mebibytes(text) is None
    assert values.quantity(text, "W") is None


@given(st.text())
@settings(max_examples=60)
def test_nothing_raises(text: str) -> None:
    for function in (
        values.known,
        values.integer,
        values.mebibytes,
        values.switch,
        values.selected,
        values.limit,
        values.cpu_list,
        values.json_value,
        values.json_object,
    ):
        function(text)
    values.quantity(text, "W", "")
    values.whole(text, "C")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, "\x00", "NaN{"])
def test_hostile_json(text: str) -> None:
    value, error = values.json_value(text)
    assert value is None
    assert error


def test_arabic_digits_are_no_number() -> None:
    assert values.integer("\u0663\u0664") is None
    assert values.cpu_list("\u0660-\u0663") is None
