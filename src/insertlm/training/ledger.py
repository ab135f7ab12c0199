"""The losses of every step, kept where they were computed until someone asks.

A step writes its losses into a row of a table on the device: inside a captured graph, and without the host waiting. The
host reads the table when it is full or a line of the log is due. So the first step that went wrong has a number, though
nobody looked while it happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Ledger"]

_ROOM = 1024  # steps before the host has to look


class Ledger:
    """bad: which of the steps of the last `means` was the first whose loss is not finite, counted from 0; None if all
    are."""

    def __init__(self, room: int = _ROOM) -> None:
        self.room = room
        self.bad: int | None = None
        self._names: list[str] = []
        self._table, self._place = torch.empty(0), torch.empty(0)
        self._unread = 0
        self._read: list[Tensor] = []

    def write(self, losses: Mapping[str, Tensor]) -> None:
        """Device only. losses: scalars, "loss" among them, the same names every time."""
        if not self._names:
            self._names = list(losses)
            like = losses["loss"]
            self._table = torch.zeros(self.room, len(losses), dtype=like.dtype, device=like.device)
            self._place = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._table.index_copy_(0, self._place, torch.stack(list(losses.values()))[None])
        self._place.add_(1)

    def turn(self) -> None:
        """Host only: a step has been sent on its way."""
        self._unread += 1
        if self._unread == self.room:
            self._look()

    def means(self, steps: int) -> dict[str, float]:
        """Of the last `steps` steps, which are all since the last time."""
        self._look()
        rows = torch.cat(self._read).double()
        self._read = []
        values = dict(zip(self._names, rows.unbind(1), strict=True))
        finite = values["loss"].isfinite().tolist()
        self.bad = finite.index(False) if False in finite else None
        return {name: math.fsum(value.tolist()) / steps for name, value in values.items()}

    def _look(self) -> None:
        self._read.append(self._table[: self._unread].cpu().clone())
        self._place.zero_()
        self._unread = 0
