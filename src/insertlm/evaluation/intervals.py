"""How far a number can be trusted: its 95 % interval, of a share by Wilson's formula, of a mean by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

__all__ = ["Estimate", "estimate", "wilson"]

_TIMES, _SEED = 2000, 0
_Z = 1.96  # so many standard deviations either side of the mean hold 95 % of a normal distribution


@dataclass(frozen=True)
class Estimate:
    """low, high: between them are the values of 95 % of the samples that are drawn from the texts"""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean over texts or, with weights, the sum of values over the sum of weights, such as words written over words
    removed. Texts are drawn with replacement, always in the same way."""
    above = np.asarray(values, dtype=np.float64)
    below = np.ones_like(above) if weights is None else np.asarray(weights, dtype=np.float64)
    drawn = np.random.default_rng(_SEED).integers(len(above), size=(_TIMES, len(above)))
    low, high = np.quantile(above[drawn].sum(1) / below[drawn].sum(1), (0.025, 0.975))
    return Estimate(float(above.sum() / below.sum()), float(low), float(high))


def wilson(percent: float, count: int) -> tuple[float, float]:
    """The interval of a share of `count` examples, in percent. Unlike percent ± 1.96 standard errors it stays within 0
    to 100, and it has a width even if all examples are right or none is."""
    share, square = percent / 100, _Z * _Z
    middle = share + square / (2 * count)
    half = _Z * sqrt(share * (1 - share) / count + square / (4 * count * count))
    low, high = (100 * (middle + side) / (1 + square / count) for side in (-half, half))
    return max(0.0, low), min(100.0, high)
