"""Figures that are not charts have their title on top, whole and clear of all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.figure import Figure

from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.plots import Panel, comparison_figure, graph_figure, puzzle_figure
from insertlm.tasks.zebra.clues import Clue, Street

TITLE = "3 fresh star-hard graphs of $nodes$, seed 5"
ROW = Trajectory([], [], [Insertion(0, 0, 7, -0.1, 0.1)], stop_probability=1.0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda title: comparison_figure([Panel([ROW], [True], "ILM")], str, title),
        lambda title: graph_figure([(1, 2), (2, 3), (2, 4)], 1, 3, title=title),
        lambda title: puzzle_figure(Street(3, 3, [Clue(0, (0, 6))]), [], [(0, 0, 0)], title),
    ],
)
def test_the_title_is_on_top(draw: Callable[[str], Figure]) -> None:
    figure = draw(TITLE)
    figure.draw_without_rendering()
    [title] = figure.texts
    assert title.get_text() == TITLE
    extent = title.get_window_extent()
    assert figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 and extent.y1 <= figure.bbox.y1
    others: list[Any] = [artist for axes in figure.axes for artist in (*axes.texts, *axes.patches)]
    assert all(other.get_window_extent().y1 <= extent.y0 for other in others)
    assert draw("").get_size_inches()[1] < figure.get_size_inches()[1]  # no title, no room for it
