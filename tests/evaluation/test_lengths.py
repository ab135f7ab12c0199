"""Lengths and the distance between two sets of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insertlm.evaluation.lengths import compare_lengths, describe_lengths

sample = st.lists(st.integers(1, 30), min_size=1, max_size=20)


def test_quantiles_and_mean() -> None:
    found = describe_lengths(list(range(1, 102)))
    assert found.mean == 51
    assert found.quantiles == {"5": 6, "25": 26, "50": 51, "75": 76, "95": 96}


@given(sample, sample)
def test_the_distance_is_the_largest_gap_between_shares(a: list[int], b: list[int]) -> None:
    gaps = [abs(sum(x <= t for x in a) / len(a) - sum(x <= t for x in b) / len(b)) for t in range(32)]
    found = compare_lengths(a, b)
    assert found.distance == pytest.approx(max(gaps))
    assert found.shift == pytest.approx(sum(a) / len(a) - sum(b) / len(b))
    assert compare_lengths(b, a).distance == found.distance
    assert 0 <= found.p_value <= 1


def test_p_values_are_those_of_the_table() -> None:
    """P(K > 1.36) = 0.05 and P(K > 1.63) = 0.01, and one source gives small p-values as often as they say."""
    size = 20_000
    base = list(range(size))
    for x, p in ((1.358, 0.05), (1.628, 0.01)):
        shift = round(x * np.sqrt(2 / size) * size)
        assert compare_lengths(base, [i + shift for i in base]).p_value == pytest.approx(p, rel=0.03)
    draw = np.random.default_rng(0)
    p_values = [compare_lengths(*draw.integers(0, 10**9, (2, 60)).tolist()).p_value for _ in range(400)]
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.09
    assert compare_lengths([5, 6], [5, 6]).p_value == 1
