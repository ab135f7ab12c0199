"""Deletion within one stretch of a text, so that a model sees what infilling asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insertlm.core.noise import chance, randint, stretch
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import COUNT, FIRST, SIZE, STRETCHED, Corruption, Order, at_random, first_ones

__all__ = ["Stretch"]


@dataclass(frozen=True)
class Stretch(Corruption):
    """For a share of the examples, all deleted tokens lie in one stretch of S tokens, which may run over the end to the
    beginning. S is uniform on {1 … L} and n on {0 … S}. The other examples are as of Uniform."""

    share: float
    order: Order = at_random

    def count(self, rows: Rows, noise: Noise) -> Tensor:
        return randint(self._size(rows.target_length, noise) + 1, *noise, COUNT)

    def deleted(self, rows: Rows, noise: Noise) -> Tensor:
        # The same draw as in `count`, for it is the same stream: so n never exceeds the stretch.
        size = self._size(rows.target_length, noise)
        candidates = stretch(rows.target_length, size, rows.target.shape[1], *noise, FIRST)
        return first_ones(self.order(rows, noise), candidates, self.count(rows, noise))

    def _size(self, length: Tensor, noise: Noise) -> Tensor:
        """How long the stretch is, [B]: the whole text where there is none."""
        some = randint(length, *noise, SIZE) + 1
        return torch.where(chance(self.share, *noise, STRETCHED), torch.minimum(some, length), length)
