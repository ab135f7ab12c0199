"""Training curves: validation accuracy, or training and validation loss, over time or steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import FAINT, INK, LINE, chart, key, styles_of, unit_of_time
from insertlm.plots.placing import Label, place_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "LossCurve", "Stage", "loss_figure", "training_figure"]


class Stage(NamedTuple):
    """One run. x: seconds or steps of training, those of the stages before it included   y: accuracies in percent, or
    losses"""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Curve(NamedTuple):
    """Runs of which each began with the weights of the one before. The label is that of the last."""

    label: str
    stages: Sequence[Stage]


class LossCurve(NamedTuple):
    """Such runs' losses. learning: of the batches of training, and not of validations"""

    label: str
    stages: Sequence[Stage]
    learning: bool


def training_figure(curves: Sequence[Curve], title: str, *, over_steps: bool) -> Figure:
    """A line for every curve. Curves with the same label share a colour and an entry of the key. Stages are named at
    their first validation, to which a dotted line leads from the stage before; grey ones belong to several curves."""
    labels = list(dict.fromkeys(curve.label for curve in curves))
    x_label, seconds = _axis(curves, over_steps=over_steps)
    figure, axes = chart(labels, x_label, "validation accuracy, %", title)
    axes.set_ylim(-3, 103)
    styles, keys = styles_of(labels), dict[str, Any]()
    shared = Counter(stage.name for curve in curves if len(curve.stages) > 1 for stage in curve.stages)
    named: dict[str, Label] = {}
    for label, stages in curves:
        colour, marker = styles[label]
        before: tuple[float, float] | None = None
        for stage in stages:
            ink = FAINT if shared[stage.name] > 1 else colour
            xs = [x / seconds for x in stage.x]
            [line] = axes.plot(xs, stage.y, color=ink, marker=marker, clip_on=False, **LINE)
            first = (xs[0], stage.y[0])
            if before:
                axes.plot(*zip(before, first, strict=True), color=ink, linestyle="dotted", linewidth=1.3)
            if len(stages) > 1:
                letters = INK if ink == FAINT else ink
                named.setdefault(stage.name, Label(stage.name, *first, letters, -math.pi / 4))
            before = (xs[-1], stage.y[-1])
        keys[label] = line
    return _finished(figure, keys, title, named, over_steps=over_steps)


def loss_figure(curves: Sequence[LossCurve], title: str, *, over_steps: bool) -> Figure:
    """Losses: a line with marks for validations, and a thin one in its colour for what is learnt from."""
    labels = list(dict.fromkeys(curve.label for curve in curves))
    x_label, seconds = _axis(curves, over_steps=over_steps)
    validated = any(not curve.learning for curve in curves)
    figure, axes = chart(labels, x_label, "loss (with marks: validation)" if validated else "training loss", title)
    styles, keys = styles_of(labels), dict[str, Any]()
    seen = list[float]()
    for label, stages, learning in curves:
        colour, marker = styles[label]
        xs, ys = ([value for stage in stages for value in getattr(stage, part)] for part in ("x", "y"))
        xs = [x / seconds for x in xs]
        seen += ys[len(ys) // 10 :]  # the first steps are far above the rest, which would be flat under them
        if learning:
            [line] = axes.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.6)
            keys.setdefault(label, line)
        else:
            [keys[label]] = axes.plot(xs, ys, color=colour, marker=marker, clip_on=False, **LINE)
    room = 0.05 * (max(seen) - min(seen)) or 0.5
    axes.set_ylim(min(seen) - room, max(seen) + room)
    return _finished(figure, keys, title, {}, over_steps=over_steps)


def _axis(curves: Sequence[Curve | LossCurve], *, over_steps: bool) -> tuple[str, float]:
    """What the x axis says, and how many seconds or steps one of its units has."""
    longest = max(x for curve in curves for stage in curve.stages for x in stage.x)
    unit, seconds = ("steps", 1.0) if over_steps else unit_of_time(longest)
    return unit if over_steps else f"{unit} of training", seconds


def _finished(figure: Figure, keys: dict[str, Any], title: str, named: dict[str, Label], *, over_steps: bool) -> Figure:
    [axes] = figure.axes
    axes.set_xlim(left=0)
    if over_steps:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    key(figure, keys, title)
    figure.draw_without_rendering()  # labels need positions on the page, which drawing determines
    place_labels(axes, list(named.values()))
    return figure
