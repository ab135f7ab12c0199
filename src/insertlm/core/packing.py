"""Packed rows: the only batch format.

Rows of different lengths lie end to end in one buffer [T], without padding. A matrix `keep: [B, C]` says which cells of
an id matrix stay. One running count over it gives the packed place of every kept cell, and for every dropped cell the
place of the nearest kept cell to its left, which is the slot it would be inserted at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Joined", "Packing", "Segments", "most_spare", "running_sum"]


@dataclass(frozen=True, eq=False)
class Segments:
    """Which packed rows attend to each other.

    cu: [S+1] int32, where each segment starts, and the end of the last   longest: the most rows of a segment
    total: the number of all rows if the host knows it, which saves a wait for the device
    """

    cu: Tensor
    longest: int
    total: int | None = None

    @property
    def lengths(self) -> Tensor:
        """[S]"""
        return self.cu[1:] - self.cu[:-1]

    @cached_property
    def cells(self) -> Tensor:
        """[T]: the cell of each packed row in a dense [S, longest] matrix, flattened."""
        count = int(self.cu[-1]) if self.total is None else self.total
        segment = torch.repeat_interleave(
            torch.arange(len(self.cu) - 1, device=self.cu.device), self.lengths, output_size=count
        )
        offset = torch.arange(count, device=self.cu.device) - self.cu[segment]
        return segment * self.longest + offset

    @cached_property
    def valid(self) -> Tensor:
        """[S, longest]: which cells of the dense matrix hold a row."""
        return torch.arange(self.longest, device=self.cu.device) < self.lengths[:, None]


def most_spare(capacity: int) -> int:
    """How many rows of a buffer may stay empty."""
    return max(128, capacity // 32)


class Packing:
    """Where the kept cells of a [B, C] matrix go.

    With `capacity`, the buffer has that many rows whatever is kept, so that shapes stay static for compilation and CUDA
    graphs, and the host does not wait for the device. It must have room for all kept cells, and no more than
    `most_spare` rows besides.

    With `counts`, the number of kept cells of each row on the host, the host does not wait either.

    where: [B, C] int64, see above   lengths: [B] kept cells   starts: [B] first packed row   total: rows of the buffer
    """

    def __init__(self, keep: Tensor, capacity: int | None = None, counts: NDArray[np.int64] | None = None) -> None:
        self.keep = keep
        count = running_sum(keep)
        self.lengths = count[:, -1]
        ends = running_sum(self.lengths)
        self.starts = ends - self.lengths
        self.where = count + (self.starts - 1)[:, None]
        cu = torch.cat([ends.new_zeros(1), ends])
        if capacity is None:
            counts = self.lengths.cpu().numpy() if counts is None else counts
            self.total, longest = int(counts.sum()), int(counts.max())
        else:
            self.total, longest = capacity, keep.shape[1]
            cu = _with_tail(cu, longest, capacity)
        self.segments = Segments(cu.int(), longest, self.total)

    @property
    def real(self) -> Tensor:
        """[B+1], where each row's cells start in the buffer, and the end of the last"""
        return torch.cat([self.starts, self.starts[-1:] + self.lengths[-1:]])

    def pack(self, matrix: Tensor, fill: int = 0) -> Tensor:
        """The kept cells of a [B, C] matrix as [total]; the tail is `fill`."""
        # One scatter for all cells, because picking the kept ones would ask the device how many they are.
        buffer = matrix.new_full((self.total + 1,), fill)  # dropped cells all land in the extra last place
        place = torch.where(self.keep, self.where, self.total)
        return buffer.scatter(0, place.flatten(), matrix.flatten())[:-1]


class Joined:
    """Two buffers in one: the rows of the first, those of the second right behind them, then whatever is spare.

    capacity: rows of the new buffer   begin: [] where the second begins   segments: of both
    """

    def __init__(self, first: Packing, second: Packing, capacity: int | None = None) -> None:
        edges, more = first.real, second.real
        self.begin, longest = edges[-1], max(first.segments.longest, second.segments.longest)
        cu = torch.cat([edges, self.begin + more[1:]])
        total = first.total + second.total if capacity is None else capacity
        row = torch.arange(total, device=cu.device)
        behind = first.total + row - self.begin
        self._source = torch.where(row < self.begin, row, behind).clamp(max=first.total + second.total - 1)
        cu = cu if capacity is None else _with_tail(cu, longest, capacity)
        self.segments = Segments(cu.int(), longest, total)

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """What is packed in the two buffers, in the new one."""
        return torch.cat([first, second]).index_select(0, self._source)


def _with_tail(cu: Tensor, longest: int, capacity: int) -> Tensor:
    """The edges of the segments, with those of an empty tail. It is cut into segments of at most `longest` rows: of a
    longer one the attention kernel would leave rows unwritten, and many empty segments would slow it down."""
    pieces = -(-most_spare(capacity) // longest)
    tail = cu[-1] + longest * torch.arange(1, pieces, device=cu.device)
    return torch.cat([cu, tail.clamp(max=capacity), cu.new_full((1,), capacity)])


@torch.library.custom_op("insertlm::running_sum", mutates_args=())
def running_sum(values: Tensor) -> Tensor:
    """Along each row: [..., C] bool or int64 to int64."""
    # An operator of its own, to hide it from the compiler. From one sum over all cells the compiler makes blocks that
    # wait for each other, for a millisecond on a shared GPU; on sums by row that of torch 2.11 fails.
    return values.cumsum(-1)


@running_sum.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values, dtype=torch.int64, memory_format=torch.contiguous_format)
