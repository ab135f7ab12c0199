"""Groups of tokens: in each the last has to be found out, and the others are a frame that is written first, from left
to right. What an ILM with `group` deletes and asks for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["frame_behind", "is_end", "next_ones"]


def is_end(column: Tensor, group: int) -> Tensor:
    """Whether a column of a target is the last of a group."""
    return (column + 1) % group == 0


def frame_behind(column: Tensor, length: Tensor, group: int) -> Tensor:
    """How many tokens of the frame stand to the right of each. column: [L]   length: [B]. Returns [B, L]"""
    return (length - length // group)[:, None] - (column - column // group) - 1


def next_ones(deleted: Tensor, length: Tensor, group: int) -> Tensor:
    """Those of the deleted tokens that may come next: all, but of groups only the first of the frame, if one of it is
    missing. deleted: [B, L] bool. Returns the same"""
    if group == 1:
        return deleted
    column = torch.arange(deleted.shape[1], device=deleted.device)
    in_frame = ~is_end(column, group)
    missing = (deleted & in_frame).sum(1, keepdim=True)
    first = in_frame & (frame_behind(column, length, group) == missing - 1)
    return torch.where(missing > 0, first, deleted)
