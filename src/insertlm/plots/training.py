"""Training curves: validation accuracy over time or steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from insertlm.plots.figure import LINE, chart, key, styles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "training_figure"]


class Curve(NamedTuple):
    """One run. x: minutes or steps   accuracy: in percent"""

    label: str
    x: Sequence[float]
    accuracy: Sequence[float]


def training_figure(curves: Sequence[Curve], x_label: str) -> Figure:
    """A line for every run. Runs with the same label share a colour and an entry of the key."""
    labels = list(dict.fromkeys(curve.label for curve in curves))
    figure, axes = chart(labels, x_label, "validation accuracy, %")
    axes.set_ylim(-3, 103)
    styles = styles_of(labels)
    keys = {}
    for label, x, accuracy in curves:
        colour, marker = styles[label]
        [keys[label]] = axes.plot(x, accuracy, color=colour, marker=marker, clip_on=False, **LINE)
    axes.set_xlim(left=0)
    key(figure, keys)
    return figure
