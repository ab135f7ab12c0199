"""Zebra puzzles: given clues about who lives where, write which value of each attribute belongs to which house.

    prefix   left-of LHS c 2 2 RHS c 2 1 CLUE_END  ends LHS c 1 2 RHS CLUE_END  …      (clues, in random order)
    target   a h v  a h v  …                      (attribute a has value v in house h, for every a and h)

clues.py explains the clues. `order: sorted` writes the target by house, then attribute. `solver` writes it in the order
in which a solver who reads the clues again and again, and rules out what they forbid, deduces each value's house: the
order an oracle would choose for a model that writes from left to right. All numbers are digits, as published. With
`own_words` attributes and houses of the target have words of their own, `a2 h0 3`, which can be told apart even if
some of the target is missing.

A puzzle has one solution, and deduction finds it without trying anything out. No clue is redundant: without any one of
them there is more than one solution. Both are checked for every puzzle, the first by deduction, the second by a search
that tries everything. To make a puzzle, true clues of random kinds are drawn, each of which tells something new, until
they determine everything; then clues that deduction does not need are dropped. What fails the second check is drawn
again in the same size, so all sizes are equally likely. The size is not stated; it is the largest number in the clues.

The splits are disjoint by construction, as in star.py. A hash of the content assigns a puzzle to its split. It is the
same for puzzles that differ in the names of attributes or values, in the order of clues, or in the order of sides that
a clue does not tell apart. So no two splits share a puzzle under any renaming. (Different puzzles may share a hash,
which does no harm.)

The splits of a recipe are kept in the user's cache folder, since large ones take minutes to make. Those of other seeds
are not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from insertlm.core.errors import InsertlmError
from insertlm.core.section import Count, Index
from insertlm.tasks.base import SPLITS, Example, Examples, Kind, Split, Task
from insertlm.tasks.stored import stored
from insertlm.tasks.zebra.clues import LEAST, MOST_TOKENS, NONE, OWN_WORDS, SIDE, TOKENIZER, Street, name, read
from insertlm.tasks.zebra.puzzles import VERSION, Puzzles, Sizes, make
from insertlm.text.tokenizers import WordTokenizer

__all__ = ["Triple", "Zebra", "in_threes", "places", "table"]

Side = Annotated[int, msgspec.Meta(ge=LEAST, le=SIDE)]
Triple = tuple[int, ...]


class Zebra(Task, frozen=True, kw_only=True, tag="zebra"):
    """Find out who lives where."""

    kind: ClassVar[Kind] = "puzzle"
    things: ClassVar[str] = "puzzles"
    has_solving_order: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"zebra": {}}

    min_houses: Side = LEAST  # all combinations of numbers of houses and attributes are equally likely
    max_houses: Side = SIDE  # of a puzzle
    min_attributes: Side = LEAST  # of a house
    max_attributes: Side = SIDE  # of a house
    order: Literal["sorted", "solver"] = "sorted"  # of the target: by house, then attribute, or as deduction finds it
    own_words: bool = False  # whether attributes and houses of the target have words of their own; else digits
    train: Count = 1_500_000  # examples per split
    validation: Count = 1_000  # examples
    test: Count = 10_000  # examples
    seed: Index = 1  # of the puzzles

    def __post_init__(self) -> None:
        for what in ("houses", "attributes"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least > most:
                raise ValueError(f"min_{what} {least} is more than max_{what} {most}")

    @property
    def longest_prefix(self) -> int:
        return MOST_TOKENS

    @property
    def longest_target(self) -> int:
        return 3 * self.max_houses * self.max_attributes

    @property
    def tokenizer(self) -> WordTokenizer:
        return OWN_WORDS if self.own_words else TOKENIZER

    def examples(self, split: Split, count: int | None = None, seed: int | None = None) -> Examples:
        wanted = getattr(self, split) if count is None else count
        return self.puzzles(split, wanted, seed).examples(self.order == "sorted", self._firsts)

    def puzzles(self, split: Split, count: int, seed: int | None = None) -> Puzzles:
        """The puzzles of which `examples` gives the ids."""
        if seed is not None:
            return self._make(split, count, seed)
        sizes = "-".join(map(str, self._sizes))
        # A file that holds more than is asked for will do, since a smaller count is the beginning of a larger one.
        kept = stored(
            f"zebra-{VERSION}-{sizes}-seed{self.seed}-{split}",
            enough=lambda arrays: len(arrays["heads"]) >= count,
            make=lambda: self._make(split, count, self.seed).arrays(),
        )
        return Puzzles(**kept)[:count]

    def render(self, example: Example) -> str:
        """The clues in English, the target as a table, and the words of both."""
        street = read(TOKENIZER.decode(example.prefix))
        lines = [f"{street.size} houses, {street.attributes} attributes"]
        lines += [f"{number:3}. {clue.in_english()}" for number, clue in enumerate(street.clues, start=1)]
        lines += ["", table(street, self.triples(example.target)), ""]
        lines += [f"clues  {TOKENIZER.decode(example.prefix)}", f"target {self.tokenizer.decode(example.target)}"]
        return "\n".join(lines)

    def parse_prompt(self, text: str) -> list[int]:
        """Clues in the words of the vocabulary."""
        street = read(text)
        if street.size > self.max_houses or street.attributes > self.max_attributes:
            raise InsertlmError(
                f"a puzzle of {street.size} houses and {street.attributes} attributes; "
                f"this task has at most {self.max_houses} and {self.max_attributes}"
            )
        prefix = TOKENIZER.encode(" ".join(map(str, street.clues)))
        if len(prefix) > self.longest_prefix:
            raise InsertlmError(f"clues of {len(prefix)} words; this task has at most {self.longest_prefix}")
        return prefix

    def scores(self, example: Example, written: Sequence[int]) -> Mapping[str, float]:
        """sequence_accuracy: whether the triples written are those of the solution, in any order

        token_accuracy: share of the solution's triples that are among them
        clue_accuracy: whether all clues hold if values live where the triples say
        sequence_accuracy_MxN: as sequence_accuracy, for puzzles of M houses and N attributes
        """
        # Sets: the order of triples does not matter, and a repeated one counts once.
        street = read(TOKENIZER.decode(example.prefix))
        right, found = set(self.triples(example.target)), set(self.triples(written))
        solved = float(right == found)
        place = places(found)
        return {
            "sequence_accuracy": solved,
            "token_accuracy": len(right & found) / len(right),
            "clue_accuracy": float(all(clue.holds(place, street.size) for clue in street.clues)),
            f"sequence_accuracy_{street.size}x{street.attributes}": solved,
        }

    def triples(self, ids: Sequence[int]) -> list[Triple]:
        """A target as numbers, with NONE for a word that cannot stand in its place."""

        def number(word: int, first: int) -> int:
            return word - first if first <= word < first + SIDE else NONE

        return [tuple(map(number, part, self._firsts)) for part in in_threes(ids)]

    @property
    def _firsts(self) -> tuple[int, int, int]:
        """The ids of attribute 0, house 0 and value 0 in a target. Those of the digits are the digits."""
        own = len(TOKENIZER.words)
        return (own, own + SIDE, 0) if self.own_words else (0, 0, 0)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.min_houses, self.max_houses, self.min_attributes, self.max_attributes)

    def _make(self, split: Split, count: int, seed: int) -> Puzzles:
        from insertlm.core.progress import progress_bar  # slow to import, and seldom needed

        with progress_bar("making puzzles", count) as advance:
            return make(SPLITS.index(split), count, seed, self._sizes, advance)


def table(street: Street, triples: Collection[Triple]) -> str:
    """A column for every house, a line for every attribute. A cell shows all its values, or a dash if it has none."""
    rows = [["house", *map(str, range(street.size))]]
    for attribute in range(street.attributes):
        row = [""]
        for house in range(street.size):
            values = [value for value in range(SIDE) if (attribute, house, value) in triples]
            row.append("/".join(name(SIDE * attribute + value) for value in values) or "–")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def in_threes(values: Sequence[int]) -> list[Triple]:
    """Values that belong to the ids of a target, in threes. The last part of an incomplete text has fewer."""
    return [tuple(values[i : i + 3]) for i in range(0, len(values), 3)]


def places(triples: Collection[Triple]) -> dict[int, int]:
    """The house of every value that has exactly one."""
    houses: dict[int, set[int]] = {}
    for triple in triples:
        if len(triple) == 3 and max(triple) < SIDE:
            attribute, house, value = triple
            houses.setdefault(SIDE * attribute + value, set()).add(house)
    return {cell: found.pop() for cell, found in houses.items() if len(found) == 1}
