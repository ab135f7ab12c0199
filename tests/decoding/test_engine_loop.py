"""The decoding loop by itself, with a model that follows a script: who stops when, and what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from insertlm.decoding.canvas import Canvas
from insertlm.decoding.engine import Step, decode
from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Trajectory


@dataclass
class Script:
    """Always writes 5 at the end of the text; prompt r stops at the step for which `stop` gives a chance."""

    stop: dict[tuple[int, int], float]
    seen: list[tuple[int, list[int]]] = field(default_factory=list)

    def step(self, canvas: Canvas, number: int) -> Step:
        rows = canvas.row.tolist()
        self.seen.append((number, rows))
        last = canvas.ranks.masked_fill(~canvas.used, -1).argmax(1)
        score = torch.full((len(rows),), -0.5)
        stop = torch.tensor([self.stop.get((row, number), 0.25) for row in rows])
        return Step(last, torch.full_like(last, 5), score, stop)


def run(script: Script, count: int, config: DecodeConfig) -> list[Trajectory]:
    batch = [Prompt([1, 2], start=[3]) for _ in range(count)]
    return decode(lambda canvas: script, batch, config, config.max_length or 99, 8, 9, torch.device("cpu"))


def test_rows_stop_at_the_threshold_and_leave() -> None:
    script = Script({(0, 1): 0.5, (1, 2): 0.75, (2, 0): 1.0, (1, 1): 0.4375})
    written = run(script, 4, DecodeConfig(max_steps=4))
    assert script.seen == [(0, [0, 1, 2, 3]), (1, [0, 1, 3]), (2, [1, 3]), (3, [3]), (4, [3])]
    assert [t.ids for t in written] == [[3, 5], [3, 5, 5], [3], [3, 5, 5, 5, 5]]
    assert [t.stop_probability for t in written] == [0.5, 0.75, 1.0, 0.25]
    assert [t.complete for t in written] == [True, True, True, False]
    assert [[e.stop_probability for e in t.events] for t in written] == [[0.25], [0.25, 0.4375], [], [0.25] * 4]
    assert all(event.log_probability == -0.5 for t in written for event in t.events)


def test_the_last_allowed_insertion_is_judged_too() -> None:
    assert [t.complete for t in run(Script({(0, 2): 0.9}), 2, DecodeConfig(max_steps=2))] == [True, False]


def test_a_threshold_of_zero_stops_at_once() -> None:
    assert [t.events for t in run(Script({}), 2, DecodeConfig(stop_threshold=0.0))] == [[], []]


def test_max_length_counts_the_whole_row() -> None:
    written = run(Script({}), 1, DecodeConfig(max_length=8, max_steps=100))
    assert written[0].ids == [3, 5, 5, 5]  # with two of the prefix, <stop> and <bos>: eight
    assert not written[0].complete
    assert run(Script({}), 1, DecodeConfig(max_length=5))[0].events == []
