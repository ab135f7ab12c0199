"""Sequence accuracy: a bar for each evaluation, the best first, and for puzzles a row of boxes by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from insertlm.evaluation.intervals import wilson
from insertlm.plots.figure import (
    BLUE,
    INK,
    TITLE,
    TITLE_LETTER,
    draw_box,
    dress,
    figure_title,
    readable_on,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Result", "accuracy_figure"]

# All in inches.
LINE, BAR = 0.4, 0.26  # from line to line; height of a bar and of a box
ROOM, NUMBER = 2.6, 1.6  # width of 100 %, and of the number to its right
BOX, GAP, GROUP = 0.36, 0.03, 0.12  # width of a box; between boxes; more between numbers of houses
MARGIN, HEAD, FOOT = 0.12, 0.25, 0.55  # around all; above the first line; below the last
LETTER = 0.072
SIZES = "by size of puzzle (houses × attributes), %"

Size = tuple[int, int]


class Result(NamedTuple):
    """One evaluation. accuracy: in percent   sizes: accuracies by houses and attributes, if known"""

    label: str
    accuracy: float
    examples: int
    sizes: Mapping[Size, float]

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, in percent."""
        return wilson(self.accuracy, self.examples)


def accuracy_figure(results: Sequence[Result], title: str) -> Figure:
    """A line for each evaluation: its label, its bar and, if sizes are known, their boxes. The best is on top."""
    results = sorted(results, key=lambda result: result.accuracy, reverse=True)
    places = _columns(sorted({size for result in results for size in result.sizes}))
    labels = 2 * MARGIN + LETTER * max(len(result.label) for result in results)
    ends = [ROOM + NUMBER, *(left + BOX for left in places.values()), TITLE_LETTER * len(title) - labels]
    if places:
        ends.append(min(places.values()) + LETTER * len(SIZES))
    height = LINE * len(results)
    figure, axes = sheet(-labels, max(ends) + MARGIN, bottom=height + FOOT, top=-HEAD - TITLE)
    across, up = figure.get_size_inches()
    area = (labels / across, FOOT / up, (ROOM + NUMBER) / across, height / up)
    _draw_bars(figure.add_axes(area), results)
    for line, result in enumerate(results):
        for size, share in result.sizes.items():
            _draw_share(axes, places[size], (line + 0.5) * LINE, share)
    if places:
        _label_columns(axes, places, height)
    figure_title(figure, MARGIN, title)
    return figure


def _columns(sizes: Sequence[Size]) -> dict[Size, float]:
    """The left side of the boxes of each size: right of the bars, sizes with equally many houses side by side."""
    groups = sorted({houses for houses, _ in sizes})
    return {
        size: ROOM + NUMBER + number * (BOX + GAP) + groups.index(size[0]) * GROUP for number, size in enumerate(sizes)
    }


def _draw_bars(axes: Axes, results: Sequence[Result]) -> None:
    dress(axes, "sequence accuracy, %, with its 95 % interval", "")
    lines, shares = range(len(results)), [result.accuracy for result in results]
    whisker: dict[str, Any] = {"elinewidth": 1.0, "ecolor": INK, "capsize": 2.5}
    lows, highs = zip(*(result.interval for result in results), strict=True)
    beyond = np.clip([np.subtract(shares, lows), np.subtract(highs, shares)], 0, None)  # rounding may leave -1e-14
    axes.barh(lines, shares, BAR / LINE, xerr=beyond, color=BLUE, error_kw=whisker)
    for line, result in enumerate(results):
        beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points"}
        low, high = result.interval
        told = f"{result.accuracy:.2f} [{low:.2f}, {high:.2f}]"
        axes.annotate(told, (high, line), va="center", fontsize=8, color=INK, **beside)
    axes.set(xlim=(0, 100 * (ROOM + NUMBER) / ROOM), ylim=(len(results) - 0.5, -0.5))
    axes.set_xticks(range(0, 101, 20))
    axes.set_yticks(lines, [result.label for result in results], fontsize=9, parse_math=False)
    axes.xaxis.set_label_coords(0.5 * ROOM / (ROOM + NUMBER), -0.3 / (LINE * len(results)))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_bounds(0, 100)


def _draw_share(axes: Axes, left: float, middle: float, share: float) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    fill = to_hex(colormaps["Blues"](0.06 + 0.0082 * share))
    draw_box(axes, left, middle - BAR / 2, BOX, BAR, facecolor=fill, linewidth=0)
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": readable_on(fill)}
    shown = "100" if share == 100 else f"{min(share, 99):.0f}"  # 99.6 is not rounded to 100, which means all
    axes.text(left + BOX / 2, middle, shown, **text)


def _label_columns(axes: Axes, places: Mapping[Size, float], height: float) -> None:
    for (houses, attributes), left in places.items():
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": INK}
        axes.text(left + BOX / 2, -0.08, f"{houses}×{attributes}", **text)
    axes.text(min(places.values()), height + 0.3, SIZES, va="top", fontsize=9, color=INK)
