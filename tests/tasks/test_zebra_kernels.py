"""Deduction and search against brute force, and the split hash against every renaming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insertlm.tasks.base import TENTHS
from insertlm.tasks.zebra.clues import HOUSE, KINDS, SIDE, Clue, Street, street_of
from insertlm.tasks.zebra.kernels import FOUND, IMPOSSIBLE, OPERANDS, _content, deduce, everything, search
from insertlm.tasks.zebra.puzzles import Puzzles, Sizes, make

SMALL = Sizes(3, 4, 3, 3)
Place = dict[int, int]


def streets(puzzles: Puzzles) -> Iterator[tuple[Street, Place]]:
    """Every puzzle with its solution."""
    for i in range(len(puzzles)):
        one = puzzles[i : i + 1]
        clues = [Clue.of(code) for code in one.clues.tolist()]
        size, attributes, _ = one.heads[0].tolist()
        yield Street(size, attributes, clues), dict(one.cells.tolist())


def solutions(street: Street) -> Iterator[Place]:
    """By trying everything."""
    for rows in product(permutations(range(street.size)), repeat=street.attributes):
        place = {SIDE * a + value: house for a, row in enumerate(rows) for value, house in enumerate(row)}
        if all(clue.holds(place, street.size) for clue in street.clues):
            yield place


def codes(clues: Sequence[Clue]) -> np.ndarray:
    return np.array([clue.code for clue in clues], np.uint8).reshape(-1, 4)


@st.composite
def clue_lists(draw: st.DrawFn) -> Street:
    """Any clues, sensible or not, about three houses and three attributes."""
    cells = st.builds(lambda a, v: SIDE * a + v, st.integers(0, 2), st.integers(0, 2))
    operand = cells | st.integers(HOUSE, HOUSE + 2)
    arity = dict(zip(range(7), (2, 2, 2, 2, 2, 1, 3), strict=True))
    kinds = draw(st.lists(st.integers(0, 6), max_size=6))
    return Street(3, 3, [Clue(kind, tuple(draw(operand) for _ in range(arity[kind]))) for kind in kinds])


@settings(max_examples=150, deadline=None)
@given(clue_lists())
def test_deduction_and_search_agree_with_brute_force(street: Street) -> None:
    right = list(islice(solutions(street), 500))
    houses, order = np.empty(OPERANDS, np.int64), np.empty(0, np.uint8)
    everything(houses, 3, 3)
    outcome = deduce(codes(street.clues), -1, houses, 3, 3, order)
    if outcome == FOUND:
        assert len(right) == 1
    if outcome == IMPOSSIBLE:
        assert not right
    else:  # nothing that is possible is ruled out
        assert all(houses[cell] >> house & 1 for place in right for cell, house in place.items())
    first, second, nothing = np.empty_like(houses), np.empty_like(houses), np.zeros_like(houses)
    assert search(codes(street.clues), -1, 3, 3, nothing, first) == bool(right)
    if right:
        assert {cell: int(first[cell]).bit_length() - 1 for cell in right[0]} in right
        assert search(codes(street.clues), -1, 3, 3, first, second) == (len(right) > 1)


def test_every_puzzle_has_one_solution_and_needs_every_clue() -> None:
    for street, place in streets(make(0, 24, 5, SMALL)):
        assert list(solutions(street)) == [place]
        for i in range(len(street.clues)):
            spared = street._replace(clues=street.clues[:i] + street.clues[i + 1 :])
            assert len(list(islice(solutions(spared), 2))) == 2


def test_large_puzzles_too_by_search() -> None:
    nothing, first, other = (np.zeros(OPERANDS, np.int64) for _ in range(3))
    for street, place in streets(make(1, 12, 3, Sizes(5, 6, 5, 6))):
        size, attributes, all_clues = street.size, street.attributes, codes(street.clues)
        assert all(clue.holds(place, size) for clue in street.clues)
        assert search(all_clues, -1, size, attributes, nothing, first)
        assert {cell: int(first[cell]).bit_length() - 1 for cell in place} == place
        assert not search(all_clues, -1, size, attributes, first, other)
        for i in range(len(street.clues)):
            assert search(np.delete(all_clues, i, axis=0), -1, size, attributes, first, other)


def test_the_size_can_be_read_off_the_clues() -> None:
    for street, _ in streets(make(0, 300, 2, Sizes(3, 6, 3, 6))):
        assert street_of(street.clues) == street


def test_cells_come_in_the_order_of_deduction() -> None:
    """Each value is known, after those before it, from the clues read so far; the clues alone give the first."""
    for street, place in streets(make(0, 30, 4, Sizes(3, 6, 3, 6))):
        houses, order = np.empty(OPERANDS, np.int64), np.empty(HOUSE, np.uint8)
        everything(houses, street.size, street.attributes)
        assert deduce(codes(street.clues), -1, houses, street.size, street.attributes, order) == FOUND
        assert order[: len(place)].tolist() == list(place)


def renamed(street: Street, place: Place, random: Random) -> tuple[Street, Place]:
    """Other names for attributes and values, clues in another order, symmetric clues turned round."""
    attributes = random.sample(range(street.attributes), street.attributes)
    values = [random.sample(range(street.size), street.size) for _ in attributes]

    def rename(operand: int) -> int:
        if operand >= HOUSE:
            return operand
        a, v = divmod(operand, SIDE)
        return SIDE * attributes[a] + values[a][v]

    def turn(clue: Clue) -> Clue:
        sides = tuple(map(rename, clue.operands))
        symmetric = KINDS[clue.kind] in ("=", "!=", "nbr", "inbetween")
        return Clue(clue.kind, sides[::-1] if symmetric and random.random() < 0.5 else sides)

    clues = random.sample([turn(clue) for clue in street.clues], len(street.clues))
    return street._replace(clues=clues), {rename(cell): house for cell, house in place.items()}


def content(street: Street, place: Place) -> int:
    solution = np.zeros(OPERANDS, np.int64)
    for cell, house in [*place.items(), *((HOUSE + house, house) for house in range(street.size))]:
        solution[cell] = 1 << house
    return int(_content(codes(street.clues), solution, street.size, street.attributes))


@pytest.mark.parametrize("seed", range(3))
def test_a_renamed_puzzle_stays_in_its_split(seed: int) -> None:
    random = Random(seed)
    for split in range(3):
        for street, place in streets(make(split, 20, seed, Sizes(3, 6, 3, 6))):
            hashes = {content(*renamed(street, place, random)) for _ in range(5)} | {content(street, place)}
            assert len(hashes) == 1
            assert TENTHS[hashes.pop() % len(TENTHS)] == split


def test_the_hash_tells_puzzles_apart() -> None:
    found = [content(*one) for one in streets(make(0, 500, 9, Sizes(3, 6, 3, 6)))]
    assert len(set(found)) == len(found)
    street, place = next(streets(make(0, 1, 9, Sizes(4, 4, 4, 4))))
    for i, clue in enumerate(street.clues):
        other = clue._replace(kind=(clue.kind + 1) % 5) if clue.kind < 5 else Clue(KINDS.index("="), (0, 6))
        changed = street._replace(clues=[*street.clues[:i], other, *street.clues[i + 1 :]])
        assert content(changed, place) != content(street, place)
