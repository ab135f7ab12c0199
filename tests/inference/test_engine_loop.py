"""The decoding loop by itself, with a model that follows a script: who stops when, and what is recorded."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from insertlm.inference.engine import decode, exclusively
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.inference.writer import Step, Writer


@dataclass
class Script(Writer):
    """Always writes 5 at the end of the text; prompt r stops at the step for which `stop` gives a chance."""

    stop: dict[tuple[int, int], float]
    threshold: float = 0.5
    most: int = 99
    patience: int = 1
    row: Tensor = field(default_factory=lambda: torch.arange(0))
    length: int = 1
    seen: list[tuple[int, list[int]]] = field(default_factory=list)

    def step(self, number: int) -> Step:
        rows = self.row.tolist()
        self.seen.append((number, rows))
        stop = torch.tensor([self.stop.get((row, number), 0.25) for row in rows])
        place = torch.full((len(rows), 1), self.length)
        full = torch.full_like(stop, self.length >= self.most, dtype=torch.bool)
        return Step(stop >= self.threshold, full, stop, place, torch.full_like(place, 5), torch.full(place.shape, -0.5))

    def select(self, rows: Tensor) -> None:
        self.row = self.row[rows]

    def write(self, step: Step) -> Tensor:
        self.length += 1
        return step.place.clamp(max=self.length - 1)


def run(script: Script, count: int, max_steps: int) -> list[Trajectory]:
    script.row = torch.arange(count)
    return decode(lambda: script, [Prompt([1, 2], start=[3])] * count, DecodeConfig(max_steps=max_steps), 99)


def test_rows_stop_at_the_threshold_and_leave() -> None:
    script = Script({(0, 1): 0.5, (1, 2): 0.75, (2, 0): 1.0, (1, 1): 0.4375})
    written = run(script, 4, 4)
    assert script.seen == [(0, [0, 1, 2, 3]), (1, [0, 1, 3]), (2, [1, 3]), (3, [3]), (4, [3])]
    assert [t.ids for t in written] == [[3, 5], [3, 5, 5], [3], [3, 5, 5, 5, 5]]
    assert [t.stop_probability for t in written] == [0.5, 0.75, 1.0, 0.25]
    assert [t.limit for t in written] == [None, None, None, "max_steps"]
    assert [[e.stop_probability for e in t.events] for t in written] == [[0.25], [0.25, 0.4375], [], [0.25] * 4]
    assert all(event.log_probability == -0.5 for t in written for event in t.events)


@pytest.mark.parametrize("patience", [2, 3, 9])
def test_texts_may_leave_later_without_a_trace(patience: int) -> None:
    chances = {(0, 1): 0.5, (1, 2): 0.75, (2, 0): 1.0, (1, 1): 0.4375, (0, 2): 0.9, (2, 3): 0.6}
    expected, script = run(Script(chances), 4, 6), Script(chances, patience=patience)
    assert run(script, 4, 6) == expected
    assert max(len(rows) for number, rows in script.seen if 0 < number < patience) == 3  # the first look is at once


def test_the_last_allowed_insertion_is_judged_too() -> None:
    assert [t.complete for t in run(Script({(0, 2): 0.9}), 2, 2)] == [True, False]


def test_a_text_that_is_complete_at_once_gets_nothing() -> None:
    assert [t.events for t in run(Script({}, threshold=0.0), 2, 4)] == [[], []]


def test_a_full_text_is_cut() -> None:
    script = Script({}, most=4)
    assert [(t.ids, t.complete) for t in run(script, 1, 100)] == [([3, 5, 5, 5], False)]
    assert run(Script({}, most=1), 1, 100)[0].events == []


def test_a_model_that_cannot_tell_says_so() -> None:
    [written] = run(Script({(0, 0): math.nan, (0, 1): math.nan}), 1, 1)
    assert [written.stop_probability, written.events[0].stop_probability] == [None, None]


@dataclass
class Several(Writer):
    """Writes three tokens at once, of which one is nothing, in no order."""

    row: Tensor = field(default_factory=lambda: torch.arange(1))
    done: bool = False
    patience: int = 1

    def step(self, number: int) -> Step:
        one, three = torch.tensor([self.done]), torch.tensor([[7, 8, 9]])
        return Step(one, ~one & False, torch.tensor([0.5]), three, three, -three.float())

    def select(self, rows: Tensor) -> None:
        raise AssertionError("nothing ends early")

    def write(self, step: Step) -> Tensor:
        self.done = True
        return torch.tensor([[3, -1, 0]])


def test_tokens_of_one_step_are_recorded_in_reading_order() -> None:
    [written] = decode(Several, [Prompt([], start=[1, 2])], DecodeConfig(), 99)
    assert [(e.step, e.rank, e.token, e.log_probability) for e in written.events] == [(0, 0, 9, -9.0), (0, 3, 7, -7.0)]
    assert written.ids == [9, 1, 2, 7]


def test_every_gpu_has_a_lock_of_its_own() -> None:
    """So that models on different GPUs do not wait for each other; on a CPU nobody waits."""
    first, again, second = (exclusively(torch.device("cuda", gpu)) for gpu in (0, 0, 1))
    assert first is again
    assert first is not second
    assert isinstance(exclusively(torch.device("cpu")), nullcontext)
