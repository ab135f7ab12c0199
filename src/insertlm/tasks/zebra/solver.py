"""Solve a zebra puzzle by deduction, as a person would, and explain what is wrong with one that has no solution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.tasks.zebra.clues import HOUSE, SIDE, Street, name
from insertlm.tasks.zebra.puzzles import kernels

__all__ = ["Solution", "solve"]

Solution = list[tuple[int, int]]  # values, as operands, and their houses, in the order in which they become known


def solve(street: Street) -> Solution:
    """Refuses clues that contradict each other or leave several solutions.

    Values come in the order in which deduction finds them. If it gets stuck, the first value that is still unknown (by
    attribute, then number) is looked up in the solution, and deduction goes on from there.
    """
    # A search settles whether there is exactly one solution; only then does the order of deduction mean anything.
    kernel = kernels()
    size, attributes, clues = street.size, street.attributes, street.clues
    codes = np.array([clue.code for clue in clues], np.uint8).reshape(-1, 4)
    solution = _search(street, codes, np.zeros(kernel.OPERANDS, np.int64))
    if solution is None:
        raise InsertlmError(_contradiction(street, codes))
    if (other := _search(street, codes, solution)) is not None:
        raise InsertlmError(_ambiguity(street, solution, other))
    houses, order = np.empty_like(solution), np.empty(HOUSE, np.uint8)
    kernel.everything(houses, size, attributes)
    found: dict[int, int] = {}
    while True:  # each round begins with all that is known, and adds what deduction finds
        kernel.deduce(codes, -1, houses, size, attributes, order)
        known = [cell for cell in _cells(street) if houses[cell] == solution[cell]]
        for cell in order[: len(known)].tolist():
            found.setdefault(cell, _house(solution[cell]))
        unknown = [cell for cell in _cells(street) if cell not in found]
        if not unknown:
            return list(found.items())
        houses[unknown[0]] = solution[unknown[0]]


def _search(street: Street, codes: NDArray[np.uint8], avoid: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """A solution other than `avoid`."""
    found = np.empty_like(avoid)
    return found if kernels().search(codes, -1, street.size, street.attributes, avoid, found) else None


def _contradiction(street: Street, codes: NDArray[np.uint8]) -> str:
    """Names the first clue that cannot be true with those before it."""
    nothing = np.zeros(kernels().OPERANDS, np.int64)
    numbers = range(1, len(codes) + 1)
    number = next(number for number in numbers if _search(street, codes[:number], nothing) is None)
    why = "contradicts those before it" if number > 1 else "cannot be true"
    return f"no solution: clue {number} ({street.clues[number - 1]}) {why}"


def _ambiguity(street: Street, one: NDArray[np.int64], other: NDArray[np.int64]) -> str:
    cell = next(cell for cell in _cells(street) if one[cell] != other[cell])
    a, b = sorted((_house(one[cell]), _house(other[cell])))
    return (
        f"several solutions: the {len(street.clues)} clues leave open whether value {cell % SIDE} of attribute "
        f"{cell // SIDE} ({name(cell)}) is in house {a} or {b}"
    )


def _cells(street: Street) -> list[int]:
    return [SIDE * attribute + value for attribute in range(street.attributes) for value in range(street.size)]


def _house(bit: np.int64) -> int:
    return int(bit).bit_length() - 1
