"""Lengths of texts, and whether two samples could come from one distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Difference", "Lengths", "compare_lengths", "describe_lengths"]

_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Lengths:
    """quantiles: by the share below them in percent, such as "5" """

    mean: float
    quantiles: dict[str, float]


@dataclass(frozen=True)
class Difference:
    """Between two samples. distance: the Kolmogorov–Smirnov statistic, the largest gap between their distribution
    functions, 0 to 1   p_value: the probability of this gap or a larger one if both came from one distribution
    (asymptotic; conservative where lengths tie)   shift: the first mean minus the second, in tokens"""

    distance: float
    p_value: float
    shift: float


def describe_lengths(lengths: Sequence[int]) -> Lengths:
    values = np.asarray(lengths, dtype=np.float64)
    quantiles = np.quantile(values, _SHARES)
    return Lengths(
        float(values.mean()), {f"{100 * share:g}": float(q) for share, q in zip(_SHARES, quantiles, strict=True)}
    )


def compare_lengths(ours: Sequence[int], theirs: Sequence[int]) -> Difference:
    a, b = np.sort(ours), np.sort(theirs)
    places = np.union1d(a, b)  # the distribution functions change nowhere else
    below_a, below_b = (np.searchsorted(x, places, side="right") / len(x) for x in (a, b))
    distance = float(np.abs(below_a - below_b).max())
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    # Stephens' correction makes the asymptotic p-value accurate for small samples, too.
    p_value = _kolmogorov((root + 0.12 + 0.11 / root) * distance)
    return Difference(distance, p_value, float(a.mean() - b.mean()))


def _kolmogorov(x: float) -> float:
    """P(K > x) for the Kolmogorov distribution. Its alternating series converges fast unless x is near 0."""
    if x < 0.2:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * math.fsum(terms)))
