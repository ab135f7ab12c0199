"""A zebra puzzle as a model solved it: the table with the order in which its cells were written, and the clues."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import (
    BAD,
    BLUE,
    FAINT,
    GREY,
    INK,
    TITLE,
    draw_box,
    draw_mark,
    draw_order_bar,
    figure_title,
    readable_on,
    sheet,
    turn_colours,
)
from insertlm.tasks.zebra.clues import ATTRIBUTES, HOUSE, SIDE, Street, name
from insertlm.tasks.zebra.task import Triple, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Written", "puzzle_figure"]

# All in inches.
WIDTH, HEIGHT, GAP = 0.96, 0.52, 0.16  # of a cell, and between cells
MARGIN, VERDICT, HEAD, NAMES = 0.15, 0.5, 0.3, 0.7  # around all; above the table; left of it for attributes
KEY, STRAY, BAR = 0.32, 0.28, 0.64  # below the table: key of the outlines, values outside the table, colour bar
CLUE, LETTER, HEADING = 0.215, 0.068, 2.2  # of a clue; of a letter in it; of the heading above the clues
SMALL_LETTER = 0.056  # of a value outside the table
NARROWEST, ENTRY = 3.3, 1.52  # of the table and what is below it; of an entry of the key
STRIPS = 3  # shown in a cell that was written several times
# Kinds differ in line style and mark as well as colour, for readers and printers without colour.
OUTLINES: dict[str, dict[str, Any]] = {
    "wrong": {"edgecolor": BAD, "linestyle": "solid", "label": "✗ wrong (right value)"},
    "missing": {"edgecolor": BAD, "linestyle": (0, (2.5, 2)), "label": "– missing (right value)"},
    "repeated": {"edgecolor": BLUE, "linestyle": (0, (6, 1.2, 1, 1.2)), "label": "written more than once"},
}


class Written(NamedTuple):
    """A triple of attribute, house and value; the last of a text may be shorter. turn: in which it became complete
    text: as it was written"""

    triple: Triple
    turn: int
    text: str


class _Entry(NamedTuple):
    """A value in a cell. number: 1 for the first to come; values of the same turn share a number"""

    value: int
    number: int


class _Cell(NamedTuple):
    """A cell of the table with all values written there, in order. right: the true value"""

    attribute: int
    house: int
    entries: list[_Entry]
    right: int

    @property
    def kind(self) -> str:
        if not self.entries:
            return "missing"
        if len(self.entries) > 1:
            return "repeated"
        return "right" if self.entries[0].value == self.right else "wrong"


def puzzle_figure(street: Street, written: Sequence[Written], solution: Collection[Triple], title: str = "") -> Figure:
    """A column for each house and a row for each attribute. Cells are numbered in the order in which they became
    complete, and later ones are darker. Cells that are wrong, missing or written more than once are outlined, and
    clues that do not hold are crossed out.

    solution: the true triples
    """
    cells = _cells(street, written, solution)
    stray = _stray_note([each.text for each in written if not _fits(street, each.triple)])
    kinds = [kind for kind in OUTLINES if any(cell.kind == kind for cell in cells)]
    longest = max(len(clue.in_english()) for clue in street.clues)
    # The width of the left part, which has the table.
    table = max(NARROWEST, street.size * (WIDTH + GAP), ENTRY * len(kinds), SMALL_LETTER * len(stray))
    below = street.attributes * (HEIGHT + GAP)
    bar = below + (KEY if kinds else 0.0) + (STRAY if stray else 0.0)
    right = table + max(0.3 + HEADING, 0.6 + LETTER * (longest + 2))  # 2: for a cross
    bottom = max(bar + BAR, CLUE * len(street.clues) - HEAD) + MARGIN
    figure, axes = sheet(
        -NAMES - MARGIN, right + MARGIN, bottom=bottom, top=-HEAD - VERDICT - (TITLE if title else 0.0)
    )
    figure_title(figure, MARGIN, title)
    colours = turn_colours(max((entry.number for cell in cells for entry in cell.entries), default=1))
    for cell in cells:
        _draw_cell(axes, cell, colours)
    _draw_names(axes, street)
    _draw_verdict(axes, cells, solved={each.triple for each in written} == set(solution))
    _draw_key(axes, kinds, below + KEY / 2)
    axes.text(0, bar - STRAY / 2, stray, va="center", fontsize=7.5, color=BAD)
    _draw_clues(axes, street, places([each.triple for each in written]), table + 0.3)
    draw_order_bar(
        figure, colours, NAMES + MARGIN, bottom - bar - 0.26, "order in which cells were complete, 1 = first"
    )
    return figure


def _fits(street: Street, triple: Triple) -> bool:
    return len(triple) == 3 and triple[0] < street.attributes and triple[1] < street.size and triple[2] < SIDE


def _stray_note(stray: Sequence[str]) -> str:
    if not stray:
        return ""
    shown = ", ".join(stray[:STRIPS])
    more = f" and {len(stray) - STRIPS} more" if len(stray) > STRIPS else ""
    return f"✗ not in the table: {shown}{more}"


def _cells(street: Street, written: Sequence[Written], solution: Collection[Triple]) -> list[_Cell]:
    there = sorted((each for each in written if _fits(street, each.triple)), key=lambda each: each.turn)
    numbers = {turn: number for number, turn in enumerate(dict.fromkeys(each.turn for each in there), start=1)}
    cells = {(attribute, house): _Cell(attribute, house, [], value) for attribute, house, value in sorted(solution)}
    for (attribute, house, value), turn, _ in there:
        cells[attribute, house].entries.append(_Entry(value, numbers[turn]))
    return list(cells.values())


# --- The table


def _draw_cell(axes: Axes, cell: _Cell, colours: Sequence[str]) -> None:
    left, top = cell.house * (WIDTH + GAP), cell.attribute * (HEIGHT + GAP)
    if cell.kind in OUTLINES:
        pad = 0.3 * GAP
        frame = (left - pad, top - pad, WIDTH + 2 * pad, HEIGHT + 2 * pad)
        draw_box(axes, *frame, facecolor="none", linewidth=1.6, **OUTLINES[cell.kind])
    if len(cell.entries) > 1:
        _draw_strips(axes, cell, left, top, colours)
        return
    number = cell.entries[0].number if cell.entries else None
    fill = "white" if number is None else colours[number]
    small = [] if number is None else [str(number)]
    if cell.kind != "right":
        small.append(f"({_name(cell, cell.right)})")
    draw_box(axes, left, top, WIDTH, HEIGHT, facecolor=fill, linewidth=0)
    text: dict[str, Any] = {"ha": "center", "va": "center", "color": readable_on(fill)}
    shown = _marked(cell, cell.entries[0].value) if cell.entries else "–"
    axes.text(left + WIDTH / 2, top + 0.38 * HEIGHT, shown, fontsize=10, **text)
    axes.text(left + WIDTH / 2, top + 0.79 * HEIGHT, "  ".join(small), fontsize=7, **text)


def _draw_strips(axes: Axes, cell: _Cell, left: float, top: float, colours: Sequence[str]) -> None:
    """The values of a cell that was written several times, one below the other; of many, only the first."""
    shown = cell.entries if len(cell.entries) <= STRIPS else cell.entries[: STRIPS - 1]
    strips = [(colours[number], _marked(cell, value), str(number)) for value, number in shown]
    if more := len(cell.entries) - len(shown):
        strips.append((GREY, f"{more} more", ""))
    height = HEIGHT / len(strips)
    for place, (fill, words, number) in enumerate(strips):
        middle, ink = top + (place + 0.46) * height, readable_on(fill)
        draw_box(axes, left, top + place * height, WIDTH, 0.92 * height, facecolor=fill, linewidth=0)
        axes.text(left + 0.08, middle, words, va="center_baseline", fontsize=7.5, color=ink)
        axes.text(left + WIDTH - 0.08, middle, number, ha="right", va="center_baseline", fontsize=6.5, color=ink)


def _name(cell: _Cell, value: int) -> str:
    return name(SIDE * cell.attribute + value)


def _marked(cell: _Cell, value: int) -> str:
    return _name(cell, value) if value == cell.right else f"{_name(cell, value)} ✗"


def _draw_names(axes: Axes, street: Street) -> None:
    for house in range(street.size):
        middle = house * (WIDTH + GAP) + WIDTH / 2
        axes.text(middle, -HEAD / 2, name(HOUSE + house), ha="center", va="center", fontsize=8.5, color=FAINT)
    for attribute in range(street.attributes):
        middle = attribute * (HEIGHT + GAP) + HEIGHT / 2
        axes.text(-0.16, middle, ATTRIBUTES[attribute], ha="right", va="center", fontsize=8.5, color=FAINT)


# --- Around it


def _draw_verdict(axes: Axes, cells: Sequence[_Cell], *, solved: bool) -> None:
    middle, right = -HEAD - 0.5 * VERDICT, sum(cell.kind == "right" for cell in cells)
    told = "solved" if solved else f"not solved: {right} of {len(cells)} cells are right"
    draw_mark(axes, 0.0, middle, good=solved)
    axes.text(0.24, middle, told, va="center", fontsize=11, color=INK, weight="bold")


def _draw_key(axes: Axes, kinds: Sequence[str], middle: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor="none", linewidth=1.4, **OUTLINES[kind]) for kind in kinds]
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (0.0, middle), "bbox_transform": axes.transData}
    spaces: dict[str, Any] = {"borderpad": 0.0, "borderaxespad": 0.0, "handlelength": 1.6, "columnspacing": 1.2}
    if handles:
        axes.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=7.5, labelcolor=INK, **place, **spaces)


def _draw_clues(axes: Axes, street: Street, place: Mapping[int, int], left: float) -> None:
    broken = [clue for clue in street.clues if not clue.holds(place, street.size)]
    head = "clues (✗ does not hold)" if broken else "clues"
    axes.text(left, -HEAD - 0.5 * VERDICT, head, va="center", fontsize=11, color=INK, weight="bold")
    for number, clue in enumerate(street.clues, start=1):
        ink, middle = BAD if clue in broken else INK, (number - 0.5) * CLUE - HEAD
        told = f"{clue.in_english()} ✗" if clue in broken else clue.in_english()
        axes.text(left + 0.2, middle, f"{number}", ha="right", va="center", fontsize=7, color=FAINT)
        axes.text(left + 0.3, middle, told, va="center", fontsize=8.5, color=ink)
