"""The language of zebra puzzles: clues as bytes, as words of the vocabulary, and in English.

A street has `size` houses, numbered from the left. It has some attributes, each of which gives every house a different
one of `size` values. The operand 6 · attribute + value stands for a value, HOUSE + number for a house. A clue is a kind
and up to three operands; its words, as published:

    kind LHS operand RHS operand* CLUE_END        7, 10 or 13 words, for one, two or three operands
    c attribute value   or   n 0 house            an operand; the 0 keeps all operands equally long

    =  !=             in the same house, in different houses (the second operand may be a house)
    left-of           somewhere to the left of          immediate-left   in the house to the left of
    nbr               in the next house on either side  ends             in the first house or the last
    inbetween         the second operand somewhere between the first and the third, in either direction
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from insertlm.core.errors import InsertlmError
from insertlm.text.tokenizers import WordTokenizer

__all__ = [
    "ATTRIBUTES",
    "HOUSE",
    "KINDS",
    "LEAST",
    "MOST_TOKENS",
    "NONE",
    "OWN_WORDS",
    "SIDE",
    "TOKENIZER",
    "Clue",
    "Street",
    "name",
    "read",
    "street_of",
]

# Compiled kernels, which numba keeps on disk, hold copies of these numbers: touch kernels.py when one changes.
KINDS = ("=", "!=", "left-of", "immediate-left", "nbr", "ends", "inbetween")
SIDE = 6  # most houses, and most attributes
LEAST = 3
HOUSE = SIDE * SIDE  # the operand of house 0
NONE = 255  # no operand
MOST_TOKENS = 350  # of all clues of a puzzle, so that no row is longer than the published 460

# The words in the published order. The published ids put the special tokens first; ours come last, as in all tasks, and
# one id is reserved for the published [SEP], so that there are 25.
_RELATIONS = ("nbr", "left-of", "inbetween", "immediate-left", "ends", "!=", "=")
TOKENIZER = WordTokenizer((*map(str, range(SIDE)), *_RELATIONS, "c", "n", "CLUE_END", "RHS", "LHS"), reserved=1)
# Attributes and houses of a target can have words of their own, so that a word tells what it is without its neighbours.
OWN_WORDS = WordTokenizer((*TOKENIZER.words, *(f"{what}{i}" for what in "ah" for i in range(SIDE))), reserved=1)
_ENGLISH = (
    "{x} and {y} share a house",
    "{x} and {y} live in different houses",
    "{x} is left of {y}",
    "{x} is directly left of {y}",
    "{x} is next to {y}",
    "{x} is at an end of the street",
    "{y} is between {x} and {z}",
)
_ENGLISH_HOUSE = ("{x} is in {y}", "{x} is not in {y}")
ATTRIBUTES = ("colour", "person", "pet", "drink", "food", "hobby")  # what people call them; clues do not
_NAMES = (
    ("red", "blue", "green", "white", "yellow", "black"),
    ("Anna", "Ben", "Clara", "David", "Emma", "Felix"),
    ("cat", "dog", "fish", "horse", "mouse", "zebra"),
    ("tea", "milk", "water", "juice", "coffee", "cocoa"),
    ("apple", "bread", "cheese", "rice", "soup", "toast"),
    ("chess", "music", "tennis", "dance", "yoga", "golf"),
)
_ARITY = (2, 2, 2, 2, 2, 1, 3)
_HEADER = re.compile(r"\s*(\d+) houses,\s*(\d+) attributes\b")


class Clue(NamedTuple):
    kind: int
    operands: tuple[int, ...]

    @classmethod
    def of(cls, code: Sequence[int]) -> Clue:
        return cls(code[0], tuple(operand for operand in code[1:] if operand != NONE))

    @property
    def code(self) -> list[int]:
        """As four bytes."""
        return [self.kind, *self.operands, *[NONE] * (3 - len(self.operands))]

    def __str__(self) -> str:
        first, *others = ([*_operand_words(operand)] for operand in self.operands)
        return " ".join([KINDS[self.kind], "LHS", *first, "RHS", *chain(*others), "CLUE_END"])

    def holds(self, place: Mapping[int, int], size: int) -> bool:
        """Whether the clue is true if values live in these houses. It is false if one of its values lives in none."""
        houses = [operand - HOUSE if operand >= HOUSE else place.get(operand) for operand in self.operands]
        x, y, z = [*houses, -1, -1][:3]  # numbers for operands that its kind does not have
        if x is None or y is None or z is None:
            return False
        between = x < y < z or z < y < x
        return (x == y, x != y, x < y, x + 1 == y, abs(x - y) == 1, x in (0, size - 1), between)[self.kind]

    def in_english(self) -> str:
        house = self.kind < len(_ENGLISH_HOUSE) and self.operands[1] >= HOUSE
        pattern = (_ENGLISH_HOUSE if house else _ENGLISH)[self.kind]
        text = pattern.format(**dict(zip("xyz", map(name, self.operands), strict=False)))
        return f"{text[0].upper()}{text[1:]}."


class Street(NamedTuple):
    """A puzzle without its solution."""

    size: int
    attributes: int
    clues: list[Clue]


def name(operand: int) -> str:
    """What an operand is called in English."""
    return f"house {operand - HOUSE}" if operand >= HOUSE else _NAMES[operand // SIDE][operand % SIDE]


def street_of(clues: list[Clue]) -> Street:
    """A puzzle is as large as the largest number in its clues says, but at least LEAST."""
    everything = [operand for clue in clues for operand in clue.operands]
    numbers = [operand - HOUSE if operand >= HOUSE else operand % SIDE for operand in everything]
    attributes = [operand // SIDE for operand in everything if operand < HOUSE]
    return Street(max(LEAST, 1 + max(numbers, default=0)), max(LEAST, 1 + max(attributes, default=0)), clues)


def _operand_words(operand: int) -> tuple[str, str, str]:
    if operand >= HOUSE:
        return "n", "0", str(operand - HOUSE)
    return "c", str(operand // SIDE), str(operand % SIDE)


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(text: str) -> Street:
    """Read clues in the words of the vocabulary, with or without a first line such as `4 houses, 3 attributes`."""
    header = _HEADER.match(text)
    body = text[header.end() :] if header else text
    *pieces, rest = body.split("CLUE_END")
    if rest.strip():
        raise InsertlmError(f"clue {len(pieces) + 1} ({_short(rest)}): expected CLUE_END at its end")
    if not pieces:
        raise InsertlmError("there is no clue; expected such as: left-of LHS c 2 2 RHS c 2 1 CLUE_END")
    street = street_of([_read_clue(number, piece) for number, piece in enumerate(pieces, start=1)])
    if header is None:
        return street
    size, attributes = int(header[1]), int(header[2])
    for count, what in ((size, "houses"), (attributes, "attributes")):
        if not LEAST <= count <= SIDE:
            raise InsertlmError(f"impossible size: {count} {what}; expected {LEAST} … {SIDE}")
    for number, clue in enumerate(street.clues, start=1):
        _check_fits(number, clue, size, attributes)
    return Street(size, attributes, street.clues)


def _read_clue(number: int, text: str) -> Clue:
    words = text.split()
    here = f"clue {number} ({_short(text)})"
    if not words or words[0] not in KINDS:
        found = repr(words[0]) if words else "nothing"
        raise InsertlmError(f"{here}: unknown kind of clue; expected one of {', '.join(KINDS)}, got {found}")
    kind = KINDS.index(words[0])
    marks = [word for word in words if word in ("LHS", "RHS")]
    if marks != ["LHS", "RHS"] or words[1] != "LHS" or words.index("RHS") != 5 or len(words) % 3:
        raise InsertlmError(f"{here}: expected {words[0]} LHS, an operand of three words, RHS and more such operands")
    triples = [words[2:5], *(words[i : i + 3] for i in range(6, len(words), 3))]
    if len(triples) != _ARITY[kind]:
        raise InsertlmError(f"{here}: {words[0]} has {_ARITY[kind]} operands, got {len(triples)}")
    return Clue(kind, tuple(_read_operand(here, *triple) for triple in triples))


def _read_operand(here: str, mark: str, first: str, second: str) -> int:
    if mark == "n":
        if first != "0":
            raise InsertlmError(f"{here}: expected n 0 and a house, got n {first} {second}")
        return HOUSE + _number(here, "house", second)
    if mark != "c":
        raise InsertlmError(f"{here}: expected c, attribute and value, or n, 0 and a house; got {mark!r}")
    return SIDE * _number(here, "attribute", first) + _number(here, "value", second)


def _number(here: str, what: str, word: str) -> int:
    numbers = [str(number) for number in range(SIDE)]
    if word not in numbers:
        raise InsertlmError(f"{here}: unknown {what} {word!r}; expected 0 … {SIDE - 1}")
    return int(word)


def _check_fits(number: int, clue: Clue, size: int, attributes: int) -> None:
    here = f"clue {number} ({clue})"
    for operand in clue.operands:
        if operand >= HOUSE:
            named = [("house", operand - HOUSE, size)]
        else:
            named = [("attribute", operand // SIDE, attributes), ("value", operand % SIDE, size)]
        for what, found, count in named:
            if found >= count:
                raise InsertlmError(f"{here}: unknown {what} {found}; this puzzle has 0 … {count - 1}")


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:59]}…"
