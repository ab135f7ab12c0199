"""What a task is: examples of a prefix that is given and a target that must be written, and scores for what is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.core.files import write_atomically
from insertlm.core.section import NamedSection
from insertlm.text.tokenizers import Tokenizer

__all__ = ["SPLITS", "TENTHS", "Corpus", "Example", "Examples", "Kind", "Split", "Task", "exact_scores", "expect_task"]

Kind = Literal["text", "graph", "puzzle"]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# A hash of its content assigns an example to a split, so that no two splits share one: the index of the split for each
# tenth of all hashes.
TENTHS: NDArray[np.int64] = np.array([0] * 8 + [1, 2])


class Example(NamedTuple):
    """Ids without special tokens, which each family adds in its own way."""

    prefix: list[int]
    target: list[int]


@dataclass(frozen=True)
class Examples:
    """Many examples as id matrices. What lies beyond a row's length is padding and means nothing.

    prefix: [N, P] int32   prefix_length: [N] int32   target: [N, L] int32   target_length: [N] int32
    solving_order: [N, L] int32, the step, from 0, at which a solver of the task finds each target token; None where
    there is no solver
    """

    prefix: NDArray[np.int32]
    prefix_length: NDArray[np.int32]
    target: NDArray[np.int32]
    target_length: NDArray[np.int32]
    solving_order: NDArray[np.int32] | None = None

    @property
    def fingerprint(self) -> None:
        """See Corpus. Examples in memory follow from the recipe alone, so they have none."""

    def __len__(self) -> int:
        return len(self.prefix_length)

    def __getitem__(self, row: int) -> Example:
        return Example(
            self.prefix[row, : self.prefix_length[row]].tolist(),
            self.target[row, : self.target_length[row]].tolist(),
        )

    def take(self, rows: NDArray[np.int64]) -> Examples:
        """The examples of these rows, in this order."""
        order = None if self.solving_order is None else self.solving_order[rows]
        return Examples(self.prefix[rows], self.prefix_length[rows], self.target[rows], self.target_length[rows], order)

    def __iter__(self) -> Iterator[Example]:
        return (self[row] for row in range(len(self)))


class Corpus(Protocol):
    """More examples than fit into memory, read as they are needed and in any order."""

    @property
    def fingerprint(self) -> str:
        """Differs if any example does. A run is resumed only with the examples it began with."""
        ...

    def __len__(self) -> int: ...

    def take(self, documents: NDArray[np.int64]) -> Examples:
        """The examples of these numbers. The matrices have the same width whichever are asked for."""
        ...


class Task(NamedSection, frozen=True, kw_only=True):
    """A source of examples, and a judge of what is written for them.

    A task is a recipe section: its fields are the keys of `task` in a recipe. The rest of the library knows a task by
    what it declares here, and does not ask which class it is.
    """

    kind: ClassVar[Kind]
    things: ClassVar[str]  # what its examples are called, in the plural
    has_answers: ClassVar[bool] = True  # False: texts are written from nothing, and none is the right one
    has_solving_order: ClassVar[bool] = False  # whether its examples have one, see Examples
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # keys of well-known settings, by name

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    @property
    def longest_prefix(self) -> int:
        """The most prefix tokens an example of this task can have."""
        raise NotImplementedError

    @property
    def longest_target(self) -> int:
        """The most target tokens an example of this task can have."""
        raise NotImplementedError

    def examples(self, split: Split, count: int | None = None, seed: int | None = None) -> Examples:
        """The split's examples, the same at every call.

        count: how many, the recipe's number if None   seed: another one gives fresh examples of the same split
        """
        raise NotImplementedError

    def split_size(self, split: Split) -> int:
        """How many examples the split has: the recipe's number, or all that there are of a corpus."""
        size: int = getattr(self, split)
        return size

    def training_set(self) -> Examples | Corpus:
        """What training reads: examples that fit into memory, or a corpus that need not."""
        return self.examples("train")

    def render(self, example: Example) -> str:
        """An example as a person would want to read it."""
        raise NotImplementedError

    def parse_prompt(self, text: str) -> list[int]:
        """The prefix ids of what a user typed."""
        raise NotImplementedError

    def scores(self, example: Example, written: Sequence[int]) -> Mapping[str, float]:
        """How good a written text is, each score from 0 to 1.

        At least `sequence_accuracy`, which is 1 if the example is solved, and `token_accuracy`. A score that only some
        examples have is averaged over those.
        """
        return exact_scores(example, written)

    # --- Files. A task may need files of the user, such as a tokenizer. A model is worthless without them, so every
    # model folder gets a copy.

    def files(self) -> dict[str, bytes]:
        """What has to lie beside the weights, by file name."""
        return {}

    def save_files(self, folder: Path) -> None:
        for name, data in self.files().items():
            write_atomically(folder / name, data)

    def fits_files(self, folder: Path) -> bool:
        """Whether a model in `folder` was trained with the same files."""
        return True

    def with_files(self, folder: Path) -> Self:
        """This task with the files in `folder`, if there are any, in place of its own."""
        return self

    def portable(self) -> Self:
        """As it is published: with the names of files but not their folders, which are nobody else's business."""
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the examples come from, for readers of a model card."""
        return ()


T = TypeVar("T", bound=Task)


def expect_task(task: Task, wanted: type[T], name: str) -> T:
    """The task, if it is a `wanted`: for commands and routes that draw or serve one task only. name: for the message"""
    if not isinstance(task, wanted):
        raise InsertlmError(f"{name}: is about {task.things}; expected {wanted.things}")
    return task


def exact_scores(example: Example, written: Sequence[int]) -> Mapping[str, float]:
    """For tasks with one right text.

    sequence_accuracy: whether the text is the target, token for token and in length
    token_accuracy: share of target positions that hold the right token. Positions that a text is too short for count as
    wrong; what it has beyond the target does not count
    """
    hits = sum(a == b for a, b in zip(example.target, written, strict=False))
    return {
        "sequence_accuracy": float(list(written) == example.target),
        "token_accuracy": hits / len(example.target),
    }
