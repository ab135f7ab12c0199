"""A judge's scores: for each rubric a group of bars, one for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from insertlm.plots.figure import FAINT, INK, chart, key, styles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Judged", "judge_figure"]

GROUP = 0.82  # the share of the width of a rubric that its bars take
FEW = 4  # with at most so many models, bars show their score


class Judged(NamedTuple):
    """One model. scores: mean and standard error by rubric (None: the judge gave no score)"""

    label: str
    scores: Mapping[str, tuple[float, float] | None]


def judge_figure(models: Sequence[Judged], title: str) -> Figure:
    labels = [model.label for model in models]
    rubrics = list(dict.fromkeys(name for model in models for name in model.scores))
    figure, axes = chart(labels, "", "score, 1 to 5", title)
    styles = styles_of(labels)
    width = GROUP / len(models)
    keys: dict[str, Any] = {}
    for number, (label, scores) in enumerate(models):
        places = [rubric + (number + 0.5) * width - GROUP / 2 for rubric in range(len(rubrics))]
        found = [scores.get(name) for name in rubrics]
        heights = [pair[0] - 1 if pair else 0.0 for pair in found]  # a bar starts at 1, the lowest score
        errors = [pair[1] if pair else 0.0 for pair in found]
        whisker: dict[str, Any] = {"elinewidth": 0.8, "ecolor": FAINT}
        keys[label] = axes.bar(
            places, heights, width * 0.9, bottom=1, yerr=errors, color=styles[label][0], error_kw=whisker
        )
        if len(models) <= FEW:
            for place, pair in zip(places, found, strict=True):
                top, text = (pair[0] + pair[1], f"{pair[0]:.1f}") if pair else (1.0, "none")
                offset: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points"}
                axes.annotate(text, (place, top), ha="center", fontsize=7, color=INK, **offset)
    axes.set_ylim(1, 5.3)
    axes.set_yticks(range(1, 6))
    axes.set_xticks(range(len(rubrics)), [name.replace(" ", "\n") for name in rubrics])
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    key(figure, keys, title)
    return figure
