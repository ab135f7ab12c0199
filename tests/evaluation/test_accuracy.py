"""Accuracy: exact means exact, length included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insertlm.evaluation.accuracy import accuracy
from insertlm.families.base import Family
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.tasks.base import Example, Examples, Task
from insertlm.tasks.star import PRESETS, Star

EXACT = Star(**PRESETS["star-easy"])
texts = st.lists(st.integers(0, 3), max_size=6)
targets = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def examples_of(rows: Sequence[Sequence[int]]) -> Examples:
    """Examples with these targets; 99 is padding."""
    target = np.full((len(rows), max(map(len, rows))), 99, dtype=np.int32)
    for row, ids in enumerate(rows):
        target[row, : len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], dtype=np.int32)
    nothing = np.zeros((len(rows), 0), dtype=np.int32)
    return Examples(nothing, np.zeros(len(rows), dtype=np.int32), target, lengths)


@pytest.mark.parametrize(
    ("written", "sequence", "token"),
    [
        ([1, 2, 3, 4], 100, 100),
        ([1, 2, 3], 0, 75),  # too short
        ([1, 2, 3, 4, 5], 0, 100),  # too long
        ([2, 3, 4], 0, 0),  # out of place
        ([1, 9, 3, 9], 0, 50),
        ([], 0, 0),
    ],
)
def test_one_text(written: list[int], sequence: float, token: float) -> None:
    assert accuracy(EXACT, examples_of([[1, 2, 3, 4]]), [written]) == {
        "sequence_accuracy": sequence,
        "token_accuracy": token,
    }


def test_every_example_counts_the_same_whatever_its_length() -> None:
    scores = accuracy(EXACT, examples_of([[1], [1, 2, 3, 4]]), [[1], [0, 0, 0, 0]])
    assert scores == {"sequence_accuracy": 50, "token_accuracy": 50}


def test_padding_of_a_short_target_is_not_part_of_it() -> None:
    scores = accuracy(EXACT, examples_of([[1], [1, 2, 3]]), [[1, 99, 99], [1, 2, 3]])
    assert scores == {"sequence_accuracy": 50, "token_accuracy": 100}


def test_as_many_texts_as_examples() -> None:
    with pytest.raises(ValueError, match="shorter"):
        accuracy(EXACT, examples_of([[1], [2]]), [[1]])


@given(st.lists(st.tuples(targets, texts), min_size=1, max_size=8))
def test_sequence_accuracy_counts_equal_texts_and_token_accuracy_is_no_lower(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    scores = accuracy(EXACT, examples_of([target for target, _ in pairs]), [text for _, text in pairs])
    exact = sum(target == text for target, text in pairs)
    assert scores["sequence_accuracy"] == pytest.approx(100 * exact / len(pairs))
    assert -1e-9 <= scores["sequence_accuracy"] <= scores["token_accuracy"] + 1e-9 <= 100 + 2e-9


class Lottery:
    """Solves what is even; odd examples have a score of their own."""

    def scores(self, example: Example, written: Sequence[int]) -> dict[str, float]:
        odd = {"odd_accuracy": 0.25} if example.target[0] % 2 else {}
        return {"sequence_accuracy": 1.0 - example.target[0] % 2, "token_accuracy": written[0] / 4, **odd}


def test_a_score_that_only_some_examples_have_is_averaged_over_those() -> None:
    scores = accuracy(cast(Task, Lottery()), examples_of([[1], [2], [3], [4]]), [[1], [1], [2], [4]])
    assert scores == {"odd_accuracy": 25, "sequence_accuracy": 50, "token_accuracy": 50}


class Parrot:
    """Writes a prompt's prefix as its text, and remembers how many it was asked for at once."""

    framing = 2

    def __init__(self) -> None:
        self.batches: list[int] = []

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        return 9

    def decode(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> list[Trajectory]:
        self.batches.append(len(prompts))
        return [Trajectory([], prompt.prefix, [], 1.0) for prompt in prompts]


@pytest.mark.parametrize(("batch_size", "batches"), [(3, [3, 3, 1]), (7, [7]), (100, [7]), (1, [1] * 7)])
def test_prompts_are_decoded_in_batches_and_in_order(batch_size: int, batches: list[int]) -> None:
    parrot, done = Parrot(), list[int]()
    prompts = [Prompt([number]) for number in range(7)]
    written = list(generate(cast(Family, parrot), prompts, DecodeConfig(), batch_size, done.append))
    assert [trajectory.ids for trajectory in written] == [[number] for number in range(7)]
    assert parrot.batches == batches
    assert done == [sum(batches[: i + 1]) for i in range(len(batches))]


def test_no_prompts_no_texts() -> None:
    assert list(generate(cast(Family, Parrot()), [], DecodeConfig(), 5)) == []
