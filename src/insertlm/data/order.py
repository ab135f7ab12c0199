"""Which examples a step sees: a pure function of (seed, step), with no shuffled list to hold or to save.

Each epoch visits every example once, in the order of a keyed permutation: a Feistel network over the next power of
four, walked until it lands inside the data set. It needs no memory, whatever the size of the corpus.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from insertlm.core.hashing import mix64

__all__ = ["Order", "ProcessOrder"]

_ROUNDS = 6


class Order:
    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.half_bits = max(1, (max(count - 1, 1).bit_length() + 1) // 2)

    def batches(self, first: int, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples and epochs of `steps` steps from step `first` on: two [steps, batch_size] arrays."""
        place = np.arange(first * self.batch_size, (first + steps) * self.batch_size, dtype=np.int64)
        return self._at(place.reshape(steps, self.batch_size))

    def _at(self, place: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The examples at these places of the endless sequence of all epochs, and their epochs."""
        epoch, offset = place // self.count, place % self.count
        return self._permute(offset, epoch), epoch

    def _permute(self, offset: NDArray[np.int64], epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        example = self._feistel(offset, epoch)
        while (outside := example >= self.count).any():
            example[outside] = self._feistel(example[outside], epoch[outside])
        return example

    def _feistel(self, x: NDArray[np.int64], epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        """A bijection of [0, 4^half_bits) for every epoch."""
        mask = (1 << self.half_bits) - 1
        left, right = x >> self.half_bits, x & mask
        key = mix64(epoch.astype(np.uint64) + mix64(np.full_like(epoch, self.seed, dtype=np.uint64)))
        for number in range(_ROUNDS):
            scrambled = mix64(right.astype(np.uint64) + key + np.uint64(number << 40)).astype(np.int64)
            left, right = right, left ^ (scrambled & mask)
        return (left << self.half_bits) | right


class ProcessOrder(Order):
    """One process's part of an order. Every batch is cut into `world * accumulate` pieces of one size; a process takes
    `accumulate` of them that follow each other. It counts pieces where an order counts steps."""

    def __init__(self, order: Order, rank: int, world: int, accumulate: int) -> None:
        super().__init__(order.count, order.batch_size // (world * accumulate), order.seed)
        self.rank, self.world, self.accumulate = rank, world, accumulate

    def batches(self, first: int, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples and epochs of `steps` pieces from piece `first` on: two [steps, batch_size] arrays."""
        step, number = np.divmod(np.arange(first, first + steps, dtype=np.int64), self.accumulate)
        piece = (step * self.world + self.rank) * self.accumulate + number
        return self._at(piece[:, None] * self.batch_size + np.arange(self.batch_size))
