"""Training curves: one line per run, one colour and one entry of the key per label."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from matplotlib.figure import Figure

from insertlm.plots import Curve, training_figure


def lines(figure: Figure) -> list[Any]:
    return list(figure.axes[0].lines)


def entries(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def curve(label: str, *accuracy: float) -> Curve:
    return Curve(label, [1.0 + i for i in range(len(accuracy))], accuracy)


def test_a_line_shows_its_run() -> None:
    figure = training_figure([Curve("ILM", [0.5, 2.0], [10.0, 90.0])], "minutes of training")
    [line] = lines(figure)
    assert line.get_xydata().tolist() == [[0.5, 10.0], [2.0, 90.0]]
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("minutes of training", "validation accuracy, %")
    assert axes.get_xlim()[0] == 0
    low, high = axes.get_ylim()
    assert low < 0
    assert high > 100


def test_seeds_share_a_colour_and_an_entry() -> None:
    figure = training_figure([curve("ILM", 1, 2), curve("ARM", 3, 4), curve("ILM", 5, 6)], "steps")
    first, other, second = lines(figure)
    assert (first.get_color(), first.get_marker()) == (second.get_color(), second.get_marker())
    assert first.get_color() != other.get_color()
    assert first.get_marker() != other.get_marker()
    assert entries(figure) == ["ILM", "ARM"]


def test_more_labels_than_colours_can_be_drawn() -> None:
    assert len(lines(training_figure([curve(str(i), i) for i in range(9)], "steps"))) == 9


@pytest.mark.parametrize(
    "labels", [["ILM"], ["ILM", "ARM", "MDM", "IT"], [f"ILM (runs/{i}-{'x' * 70})" for i in range(6)]]
)
def test_no_text_overlaps_or_is_cut_off(labels: list[str]) -> None:
    figure = training_figure([curve(label, 0, 100) for label in labels], "minutes of training")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    texts = [*figure.legends[0].get_texts(), axes.xaxis.label, axes.yaxis.label, *ticks]
    extents = [text.get_window_extent() for text in texts if text.get_text()]
    visible = [extent for extent in extents if extent.width]
    assert not any(a.overlaps(b) for a, b in combinations(visible, 2))
    for extent in [text.get_window_extent() for text in figure.legends[0].get_texts()]:
        assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1
        assert axes.get_window_extent().y1 < extent.y0
