"""A 64-bit hash for numpy arrays: randomness as a pure function."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix64"]


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the input changes about half of the output's (the finaliser of SplitMix64; it is one to one)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
