"""What a task gives to everything below it: examples of a prefix that is given and a target that must be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from insertlm.text.tokenizers import Tokenizer

__all__ = ["SPLITS", "TENTHS", "Corpus", "Example", "Examples", "Split", "Task", "exact_scores"]

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# A hash of its content assigns an example to a split: the split, by index, of each tenth of all hashes.
TENTHS: NDArray[np.int64] = np.array([0] * 8 + [1, 2])


class Example(NamedTuple):
    """Ids without any special token; families add their own."""

    prefix: list[int]
    target: list[int]


@dataclass(frozen=True)
class Examples:
    """Many examples as id matrices; what lies beyond a row's length is padding and means nothing.

    prefix: [N, P] int32   prefix_length: [N] int32   target: [N, L] int32   target_length: [N] int32
    found: [N, L] int32, when somebody who solves it comes to know each target token, from 0; None: no such order
    """

    prefix: NDArray[np.int32]
    prefix_length: NDArray[np.int32]
    target: NDArray[np.int32]
    target_length: NDArray[np.int32]
    found: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.prefix_length)

    def __getitem__(self, row: int) -> Example:
        return Example(
            self.prefix[row, : self.prefix_length[row]].tolist(),
            self.target[row, : self.target_length[row]].tolist(),
        )

    def take(self, rows: NDArray[np.int64]) -> Examples:
        """These, in this order."""
        found = None if self.found is None else self.found[rows]
        return Examples(self.prefix[rows], self.prefix_length[rows], self.target[rows], self.target_length[rows], found)

    def __iter__(self) -> Iterator[Example]:
        return (self[row] for row in range(len(self)))


class Corpus(Protocol):
    """Examples that are too many to hold: read as they are needed, in any order."""

    def __len__(self) -> int: ...

    def take(self, documents: NDArray[np.int64]) -> Examples:
        """These, in id matrices of the same width whichever they are."""
        ...


class Task(Protocol):
    """A source of examples. Tasks are recipe sections: their fields are the `task` keys of a recipe.

    things: what its examples are, in the plural   solved: whether they say when each token is found, see Examples
    """

    things: ClassVar[str]
    solved: ClassVar[bool]

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def longest_prefix(self) -> int:
        """The most prefix tokens an example of this task can have."""
        ...

    @property
    def longest_target(self) -> int:
        """The most target tokens an example of this task can have."""
        ...

    def examples(self, split: Split, count: int | None = None, seed: int | None = None) -> Examples:
        """The split's examples, the same at every call (`count`, `seed`: those of the recipe; another seed gives
        fresh examples of the same split)."""
        ...

    def training_set(self) -> Examples | Corpus:
        """What training reads: examples that fit into memory, or a corpus that need not."""
        ...

    def render(self, example: Example) -> str:
        """An example as a person would want to read it."""
        ...

    def parse_prompt(self, text: str) -> list[int]:
        """The prefix ids of what a user typed."""
        ...

    def scores(self, example: Example, written: Sequence[int]) -> Mapping[str, float]:
        """How good a written text is, each from 0 to 1: at least `sequence_accuracy`, 1 if the example is solved, and
        `token_accuracy`. A score that only some examples have is averaged over those."""
        ...


def exact_scores(example: Example, written: Sequence[int]) -> Mapping[str, float]:
    """For tasks with one right text.

    sequence_accuracy: the text is the target, token for token and in length
    token_accuracy: share of target positions that hold the right token; a text that is too short misses the rest, and
    one that is too long is no better for it
    """
    hits = sum(a == b for a, b in zip(example.target, written, strict=False))
    return {
        "sequence_accuracy": float(list(written) == example.target),
        "token_accuracy": hits / len(example.target),
    }
