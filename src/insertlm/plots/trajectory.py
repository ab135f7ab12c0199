"""The order in which sequences were written: a row of cells for each, the darker the later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from insertlm.inference.trajectory import Trajectory
from insertlm.plots.figure import FAINT, INK, blank, draw_box, draw_mark, draw_order_bar, readable_on, turn_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Panel", "comparison_figure", "trajectory_figure"]

# All in inches.
LINE, CELL, GAP = 0.54, 0.46, 0.05  # from line to line; height of a cell; between cells
SIDE = 0.45  # left of the cells for row numbers, right of them for marks
TOP, TITLE, BOTTOM = 0.12, 0.4, 0.75  # above a panel, for its title, and below all of them for the colour bar
NARROWEST, WIDEST = 3.0, 12.0  # the room for cells; longer rows go on in the next line


class Panel(NamedTuple):
    """Sequences that stand together. marks: one per sequence, which rows get a tick and which a cross."""

    trajectories: Sequence[Trajectory]
    marks: Sequence[bool] | None = None
    title: str = ""


class _Cell(NamedTuple):
    """One token: its place (inches from the first cell, lines from the top) and its turn (0: it was given)."""

    left: float
    line: int
    width: float
    name: str
    turn: int


class _Laid(NamedTuple):
    """A panel with the cells of its rows. starts: the line of each row's first cell, and at last the number of lines"""

    panel: Panel
    rows: list[list[_Cell]]
    starts: list[int]


def trajectory_figure(
    trajectories: Sequence[Trajectory], names: Callable[[int], str], marks: Sequence[bool] | None = None
) -> Figure:
    """One row per sequence, its tokens in reading order; the darker a token, the later it was inserted.

    `names` turns an id into text. `marks`, one per trajectory, tells which rows get a tick and which a cross. Given
    tokens are grey and have no number.
    """
    return comparison_figure([Panel(trajectories, marks)], names)


def comparison_figure(panels: Sequence[Panel], names: Callable[[int], str]) -> Figure:
    """A panel for each way of writing, on one scale of colours: side by side where that fits, else below each other."""
    laid = [_lay_out(panel, names) for panel in panels]
    cells = [cell for each in laid for row in each.rows for cell in row]
    width = max([NARROWEST, *(cell.left + cell.width for cell in cells)]) + 2 * SIDE
    head = TOP + (TITLE if any(panel.title for panel in panels) else 0.0)
    columns = _columns(len(panels), max(1, int((WIDEST + 2 * SIDE) / width)))
    lines = [laid[first : first + columns] for first in range(0, len(laid), columns)]
    heights = [head + LINE * max(each.starts[-1] for each in line) for line in lines]
    figure = blank(columns * width, sum(heights) + BOTTOM)
    colours = turn_colours(max([1, *(cell.turn for cell in cells)]))
    for number, line in enumerate(lines):
        bottom = BOTTOM + sum(heights[number + 1 :])
        for column, each in enumerate(line):
            axes = _axes(figure, column * width, bottom, width, heights[number], head)
            _draw_panel(axes, each, colours)
    draw_order_bar(figure, colours, SIDE, 0.42, "insertion order")
    return figure


def _columns(panels: int, most: int) -> int:
    """As few lines of panels as can be, as even as can be."""
    return math.ceil(panels / math.ceil(panels / most))


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float, head: float) -> Axes:
    """Measured in inches from the first cell, downwards: lines are counted from the top."""
    across, up = figure.get_size_inches()
    place = (left / across, bottom / up, width / across, height / up)
    axes = figure.add_axes(place, xlim=(-SIDE, width - SIDE), ylim=(height - head, -head))
    axes.set_axis_off()
    return axes


def _lay_out(panel: Panel, names: Callable[[int], str]) -> _Laid:
    rows: list[list[_Cell]] = []
    starts = [0]
    for trajectory in panel.trajectories:
        rows.append(_cells(trajectory, names, starts[-1]))
        starts.append(max((cell.line + 1 for cell in rows[-1]), default=starts[-1] + 1))
    return _Laid(panel, rows, starts)


def _draw_panel(axes: Axes, laid: _Laid, colours: Sequence[str]) -> None:
    for row in laid.rows:
        for cell in row:
            _draw_cell(axes, cell, colours[cell.turn])
    _label_rows(axes, laid)
    if laid.panel.title:
        axes.text(0, -TITLE / 2, laid.panel.title, va="center", fontsize=11, color=INK, weight="bold", parse_math=False)


def _cells(trajectory: Trajectory, names: Callable[[int], str], line: int) -> list[_Cell]:
    """A row, which starts in the given line."""
    cells: list[_Cell] = []
    left = 0.0
    for token, turn in zip(trajectory.ids, trajectory.turns, strict=True):
        name = names(token)
        width = max(0.48, 0.2 + 0.09 * len(name))  # short names in equal cells, so that rows align
        if cells and left + width > WIDEST:
            left, line = 0.0, line + 1
        cells.append(_Cell(left, line, width, name, turn))
        left += width + GAP
    return cells


def _draw_cell(axes: Axes, cell: _Cell, fill: str) -> None:
    top, middle, ink = cell.line * LINE, cell.left + cell.width / 2, readable_on(fill)
    draw_box(axes, cell.left, top, cell.width, CELL, color=fill, linewidth=0)
    # parse_math: a `$` is a token like any other
    name = axes.text(middle, top + CELL / 2, cell.name, fontsize=10.5, color=ink, parse_math=False)
    name.set(ha="center", va="center")
    if cell.turn:
        name.set_y(top + 0.4 * CELL)
        axes.text(middle, top + 0.79 * CELL, str(cell.turn), fontsize=6, color=ink, ha="center", va="center")


def _label_rows(axes: Axes, laid: _Laid) -> None:
    """Row numbers on the left, marks after the last cell; a row without tokens says so."""
    rows, starts, marks = laid.rows, laid.starts[:-1], laid.panel.marks
    for number, (row, start) in enumerate(zip(rows, starts, strict=True), start=1):
        middle = start * LINE + CELL / 2
        axes.text(-0.14, middle, str(number), ha="right", va="center", fontsize=8, color=FAINT)
        if not row:
            axes.text(0, middle, "(empty)", va="center", fontsize=9, color=FAINT)
    for row, start, good in zip(rows, starts, marks or [], strict=marks is not None):
        end, line = (row[-1].left + row[-1].width, row[-1].line) if row else (0.7, start)
        draw_mark(axes, end + 0.12, line * LINE + CELL / 2, good=good)
