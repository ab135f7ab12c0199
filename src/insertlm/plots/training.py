"""Training curves: validation accuracy over time or steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import FAINT, INK, LINE, chart, key, styles_of, unit_of_time
from insertlm.plots.placing import Label, place_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "Stage", "training_figure"]


class Stage(NamedTuple):
    """One run. x: seconds or steps of training, those of the stages before it included   accuracy: in percent"""

    name: str
    x: Sequence[float]
    accuracy: Sequence[float]


class Curve(NamedTuple):
    """Runs of which each began with the weights of the one before. The label is that of the last."""

    label: str
    stages: Sequence[Stage]


def training_figure(curves: Sequence[Curve], title: str, *, over_steps: bool) -> Figure:
    """A line for every curve. Curves with the same label share a colour and an entry of the key. Stages are named at
    their first validation, to which a dotted line leads from the stage before; grey ones belong to several curves."""
    labels = list(dict.fromkeys(curve.label for curve in curves))
    longest = max(x for curve in curves for stage in curve.stages for x in stage.x)
    unit, seconds = ("steps", 1.0) if over_steps else unit_of_time(longest)
    x_label = unit if over_steps else f"{unit} of training"
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
            [line] = axes.plot(xs, stage.accuracy, color=ink, marker=marker, clip_on=False, **LINE)
            first = (xs[0], stage.accuracy[0])
            if before:
                axes.plot(*zip(before, first, strict=True), color=ink, linestyle="dotted", linewidth=1.3)
            if len(stages) > 1:
                letters = INK if ink == FAINT else ink
                named.setdefault(stage.name, Label(stage.name, *first, letters, -math.pi / 4))
            before = (xs[-1], stage.accuracy[-1])
        keys[label] = line
    axes.set_xlim(left=0)
    if over_steps:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    key(figure, keys, title)
    figure.draw_without_rendering()  # labels need positions on the page, which drawing determines
    place_labels(axes, list(named.values()))
    return figure
