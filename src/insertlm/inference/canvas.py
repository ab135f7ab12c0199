"""The texts of a batch while tokens are inserted: the bookkeeping of the paper's Algorithm 2 in tensor operations.

Tokens are stored in the order in which they came (the paper's v) beside their current ranks (its u). So an insertion
appends one cell and raises the ranks behind it, and no token moves. A row holds prefix, stop token, <bos>, given text
and inserted tokens. Ranks are rotary positions: the stop token has 0, then come the prefix, <bos> and the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from insertlm.inference.settings import Prompt

__all__ = ["Canvas"]


class Counts(NamedTuple):
    """Each [B]"""

    length: NDArray[np.int64]
    prefix: NDArray[np.int64]
    open: NDArray[np.int64]
    limit: NDArray[np.int64]


@dataclass
class Canvas:
    """tokens, ranks: [B, C]   open: [B, C] bool, whether a token may be inserted right behind this one
    length: [B] cells in use   prefix: [B] those of the prefix   given: [B] those in use at the start
    limit: [B] the most cells that may be used
    counts: a copy on the host of lengths, prefixes, numbers of open cells and limits, to avoid waiting for the device
    """

    counts: Counts
    tokens: Tensor
    ranks: Tensor
    open: Tensor
    length: Tensor
    prefix: Tensor
    given: Tensor
    limit: Tensor

    @classmethod
    def start(
        cls, prompts: Sequence[Prompt], stop: int, bos: int, room: int | NDArray[np.int64], device: torch.device
    ) -> Canvas:
        """room: the most insertions of all rows, or of each, [B]. One more column takes writes that are meant for no
        cell, so that `insert` needs no mask."""
        prefix = np.array([len(prompt.prefix) for prompt in prompts])
        length = prefix + 2 + np.array([len(prompt.start) for prompt in prompts])
        limit = length + room
        columns = np.arange(length.max() + np.max(room) + 1)
        # Built on the host and copied once, because every tensor operation would cost a launch.
        tokens = np.zeros((len(prompts), len(columns)), np.int64)
        for cells, prompt, used in zip(tokens, prompts, length, strict=True):
            cells[:used] = [*prompt.prefix, stop, bos, *prompt.start]
        place = columns - prefix[:, None]  # 0 is the stop token
        ranks = np.where(place < 0, columns + 1, np.where(place == 0, 0, columns)) * (columns < length[:, None])
        open_ = (place > 0) & (columns < length[:, None])
        for cells, prompt, first in zip(open_, prompts, prefix + 1, strict=True):
            if prompt.open is not None:
                cells[:] = False
                cells[[first + gap for gap in prompt.open]] = True
        parts = (tokens, ranks, open_, length, prefix, length, limit)
        counts = Counts(length, prefix, open_.sum(1), limit)
        return cls(counts, *(torch.tensor(part, device=device) for part in parts))

    def __len__(self) -> int:
        return len(self.length)

    @property
    def columns(self) -> Tensor:
        """[C]"""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    @property
    def used(self) -> Tensor:
        """[B, C]: the cells that hold a token."""
        return self.columns < self.length[:, None]

    @property
    def slots(self) -> Tensor:
        """[B, C]: the open cells. A row without any shows its <bos>: the text has ended, but softmaxes need a slot."""
        return self.open | (~self.open.any(1, keepdim=True) & (self.columns == self.prefix[:, None] + 1))

    @property
    def right(self) -> Tensor:
        """[B, C]: the cell that follows each in the text; 0, which follows none, behind the last."""
        return self._by_rank(self.columns.expand_as(self.ranks)).gather(1, (self.ranks + 1) * self.used)

    @property
    def gap(self) -> Tensor:
        """[B, C]: the gap that each token is in or, if it is given, that follows it. Gaps have numbers from 0 to C - 1
        that mean nothing else. Of unused cells it is 0."""
        given = (self.columns >= self.prefix[:, None]) & (self.columns < self.given[:, None])
        return self._by_rank(given.long()).cumsum(1).gather(1, self.ranks * self.used) * self.used

    def _by_rank(self, values: Tensor) -> Tensor:
        """Values of the cells in use, in the order of the row, [B, C + 1]; 0 behind the last."""
        nobody = torch.zeros(len(values), values.shape[1] + 1, dtype=values.dtype, device=values.device)
        place = torch.where(self.used, self.ranks, values.shape[1])
        return nobody.scatter(1, place, values * self.used)

    def select(self, rows: Tensor) -> Canvas:
        """Keep only these rows. rows: [B'] indices"""
        counts, *parts = (getattr(self, part.name) for part in fields(self))
        here = rows.cpu().numpy()
        still = Counts(*(count[here] for count in counts))
        return Canvas(still, *(part.index_select(0, rows) for part in parts))

    def join(self, other: Canvas) -> Canvas:
        """The rows of both."""
        counts = Counts(*(np.concatenate(pair) for pair in zip(self.counts, other.counts, strict=True)))
        columns = int(counts.limit.max()) + 1  # a negative padding below cuts cells that nobody can use any more
        parts = []
        for part in fields(self)[1:]:
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            if mine.dim() == 2:
                mine, theirs = (F.pad(cells, (0, columns - cells.shape[1])) for cells in (mine, theirs))
            parts.append(torch.cat([mine, theirs]))
        return Canvas(counts, *parts)

    def insert(self, slot: Tensor, token: Tensor) -> Tensor:
        """Insert token[b, k] right behind cell slot[b, k] of row b, for all k at once. The slots of a row are distinct;
        -1 means no insertion. Returns ranks in the text after the insertions, -1 for none. All [B, K]"""
        real = slot >= 0
        # All insertions happen at once, so every token, old or new, moves by the number of slots before it.
        behind = self.ranks.gather(1, slot.clamp(min=0)).masked_fill(~real, self.tokens.shape[1])
        self.ranks += (behind[:, None, :] < self.ranks[:, :, None]).sum(2) * self.used
        rank = behind + 1 + (behind[:, None, :] < behind[:, :, None]).sum(2)
        cell = torch.where(real, self.length[:, None] + real.cumsum(1) - 1, self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, cell, token)
        self.ranks.scatter_(1, cell, rank)
        self.open.scatter_(1, cell, real)
        self.length += real.sum(1)
        # Usually every row gets one token, and then the host knows the new counts without asking the device.
        added = 1 if slot.shape[1] == 1 else real.sum(1).cpu().numpy()
        self.counts = self.counts._replace(length=self.counts.length + added, open=self.counts.open + added)
        return torch.where(real, rank - self.prefix[:, None] - 2, -1)
