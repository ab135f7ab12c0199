"""Zebra puzzles by the million: made on all cores, kept in compact arrays, turned into ids when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from insertlm.core.cores import cores
from insertlm.core.errors import InsertlmError
from insertlm.tasks.base import TENTHS, Examples
from insertlm.tasks.zebra.clues import HOUSE, KINDS, NONE, SIDE, TOKENIZER

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["CHUNK", "VERSION", "Puzzles", "Sizes", "kernels", "make"]

VERSION = 1  # of the generator: another number, other puzzles
CHUNK = 256  # puzzles per random stream; another value gives other data
_AT_ONCE = 1 << 16  # puzzles that are turned into ids together, to bound the memory of intermediate arrays

Bytes = NDArray[np.uint8]
_Cells = NDArray[np.int64] | slice  # some, in an order


class Sizes(NamedTuple):
    """Bounds on the size of a street; all combinations are equally likely."""

    min_houses: int
    max_houses: int
    min_attributes: int
    max_attributes: int


@dataclass(frozen=True)
class Puzzles:
    """Many puzzles, end to end.

    heads: [N, 3] houses, attributes, clues   clues: [K, 4] kind and operands
    cells: [C, 2] the values of a puzzle in the order in which deduction finds them, with their houses
    """

    heads: Bytes
    clues: Bytes
    cells: Bytes

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, part: slice) -> Puzzles:
        heads = self.heads.astype(np.int64)
        clue = np.concatenate([[0], heads[:, 2].cumsum()])
        cell = np.concatenate([[0], (heads[:, 0] * heads[:, 1]).cumsum()])
        first, last, _ = part.indices(len(self))
        return Puzzles(
            self.heads[first:last], self.clues[clue[first] : clue[last]], self.cells[cell[first] : cell[last]]
        )

    def arrays(self) -> dict[str, Bytes]:
        return asdict(self)

    def examples(self, by_house: bool, firsts: Sequence[int] = (0, 0, 0)) -> Examples:
        """As ids. by_house: whether targets are in the order of houses, then attributes, or else in that of deduction
        firsts: the ids of attribute 0, house 0 and value 0 in a target"""
        parts = [self[first : first + _AT_ONCE] for first in range(0, len(self), _AT_ONCE)]
        prefix = [part._prefix() for part in parts]
        orders = [part._order(by_house) for part in parts]
        target = [part._target(order, firsts) for part, order in zip(parts, orders, strict=True)]
        solving_order = [part._solving_order(order) for part, order in zip(parts, orders, strict=True)]
        return Examples(*_joined(prefix), *_joined(target), _joined(solving_order)[0])

    def _prefix(self) -> tuple[Bytes, NDArray[np.int32]]:
        """The words of all clues end to end, and how many each puzzle has."""
        kind, *operands = (table[self.clues[:, i]] for i, table in enumerate(_tables()))
        lhs, rhs, end = (np.full_like(kind, TOKENIZER.encode(word)[0]) for word in ("LHS", "RHS", "CLUE_END"))
        words = (kind, lhs, operands[0], rhs, operands[1], operands[2], end)
        table = np.concatenate(words, axis=1)  # [K, 13], all clues with room for three operands
        real = table != NONE
        owner = np.repeat(np.arange(len(self)), self.heads[:, 2])
        lengths = np.bincount(owner, weights=real.sum(axis=1), minlength=len(self))
        return table[real], lengths.astype(np.int32)

    def _target(self, order: _Cells, firsts: Sequence[int]) -> tuple[Bytes, NDArray[np.int32]]:
        """The triples of all solutions end to end, and how many ids each has. order: of cells, see `_order`"""
        value, house = self.cells[:, 0], self.cells[:, 1]
        triples = np.stack([value // SIDE, house, value % SIDE], axis=1) + np.array(firsts, np.uint8)
        return triples[order].ravel(), 3 * self._sizes

    def _solving_order(self, order: _Cells) -> tuple[Bytes, NDArray[np.int32]]:
        """The step at which deduction finds each of these ids, in the same form."""
        first = np.repeat(self._sizes.cumsum() - self._sizes, self._sizes)
        step = (np.arange(len(self.cells)) - first).astype(np.uint8)  # cells are stored in the order of deduction
        return step[order].repeat(3), 3 * self._sizes

    @property
    def _sizes(self) -> NDArray[np.int32]:
        """Cells of each puzzle."""
        return self.heads[:, 0].astype(np.int32) * self.heads[:, 1]

    def _order(self, by_house: bool) -> _Cells:
        """The order of cells in a target."""
        if not by_house:
            return slice(None)
        owner = np.repeat(np.arange(len(self)), self._sizes)
        return np.lexsort((self.cells[:, 0] // SIDE, self.cells[:, 1], owner))


def _tables() -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Lookup tables from kinds and operands to ids, NONE where there is none."""
    kinds = np.array([TOKENIZER.encode(kind) for kind in KINDS], np.uint8)
    operands = np.full((256, 3), NONE, np.uint8)
    for operand in range(HOUSE):
        operands[operand] = TOKENIZER.encode(f"c {operand // SIDE} {operand % SIDE}")
    for house in range(SIDE):
        operands[HOUSE + house] = TOKENIZER.encode(f"n 0 {house}")
    return kinds, operands, operands, operands


def _joined(parts: list[tuple[Bytes, NDArray[np.int32]]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ragged rows to a padded matrix and their lengths."""
    if not parts:
        return np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
    lengths = np.concatenate([length for _, length in parts])
    # Parts are of bytes, and the matrix, four times as large, exists only once.
    matrix = np.full((len(lengths), lengths.max()), TOKENIZER.specials.pad, np.int32)
    first = 0
    for flat, length in parts:
        rows = matrix[first : first + len(length)]
        rows[np.arange(matrix.shape[1]) < length[:, None]] = flat
        first += len(length)
    return matrix, lengths


# --- Making -----------------------------------------------------------------------------------------------------------


def kernels() -> ModuleType:
    try:
        from insertlm.tasks.zebra import kernels as zebra_kernels
    except ImportError as error:
        raise InsertlmError("zebra puzzles are made and solved with numba: pip install 'insertlm[zebra]'") from error
    return zebra_kernels


def make(
    split: int, count: int, seed: int, sizes: Sizes, progress: Callable[[int], None] = lambda done: None
) -> Puzzles:
    """The first `count` puzzles of a split, given by index.

    Every chunk has a random stream of its own, so a larger count extends a smaller one, whatever the number of cores.
    """
    draw, splits = kernels().draw, TENTHS.astype(np.uint8)

    def chunk(number: int) -> tuple[Bytes, Bytes, Bytes]:
        [state] = np.random.SeedSequence((seed, split, number)).generate_state(1, np.uint64)
        found: tuple[Bytes, Bytes, Bytes] = draw(
            state, min(CHUNK, count - number * CHUNK), np.array(sizes), splits, split
        )
        return found

    parts, pool = [], ThreadPoolExecutor(cores())
    try:
        for part in pool.map(chunk, range(-(-count // CHUNK))):
            parts.append(part)
            progress(min(count, len(parts) * CHUNK))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, do not make the rest first
    return Puzzles(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
