from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observe.live.histogram import BUCKETS, GROWTH, LOW_SECONDS, LatencyHistogram

LATENCIES = st.floats(min_value=LOW_SECONDS * 2, max_value=100.0)


def of(values: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(LATENCIES, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_lies_within_a_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    exact = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    found = of(values).percentile(share)
    assert found is not None
    assert exact / GROWTH / 1.0001 <= found <= exact * GROWTH * 1.0001


@given(st.lists(LATENCIES, max_size=50), st.lists(LATENCIES, max_size=50))
def test_differences_and_sums_are_those_of_the_values(before: list[float], after: list[float]) -> None:
    early, late = of(before), of(before + after)
    assert late.since(early).counts == of(after).counts
    assert LatencyHistogram.total([early, of(after)]).counts == late.counts


@given(st.lists(LATENCIES, max_size=50))
def test_pairs_carry_all_of_it(values: list[float]) -> None:
    histogram = of(values)
    pairs = histogram.to_pairs()
    assert len(pairs) <= len(values)
    assert LatencyHistogram.from_pairs(pairs).counts == histogram.counts


def test_values_beyond_the_buckets_are_counted_at_their_ends() -> None:
    histogram = of([0.0, -1.0, 1e-9, 1e6])
    assert histogram.counts[0] == 3
    assert histogram.counts[BUCKETS - 1] == 1


def test_of_nothing_there_is_no_percentile() -> None:
    assert LatencyHistogram().percentile(0.5) is None


@pytest.mark.parametrize("pairs", [[(BUCKETS, 1)], [(-1, 1)], [(0, -1)]])
def test_invalid_pairs_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises((ValueError, IndexError)):
        LatencyHistogram.from_pairs(pairs)
