"""A canvas is a batch of Python lists that are written with `list.insert`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from insertlm.inference.canvas import Canvas
from insertlm.inference.settings import Prompt

STOP, BOS = 90, 91
CPU = torch.device("cpu")


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    prefix = draw(st.lists(st.integers(0, 9), max_size=4))
    start = draw(st.lists(st.integers(10, 19), max_size=4))
    gaps = st.frozensets(st.integers(0, len(start)), min_size=1)
    return Prompt(prefix, draw(st.integers(0, 99)), start, draw(st.none() | gaps))


@dataclass
class Line:
    """What one row of the canvas must be: its text in reading order as (cell, token), and which cells are open."""

    prompt: Prompt
    text: list[tuple[int, int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    used: int = 0

    def __post_init__(self) -> None:
        first = len(self.prompt.prefix) + 1
        self.text = [(first + k, token) for k, token in enumerate([BOS, *self.prompt.start])]
        gaps = range(len(self.text)) if self.prompt.open is None else self.prompt.open
        self.open = {first + gap for gap in gaps}
        self.used = first + len(self.text)

    def insert(self, cell: int, token: int) -> int:
        rank = [place for place, _ in self.text].index(cell)
        self.text.insert(rank + 1, (self.used, token))
        self.open.add(self.used)
        self.used += 1
        return rank

    def check(self, canvas: Canvas, row: int) -> None:
        prefix, used = self.prompt.prefix, int(canvas.length[row])
        assert used == self.used
        assert int(canvas.prefix[row]) == len(prefix)
        order = canvas.ranks[row, :used].argsort()
        assert canvas.ranks[row, :used][order].tolist() == list(range(used))
        text = [token for _, token in self.text]
        assert canvas.tokens[row, :used][order].tolist() == [STOP, *prefix, *text]
        assert canvas.tokens[row, : len(prefix)].tolist() == prefix
        assert set(canvas.open[row].nonzero().squeeze(1).tolist()) == self.open
        assert [int(count[row]) for count in canvas.counts[:3]] == [used, len(prefix), len(self.open)]
        cells = [cell for cell, _ in self.text]
        assert canvas.right[row, cells].tolist() == [*cells[1:], 0]
        gaps, number = dict[int, list[int]](), 0
        for cell in cells:
            number += cell < len(prefix) + 2 + len(self.prompt.start)  # given tokens begin a gap
            gaps.setdefault(number, []).append(cell)
        found = [set(canvas.gap[row, each].tolist()) for each in gaps.values()]
        assert all(len(each) == 1 for each in found)
        assert len(set[int]().union(*found)) == len(gaps)
        assert canvas.used[row].tolist() == [cell < used for cell in range(canvas.tokens.shape[1])]


@given(st.lists(prompts(), min_size=1, max_size=4), st.data())
@settings(max_examples=60)
def test_any_insertions_are_list_insert(batch: list[Prompt], data: st.DataObject) -> None:
    """Rows leave and change places in between."""
    room = data.draw(st.integers(1, 6))
    canvas = Canvas.start(batch, STOP, BOS, room, CPU)
    lines = [Line(prompt) for prompt in batch]
    for turn in range(room):
        assert len(canvas) == len(lines)
        for row, line in enumerate(lines):
            line.check(canvas, row)
        cells = [data.draw(st.sampled_from(sorted(line.open))) for line in lines]
        tokens = [20 + turn * 5 + row for row in range(len(lines))]
        ranks = canvas.insert(torch.tensor(cells)[:, None], torch.tensor(tokens)[:, None])
        assert ranks[:, 0].tolist() == [line.insert(*pair) for line, *pair in zip(lines, cells, tokens, strict=True)]
        stay = data.draw(st.lists(st.sampled_from(range(len(lines))), min_size=1, unique=True))
        canvas, lines = canvas.select(torch.tensor(stay)), [lines[row] for row in stay]
    for row, line in enumerate(lines):
        line.check(canvas, row)


@given(st.lists(prompts(), min_size=1, max_size=4), st.data())
@settings(max_examples=60)
def test_several_insertions_at_once_are_one_after_the_other(batch: list[Prompt], data: st.DataObject) -> None:
    """Each row gets as many as it likes, in any order, up to one per open cell."""
    canvas = Canvas.start(batch, STOP, BOS, 12, CPU)
    lines = [Line(prompt) for prompt in batch]
    for turn in range(2):
        chosen = [data.draw(st.lists(st.sampled_from(sorted(line.open)), max_size=3, unique=True)) for line in lines]
        cells = [[*some, *[-1] * (3 - len(some))] for some in chosen]
        tokens = torch.arange(3 * len(lines)).view(-1, 3) + 20 + 20 * turn
        ranks = canvas.insert(torch.tensor(cells), tokens)
        for line, some, written, found in zip(lines, chosen, tokens.tolist(), ranks.tolist(), strict=True):
            for cell, token in zip(some, written, strict=False):
                line.insert(cell, token)
            place = {token: rank - 1 for rank, (_, token) in enumerate(line.text)}
            assert found == [*(place[token] for token in written[: len(some)]), *[-1] * (3 - len(some))]
    for row, line in enumerate(lines):
        line.check(canvas, row)


def test_selected_rows_go_on_alone() -> None:
    canvas = Canvas.start([Prompt([1]), Prompt([2])], STOP, BOS, 3, CPU)
    part = canvas.select(torch.tensor([1]))
    part.insert(torch.tensor([[2]]), torch.tensor([[7]]))
    assert canvas.length.tolist() == [3, 3]
    assert part.length.tolist() == [4]
    assert canvas.tokens[1, 3] != 7
    assert not bool(canvas.open[1, 3])


def test_rows_that_join_keep_a_column_for_nothing() -> None:
    one, other = (Canvas.start([Prompt([])], STOP, BOS, 1, CPU) for _ in range(2))
    whole = one.join(other)
    whole.insert(torch.tensor([[1, -1], [1, -1]]), torch.tensor([[7, 8], [7, 8]]))
    assert whole.tokens[:, 2].tolist() == [7, 7]
    assert whole.open[:, 2].tolist() == [True, True]


@given(st.lists(prompts(), min_size=2, max_size=4), st.data())
@settings(max_examples=40)
def test_rows_that_join_are_what_they_were(batch: list[Prompt], data: st.DataObject) -> None:
    """However much room each has."""
    lines, rooms = [Line(prompt) for prompt in batch], [data.draw(st.integers(2, 6)) for _ in batch]
    canvases = [Canvas.start([prompt], STOP, BOS, room, CPU) for prompt, room in zip(batch, rooms, strict=True)]
    whole = canvases[0]
    for turn, canvas in enumerate(canvases[1:], start=1):
        cell = max(lines[0].open)
        canvas.insert(torch.tensor([[max(lines[turn].open)]]), torch.tensor([[20 + turn]]))
        lines[turn].insert(max(lines[turn].open), 20 + turn)
        if turn == 1:
            whole.insert(torch.tensor([[cell]]), torch.tensor([[40]]))
            lines[0].insert(cell, 40)
        whole = whole.join(canvas)
    assert whole.limit.tolist() == whole.counts.limit.tolist()
    for row, (line, room) in enumerate(zip(lines, rooms, strict=True)):
        line.check(whole, row)
        assert int(whole.limit[row]) == line.used - 1 + room
