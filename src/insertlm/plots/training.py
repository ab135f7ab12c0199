"""Training curves: validation accuracy over time or steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import FAINT, GREY, INK, blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "training_figure"]

WIDTH, HEIGHT = 6.4, 3.4  # inches, without the key
ENTRY, LETTER = 0.2, 0.085  # inches for a line of the key and for a letter in it
LINE: dict[str, Any] = {"linewidth": 1.3, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6}
# Colours that differ for every kind of colour vision (Okabe and Ito's), and marks for who sees or prints none.
STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"), ("#56b4e9", "P"))


class Curve(NamedTuple):
    """One run. x: minutes or steps; accuracy: in percent"""

    label: str
    x: Sequence[float]
    accuracy: Sequence[float]


def training_figure(curves: Sequence[Curve], x_label: str) -> Figure:
    """A line for every run; runs of the same label share a colour and an entry of the key."""
    labels = list(dict.fromkeys(curve.label for curve in curves))
    entry = 0.7 + LETTER * max(map(len, labels))  # room for the longest one
    columns = min(len(labels), max(1, int(WIDTH / entry)))
    height = HEIGHT + ENTRY * math.ceil(len(labels) / columns)
    figure = blank(max(WIDTH, entry), height, layout="constrained")
    axes = figure.add_subplot(ylim=(-3, 103))
    styles = dict(zip(labels, cycle(STYLES), strict=False))
    keys = {}
    for label, x, accuracy in curves:
        colour, marker = styles[label]
        [keys[label]] = axes.plot(x, accuracy, color=colour, marker=marker, clip_on=False, **LINE)
    axes.set_xlim(left=0)
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel("validation accuracy, %", fontsize=9, color=INK)
    axes.tick_params(color=FAINT, labelcolor=INK, labelsize=8)
    axes.grid(color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(FAINT)
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns}
    figure.legend(keys.values(), labels, frameon=False, fontsize=9, labelcolor=INK, **place)
    return figure
