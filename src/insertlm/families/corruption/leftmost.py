"""Of what is missing in a slot, the model is asked for the leftmost alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import Corruption

__all__ = ["Leftmost"]


@dataclass(frozen=True)
class Leftmost(Corruption):
    """Another corruption, asked for less. A slot then writes from left to right, which is easier to learn for text: the
    next word is to be told, not the bag of all that are missing."""

    of: Corruption

    def count(self, rows: Rows, noise: Noise) -> Tensor:
        return self.of.count(rows, noise)

    def deleted(self, rows: Rows, noise: Noise) -> Tensor:
        return self.of.deleted(rows, noise)

    def wanted(self, deleted: Tensor, length: Tensor) -> Tensor:
        return deleted & ~F.pad(deleted, (1, 0))[:, :-1]

    def open(self, rows: Rows, noise: Noise) -> Tensor:
        return self.of.open(rows, noise)
