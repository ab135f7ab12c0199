"""A corrupted batch: some tokens deleted, the survivors closed up, and all rows packed end to end.

A row is `<stop> prefix <bos> text`. <stop> is stored behind the prefix but keeps position 0: so the rows of a prefix
are contiguous, and what follows may repeat. An example can be corrupted several times behind one prefix, which with
`prefix_lm` sees nothing of the texts and so is computed once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.noise import hash32
from insertlm.core.packing import Packing
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import DROPOUT, Corruption
from insertlm.families.corruption.uniform import UNIFORM
from insertlm.nn.attention import PackedAttention

__all__ = ["Corrupted", "corrupt", "packed_length"]


@dataclass(frozen=True)
class Corrupted:
    """A batch after deletion, packed: each of B examples as its prefix and D corrupted texts. N = B * D

    tokens, positions: [T]   text: [T] int32, 1 … D, 0 in a prefix   dropout: [T] int32 keys
    packing: of the matrix of all cells, [B, P + D (2 + L)]: the prefix, then <stop>, <bos> and the target, D times
    target: [N, L]   deleted: [N, L] bool   wanted: [N, L] bool, those of the deleted the model is asked for
    count: [N], of these   slots: [N, L] packed row of the slot each target cell belongs to
    stop: [N] packed row of <stop>
    open: [N, 1+L] bool, the slots in which something may be missing, see Corruption
    """

    tokens: Tensor
    positions: Tensor
    text: Tensor
    dropout: Tensor
    packing: Packing
    target: Tensor
    deleted: Tensor
    wanted: Tensor
    count: Tensor
    slots: Tensor
    stop: Tensor
    open: Tensor

    def attention(self, prefix_lm: bool) -> PackedAttention:
        """Rows see their whole example. With `prefix_lm` a prefix sees only itself, and no text sees another."""
        return PackedAttention(self.packing.segments, text=self.text if prefix_lm else None)

    def by_text(self, cells: Tensor) -> Tensor:
        """Cells as `packing` has them, of each text with its prefix, without <stop>: [N, P + 1 + L]"""
        texts, width = len(self.deleted) // len(cells), 2 + self.deleted.shape[1]
        front, back = cells[:, : -texts * width], cells[:, -texts * width :].reshape(-1, width)
        return torch.cat([front.repeat_interleave(texts, 0), back[:, 1:]], 1)


def packed_length(rows: Rows, noise: Noise, corruption: Corruption = UNIFORM, times: int = 1) -> Tensor:
    """How many packed rows `corrupt` makes of each example, [B]."""
    # One corruption after the other: repeated rows would be many, because the host asks for many steps at once.
    deleted = sum(corruption.count(rows, noise.copy(turn, times)) for turn in range(times))
    return rows.given_length - 2 + times * (2 + rows.target_length) - deleted


def corrupt(
    rows: Rows, noise: Noise, capacity: int | None = None, corruption: Corruption = UNIFORM, times: int = 1
) -> Corrupted:
    """Delete, close up and pack. capacity: see Packing   times: how often each example is corrupted"""
    batch, width = len(rows.target), rows.given.shape[1] - 2
    prefix, column = rows.given_length - 2, torch.arange(width, device=rows.given.device)
    texts, each = rows.repeated(times), noise.repeated(times)
    deleted = corruption.deleted(texts, each)
    wanted = corruption.wanted(deleted, texts.target_length)
    survive = F.pad(texts.real & ~deleted, (2, 0), value=True)  # <stop> and <bos> always do
    packing = Packing(torch.cat([column < prefix[:, None], survive.view(batch, -1)], 1), capacity)
    where = packing.where[:, width:].reshape_as(survive)
    # Positions count from the prefix on, in each text anew: they are those after deletion, as they are in writing.
    place = where - where[:, :1] + prefix.repeat_interleave(times)[:, None]
    place[:, 0] = 0  # <stop>
    ahead = (column + 1).expand(batch, -1)
    # The prefix has the dropout of its first text, for there is only one of it.
    keys = [
        hash32(noise.seed, example[:, None], epoch[:, None], DROPOUT, position)
        for example, epoch, position in ((noise.example, noise.epoch * times, ahead), (*each[1:], place))
    ]
    # Special tokens and target of each example, as often as it is corrupted; `packing` picks what survives of each.
    specials = rows.given.gather(1, prefix[:, None] + torch.arange(2, device=prefix.device))
    back = torch.cat([specials, rows.target], 1).repeat(1, times)
    number = torch.arange(1, times + 1, device=prefix.device).repeat_interleave(survive.shape[1])

    def pack(front: Tensor, back: Tensor) -> Tensor:
        return packing.pack(torch.cat([front, back.reshape(batch, -1)], 1))

    return Corrupted(
        tokens=pack(rows.given[:, :width], back),
        positions=pack(ahead, place),
        text=pack(torch.zeros_like(ahead), number.expand(batch, -1)).int(),
        dropout=pack(*keys).int(),
        packing=packing,
        target=texts.target,
        deleted=deleted,
        wanted=wanted,
        count=wanted.sum(1),
        slots=where[:, 2:],
        stop=where[:, 0],
        open=corruption.open(texts, each),
    )
