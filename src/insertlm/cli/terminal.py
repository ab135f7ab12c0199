"""What commands print: tables of results, and how a sequence was written.

rich prints plain text where the output is not a terminal, so colour must never be the only sign of anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
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

MARK = "›"  # before a token that is new in its line
ABSENT = "·"  # where a token will come later
UNKNOWN = "–"  # for a probability that the model does not give
LEGEND = f" {MARK} new token   log p: of all that the step wrote   stop: chance that the text is complete"
NEW, GOOD, BAD, FAINT = "bold black on green", "bold green", "bold red", "dim"
FILL = "bold underline green"
RETURN = "↵"  # shown for a line break
NEAR = 30  # characters of a long given text shown beside a blank, of whole words
EMPTY = "[ ]"  # a blank with nothing in it
BESIDE = 26  # columns that a trajectory's table needs beside the text
PLAIN_WIDTH = 120  # the width of what goes into a file or a pipe


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error as `print` does; rich would exit with code 1."""
        self.quiet = True
        raise BrokenPipeError


def standard_output() -> Console:
    """Prints text as it is, without markup or highlighting."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return _Console(markup=False, highlight=False, emoji=False, width=width)


def results_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Each row has a name, a value and a remark."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style=FAINT)
    for row in rows:
        table.add_row(*row)
    return table


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[int] = (0,)) -> Table:
    """Each row has a name and numbers, under a header. texts: the columns that hold text"""
    table = Table(box=None, header_style=FAINT, padding=(0, 2))
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column in texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def verdict(good: bool, text: str) -> Text:
    """A text with a tick or a cross."""
    return Text.assemble(("✓ ", GOOD) if good else ("✗ ", BAD), text)


def show_spans(spans: Sequence[Span]) -> Text:
    """A filled text with its fills highlighted."""
    return Text.assemble(*((span.text, FILL if span.new else "") for span in spans))


def show_infilling(infilling: Infilling) -> Table:
    """A line for every step that wrote something: the blanks after it with the new tokens marked, and of the given
    text a few words beside them. Then how it ended, in the same way."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right", style=FAINT)
    table.add_column()
    for number, spans in enumerate(infilling.frames, start=1):
        table.add_row(str(number), _blanks(spans))
    table.add_row("", _blanks(infilling.outcome))
    return table


def _blanks(spans: Sequence[Span]) -> Text:
    line = Text()
    for place, span in enumerate(spans):
        if span.new:
            text = _marked(span).replace("\n", RETURN) or EMPTY
        else:
            text = _near(span.text, place > 0, place < len(spans) - 1)
        line.append(text, NEW if span.latest else FILL if span.new else "")
    return line


def _near(text: str, before: bool, behind: bool) -> str:
    """A given text, shortened in its middle. before, behind: whether there is a blank on that side"""
    text = text.replace("\n", RETURN)
    if len(text) <= (before + behind) * NEAR:
        return text
    # Whole words, unless a single one is longer. One character more shows whether a word ends just there.
    head, tail = text[: NEAR + 1], text[-NEAR - 1 :]
    head, tail = head[: head.rfind(" ") + 1] or head, tail[tail.find(" ") :] if " " in tail else tail
    return f"{head if before else ''}…{tail if behind else ''}"


def _marked(span: Span) -> str:
    """With a mark before its first letter if it is new."""
    word = span.text.lstrip()
    return f"{span.text[: len(span.text) - len(word)]}{MARK}{word}" if span.latest else span.text


def show_trajectory(trajectory: Trajectory, names: Callable[[int], str], width: int) -> Group:
    """A line for every step that wrote something: the text after it with the new tokens marked, their log-probability,
    and the probability that the text as it stands is complete.

    Every token has a column of its own, if all columns fit into `width`; else the text is closed up.
    """
    words = [names(token) for token in trajectory.ids]
    longest = max(map(cell_len, words), default=0)
    # Two spaces before a word are easier to read; one is enough for the mark.
    column = next((longest + gap for gap in (2, 1) if len(words) * (longest + gap) + BESIDE <= width), None)
    table = Table(box=None, header_style=FAINT, padding=(0, 1))
    table.add_column("step", justify="right", style=FAINT)
    table.add_column("text", no_wrap=column is not None)
    table.add_column("log p", justify="right")
    table.add_column("stop", justify="right")
    tokens = list(zip(words, trajectory.turns, strict=True))
    steps = trajectory.steps
    stops = [*(events[0].stop_probability for events in steps), trajectory.stop_probability]
    table.add_row("0", _line(tokens, 0, column), "", _probability(stops[0]))
    for turn, (events, stop) in enumerate(zip(steps, stops[1:], strict=True), start=1):
        score = sum(event.log_probability for event in events)
        table.add_row(str(events[0].step + 1), _line(tokens, turn, column), f"{score:.3f}", _probability(stop))
    return Group(table, Text(LEGEND, FAINT))


def _probability(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def _line(tokens: Sequence[tuple[str, int]], now: int, column: int | None) -> Text:
    """The text after turn `now`. tokens: words and the turns in which they came (0: given)   column: the width of each
    word's column (None: the text is closed up)"""
    line = Text()
    for word, turn in tokens:
        spaces = " " * ((column or cell_len(word) + 1) - cell_len(word))
        if turn == now > 0:
            line.append(spaces[1:]).append(MARK + word, NEW)
        elif turn <= now:
            line.append(spaces + word)
        elif column is not None:
            line.append(ABSENT.rjust(column), FAINT)
    return line
