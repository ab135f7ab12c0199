"""Deletion of groups, for tasks such as zebra puzzles whose targets are tokens in groups of equal size.

The last token of a group, its end, has to be deduced; the others are a frame that is known beforehand. So the model
learns to write the frame first, from left to right, and then the ends in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insertlm.core.noise import chance, randint
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import COUNT, FRAME, SIZE, Corruption, Order, at_random

__all__ = ["Groups"]


@dataclass(frozen=True)
class Groups(Corruption):
    """n of the ends are deleted, n uniform on none to all. In a share of the examples all ends are deleted, and some of
    the frame from the right.

    size: tokens of a group   unfinished: the share of examples in which the frame is still being written
    """

    size: int
    unfinished: float
    order: Order = at_random  # of the ends

    def count(self, rows: Rows, noise: Noise) -> Tensor:
        length = rows.target_length
        ends = length // self.size
        some = randint(ends + 1, *noise, COUNT)
        more = ends + 1 + randint((length - ends).clamp(min=1), *noise, SIZE)
        return torch.where(chance(self.unfinished, *noise, FRAME), torch.minimum(more, length), some)

    def deleted(self, rows: Rows, noise: Noise) -> Tensor:
        length, width = rows.target_length, rows.target.shape[1]
        column = torch.arange(width, device=length.device)
        count, end = self.count(rows, noise)[:, None], self._is_end(column) & rows.real
        # Ranks by comparing all pairs: targets of groups are short, and there is no sorting of the ends alone.
        key = self.order(rows, noise) * width + column  # no two are equal
        rank = ((key[:, None] < key[:, :, None]) & end[:, None]).sum(2)
        frame = rows.real & (self._frame_behind(column, length) < count - length[:, None] // self.size)
        return torch.where(end, rank < count, frame)

    def wanted(self, deleted: Tensor, length: Tensor) -> Tensor:
        """The first missing token of the frame; all missing ends once the frame is there."""
        column = torch.arange(deleted.shape[1], device=deleted.device)
        in_frame = ~self._is_end(column)
        missing = (deleted & in_frame).sum(1, keepdim=True)
        first = in_frame & (self._frame_behind(column, length) == missing - 1)
        return torch.where(missing > 0, first, deleted)

    def _is_end(self, column: Tensor) -> Tensor:
        return (column + 1) % self.size == 0

    def _frame_behind(self, column: Tensor, length: Tensor) -> Tensor:
        """How many tokens of the frame stand to the right of each, [B, L]. column: [L]   length: [B]"""
        return (length - length // self.size)[:, None] - (column - column // self.size) - 1
