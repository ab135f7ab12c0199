"""How far a figure can be trusted: its interval of 95 %, by drawing the texts again and again (bootstrap)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Estimate", "estimate"]

_TIMES, _SEED = 2000, 0


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
