"""The order in which sequences were written: a row of boxes for each, darker for later tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from insertlm.inference.trajectory import Trajectory
from insertlm.plots.figure import (
    FAINT,
    INK,
    TITLE,
    TITLE_LETTER,
    blank,
    draw_box,
    draw_mark,
    draw_order_bar,
    figure_title,
    readable_on,
    turn_colours,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Panel", "comparison_figure", "trajectory_figure"]

# All in inches.
LINE, BOX, GAP = 0.54, 0.46, 0.05  # from line to line; height of a box; between boxes
SIDE = 0.45  # left of the boxes for row numbers, right of them for marks
TOP, HEAD, BOTTOM = 0.12, 0.32, 0.75  # above a panel; for its title; below all panels, for the colour bar
NARROWEST, WIDEST = 3.0, 12.0  # of the boxes; longer rows continue in the next line


class Panel(NamedTuple):
    """Sequences drawn together. marks: for each sequence True for a tick and False for a cross"""

    trajectories: Sequence[Trajectory]
    marks: Sequence[bool] | None = None
    title: str = ""


class _Box(NamedTuple):
    """One token. left: inches from the first box   line: lines from the top   turn: 0 if it was given"""

    left: float
    line: int
    width: float
    name: str
    turn: int


class _Layout(NamedTuple):
    """A panel with the boxes of its rows. starts: the first line of each row, and at the end the number of lines"""

    panel: Panel
    rows: list[list[_Box]]
    starts: list[int]


def trajectory_figure(
    trajectories: Sequence[Trajectory],
    names: Callable[[int], str],
    marks: Sequence[bool] | None = None,
    title: str = "",
) -> Figure:
    """One row per sequence, with its tokens in reading order, darker for later tokens.

    names: from an id to its text   marks: see Panel. Given tokens are grey and have no number.
    """
    return comparison_figure([Panel(trajectories, marks)], names, title)


def comparison_figure(panels: Sequence[Panel], names: Callable[[int], str], title: str = "") -> Figure:
    """Several panels with one scale of colours, side by side where they fit, else below each other."""
    layouts = [_layout(panel, names) for panel in panels]
    boxes = [box for each in layouts for row in each.rows for box in row]
    width = max([NARROWEST, *(box.left + box.width for box in boxes)]) + 2 * SIDE
    head = TOP + (HEAD if any(panel.title for panel in panels) else 0.0)
    columns = _columns(len(panels), max(1, int((WIDEST + 2 * SIDE) / width)))
    lines = [layouts[first : first + columns] for first in range(0, len(layouts), columns)]
    heights = [head + LINE * max(each.starts[-1] for each in line) for line in lines]
    figure = blank(max(columns * width, TITLE_LETTER * len(title)), sum(heights) + BOTTOM + (TITLE if title else 0.0))
    figure_title(figure, SIDE, title)
    colours = turn_colours(max([1, *(box.turn for box in boxes)]))
    for number, line in enumerate(lines):
        bottom = BOTTOM + sum(heights[number + 1 :])
        for column, each in enumerate(line):
            axes = _axes(figure, column * width, bottom, width, heights[number], head)
            _draw_panel(axes, each, colours)
    draw_order_bar(figure, colours, SIDE, 0.42, "insertion order")
    return figure


def _columns(panels: int, most: int) -> int:
    """The number of columns that gives the fewest lines of panels, as even as possible."""
    return math.ceil(panels / math.ceil(panels / most))


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float, head: float) -> Axes:
    """Axes whose coordinates are inches from the first box, with y downwards."""
    across, up = figure.get_size_inches()
    place = (left / across, bottom / up, width / across, height / up)
    axes = figure.add_axes(place, xlim=(-SIDE, width - SIDE), ylim=(height - head, -head))
    axes.set_axis_off()
    return axes


def _layout(panel: Panel, names: Callable[[int], str]) -> _Layout:
    rows: list[list[_Box]] = []
    starts = [0]
    for trajectory in panel.trajectories:
        rows.append(_boxes(trajectory, names, starts[-1]))
        starts.append(max((box.line + 1 for box in rows[-1]), default=starts[-1] + 1))
    return _Layout(panel, rows, starts)


def _draw_panel(axes: Axes, layout: _Layout, colours: Sequence[str]) -> None:
    for row in layout.rows:
        for box in row:
            _draw_token(axes, box, colours[box.turn])
    _label_rows(axes, layout)
    if layout.panel.title:
        axes.text(
            0, -HEAD / 2, layout.panel.title, va="center", fontsize=9.5, color=INK, weight="bold", parse_math=False
        )


def _boxes(trajectory: Trajectory, names: Callable[[int], str], line: int) -> list[_Box]:
    """The boxes of one row, which starts in the given line."""
    boxes: list[_Box] = []
    left = 0.0
    for token, turn in zip(trajectory.ids, trajectory.turns, strict=True):
        name = names(token)
        width = max(0.48, 0.2 + 0.09 * len(name))  # short names get equal boxes, so that rows align
        if boxes and left + width > WIDEST:
            left, line = 0.0, line + 1
        boxes.append(_Box(left, line, width, name, turn))
        left += width + GAP
    return boxes


def _draw_token(axes: Axes, box: _Box, fill: str) -> None:
    top, middle, ink = box.line * LINE, box.left + box.width / 2, readable_on(fill)
    draw_box(axes, box.left, top, box.width, BOX, color=fill, linewidth=0)
    # no parse_math, because `$` is a token like any other
    name = axes.text(middle, top + BOX / 2, box.name, fontsize=10.5, color=ink, parse_math=False)
    name.set(ha="center", va="center")
    if box.turn:
        name.set_y(top + 0.4 * BOX)
        axes.text(middle, top + 0.79 * BOX, str(box.turn), fontsize=6, color=ink, ha="center", va="center")


def _label_rows(axes: Axes, layout: _Layout) -> None:
    """Row numbers on the left and marks after the last box. A row without tokens says so."""
    rows, starts, marks = layout.rows, layout.starts[:-1], layout.panel.marks
    for number, (row, start) in enumerate(zip(rows, starts, strict=True), start=1):
        middle = start * LINE + BOX / 2
        axes.text(-0.14, middle, str(number), ha="right", va="center", fontsize=8, color=FAINT)
        if not row:
            axes.text(0, middle, "(empty)", va="center", fontsize=9, color=FAINT)
    for row, start, good in zip(rows, starts, marks or [], strict=marks is not None):
        end, line = (row[-1].left + row[-1].width, row[-1].line) if row else (0.7, start)
        draw_mark(axes, end + 0.12, line * LINE + BOX / 2, good=good)
