"""Lengths of texts, and whether two sets of them could come from one source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Difference", "Lengths", "compare_lengths", "describe_lengths"]

_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Lengths:
    """mean: of all; quantiles: by their share in percent, as text"""

    mean: float
    quantiles: dict[str, float]


@dataclass(frozen=True)
class Difference:
    """Two samples. distance: Kolmogorov and Smirnov's, the largest gap between their shares of texts up to a length, 0
    to 1; p_value: the chance of such a gap, or a larger one, if both came from one source (by the limit for large
    samples, cautious where lengths tie); shift: the first one's mean minus the second's, in tokens"""

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
    places = np.union1d(a, b)
    below_a, below_b = (np.searchsorted(x, places, side="right") / len(x) for x in (a, b))
    distance = float(np.abs(below_a - below_b).max())
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    # Stephens' correction makes the limit good from a handful of samples on.
    p_value = _kolmogorov((root + 0.12 + 0.11 / root) * distance)
    return Difference(distance, p_value, float(a.mean() - b.mean()))


def _kolmogorov(x: float) -> float:
    """P(K > x) for Kolmogorov's limit distribution. The series alternates and falls fast unless x is near 0."""
    if x < 0.2:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * math.fsum(terms)))
