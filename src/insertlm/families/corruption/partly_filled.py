"""Blanks that are partly filled in: the states through which an insertion model passes when it fills in a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insertlm.core.noise import chance, hash32, randint
from insertlm.core.packing import running_sum
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import PLACES, Corruption
from insertlm.families.corruption.blanks import MOST, Blanks, BlanksConfig, cut
from insertlm.families.corruption.uniform import UNIFORM

__all__ = ["PartlyFilled"]

_BLANKED, _MISSING = -31, -32  # streams of noise, below those of blanks and of fillers


@dataclass(frozen=True, eq=False)
class PartlyFilled(Corruption):
    """For a share of the examples: gaps are drawn as in blanks.py, and of the s tokens of each n are missing, n uniform
    on {0 … s}. So a model sees every blank when it is empty, half full and full. The other examples are as of Uniform.

    traits: [V] uint8, of text/units.py, on the device of the rows
    """

    share: float
    traits: Tensor
    config: BlanksConfig

    def count(self, rows: Rows, noise: Noise) -> Tensor:
        missing = self._missing(self._cut(rows, noise), noise).sum(1)
        return torch.where(self._has_blanks(noise), missing, UNIFORM.count(rows, noise))

    def deleted(self, rows: Rows, noise: Noise) -> Tensor:
        blanks = self._cut(rows, noise)
        column = torch.arange(rows.target.shape[1], device=rows.target.device)
        gap = blanks.gap_of(len(column))
        # One sort for all gaps, by gap and then by chance. What is in none comes first.
        draw = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], PLACES + column)
        rank = ((gap << 32) + draw).argsort(dim=1, stable=True).argsort(dim=1)
        size = blanks.end - blanks.begin
        before = len(column) - size.sum(1, keepdim=True) + running_sum(size) - size
        last = before + self._missing(blanks, noise)
        number = (gap - 1).clamp(min=0)
        missing = (gap > 0) & (rank < last.gather(1, number))
        return torch.where(self._has_blanks(noise)[:, None], missing, UNIFORM.deleted(rows, noise))

    def open(self, rows: Rows, noise: Noise) -> Tensor:
        """Of every gap the slot behind the token before it, and those behind its own tokens."""
        blanks = self._cut(rows, noise)
        slot = torch.arange(rows.target.shape[1] + 1, device=rows.target.device)
        inside = (slot >= blanks.begin[:, :, None]) & (slot <= blanks.end[:, :, None]) & blanks.used[:, :, None]
        return inside.any(1) | ~self._has_blanks(noise)[:, None]

    def _cut(self, rows: Rows, noise: Noise) -> Blanks:
        return cut(rows.target, rows.target_length, self.traits, self.config, noise)

    def _missing(self, blanks: Blanks, noise: Noise) -> Tensor:
        """How many tokens of each gap, [B, MOST]."""
        number = torch.arange(MOST, device=blanks.count.device)
        size = blanks.end - blanks.begin
        return randint(size + 1, noise.seed, noise.example[:, None], noise.epoch[:, None], _MISSING, number)

    def _has_blanks(self, noise: Noise) -> Tensor:
        """[B] bool"""
        return chance(self.share, *noise, _BLANKED)
