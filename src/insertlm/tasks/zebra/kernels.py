"""Zebra puzzles in machine code: deducing, searching and drawing, compiled by numba.

What is known of an operand (see clues.py) is the set of houses it may be in, as bits: `houses`, [OPERANDS]. A
clue is four bytes, its kind and operands.

All kernels are in one file: numba keeps compiled code on disk, and compiles anew only when this very file changes, not
when a file does that it imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from insertlm.tasks.zebra.clues import HOUSE, MOST_TOKENS, NONE, SIDE

__all__ = ["FOUND", "IMPOSSIBLE", "OPERANDS", "STUCK", "deduce", "draw", "everything", "search"]

_SAME, _OTHER, _LEFT, _NEXT, _NEAR, _END, _BETWEEN = range(7)
OPERANDS = HOUSE + SIDE
MOST_CLUES = 48
IMPOSSIBLE, STUCK, FOUND = 0, 1, 2

# Tables by set of houses: how many there are, and the number of the last.
_COUNT = np.array([bits.bit_count() for bits in range(1 << SIDE)])
_PLACE = np.array([bits.bit_length() - 1 for bits in range(1 << SIDE)])
_BRANCHES = HOUSE * (SIDE - 1) + 2  # the most states that a search holds
_STAGNANT = 400  # clues in a row that tell nothing new before a puzzle is given up

Bytes = NDArray[np.uint8]
Sets = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    try:
        return cast(F, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba finds no folder that it may write compiled code to
        return cast(F, njit(nogil=True)(function))


# --- What a clue tells ------------------------------------------------------------------------------------------------


@_compiled
def _left_of(bits: int) -> int:
    """The houses that have one of these to their right."""
    return (1 << _PLACE[bits]) - 1 if bits else 0


@_compiled
def _right_of(bits: int) -> int:
    """The houses that have one of these to their left (with bits beyond the street, which callers mask)."""
    return -2 * (bits & -bits) if bits else 0


@_compiled
def _narrow(clue: Bytes, houses: Sets, last: int) -> None:
    """Rule out what the clue forbids. last: the bit of the last house"""
    kind, x, y = clue[0], clue[1], clue[2]
    a = houses[x]
    if kind == _END:
        houses[x] = a & (1 | last)
        return
    b = houses[y]
    if kind == _SAME:
        houses[x] = houses[y] = a & b
    elif kind == _OTHER:  # only a known house rules out another
        if a & (a - 1) == 0:
            houses[y] = b & ~a
        if b & (b - 1) == 0:
            houses[x] = a & ~b
    elif kind == _LEFT:
        houses[x], houses[y] = a & _left_of(b), b & _right_of(a)
    elif kind == _NEXT:
        houses[x], houses[y] = a & (b >> 1), b & (a << 1)
    elif kind == _NEAR:
        houses[x], houses[y] = a & ((b >> 1) | (b << 1)), b & ((a >> 1) | (a << 1))
    else:
        z = clue[3]  # y is between x and z, on either side of both
        c = houses[z]
        houses[y] = b & ((_right_of(a) & _left_of(c)) | (_left_of(a) & _right_of(c)))
        houses[x] = a & (_left_of(b & _left_of(c)) | _right_of(b & _right_of(c)))
        houses[z] = c & (_left_of(b & _left_of(a)) | _right_of(b & _right_of(a)))


@_compiled
def _settle(houses: Sets, first: int, size: int) -> bool:
    """Values of one attribute live in different houses: if k of them share k houses, no other value lives there.

    Returns False if k values share fewer than k houses. By subsets of values, each built on one with a value less.
    """
    shared = np.zeros(1 << SIDE, np.int64)
    for subset in range(1, 1 << size):
        union = shared[subset] = shared[subset & (subset - 1)] | houses[first + _PLACE[subset & -subset]]
        if _COUNT[union] < _COUNT[subset]:
            return False
        if _COUNT[union] == _COUNT[subset]:
            for value in range(size):
                if not subset >> value & 1:
                    houses[first + value] &= ~union
    return True


# --- Solving ----------------------------------------------------------------------------------------------------------


@_compiled
def everything(houses: Sets, size: int, attributes: int) -> None:
    """The state before the first clue: every value may be in every house."""
    houses[:] = 0
    for attribute in range(attributes):
        houses[SIDE * attribute : SIDE * attribute + size] = (1 << size) - 1
    for house in range(size):
        houses[HOUSE + house] = 1 << house


@_compiled
def _note(houses: Sets, size: int, attributes: int, order: Bytes, known: Sets) -> None:
    """Append to `order` the values whose house has become known. known: [2], how many are there, and which, as bits"""
    for attribute in range(attributes):
        for cell in range(SIDE * attribute, SIDE * attribute + size):
            if houses[cell] & (houses[cell] - 1) == 0 and not known[1] >> cell & 1:
                order[known[0]] = cell
                known[0] += 1
                known[1] |= 1 << cell


@_compiled
def deduce(clues: Bytes, skip: int, houses: Sets, size: int, attributes: int, order: Bytes) -> int:
    """Narrow until nothing changes. Returns IMPOSSIBLE, STUCK or FOUND.

    clues: [K, 4], read from the first to the last, again and again   skip: a clue that is not used, -1 for none
    order: [HOUSE], gets the values in the order in which their houses become known; [0] if that is not needed
    """
    known, settled, changed = np.zeros(2, np.int64), np.full(attributes, -1), True
    while changed:
        changed = False
        for i in range(len(clues)):
            if i != skip:
                _narrow(clues[i], houses, 1 << (size - 1))
                if len(order):
                    _note(houses, size, attributes, order, known)
        # Sets only ever shrink, so the sum of their bits tells whether one has changed.
        for attribute in range(attributes):
            first = SIDE * attribute
            total = houses[first : first + size].sum()
            if total != settled[attribute]:
                if not _settle(houses, first, size):
                    return IMPOSSIBLE
                settled[attribute], changed = total, True
        if len(order):
            _note(houses, size, attributes, order, known)
        for house in range(size):
            if houses[HOUSE + house] == 0:
                return IMPOSSIBLE
    return FOUND if (houses & (houses - 1) == 0).all() else STUCK


@_compiled
def search(clues: Bytes, skip: int, size: int, attributes: int, avoid: Sets, found: Sets) -> bool:
    """Whether there is a solution other than `avoid`, which is then put into `found`. Both: [OPERANDS], as `houses`

    Depth first: deduce, and where that gets stuck, try every house of one value.
    """
    states = np.empty((_BRANCHES, OPERANDS), np.int64)
    nobody = np.empty(0, np.uint8)
    everything(states[0], size, attributes)
    held = 1
    while held:
        held -= 1
        outcome = deduce(clues, skip, states[held], size, attributes, nobody)
        if outcome == FOUND and (states[held] != avoid).any():
            found[:] = states[held]
            return True
        if outcome == STUCK:
            held = _branch(states, held, size, attributes, avoid)
    return False


@_compiled
def _branch(states: NDArray[np.int64], held: int, size: int, attributes: int, avoid: Sets) -> int:
    """Replace a state by one for each house of a value, one that has the fewest.

    States are taken from the end. The house of `avoid` goes there first, since it leads to the solution that is known.
    """
    houses, best, fewest = states[held].copy(), 0, SIDE + 1
    for attribute in range(attributes):
        for cell in range(SIDE * attribute, SIDE * attribute + size):
            count = _COUNT[houses[cell]]
            if 1 < count < fewest:
                best, fewest = cell, count
    for avoided in (True, False):
        for house in range(size):
            bit = 1 << house
            if houses[best] & bit and (bit == avoid[best]) == avoided:
                states[held] = houses
                states[held, best] = bit
                held += 1
    return held


# --- Drawing ----------------------------------------------------------------------------------------------------------


@_compiled
def _mix(x: np.uint64) -> np.uint64:
    """SplitMix64's finaliser, as in hashing.py."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_compiled
def _below(state: NDArray[np.uint64], bound: int) -> int:
    """A whole number below `bound`; advances the state, [1]."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    drawn: int = np.int64((_mix(state[0]) >> np.uint64(32)) % np.uint64(bound))  # type: ignore[assignment]
    return drawn


@_compiled
def _shuffle(state: NDArray[np.uint64], rows: Bytes) -> None:
    for i in range(len(rows) - 1, 0, -1):
        j = _below(state, i + 1)
        row = rows[i].copy()
        rows[i] = rows[j]
        rows[j] = row


@_compiled
def _draw_clue(state: NDArray[np.uint64], who: Bytes, size: int, attributes: int, clue: Bytes) -> None:
    """A true clue of a random kind. who: [SIDE, SIDE], the value of each attribute in each house"""
    # First the houses p, q and r of the operands, then who lives there.
    kind = _below(state, 7)
    a, b, c = _below(state, attributes), _below(state, attributes), _below(state, attributes)
    p, q = _below(state, size), 0
    clue[:] = NONE
    clue[0] = kind
    if kind == _END:
        p = (size - 1) * (p & 1)
    elif kind in (_NEXT, _NEAR):
        p = _below(state, size - 1)
        q = p + 1
        if kind == _NEAR and _below(state, 2):
            p, q = q, p
    elif kind == _BETWEEN:
        p = _below(state, size - 2)
        q = p + 1 + _below(state, size - 2 - p)
        r = q + 1 + _below(state, size - 1 - q)
        if _below(state, 2):
            p, r = r, p
        clue[3] = SIDE * c + who[c, r]
    else:
        q = (p + 1 + _below(state, size - 1)) % size
        if kind == _LEFT:
            p, q = min(p, q), max(p, q)
        else:
            q = p if kind == _SAME else q
            b = (a + 1 + _below(state, attributes - 1)) % attributes
    clue[1] = SIDE * a + who[a, p]
    if kind != _END:
        clue[2] = SIDE * b + who[b, q]
        if kind <= _OTHER and _below(state, 4) == 0:
            clue[2] = HOUSE + q


@_compiled
def _collect(state: NDArray[np.uint64], who: Bytes, size: int, attributes: int, clues: Bytes) -> int:
    """Draw clues that each tell something new until they determine everything. Returns their number, or 0."""
    houses = np.empty(OPERANDS, np.int64)
    nobody = np.empty(0, np.uint8)
    everything(houses, size, attributes)
    count, idle = 0, 0
    while count < MOST_CLUES and idle < _STAGNANT:
        _draw_clue(state, who, size, attributes, clues[count])
        before = houses.sum()
        _narrow(clues[count], houses, 1 << (size - 1))
        idle += 1
        if houses.sum() < before:
            count += 1
            idle = 0
            if deduce(clues[:count], -1, houses, size, attributes, nobody) == FOUND:
                return count
    return 0


@_compiled
def _prune(clues: Bytes, count: int, size: int, attributes: int) -> int:
    """Drop clues one by one if deduction still finds everything without them. Returns how many are left."""
    houses, nobody = np.empty(OPERANDS, np.int64), np.empty(0, np.uint8)
    i = 0
    while i < count:
        everything(houses, size, attributes)
        if deduce(clues[:count], i, houses, size, attributes, nobody) == FOUND:
            for j in range(i, count - 1):
                clues[j] = clues[j + 1]
            count -= 1
        else:
            i += 1
    return count


@_compiled
def _legible(clues: Bytes, size: int) -> bool:
    """Whether a puzzle is short enough, and its size can be read off the numbers in it, as `street_of` does."""
    tokens, largest = 0, 2
    for i in range(len(clues)):
        tokens += 4
        for operand in clues[i, 1:]:
            if operand != NONE:
                tokens += 3
                largest = max(largest, operand - HOUSE if operand >= HOUSE else operand % SIDE)
    return tokens <= MOST_TOKENS and largest == size - 1


@_compiled
def _content(clues: Bytes, solution: Sets, size: int, attributes: int) -> np.uint64:
    """A hash of a puzzle that does not depend on the names of attributes and values, nor on the order of clues.

    A value is identified by the house it lives in. An attribute is identified by a hash of all clues that name it. It
    is refined in rounds: each uses the hashes that the round before gave to the other attributes of those clues. Sides
    that a clue does not tell apart count alike.
    """
    colour, total = np.zeros(SIDE + 1, np.uint64), np.uint64(0)
    for _ in range(3):
        new, total = np.zeros(SIDE + 1, np.uint64), np.uint64(64 * size + attributes)
        for i in range(len(clues)):
            kind, whole = clues[i, 0], np.uint64(clues[i, 0])
            sides = np.zeros(3, np.uint64)
            for j in range(3):
                operand = clues[i, 1 + j]
                if operand != NONE:
                    ordered = kind in (_LEFT, _NEXT) or (kind == _BETWEEN and j == 1)
                    side = np.uint64(8 * solution[operand] + (j if ordered else 3))
                    sides[j] = _mix(colour[operand // SIDE] + _mix(side))
                    whole += sides[j]
            whole = _mix(whole)
            total += whole
            for j in range(3):
                if clues[i, 1 + j] != NONE:
                    new[clues[i, 1 + j] // SIDE] += _mix(whole ^ sides[j])
        colour = new
        colour[SIDE] = 1  # houses are no attribute
    return _mix(total)


@_compiled
def _draw_one(
    state: NDArray[np.uint64], size: int, attributes: int, splits: Bytes, split: int, clues: Bytes, solution: Sets
) -> int:
    """Draw until there is a puzzle of the split. Returns how many clues it has."""
    other = np.empty(OPERANDS, np.int64)
    who = np.zeros((SIDE, SIDE), np.uint8)
    while True:
        everything(solution, size, attributes)
        for attribute in range(attributes):
            values = np.arange(size).astype(np.uint8).reshape(-1, 1)
            _shuffle(state, values)
            who[attribute, :size] = values[:, 0]
            for house in range(size):
                solution[SIDE * attribute + who[attribute, house]] = 1 << house
        count = _collect(state, who, size, attributes, clues)
        _shuffle(state, clues[:count])
        count = _prune(clues, count, size, attributes)
        chosen = clues[:count]
        if count == 0 or not _legible(chosen, size):
            continue
        # The cheap test comes first: it drops nine in ten candidates of the small splits.
        if splits[_content(chosen, solution, size, attributes) % np.uint64(len(splits))] != split:
            continue
        # Deduction needs every clue now, but a full search might not: no clue may be redundant for it either.
        needed = True
        for i in range(count):
            needed = needed and search(chosen, i, size, attributes, solution, other)
        if needed:
            _shuffle(state, chosen)
            return count


@_compiled
def draw(seed: int, count: int, sizes: NDArray[np.int64], splits: Bytes, split: int) -> tuple[Bytes, Bytes, Bytes]:
    """Puzzles of one split.

    sizes: least and most houses, least and most attributes; all combinations are equally likely
    splits: the split of each remainder of a puzzle's hash
    Returns heads, [N, 3]: houses, attributes, clues; all clues, [K, 4]; all solutions, [C, 2]: values in the order in
    which deduction finds them, with their houses.
    """
    state = np.array([seed], np.uint64)
    heads = np.empty((count, 3), np.uint8)
    clues, cells = np.empty((count * MOST_CLUES + 1, 4), np.uint8), np.empty((count * HOUSE, 2), np.uint8)
    houses, solution, order = np.empty(OPERANDS, np.int64), np.empty(OPERANDS, np.int64), np.empty(HOUSE, np.uint8)
    k, c = 0, 0
    for i in range(count):
        size = sizes[0] + _below(state, sizes[1] - sizes[0] + 1)
        attributes = sizes[2] + _below(state, sizes[3] - sizes[2] + 1)
        number = _draw_one(state, size, attributes, splits, split, clues[k : k + MOST_CLUES + 1], solution)
        everything(houses, size, attributes)
        deduce(clues[k : k + number], -1, houses, size, attributes, order)
        heads[i, 0], heads[i, 1], heads[i, 2] = size, attributes, number
        for j in range(size * attributes):
            cells[c + j, 0] = order[j]
            cells[c + j, 1] = _PLACE[houses[order[j]]]
        k += number
        c += size * attributes
    return heads, clues[:k].copy(), cells[:c].copy()
