"""The slots of a corrupted batch one by one, for models that ask each of them what is missing in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insertlm.core.packing import Packing
from insertlm.families.corruption.packed import Corrupted
from insertlm.nn.fused import whole_blocks

__all__ = ["Slots", "slots_of"]


@dataclass(frozen=True)
class Slots:
    """The slots of a corrupted batch, packed: <bos> and every visible token of its N texts.

    packing: of the [N, 1+L] matrix of <bos> and target cells   rows: [S] where each slot lies in the corrupted batch
    missing: [S] how many tokens are missing in it   of: [N, L] the slot each target cell belongs to
    """

    packing: Packing
    rows: Tensor
    missing: Tensor
    of: Tensor


def slots_of(x: Corrupted, capacity: int | None = None) -> Slots:
    """capacity: rows of the corrupted batch, as given to `corrupt`. There are never more slots than that, nor than
    cells, in whole blocks of rows."""
    # Cells of the prefix and <stop> are left out; <bos>, which is always there, comes first.
    keep = x.by_text(x.packing.keep)[:, -x.open.shape[1] :]
    packing = Packing(keep, None if capacity is None else min(capacity, whole_blocks(keep.numel())))
    # For a deleted cell, `where` is the nearest visible one to its left: the slot it is missing in.
    of = packing.where[:, 1:]
    missing = of.new_zeros(packing.total).scatter_add(0, of.flatten(), x.deleted.flatten().long())
    bos = x.stop[:, None] + 1  # it is stored right behind <stop>
    return Slots(packing, packing.pack(torch.cat([bos, x.slots], 1)), missing, of)
