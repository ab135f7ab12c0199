"""Batches of examples for tests, and the noise that they are corrupted with."""

from __future__ import annotations

import numpy as np
import torch

from insertlm.families.base import Noise
from insertlm.tasks.base import Example, Examples

__all__ = ["as_examples", "noise_of"]


def as_examples(batch: list[Example], junk: int = 0) -> Examples:
    """Padded with `junk`, which must not matter."""
    parts = []
    for rows in ([example.prefix for example in batch], [example.target for example in batch]):
        width = max(map(len, rows))
        parts += [np.array([row + [junk] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)]
        parts += [np.array(list(map(len, rows)), np.int32)]
    return Examples(*parts)


def noise_of(count: int, seed: int = 0, first: int = 0, epoch: int = 0) -> Noise:
    return Noise(seed, torch.arange(first, first + count), torch.full((count,), epoch))
