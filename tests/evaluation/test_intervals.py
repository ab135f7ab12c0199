"""Wilson's interval against numbers that are known, and where a simpler one fails."""

from __future__ import annotations

import pytest

from insertlm.evaluation.intervals import wilson


@pytest.mark.parametrize(
    ("percent", "count", "interval"),
    [
        (90.0, 100, (82.563, 94.477)),
        (50.0, 4, (15.004, 84.996)),
        (100.0, 5, (56.551, 100.0)),  # where all are right, or none, it still has a width
        (0.0, 5, (0.0, 43.449)),
    ],
)
def test_wilson(percent: float, count: int, interval: tuple[float, float]) -> None:
    assert wilson(percent, count) == pytest.approx(interval, abs=1e-3)


def test_it_never_leaves_0_to_100() -> None:
    for count in (1, 3, 7, 10_000):
        for right in (0, 1, count):
            low, high = wilson(100 * right / count, count)
            assert 0 <= low <= 100 * right / count <= high + 1e-9
            assert high <= 100
