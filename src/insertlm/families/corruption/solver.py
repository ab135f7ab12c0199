"""States in which a solver of the task has found what is left, and nothing else yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insertlm.core.noise import chance
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import SOLVER, at_random

__all__ = ["SolverStates"]


@dataclass(frozen=True)
class SolverStates:
    """An order of deletion, see Order: in a share of the corruptions, what a solver would deduce last goes first.

    A model that writes what it is surest of passes through just such states, but random ones hardly ever are.
    """

    share: float

    def __call__(self, rows: Rows, noise: Noise) -> Tensor:
        if rows.solving_order is None:
            raise ValueError("solver states need rows with a solving order")
        solved = chance(self.share, *noise, SOLVER)[:, None]
        return torch.where(solved, -rows.solving_order, at_random(rows, noise))
