"""Lines through points that differ in one setting, labelled at both ends with its value. Plots of sweeps use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import INK, LINE, chart, key, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Trace", "traces_figure"]

DATA = "data"


class Trace(NamedTuple):
    """One line. A model may have several. notes: the label of each point, shown at the ends of the line"""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    notes: Sequence[str]


def traces_figure(
    traces: Sequence[Trace], x_label: str, y_label: str, *, data: tuple[float, float] | None = None, log: bool = False
) -> Figure:
    """data: a point for the real texts   log: whether the x axis is logarithmic"""
    labels = list(dict.fromkeys(trace.label for trace in traces))
    figure, axes = chart([*labels, DATA] if data else labels, x_label, y_label)
    styles = styles_of(labels)
    keys: dict[str, Any] = {}
    for label, x, y, _ in traces:
        colour, marker = styles[label]
        [keys[label]] = axes.plot(x, y, color=colour, marker=marker, **LINE)
    if data:
        keys[DATA] = axes.scatter(*data, marker="*", s=90, color=INK, zorder=3)
    if log:
        _logarithmic(axes)
    axes.margins(0.12)  # room for the labels at the ends
    key(figure, keys)
    figure.draw_without_rendering()  # _label_ends needs positions on the page, which drawing determines
    for trace in traces:
        _label_ends(axes, trace, styles[trace.label][0])
    return figure


def _label_ends(axes: Axes, trace: Trace, colour: str) -> None:
    """Put labels where the line, continued beyond its ends, would go."""
    places = axes.transData.transform(list(zip(trace.x, trace.y, strict=True)))
    for end, before in [(-1, -2), (0, 1)] if len(places) > 1 else [(0, 0)]:
        dx, dy = places[end] - places[before]
        length = math.hypot(dx, dy)
        across, up = (dx / length, dy / length) if length else (1.0, 0.0)
        side = "left" if across > 0.3 else "right" if across < -0.3 else "center"
        level = "bottom" if up > 0.3 else "top" if up < -0.3 else "center"
        beside: dict[str, Any] = {"xytext": (6 * across, 6 * up), "textcoords": "offset points"}
        point = (trace.x[end], trace.y[end])
        axes.annotate(trace.notes[end], point, ha=side, va=level, fontsize=7.5, color=colour, **beside)


def _logarithmic(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
