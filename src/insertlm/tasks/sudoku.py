"""Sudoku: given some digits of a grid, write all 81, so that no row, column or box holds a digit twice.

    prefix   a1 5  a2 3  a5 7  …     (the given cells, in reading order; a is the first row, 1 the first column)
    target   a1 5  a2 3  a3 4  …     (all 81 cells, in reading order)

A digit is written behind the name of its cell, so an unfinished text says where every digit belongs, wherever tokens
are missing. The target has the given cells too: in a masked diffusion model's block each cell has a place of its own.

A puzzle has one solution, and the given cells are emptied in random order as long as that stays so and more than
`min_givens` are left. With the default no given cell is redundant, and puzzles have about 20 to 29.

The splits are disjoint by construction. A hash of the solution assigns a puzzle to its split. It is the same for grids
that can be turned into each other by exchanging digits, rows, columns, bands and stacks, or rows with columns. So no
puzzle of one split is a puzzle of another in disguise. (Different grids may share a hash, which does no harm.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count as count_from
from itertools import islice, zip_longest
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.core.cores import cores
from insertlm.core.errors import InsertlmError
from insertlm.core.hashing import mix64
from insertlm.core.section import Count, Index
from insertlm.tasks.base import SPLITS, TENTHS, Example, Examples, Kind, Split, Task
from insertlm.tasks.stored import stored
from insertlm.text.tokenizers import WordTokenizer

__all__ = ["Sudoku", "grid_text", "read_grid", "solve", "split_of"]

VERSION = 1  # of the generator: another number, other puzzles
CHUNK = 64  # grids per random stream; another value gives other data
CELLS = [f"{row}{column}" for row in "abcdefghi" for column in range(1, 10)]
# The id of a cell's name is its number, that of a digit d is 80 + d.
TOKENIZER = WordTokenizer((*CELLS, *map(str, range(1, 10))))
ZERO = len(CELLS) - 1
ALL = (1 << 9) - 1  # a set of digits has bit d - 1 for the digit d

Grid = NDArray[np.int64]  # [81], 0 for an empty cell


class Sudoku(Task, frozen=True, kw_only=True, tag="sudoku"):
    """Fill in the grid."""

    kind: ClassVar[Kind] = "puzzle"
    things: ClassVar[str] = "grids"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"sudoku": {}}

    min_givens: Annotated[int, msgspec.Meta(ge=17, le=80)] = 17  # no puzzle has fewer than 17
    train: Count = 1_000_000  # examples per split
    validation: Count = 1_000  # examples
    test: Count = 10_000  # examples
    seed: Index = 1  # of the puzzles

    @property
    def tokenizer(self) -> WordTokenizer:
        return TOKENIZER

    @property
    def longest_prefix(self) -> int:
        return 2 * len(CELLS)

    @property
    def longest_target(self) -> int:
        return 2 * len(CELLS)

    def examples(self, split: Split, count: int | None = None, seed: int | None = None) -> Examples:
        wanted = getattr(self, split) if count is None else count
        if seed is not None:  # fresh ones, which are not kept
            return _examples(self._make(split, wanted, seed))
        kept = stored(
            f"sudoku-{VERSION}-{self.min_givens}-seed{self.seed}-{split}",
            enough=lambda arrays: len(arrays["grids"]) >= wanted,
            make=lambda: {"grids": self._make(split, wanted, self.seed)},
        )
        return _examples(kept["grids"][:wanted])

    def render(self, example: Example) -> str:
        return f"{grid_text(_grid(example.prefix))}\n\n{grid_text(_grid(example.target))}"

    def parse_prompt(self, text: str) -> list[int]:
        """A grid, see `read_grid`. What has not exactly one solution is refused."""
        given = read_grid(text)
        solve(given)
        return [word for cell in given.nonzero()[0].tolist() for word in (cell, ZERO + int(given[cell]))]

    def scores(self, example: Example, written: Sequence[int]) -> Mapping[str, float]:
        """sequence_accuracy: whether every cell is written, and right, in whatever order; a second digit is wrong

        token_accuracy: share of the empty cells that hold the right digit and no other
        sequence_accuracy_N_givens: as sequence_accuracy, for puzzles with N given cells
        """
        pairs = {tuple(written[i : i + 2]) for i in range(0, len(written), 2)}
        right = {tuple(example.target[i : i + 2]) for i in range(0, len(example.target), 2)}
        twice = [cell for cell, *_ in pairs]
        given = set(example.prefix[::2])
        asked = {pair for pair in right if pair[0] not in given}
        solved = float(pairs == right)
        return {
            "sequence_accuracy": solved,
            "token_accuracy": sum(twice.count(cell) == 1 for cell, _ in asked & pairs) / max(1, len(asked)),
            f"sequence_accuracy_{len(given)}_givens": solved,
        }

    def _make(self, split: Split, count: int, seed: int) -> NDArray[np.uint8]:
        """Puzzles and their solutions, [N, 2, 81]."""
        from insertlm.core.progress import progress_bar  # slow to import, and seldom needed

        parts: list[NDArray[np.uint8]] = []
        found = 0
        with progress_bar("making puzzles", count) as advance:
            for part in _chunks(SPLITS.index(split), seed, self.min_givens):
                parts.append(part)
                found += len(part)
                advance(min(found, count))
                if found >= count:
                    return np.concatenate(parts)[:count]
        raise AssertionError("chunks never end")


# --- Grids and ids ----------------------------------------------------------------------------------------------------


def read_grid(text: str) -> Grid:
    """81 cells: a digit, or `.` or 0 for an empty one. Blanks, and lines between boxes (| - +), mean nothing.

    Or the words of a prefix, the names of cells and their digits.
    """
    words = text.split()
    if words[:1] and words[0] in CELLS:
        return _read_words(words)
    cells = "".join(text.translate(str.maketrans("|-+", "   ")).split())
    for number, character in enumerate(cells):
        if character not in ".0123456789":
            place = f"cell {CELLS[number]}" if number < len(CELLS) else f"cell {number + 1}"
            raise InsertlmError(f"unknown character {character!r} in {place}; expected 1 … 9, or . for an empty cell")
    if len(cells) != len(CELLS):
        raise InsertlmError(f"no sudoku: a grid of {len(cells)} cells; expected {len(CELLS)}")
    return np.array([int(character.replace(".", "0")) for character in cells])


def _read_words(words: Sequence[str]) -> Grid:
    grid, names = np.zeros(len(CELLS), np.int64), words[::2]
    for name, digit in zip_longest(names, words[1::2], fillvalue=""):
        if name not in CELLS or digit not in "123456789" or len(digit) != 1:
            raise InsertlmError(
                f"no sudoku: expected a cell, a1 … i9, and its digit, got {f'{name} {digit}'.strip()!r}"
            )
        if names.count(name) > 1:
            raise InsertlmError(f"no sudoku: cell {name} is given {names.count(name)} times")
        grid[CELLS.index(name)] = int(digit)
    return grid


def grid_text(grid: Grid) -> str:
    """Nine lines, with a blank between boxes; `.` for an empty cell."""
    cells = "".join(map(str, grid.tolist())).replace("0", ".")
    lines = [" ".join(cells[i : i + 3] for i in range(first, first + 9, 3)) for first in range(0, 81, 9)]
    return "\n".join(lines)


def _grid(ids: Sequence[int]) -> Grid:
    """Cells and their digits; whatever else a model writes is left out."""
    grid = np.zeros(len(CELLS), np.int64)
    for cell, digit in zip(ids[::2], ids[1::2], strict=False):
        if cell < len(CELLS) and ZERO < digit <= ZERO + 9:
            grid[cell] = digit - ZERO
    return grid


def _examples(grids: NDArray[np.uint8]) -> Examples:
    given, cell = grids[:, 0], np.arange(len(CELLS), dtype=np.int32)
    pairs = np.stack([np.broadcast_to(cell, grids[:, 1].shape), grids[:, 1].astype(np.int32) + ZERO], -1)
    count = (given > 0).sum(1, dtype=np.int32)
    first = (given == 0).argsort(1, kind="stable")[:, : count.max(initial=0)]  # the given cells, in their order
    prefix = np.take_along_axis(pairs, first[..., None], 1)
    prefix[np.arange(first.shape[1]) >= count[:, None]] = TOKENIZER.specials.pad
    rows = len(grids)
    width = 2 * first.shape[1]
    return Examples(prefix.reshape(rows, width), 2 * count, pairs.reshape(rows, 162), np.full(rows, 162, np.int32))


# --- Solving ----------------------------------------------------------------------------------------------------------

_PLACE = np.arange(81)
_UNITS = np.stack([_PLACE // 9, 9 + _PLACE % 9, 18 + _PLACE // 27 * 3 + _PLACE % 9 // 3], 1)  # row, column, box of each
_MEMBERS = np.stack([np.nonzero(np.any(unit == _UNITS, axis=1))[0] for unit in range(27)])
_SIZE = np.array([bits.bit_count() for bits in range(ALL + 1)])
_IN_ORDER = np.tile(np.arange(9), (81, 1))
_UNIT_NAMES = [f"{what} {name}" for what, names in (("row", "abcdefghi"), ("column", "123456789")) for name in names]
_UNIT_NAMES += [f"the box of {CELLS[cell]}" for cell in (27 * (box // 3) + box % 3 * 3 for box in range(9))]


def solve(given: Grid) -> Grid:
    """The one solution; refuses a grid that has none, or several."""
    for unit, members in enumerate(_MEMBERS):
        for digit in range(1, 10):
            cells = [CELLS[cell] for cell in members if given[cell] == digit]
            if len(cells) > 1:
                where = " and ".join(cells)
                raise InsertlmError(f"no solution: {digit} stands {len(cells)} times in {_UNIT_NAMES[unit]} ({where})")
    with suppress(InsertlmError):  # without numba hard grids take seconds
        _compile()
    allowed, solution, other = np.where(given > 0, 1 << (given - 1), ALL), np.zeros_like(given), np.zeros_like(given)
    if not _search(allowed, _IN_ORDER, solution):
        raise InsertlmError(f"no solution: the {(given > 0).sum()} given digits contradict each other")
    for cell in (given == 0).nonzero()[0].tolist():
        allowed[cell] = ALL & ~(1 << (solution[cell] - 1))
        if _search(allowed, _IN_ORDER, other):
            low, high = sorted((solution[cell], other[cell]))
            raise InsertlmError(f"several solutions: cell {CELLS[cell]} can be {low} or {high}")
        allowed[cell] = 1 << (solution[cell] - 1)  # no other digit can be there
    return solution


# What follows is compiled when it is first needed, since numba takes a second to import.


@cache
def _compile() -> None:
    try:
        from numba import njit
    except ImportError as error:
        raise InsertlmError("sudokus are made with numba: pip install 'insertlm[zebra]'") from error
    for function in (_search, _shapes, _is_forced, _dig):
        try:
            compiled = njit(nogil=True, cache=True)(function)
        except RuntimeError:  # numba finds no folder that it may write compiled code to
            compiled = njit(nogil=True)(function)
        globals()[function.__name__] = compiled


def _search(allowed: Grid, ranks: NDArray[np.int64], grid: Grid) -> bool:
    """Fill the grid with digits that are allowed; False if that is impossible.

    Depth first, always in a cell that has the fewest digits left. allowed: [81] sets of digits
    ranks: [81, 9], the order in which a cell's digits are tried, as the numbers of their bits
    """
    used = np.zeros(27, np.int64)  # digits of each row, column and box
    cells, left = np.zeros(81, np.int64), np.zeros(81, np.int64)  # the cells that were filled, what is left to try
    depth = 0
    grid[:] = 0
    while True:
        best, fewest = -1, 10
        for cell in range(81):
            if grid[cell] == 0:
                a, b, c = _UNITS[cell]
                bits = allowed[cell] & ~(used[a] | used[b] | used[c])
                if _SIZE[bits] < fewest:
                    best, fewest, left[depth] = cell, _SIZE[bits], bits
                    if fewest <= 1:
                        break
        if best < 0:
            return True
        cells[depth] = best
        while left[depth] == 0:  # take back digits until there is another one to try
            if depth == 0:
                return False
            depth -= 1
            cell = cells[depth]
            for unit in _UNITS[cell]:
                used[unit] ^= 1 << (grid[cell] - 1)
            grid[cell] = 0
        cell = cells[depth]
        for bit in ranks[cell]:
            if left[depth] >> bit & 1:
                left[depth] ^= 1 << bit
                grid[cell] = bit + 1
                for unit in _UNITS[cell]:
                    used[unit] |= 1 << bit
                break
        depth += 1


# --- Making -----------------------------------------------------------------------------------------------------------


def _chunks(split: int, seed: int, min_givens: int) -> Iterator[NDArray[np.uint8]]:
    """The endless stream of a split's puzzles and solutions, [n, 2, 81] each.

    Every chunk has a random stream of its own, so a larger count extends a smaller one, whatever the number of cores.
    """
    _compile()

    def chunk(number: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng((seed, split, number))
        ranks = rng.permuted(np.broadcast_to(np.arange(9), (CHUNK, 81, 9)), axis=2)
        orders = rng.permuted(np.broadcast_to(np.arange(81), (CHUNK, 81)), axis=1)
        grids, free = np.zeros((CHUNK, 2, 81), np.int64), np.full(81, ALL)
        for solution, rank in zip(grids[:, 1], ranks, strict=True):
            _search(free, rank, solution)
        mine = np.array([SPLITS.index(split_of(solution)) == split for solution in grids[:, 1]])
        made = grids[mine]
        for (puzzle, solution), order in zip(made, orders[mine], strict=True):
            _dig(solution, order, min_givens, puzzle)
        puzzles: NDArray[np.uint8] = made.astype(np.uint8)
        return puzzles

    numbers, workers = count_from(), cores()
    with ThreadPoolExecutor(workers) as pool:
        while True:
            yield from pool.map(chunk, islice(numbers, 2 * workers))


def split_of(solution: Grid) -> Split:
    """The split of all puzzles that have this solution or one that is the same but for an exchange of digits, of rows
    in a band, of columns in a stack, of bands, of stacks, or of rows with columns."""
    lines = mix64(_shapes(solution).astype(np.uint64)).sum(1, dtype=np.uint64)
    content = mix64(mix64(lines).sum(keepdims=True, dtype=np.uint64))
    [tenth] = content % np.uint64(len(TENTHS))
    name: Split = SPLITS[TENTHS[tenth]]
    return name


def _shapes(grid: Grid) -> NDArray[np.int64]:
    """What no such exchange changes, [2, 36]: for every two rows, and every two columns, the lengths of the cycles that
    one makes of the other's digits, and whether the two lie in one band."""
    shapes = np.zeros((2, 36), np.int64)
    image = np.zeros(10, np.int64)
    for turned in range(2):
        pair = 0
        for i in range(9):
            for j in range(i):
                for k in range(9):
                    if turned:
                        image[grid[9 * k + i]] = grid[9 * k + j]
                    else:
                        image[grid[9 * i + k]] = grid[9 * j + k]
                shape = int(i // 3 == j // 3)
                for start in range(1, 10):
                    length, digit = 0, start
                    while image[digit]:  # each digit is visited once
                        following = image[digit]
                        image[digit] = 0
                        digit = following
                        length += 1
                    if length:
                        shape += 8**length  # at most four cycles have the same length
                shapes[turned, pair] = shape
                pair += 1
    return shapes


def _dig(solution: Grid, order: Grid, least: int, puzzle: Grid) -> None:
    """Make a puzzle: empty cells in this order, unless the solution would not be the only one any more."""
    other, used = np.zeros(81, np.int64), np.full(27, ALL)  # digits that are given in each row, column and box
    allowed = 1 << (solution - 1)
    puzzle[:] = solution
    givens = 81
    for cell in order:
        if givens == least:
            break
        bit = allowed[cell]
        puzzle[cell] = 0
        for unit in _UNITS[cell]:
            used[unit] ^= bit
        allowed[cell] = ALL & ~bit
        # A search, unless it is plain to see: is there a solution with another digit in this cell?
        if _is_forced(puzzle, used, cell, bit) or not _search(allowed, _IN_ORDER, other):
            allowed[cell] = ALL
            givens -= 1
            continue
        allowed[cell], puzzle[cell] = bit, solution[cell]
        for unit in _UNITS[cell]:
            used[unit] |= bit


def _is_forced(puzzle: Grid, used: NDArray[np.int64], cell: int, bit: int) -> bool:
    """Whether no other digit fits into the cell, or the digit fits into no other cell of its row, column or box."""
    a, b, c = _UNITS[cell]
    if used[a] | used[b] | used[c] | bit == ALL:
        return True
    for unit in _UNITS[cell]:
        alone = True
        for other in _MEMBERS[unit]:
            if other != cell and puzzle[other] == 0:
                a, b, c = _UNITS[other]
                alone = alone and (used[a] | used[b] | used[c]) & bit != 0
        if alone:
            return True
    return False
