# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Metric contracts: the reader of PromQL, case I15, and every metric of our own rules in a real scrape."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.telemetry.contract import (
    RENAMED,
    SINCE,
    ExpressionError,
    known_since,
    metric_names,
    missing_metrics,
    selectors,
)
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import (
    ScrapeError,
    merge_scrapes,
    parse_scrape,
)

from . import scrapes

SCRAPE_A = 'vllm:gpu_cache_usage_perc 0.4\nvllm:time_per_output_token_seconds_bucket{le="1"} 2\n'
SCRAPE_B = 'vllm:kv_cache_usage_perc 0.4\nvllm:inter_token_latency_seconds_bucket{le="1"} 2\n'
RULES_OF_A = [
    "vllm:gpu_cache_usage_perc > 0.9",
    "histogram_quantile(0.99, sum by (le) (rate(vllm:time_per_output_token_seconds_bucket[5m]))) > 0.2",
]


def test_i15_rules_of_one_version_on_the_scrape_of_another_list_what_is_missing() -> None:
    assert missing_metrics(RULES_OF_A, parse_scrape(SCRAPE_A)) == ()
    missing = missing_metrics(RULES_OF_A, parse_scrape(SCRAPE_B))
    assert [str(one) for one in missing] == [
        "vllm:gpu_cache_usage_perc (today vllm:kv_cache_usage_perc)",
        "vllm:time_per_output_token_seconds_bucket (today vllm:inter_token_latency_seconds_bucket)",
    ]


def test_i15_on_the_real_scrape() -> None:
    missing = missing_metrics(RULES_OF_A, scrapes.vllm())
    assert [one.name for one in missing] == ["vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds_bucket"]


def test_todays_names_are_in_todays_scrape_and_the_old_ones_are_not() -> None:
    names = scrapes.vllm().names()
    for old, new in RENAMED.items():
        if old.startswith("vllm:"):
            assert old not in names
            assert old + "_bucket" not in names
        if new.startswith("vllm:"):
            assert {new, new + "_bucket"} & names, new


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("up", ("up",)),
        ("up == 0", ("up",)),
        ('sum by (pool, le) (rate(a_bucket{x="y",z!~"q|{"}[5m] offset 1h))', ("a_bucket",)),
        ("sum(rate(a[5m])) by (pool) / on (pool) group_left (node) max(b) without (gpu)", ("a", "b")),
        ("a and on (node) b unless ignoring (x) c or vector(0)", ("a", "b", "c")),
        ("histogram_quantile(0.99, a_bucket) > bool 1e-3", ("a_bucket",)),
        ("max_over_time((a > 1)[1h:5m] @ end())", ("a",)),
        ('label_replace(a, "dst", "$1", "src", "(.*)")', ("a",)),
        ('count_values("v", a) # and b', ("a",)),
        ('{__name__="a", job="x"}', ("a",)),
        ("a * NaN + Inf - 0x1F", ("a",)),
        ("rate(a[$__rate_interval])", ("a",)),
        ('a{pool=~"$pool"} % 2 ^ 3', ("a",)),
        ("quantile by (x) (0.5, a)", ("a",)),
        ("time() - a > 86400", ("a",)),
        ('{"utf8.name", job="x"}', ("utf8.name",)),
    ],
)
def test_only_what_selects_a_series_is_a_metric(expression: str, names: tuple[str, ...]) -> None:
    assert metric_names(expression) == names


def test_a_selectors_labels_are_read() -> None:
    (selector,) = selectors('a{x="1",y!="2",z=~"3|4",w!~\'5\'}[5m]')
    assert selector.labels == (("x", "=", "1"), ("y", "!=", "2"), ("z", "=~", "3|4"), ("w", "!~", "5"))


@pytest.mark.parametrize(
    "expression", ["a{", 'a{x="1"', "sum(a", "a)", "a]", "a{x}", "a{x=1}", "sum by (", "a ; b", "a}"]
)
def test_what_is_not_promql_is_refused(expression: str) -> None:
    with pytest.raises(ExpressionError):
        selectors(expression)


@given(st.text(max_size=60))
def test_no_text_makes_the_reader_raise_anything_else(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        selectors(text)


@given(st.text(alphabet='ab_:{}="\\,# \n0123456789.eE+-NaInf', max_size=60))
def test_no_scrape_makes_the_parser_raise_anything_else(text: str) -> None:
    with contextlib.suppress(ScrapeError):
        parse_scrape(text)


def test_patterns_over_names_must_match_something() -> None:
    scrape = parse_scrape("vllm:a 1\n")
    assert missing_metrics(['{__name__=~"vllm:.*"}'], scrape) == ()
    assert [str(one) for one in missing_metrics(['{__name__=~"sglang:.*"}'], scrape)] == ['{__name__=~"sglang:.*"}']
    with pytest.raises(ExpressionError, match="regular expression"):
        missing_metrics(['{__name__=~"["}'], scrape)


def test_a_dashboard_keyed_on_model_name_sees_nothing_of_triton() -> None:
    expression = 'rate(nv_inference_request_success{model_name="m"}[5m])'
    (missing,) = missing_metrics([expression], scrapes.triton(), check_labels=True)
    assert str(missing) == "nv_inference_request_success has no label model_name (it has model, version)"
    assert missing_metrics([expression.replace("model_name", "model")], scrapes.triton(), check_labels=True) == ()
    # Labels that the scrape configuration adds, and matchers that an absent label satisfies, are no fault.
    expression = 'nv_inference_request_success{pool="short",reason!="x",other=""}'
    assert missing_metrics([expression], scrapes.triton(), check_labels=True, target_labels=["pool"]) == ()


def test_a_declared_family_without_a_sample_yet_is_there() -> None:
    scrape = parse_scrape("# TYPE vllm:x histogram\n# TYPE vllm:y counter\n")
    assert missing_metrics(["vllm:x_bucket", "vllm:x_count", "vllm:y"], scrape, check_labels=True) == ()
    assert missing_metrics(["vllm:x"], scrape) != ()


def test_versions() -> None:
    assert known_since("vllm:admission_rejections_total", "0.32.0")
    assert not known_since("vllm:admission_rejections_total", "0.26.0")
    assert known_since("vllm:anything", "0.26.0")
    assert set(SINCE) <= scrapes.vllm().names()
    with pytest.raises(ValueError, match="'latest' does not begin with two numbers"):
        known_since("x", "latest")


# Our own rules and dashboard


def test_every_metric_of_the_cpu_rules_is_in_a_real_scrape() -> None:
    everything = merge_scrapes(
        [
            scrapes.vllm(),
            scrapes.agent(),
            scrapes.mtail(),
            scrapes.node(),
            scrapes.nginx(),
            scrapes.audit_textfile(),
            scrapes.rotation_textfile(),
        ]
    )
    missing = missing_metrics(
        scrapes.expressions("cpu"),
        everything,
        recorded=scrapes.recorded("cpu"),
        target_labels=scrapes.TARGET_LABELS,
        check_labels=True,
    )
    assert {str(one) for one in missing} <= scrapes.PROMETHEUS_SELF


def test_every_metric_of_the_gpu_rules_is_in_a_real_scrape_or_documented() -> None:
    everything = merge_scrapes(
        [
            scrapes.vllm(),
            scrapes.triton(),
            scrapes.agent(),
            scrapes.gpu_agent(),
            scrapes.mtail(),
            scrapes.node(),
            scrapes.nginx(),
            scrapes.audit_textfile(),
            scrapes.rotation_textfile(),
        ]
    )
    missing = missing_metrics(scrapes.expressions("gpu"), everything, recorded=scrapes.recorded("gpu"))
    assert {one.name for one in missing} <= scrapes.NOT_SCRAPED | scrapes.PROMETHEUS_SELF


def test_nothing_is_listed_as_not_scraped_without_need() -> None:
    everything = merge_scrapes([scrapes.vllm(), scrapes.triton(), scrapes.agent(), scrapes.gpu_agent()])
    used = {name for expression in scrapes.expressions("gpu") for name in metric_names(expression)}
    assert used | scrapes.used_by_the_dashboard() >= scrapes.NOT_SCRAPED
    assert not scrapes.NOT_SCRAPED & everything.names()


def test_every_metric_of_the_dashboard_is_in_a_real_scrape_or_recorded() -> None:
    everything = merge_scrapes([scrapes.vllm(), scrapes.agent(), scrapes.gpu_agent(), scrapes.mtail(), scrapes.nginx()])
    missing = missing_metrics(scrapes.dashboard_expressions(), everything, recorded=scrapes.recorded("gpu"))
    assert missing == ()


def test_the_counters_that_dcgm_is_asked_for_hold_what_the_rules_use() -> None:
    used = {name for expression in scrapes.expressions("gpu") for name in metric_names(expression)}
    assert {name for name in used if name.startswith("DCGM_")} <= scrapes.dcgm_counters()
    assert {"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_FAILURE"} <= scrapes.dcgm_counters()
