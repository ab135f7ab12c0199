"""What commands print: results, and how a sequence came about.

Rich turns all of it into plain text where the output is not a terminal, so nothing may be told by colour alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from insertlm.inference.trajectory import Trajectory

if TYPE_CHECKING:  # it imports torch
    from insertlm.infill.results import Infilling, Span

__all__ = [
    "grid",
    "results_table",
    "show_infilling",
    "show_spans",
    "show_trajectory",
    "standard_output",
    "verdict",
]

MARK = "›"  # before the token that is new in a line
ABSENT = "·"  # where a token will come later
UNKNOWN = "–"  # for a probability that the model cannot tell
LEGEND = f" {MARK} new token   log p: of all that the step wrote   stop: chance that the text is complete"
NEW, GOOD, BAD, FAINT = "bold black on green", "bold green", "bold red", "dim"
FILL = "bold underline green"
RETURN = "↵"  # for the end of a line
NEAR = 30  # characters of a long given text that are shown beside a blank
BESIDE = 26  # columns that a trajectory's table needs beside the text
PLAIN_WIDTH = 120  # of what goes into a file or a pipe


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise it like `print` does; rich would end the process with code 1."""
        self.quiet = True
        raise BrokenPipeError


def standard_output() -> Console:
    """For text as it is: no markup, no colours of rich's own choice."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return _Console(markup=False, highlight=False, emoji=False, width=width)


def results_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Name, value and a remark in each row."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style=FAINT)
    for row in rows:
        table.add_row(*row)
    return table


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A name and then numbers in each row, under a header."""
    table = Table(box=None, header_style=FAINT, padding=(0, 2))
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    return table


def verdict(good: bool, text: str) -> Text:
    """A text with a tick or a cross."""
    return Text.assemble(("✓ ", GOOD) if good else ("✗ ", BAD), text)


def show_spans(spans: Sequence[Span]) -> Text:
    """A filled text; the fills stand out."""
    return Text.assemble(*((span.text, FILL if span.new else "") for span in spans))


def show_infilling(infilling: Infilling) -> Table:
    """A line for every step that wrote something: the text after it with the new tokens marked, and of what was given
    only what is near; then the whole text."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right", style=FAINT)
    table.add_column()
    for number, spans in enumerate(infilling.frames, start=1):
        line = Text()
        for place, span in enumerate(spans):
            text = (
                _marked(span).replace("\n", RETURN) if span.new else _near(span.text, place > 0, place < len(spans) - 1)
            )
            line.append(text, NEW if span.latest else FILL if span.new else "")
        table.add_row(str(number), line)
    table.add_row("", show_spans(infilling.spans))
    return table


def _near(text: str, before: bool, behind: bool) -> str:
    """Of a long text, what is next to something before and behind it."""
    text = text.replace("\n", RETURN)
    if len(text) <= (before + behind) * NEAR:
        return text
    return f"{text[:NEAR] if before else ''}…{text[-NEAR:] if behind else ''}"


def _marked(span: Span) -> str:
    """With a mark before it, behind its blank space, if it is new."""
    word = span.text.lstrip()
    return f"{span.text[: len(span.text) - len(word)]}{MARK}{word}" if span.latest else span.text


def show_trajectory(trajectory: Trajectory, names: Callable[[int], str], width: int) -> Group:
    """A line for every step that wrote something: the text after it with the new tokens marked, their log-probability,
    and the probability that the text as it stands is complete.

    Every token stands in the place it has in the end, if that fits into `width`; else the text is closed up.
    """
    cells = [names(token) for token in trajectory.ids]
    size = max(map(cell_len, cells), default=0)
    # Two blanks before a token are easier to read, one is enough for the mark.
    cell = next((size + gap for gap in (2, 1) if len(cells) * (size + gap) + BESIDE <= width), None)
    table = Table(box=None, header_style=FAINT, padding=(0, 1))
    table.add_column("step", justify="right", style=FAINT)
    table.add_column("text", no_wrap=cell is not None)
    table.add_column("log p", justify="right")
    table.add_column("stop", justify="right")
    tokens = list(zip(cells, trajectory.turns, strict=True))
    steps = trajectory.steps
    stops = [*(events[0].stop_probability for events in steps), trajectory.stop_probability]
    table.add_row("0", _line(tokens, 0, cell), "", _probability(stops[0]))
    for turn, (events, stop) in enumerate(zip(steps, stops[1:], strict=True), start=1):
        score = sum(event.log_probability for event in events)
        table.add_row(str(events[0].step + 1), _line(tokens, turn, cell), f"{score:.3f}", _probability(stop))
    return Group(table, Text(LEGEND, FAINT))


def _probability(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def _line(tokens: Sequence[tuple[str, int]], now: int, cell: int | None) -> Text:
    """The text after turn `now`. tokens: names and the turns in which they came (0: given); cell: the room that each
    has (None: the text is closed up)."""
    line = Text()
    for name, turn in tokens:
        blanks = " " * ((cell or cell_len(name) + 1) - cell_len(name))
        if turn == now > 0:
            line.append(blanks[1:]).append(MARK + name, NEW)
        elif turn <= now:
            line.append(blanks + name)
        elif cell is not None:
            line.append(ABSENT.rjust(cell), FAINT)
    return line
