"""The losses of every step, kept on the device until someone asks for them.

A step writes its losses into a row of a table on the device, inside a captured graph, so the host does not wait. The
host reads the table when it is full or a line of the log is due. So the first step that went wrong has a number, though
nobody looked while it happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Ledger"]

_ROWS = 1024  # steps until the host has to read the table


class Ledger:
    """bad: the first step since the last `means` whose loss was not finite, counted from 0; None if all were finite"""

    def __init__(self, rows: int = _ROWS) -> None:
        self.rows = rows
        self.bad: int | None = None
        self._names: list[str] = []
        self._table, self._place = torch.empty(0), torch.empty(0)
        self._unread = 0
        self._read: list[Tensor] = []

    def write(self, losses: Mapping[str, Tensor]) -> None:
        """On the device alone. losses: scalars, "loss" among them, the same names every time."""
        if not self._names:
            self._names = list(losses)
            like = losses["loss"]
            self._table = torch.zeros(self.rows, len(losses), dtype=like.dtype, device=like.device)
            self._place = torch.zeros(1, dtype=torch.int64, device=like.device)
        # The place is a tensor, because a captured graph repeats the same calls and cannot count on the host.
        self._table.index_copy_(0, self._place, torch.stack(list(losses.values()))[None])
        self._place.add_(1)

    def count_step(self) -> None:
        """On the host alone: a step has been started."""
        self._unread += 1
        if self._unread == self.rows:
            self._fetch()

    def means(self, steps: int) -> dict[str, float]:
        """The means of the last `steps` steps, which must be all steps since the last call."""
        self._fetch()
        rows = torch.cat(self._read).double()
        self._read = []
        values = dict(zip(self._names, rows.unbind(1), strict=True))
        finite = values["loss"].isfinite().tolist()
        self.bad = finite.index(False) if False in finite else None
        # fsum is exact, so a mean does not depend on when the table was read.
        return {name: math.fsum(value.tolist()) / steps for name, value in values.items()}

    def _fetch(self) -> None:
        self._read.append(self._table[: self._unread].cpu().clone())
        self._place.zero_()
        self._unread = 0
