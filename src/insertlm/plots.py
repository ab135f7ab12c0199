"""Pictures: the order in which sequences were written, and star graphs with the path through them.

matplotlib is an extra: it is imported inside the functions, so that everything else works without it. Figures are made
without pyplot: no display, no global state, no figures that stay open. Both pictures are drawn in inches on one axes
that fills the figure, so a figure grows with its content and text keeps its size.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from insertlm.decoding.trajectory import Trajectory
from insertlm.errors import InsertlmError
from insertlm.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["graph_figure", "save", "trajectory_figure"]

FORMATS = (".png", ".svg", ".pdf")
INK, FAINT, GREY = "#1f2430", "#8b93a1", "#eceef2"
GOOD, BAD, BLUE, AMBER, TINT = "#17834f", "#c8372d", "#2f6fde", "#f5b335", "#dce8ff"

# Generation order, in inches.
LINE, CELL, GAP = 0.54, 0.46, 0.05  # from line to line; height of a cell; between cells
SIDE = 0.45  # left of the cells for row numbers, right of them for marks
TOP, BOTTOM = 0.12, 0.75  # the colour bar lies at the bottom
NARROWEST, WIDEST = 3.0, 12.0  # the room for cells; longer rows go on in the next line

# Star graphs.
HOP, MARGIN, KEY = 0.46, 0.35, 0.35  # inches from node to node, around the nodes, and for the key at the bottom
NODE = 9.0  # radius of a node, in points
NODE_SIZES = {"o": 1.0, "s": 0.9, "D": 0.82}  # shapes that look equally large
# Shapes as well as colours: readers and printers differ in the colours they see. Marker, fill, outline.
NODE_STYLES = {
    "source": ("s", AMBER, INK),
    "goal": ("D", GOOD, INK),
    "path": ("o", TINT, BLUE),
    "other": ("o", GREY, GREY),
}

Edge = tuple[int, int]
Point = tuple[float, float]


class _Cell(NamedTuple):
    """One token: its place (inches from the first cell, lines from the top) and its turn (0: it was given)."""

    left: float
    line: int
    width: float
    name: str
    turn: int


def trajectory_figure(
    trajectories: Sequence[Trajectory], names: Callable[[int], str], marks: Sequence[bool] | None = None
) -> Figure:
    """One row per sequence, its tokens in reading order; the darker a token, the later it was inserted.

    `names` turns an id into text. `marks`, one per trajectory, tells which rows get a tick and which a cross. Given
    tokens are grey and have no number.
    """
    rows: list[list[_Cell]] = []
    starts = [0]  # the line of each row's first cell, and at last the number of lines
    for trajectory in trajectories:
        rows.append(_cells(trajectory, names, starts[-1]))
        starts.append(max((cell.line + 1 for cell in rows[-1]), default=starts[-1] + 1))
    cells = [cell for row in rows for cell in row]
    width = max([NARROWEST, *(cell.left + cell.width for cell in cells)])
    # The vertical axis points down: lines are counted from the top.
    figure, axes = _canvas(-SIDE, width + SIDE, bottom=starts[-1] * LINE + BOTTOM, top=-TOP)
    colours = _turn_colours(max([1, *(cell.turn for cell in cells)]))
    for cell in cells:
        _draw_cell(axes, cell, colours[cell.turn])
    _label_rows(axes, rows, starts[:-1], marks)
    _draw_bar(figure, colours)
    return figure


def graph_figure(edges: Sequence[Edge], source: int, goal: int, path: Sequence[int] = ()) -> Figure:
    """A star graph around its junction: arms that lead to it on the left, arms that leave it on the right.

    `path` (nodes, true or predicted) is highlighted; a step of it that is not an edge is dashed and red.
    """
    nodes = list(dict.fromkeys([*chain.from_iterable(edges), source, goal, *path]))
    places = _layout(edges, nodes, source, goal)
    xs, ys = zip(*places.values(), strict=True)
    spare = max(0.0, NARROWEST - (max(xs) - min(xs) + 2 * MARGIN)) / 2
    figure, axes = _canvas(
        min(xs) - MARGIN - spare, max(xs) + MARGIN + spare, bottom=min(ys) - MARGIN - KEY, top=max(ys) + MARGIN
    )
    steps = set(pairwise(path))
    for edge in dict.fromkeys([*edges, *steps]):
        _draw_edge(axes, places[edge[0]], places[edge[1]], strong=edge in steps, real=edge in edges)
    for node in nodes:
        kind = "source" if node == source else "goal" if node == goal else "path" if node in path else "other"
        _draw_node(axes, places[node], str(node), kind)
    _draw_key(axes, right=not steps.isdisjoint(edges), wrong=not steps.issubset(edges))
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix (.png, .svg, .pdf) chooses the format."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InsertlmError(f"cannot write {path}: unknown suffix {path.suffix!r}; expected {', '.join(FORMATS)}")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=200, format=path.suffix[1:].lower())
    write_atomically(path, picture.getvalue())


def _canvas(left: float, right: float, *, bottom: float, top: float) -> tuple[Figure, Axes]:
    """A figure of one axes, both as large as the given range is in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InsertlmError("plots need matplotlib: pip install insertlm[plot]") from error
    figure = Figure(figsize=(right - left, abs(top - bottom)), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
    axes.set_axis_off()
    return figure, axes


# --- Generation order


def _cells(trajectory: Trajectory, names: Callable[[int], str], line: int) -> list[_Cell]:
    """A row, which starts in the given line."""
    cells: list[_Cell] = []
    left = 0.0
    for token, turn in zip(trajectory.ids, _turns(trajectory), strict=True):
        name = names(token)
        width = max(0.48, 0.2 + 0.09 * len(name))  # short names in equal cells, so that rows align
        if cells and left + width > WIDEST:
            left, line = 0.0, line + 1
        cells.append(_Cell(left, line, width, name, turn))
        left += width + GAP
    return cells


def _turns(trajectory: Trajectory) -> list[int]:
    """When each token of the text came, from 1; tokens of the same step share a turn; 0: given."""
    steps = sorted({event.step for event in trajectory.events})
    turn_of_step = {step: turn for turn, step in enumerate(steps, start=1)}
    return [turn_of_step[trajectory.events[event].step] if event >= 0 else 0 for event in trajectory.order]


def _turn_colours(last: int) -> list[str]:
    """A colour for each turn from 0 (grey: given) over 1 (light) to the last (dark)."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["magma_r"]
    # Without its ends, which are hard to tell from the paper and from black.
    return [GREY, *(to_hex(shades(0.08 + 0.74 * turn / max(1, last - 1))) for turn in range(last))]


def _draw_cell(axes: Axes, cell: _Cell, fill: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    top, middle, ink = cell.line * LINE, cell.left + cell.width / 2, _readable_on(fill)
    shape = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch((cell.left, top), cell.width, CELL, boxstyle=shape, color=fill, linewidth=0))
    # parse_math: a `$` is a token like any other
    name = axes.text(middle, top + CELL / 2, cell.name, fontsize=10.5, color=ink, parse_math=False)
    name.set(ha="center", va="center")
    if cell.turn:
        name.set_y(top + 0.4 * CELL)
        axes.text(middle, top + 0.79 * CELL, str(cell.turn), fontsize=6, color=ink, ha="center", va="center")


def _readable_on(fill: str) -> str:
    """Dark or white text, whichever has the higher contrast (relative luminance as in WCAG)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(fill)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if luminance > 0.22 else "white"


def _label_rows(
    axes: Axes, rows: Sequence[Sequence[_Cell]], starts: Sequence[int], marks: Sequence[bool] | None
) -> None:
    """Row numbers on the left, marks after the last cell; a row without tokens says so."""
    for number, (row, start) in enumerate(zip(rows, starts, strict=True), start=1):
        middle = start * LINE + CELL / 2
        axes.text(-0.14, middle, str(number), ha="right", va="center", fontsize=8, color=FAINT)
        if not row:
            axes.text(0, middle, "(empty)", va="center", fontsize=9, color=FAINT)
    for row, start, good in zip(rows, starts, marks or [], strict=marks is not None):
        end, line = (row[-1].left + row[-1].width, row[-1].line) if row else (0.7, start)
        mark, colour = ("✓", GOOD) if good else ("✗", BAD)
        axes.text(end + 0.12, line * LINE + CELL / 2, mark, va="center", fontsize=13, color=colour, weight="bold")


def _draw_bar(figure: Figure, colours: Sequence[str]) -> None:
    """The colours of all turns, with a few of their numbers."""
    width, height = figure.get_size_inches()
    last = len(colours) - 1
    bar = figure.add_axes((SIDE / width, 0.42 / height, 2.4 / width, 0.09 / height), xlim=(0.5, last + 0.5))
    bar.bar(range(1, last + 1), 1.0, width=1.0, color=colours[1:])
    bar.set(ylim=(0, 1), yticks=[], xticks=sorted({round(1 + (last - 1) * i / 4) for i in range(5)}))
    bar.set_xlabel("insertion order", fontsize=8, color=INK, labelpad=2)
    bar.tick_params(labelsize=7, length=2, color=FAINT, labelcolor=INK, pad=1.5)
    bar.spines[:].set_visible(False)


# --- Star graphs


def _layout(edges: Sequence[Edge], nodes: Sequence[int], source: int, goal: int) -> dict[int, Point]:
    """Where each node goes, in inches around the junction. All graphs can be drawn; only stars come out as stars."""
    after, before = defaultdict(list), defaultdict(list)
    for tail, head in edges:
        after[tail].append(head)
        before[head].append(tail)
    junction = max(nodes, key=lambda node: (len(after[node]), node == source))
    places = {junction: (0.0, 0.0)}
    leaving = _centred(_arms(junction, after, {junction}), goal)
    leading = _centred(_arms(junction, before, {junction, *chain.from_iterable(leaving)}), source)
    angle = 2 * math.pi / max(2, len(leaving) + len(leading))
    first = max(1.3, 0.34 / HOP / (2 * math.sin(angle / 2)))  # so far out that neighbouring arms do not touch
    for arms, middle in ((leaving, 0.0), (leading, math.pi)):
        for i, arm in enumerate(arms):
            direction = middle + (i - (len(arms) - 1) / 2) * angle
            for hop, node in enumerate(arm):
                radius = HOP * (first + hop)
                places[node] = (radius * math.cos(direction), radius * math.sin(direction))
    return places | _row_below(places, [node for node in nodes if node not in places])


def _arms(junction: int, following: Mapping[int, Sequence[int]], seen: set[int]) -> list[list[int]]:
    """The chains of unseen nodes that start next to the junction."""
    arms = []
    for start in following.get(junction, ()):
        arm, ahead = [], [start]
        while ahead and ahead[0] not in seen:
            arm.append(ahead[0])
            seen.add(ahead[0])
            ahead = list(following.get(ahead[0], ()))
        arms.append(arm)
    return [arm for arm in arms if arm]


def _centred(arms: list[list[int]], node: int) -> list[list[int]]:
    """The arm of that node in the middle, so that the path runs from left to right."""
    others = [arm for arm in arms if node not in arm]
    half = len(others) // 2
    return [*others[:half], *(arm for arm in arms if node in arm), *others[half:]]


def _row_below(places: Mapping[int, Point], nodes: Sequence[int]) -> dict[int, Point]:
    """Places for nodes that are on no arm: those of a path that leaves the graph, or of a graph that is no star."""
    bottom = min(y for _, y in places.values()) - 1.5 * HOP
    return {node: (HOP * (i - (len(nodes) - 1) / 2), bottom) for i, node in enumerate(nodes)}


def _draw_edge(axes: Axes, tail: Point, head: Point, *, strong: bool, real: bool) -> None:
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        tail,
        head,
        arrowstyle="-|>,head_length=4,head_width=2.2" if strong else "-|>,head_length=3.2,head_width=1.7",
        connectionstyle="arc3" if real else "arc3,rad=0.25",
        linestyle="solid" if real else (0, (3, 2)),
        shrinkA=NODE,
        shrinkB=1.18 * NODE,
        linewidth=2.2 if strong else 1.0,
        color=(BLUE if strong else FAINT) if real else BAD,
        zorder=2 if strong else 1,
    )
    axes.add_patch(arrow)


def _draw_node(axes: Axes, place: Point, name: str, kind: str) -> None:
    marker, fill, outline = NODE_STYLES[kind]
    axes.plot(*place, marker, markersize=2 * NODE * NODE_SIZES[marker], color=fill, markeredgecolor=outline, zorder=3)
    axes.text(*place, name, ha="center", va="center_baseline", fontsize=8, color=_readable_on(fill), zorder=4)


def _draw_key(axes: Axes, *, right: bool, wrong: bool) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for kind in ("source", "goal"):
        marker, fill, outline = NODE_STYLES[kind]
        handles.append(Line2D([], [], linestyle="", marker=marker, color=fill, markeredgecolor=outline, label=kind))
    if right:
        handles.append(Line2D([], [], color=BLUE, linewidth=2.2, label="path"))
    if wrong:
        handles.append(Line2D([], [], color=BAD, linewidth=2.2, linestyle=(0, (3, 2)), label="no such edge"))
    axes.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, handletextpad=0.4)
