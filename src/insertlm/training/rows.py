"""Where a step's rows come from.

A small task lies on the device as a whole: a step selects its rows there, inside a captured graph. A corpus stays in
its files: the batches of the next few steps are read, all of them move in one transfer, and each step copies its own
into a buffer that never moves, which is what a captured graph reads. Both ways give a step the same examples, and the
same corruption. In both, a thread draws the next stretch of steps while the device computes: a device that waits for
1,850 texts to be looked at in every step loses a twelfth of its time. At most two stretches are held at a time.

Rows are kept as one matrix in int32, half of what the model reads, and widened batch by batch: 1.5 million zebra
puzzles would take 6.8 GB in int64.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insertlm.data.order import Order
from insertlm.families.base import Family, Noise, Rows
from insertlm.tasks.base import Corpus

__all__ = ["Batch", "Resident", "RowSource", "Streamed"]

_STRETCH = 64  # steps whose batches are drawn at once
_CELLS = 1 << 22  # the most cells of rows that are read ahead, unless one step has more


class Batch(NamedTuple):
    """One step's examples. example, epoch: [B] on the device   visible: packed rows after corruption
    cells: [B, W], the rows as `_Layout` packs them, on the device; None if the device has all rows"""

    example: Tensor
    epoch: Tensor
    visible: int
    cells: Tensor | None = None


class _Layout:
    """Rows as one matrix, [B, width] int32: the lengths, what is given, the target, and a solver's order if the family
    asks for one."""

    def __init__(self, like: Rows) -> None:
        parts = (like.given, like.target, like.solving_order)
        self._widths = [part.shape[1] for part in parts if part is not None]
        self.width = 2 + sum(self._widths)

    def pack(self, rows: Rows) -> Tensor:
        order = [] if rows.solving_order is None else [rows.solving_order]
        lengths = (rows.given_length[:, None], rows.target_length[:, None])
        return torch.cat([part.int() for part in (*lengths, rows.given, rows.target, *order)], 1)

    def unpack(self, cells: Tensor) -> Rows:
        lengths, given, target, *order = (part.long() for part in torch.split(cells, [2, *self._widths], 1))
        return Rows(given, lengths[:, 0], target, lengths[:, 1], *order)


class _Read(NamedTuple):
    """A stretch of steps on the host. noise: [steps * B]   visible: [steps * B]   cells: [steps * B, W], or None"""

    noise: Noise
    visible: Tensor
    cells: Tensor | None


class RowSource(ABC):
    """Gives each step its batch, and inside a step its rows."""

    def __init__(self, family: Family, layout: _Layout, order: Order, device: torch.device) -> None:
        self.family, self.order, self.device, self._layout = family, order, device, layout
        self.stretch = max(1, min(_STRETCH, _CELLS // (order.batch_size * layout.width)))
        self._drawn: tuple[int, list[Batch]] = (-1, [])
        self._reader = ThreadPoolExecutor(1, "rows")
        self._ahead: tuple[int, Future[_Read]] | None = None
        self._waited = 0.0

    def batch(self, step: int) -> Batch:
        # Many steps at once, because a draw for all of them costs hardly more than a draw for one.
        number = step // self.stretch
        if self._drawn[0] != number:
            self._drawn = (number, self._draw(number))
        return self._drawn[1][step % self.stretch]

    @abstractmethod
    def rows(self, example: Tensor) -> Rows:
        """The rows of the current step. Called inside a captured graph, so it reads memory that never moves.
        example: [B] on the device"""

    @abstractmethod
    def put(self, batch: Batch) -> None:
        """Make this the batch of the current step."""

    @abstractmethod
    def _read(self, examples: NDArray[np.int64], noise: Noise) -> _Read:
        """Runs in the thread. It must not touch the device, which may be capturing a graph. examples: [steps * B]"""

    def waited(self) -> float:
        """Seconds spent waiting for data since the last time."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def _draw(self, number: int) -> list[Batch]:
        started = time.monotonic()
        ready = self._ahead if self._ahead and self._ahead[0] == number else self._start(number)
        read = ready[1].result()  # also raises what went wrong in the thread
        self._waited += time.monotonic() - started
        self._ahead = self._start(number + 1)
        return self._batches(read)

    def _start(self, number: int) -> tuple[int, Future[_Read]]:
        return number, self._reader.submit(self._look_up, number)

    def _look_up(self, number: int) -> _Read:
        examples, epochs = (part.flatten() for part in self.order.batches(number * self.stretch, self.stretch))
        return self._read(examples, Noise(self.order.seed, torch.from_numpy(examples), torch.from_numpy(epochs)))

    def _batches(self, read: _Read) -> list[Batch]:
        """Cut into steps."""
        # The host must have the counts in time, so they are lists; all else goes to the device in one transfer.
        shape = (self.stretch, self.order.batch_size)
        example, epoch = (part.view(shape).to(self.device) for part in (read.noise.example, read.noise.epoch))
        counts: list[int] = read.visible.view(shape).sum(1).tolist()
        if read.cells is None:
            return [Batch(*part) for part in zip(example, epoch, counts, strict=True)]
        moved = _moved(read.cells, self.device).view(*shape, -1)
        return [Batch(*part) for part in zip(example, epoch, counts, moved, strict=True)]


class Resident(RowSource):
    """All rows on the device."""

    def __init__(self, family: Family, rows: Rows, order: Order, device: torch.device) -> None:
        super().__init__(family, _Layout(rows), order, device)
        # The host keeps a copy, to compute how many rows a corruption leaves without asking the device.
        self._host = self._layout.pack(rows)
        self._here = self._host.to(device)

    def rows(self, example: Tensor) -> Rows:
        return self._layout.unpack(self._here.index_select(0, example))

    def put(self, batch: Batch) -> None:
        """Nothing to do: the examples say which rows are meant."""

    def _read(self, examples: NDArray[np.int64], noise: Noise) -> _Read:
        rows = self._layout.unpack(self._host.index_select(0, noise.example))
        return _Read(noise, self.family.visible(rows, noise), None)


class Streamed(RowSource):
    """Rows of a corpus."""

    def __init__(self, family: Family, corpus: Corpus, order: Order, device: torch.device) -> None:
        super().__init__(family, _Layout(family.rows(corpus.take(np.zeros(1, np.int64)))), order, device)
        self._corpus = corpus
        # Made once: a captured graph reads from this address.
        self._buffer = torch.zeros(order.batch_size, self._layout.width, dtype=torch.int32, device=device)

    def rows(self, example: Tensor) -> Rows:
        return self._layout.unpack(self._buffer)

    def put(self, batch: Batch) -> None:
        assert batch.cells is not None
        self._buffer.copy_(batch.cells)

    def _read(self, examples: NDArray[np.int64], noise: Noise) -> _Read:
        rows = self.family.rows(self._corpus.take(examples))
        return _Read(noise, self.family.visible(rows, noise), self._layout.pack(rows))


def _moved(cells: Tensor, device: torch.device) -> Tensor:
    """From pinned memory, so that the host goes on while the transfer waits its turn."""
    return cells.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else cells
