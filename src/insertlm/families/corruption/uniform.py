"""The paper's corruption."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from insertlm.core.noise import randint
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import COUNT, Corruption, Order, at_random, first_ones

__all__ = ["UNIFORM", "Uniform"]


@dataclass(frozen=True)
class Uniform(Corruption):
    """n uniform on {0 … L}, then n of the L tokens. With n = 0 the text is complete, which teaches a model to stop."""

    order: Order = at_random

    def count(self, rows: Rows, noise: Noise) -> Tensor:
        return randint(rows.target_length + 1, *noise, COUNT)

    def deleted(self, rows: Rows, noise: Noise) -> Tensor:
        return first_ones(self.order(rows, noise), rows.real, self.count(rows, noise))


UNIFORM = Uniform()
