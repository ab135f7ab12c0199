"""Lines through points that differ in one setting, labelled at both ends with its value. Plots of sweeps use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import INK, LINE, chart, key, styles_of
from insertlm.plots.placing import Label, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Trace", "traces_figure"]

DATA = "data"
DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))


class Trace(NamedTuple):
    """One line: a model, and the setting in which its points differ. notes: the value of the setting at each point"""

    model: str
    setting: str
    x: Sequence[float]
    y: Sequence[float]
    notes: Sequence[str]

    @property
    def label(self) -> str:
        return f"{self.model}, {self.setting}"


def traces_figure(
    traces: Sequence[Trace],
    x_label: str,
    y_label: str,
    title: str,
    *,
    data: tuple[float, float] | None = None,
    log: bool = False,
) -> Figure:
    """A colour and a marker for each model, a kind of line for each setting.

    data: a point for the real texts   log: whether the x axis is logarithmic
    """
    labels = list(dict.fromkeys(trace.label for trace in traces))
    figure, axes = chart([*labels, DATA] if data else labels, x_label, y_label, title)
    styles = styles_of(list(dict.fromkeys(trace.model for trace in traces)))
    dashes = dict(zip(dict.fromkeys(trace.setting for trace in traces), cycle(DASHES), strict=False))
    keys: dict[str, Any] = {}
    for trace in traces:
        colour, marker = styles[trace.model]
        line = {**LINE, "color": colour, "marker": marker, "linestyle": dashes[trace.setting]}
        [keys[trace.label]] = axes.plot(trace.x, trace.y, **line)
    if data:
        keys[DATA] = axes.scatter(*data, marker="*", s=90, color=INK, zorder=3)
    if log:
        _logarithmic(axes)
    axes.margins(0.12)  # room for the labels at the ends
    key(figure, keys, title)
    figure.draw_without_rendering()  # labels need positions on the page, which drawing determines
    place_labels(axes, [label for trace in traces for label in _ends(axes, trace, styles[trace.model][0])])
    return figure


def _ends(axes: Axes, trace: Trace, colour: str) -> list[Label]:
    """Labels where the line, continued beyond its ends, would go."""
    places = axes.transData.transform(list(zip(trace.x, trace.y, strict=True)))
    labels = []
    for end, before in [(-1, -2), (0, 1)] if len(places) > 1 else [(0, 0)]:
        across, up = places[end] - places[before]
        labels.append(Label(trace.notes[end], trace.x[end], trace.y[end], colour, math.atan2(up, across)))
    return labels


def _logarithmic(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
