"""Training curves: validation accuracy, or training and validation loss, over time or steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from insertlm.plots.figure import LINE, chart, key, styles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "loss_figure", "training_figure"]


class Curve(NamedTuple):
    """One run. x: minutes or steps   y: accuracies in percent, or losses   learning: whether they are losses of the
    batches of training, and not of a validation"""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    learning: bool = False


def training_figure(curves: Sequence[Curve], x_label: str) -> Figure:
    """Accuracies: a line for every run. Runs with the same label share a colour and an entry of the key."""
    figure = _figure(curves, x_label, "validation accuracy, %")
    figure.axes[0].set_ylim(-3, 103)
    return figure


def loss_figure(curves: Sequence[Curve], x_label: str) -> Figure:
    """Losses: a line with marks for the validations of a run, and a thin one in its colour for what it learns from."""
    validated = any(not curve.learning for curve in curves)
    figure = _figure(curves, x_label, "loss (with marks: validation)" if validated else "training loss")
    # The first steps of a training are far above the rest, which would be flat under them.
    highest = max(max(curve.y[len(curve.y) // 10 :]) for curve in curves)
    lowest = min(min(curve.y) for curve in curves)
    room = 0.05 * (highest - lowest) or 0.5
    figure.axes[0].set_ylim(lowest - room, highest + room)
    return figure


def _figure(curves: Sequence[Curve], x_label: str, y_label: str) -> Figure:
    labels = list(dict.fromkeys(curve.label for curve in curves))
    figure, axes = chart(labels, x_label, y_label)
    styles = styles_of(labels)
    keys = {}
    for label, x, y, learning in curves:
        colour, marker = styles[label]
        if learning:
            [line] = axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.6)
            keys.setdefault(label, line)
        else:
            [keys[label]] = axes.plot(x, y, color=colour, marker=marker, clip_on=False, **LINE)
    axes.set_xlim(left=0)
    key(figure, keys)
    return figure
