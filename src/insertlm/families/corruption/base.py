"""The interface of a corruption."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.noise import hash32
from insertlm.families.base import Noise, Rows

__all__ = [
    "COUNT",
    "DROPOUT",
    "FIRST",
    "FRAME",
    "PLACES",
    "SIZE",
    "SOLVER",
    "STRETCHED",
    "Corruption",
    "Order",
    "at_random",
    "first_ones",
]

# Streams of noise: what a draw is for. They stand together because two draws of one stream would be equal, and keep
# their numbers because a run that is resumed must see the states it would have seen. Places count up from PLACES.
COUNT, DROPOUT, PLACES = 0, 1, 2
STRETCHED, FIRST, SIZE, FRAME, SOLVER = -1, -2, -3, -4, -5

_LAST = 1 << 32  # above every hash


class Corruption(ABC):
    """Which tokens of a target are deleted, drawn anew for every visit of an example."""

    @abstractmethod
    def count(self, rows: Rows, noise: Noise) -> Tensor:
        """How many tokens are deleted of each target, [B].

        It must work on any device: the host asks it how large a batch will be, while the device still computes an
        earlier one.
        """

    @abstractmethod
    def deleted(self, rows: Rows, noise: Noise) -> Tensor:
        """Which tokens are deleted, `count` of each target: [B, L] bool."""

    def wanted(self, deleted: Tensor, length: Tensor) -> Tensor:
        """Which of the deleted tokens the model is asked for, [B, L] bool: all, since any of them may come next."""
        return deleted

    def open(self, rows: Rows, noise: Noise) -> Tensor:
        """The slots in which something may be missing, [B, 1+L] bool: behind <bos> and behind every token. All, unless
        a corruption leaves the text outside of some gaps as it is."""
        return torch.ones_like(F.pad(rows.target, (1, 0)), dtype=torch.bool)


# In which order tokens are deleted: [B, L] keys, of which the smallest goes first.
Order = Callable[[Rows, Noise], Tensor]


def at_random(rows: Rows, noise: Noise) -> Tensor:
    """Every order is equally likely."""
    column = torch.arange(rows.target.shape[1], device=rows.target.device)
    return hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], PLACES + column)


def first_ones(keys: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The `count` candidates with the smallest keys. keys: [B, L]   candidates: [B, L] bool   count: [B]
    Returns [B, L] bool"""
    order = torch.where(candidates, keys, _LAST).argsort(dim=1, stable=True)
    column = torch.arange(keys.shape[1], device=keys.device)
    return torch.zeros_like(candidates).scatter(1, order, column < count[:, None])
