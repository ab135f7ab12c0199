"""Figures are checked by what they show: the texts and colours on them, and that nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.plots import Panel, comparison_figure, trajectory_figure
from insertlm.plots.figure import GREY
from insertlm.plots.trajectory import SIDE, WIDEST

WORDS = ["once", "upon", "a", "$time$", "there", "was", "an", "extraordinary", "_^\\", "."]


def written(
    ids: Sequence[int], when: Sequence[int], start: Sequence[int] = (), steps: Sequence[int] | None = None
) -> Trajectory:
    """The trajectory that writes `ids` before `start`, place i as event `when[i]`."""
    places = sorted(range(len(ids)), key=when.__getitem__)
    events = [
        Insertion((steps or range(len(ids)))[n], sum(p < place for p in places[:n]), ids[place], -0.1, 0.1)
        for n, place in enumerate(places)
    ]
    return Trajectory([], list(start), events, stop_probability=1.0)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def boxes(figure: Figure) -> list[FancyBboxPatch]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def luminance(colour: Any) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_tokens_stand_in_reading_order_with_their_turns() -> None:
    figure = trajectory_figure([written([5, 6, 7], when=[2, 0, 1])], names=lambda i: f"n{i}")
    assert texts(figure) == ["n5", "3", "n6", "1", "n7", "2", "1"]  # the last one is the row's number
    assert [box.get_x() for box in boxes(figure)] == sorted(box.get_x() for box in boxes(figure))
    assert figure.axes[1].get_xlabel() == "insertion order"


@pytest.mark.parametrize("count", [2, 5, 22, 100])
def test_later_is_darker_and_text_stays_readable(count: int) -> None:
    figure = trajectory_figure([written(range(count), when=range(count))], names=str)
    shades = [luminance(box.get_facecolor()) for box in boxes(figure)]
    assert all(early > late for early, late in pairwise(shades))
    inks = [luminance(text.get_color()) for text in figure.axes[0].texts[: 2 * count : 2]]
    for shade, ink in zip(shades, inks, strict=True):
        assert (max(shade, ink) + 0.05) / (min(shade, ink) + 0.05) > 3.8


def test_all_rows_share_one_scale() -> None:
    figure = trajectory_figure([written(range(9), range(9)), written([1, 2], [1, 0])], names=str)
    colours = [box.get_facecolor() for box in boxes(figure)]
    assert colours[9:] == [colours[1], colours[0]]
    assert [tick for tick in figure.axes[1].get_xticks() if tick in (1, 9)] == [1, 9]


def test_dollar_signs_are_text() -> None:
    figure = trajectory_figure([written([0], [0])], names=lambda _: "$x^2$")
    assert not figure.axes[0].texts[0].get_parse_math()


def test_given_tokens_are_grey_and_unnumbered() -> None:
    figure = trajectory_figure([written([1], [0], start=[8, 9])], names=str)
    assert texts(figure) == ["1", "1", "8", "9", "1"]
    assert [to_hex(box.get_facecolor()) == GREY for box in boxes(figure)] == [False, True, True]


def test_tokens_of_one_step_share_a_turn() -> None:
    figure = trajectory_figure([written([5, 6, 7], when=[0, 1, 2], steps=[0, 0, 4])], names=str)
    assert texts(figure)[1:6:2] == ["1", "1", "2"]


def test_marks_and_empty_rows() -> None:
    trajectories = [written([1], [0]), written([], [])]
    assert {"✓", "✗"}.isdisjoint(texts(trajectory_figure(trajectories, str)))
    shown = texts(trajectory_figure(trajectories, str, marks=[True, False]))
    assert [text for text in shown if text in "✓✗"] == ["✓", "✗"]
    assert "(empty)" in shown
    with pytest.raises(ValueError, match="zip"):
        trajectory_figure(trajectories, str, marks=[True])


def test_a_figure_of_nothing_can_be_drawn() -> None:
    trajectory_figure([], str).draw_without_rendering()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=40), min_size=1, max_size=3), st.randoms())
def test_names_fit_into_cells_and_cells_do_not_overlap(rows: list[list[int]], random: Random) -> None:
    order = [list(range(len(row))) for row in rows]
    for when in order:
        random.shuffle(when)
    figure = trajectory_figure(list(map(written, rows, order)), WORDS.__getitem__, marks=[True] * len(rows))
    figure.draw_without_rendering()
    outlines = [box.get_window_extent() for box in boxes(figure)]
    names = figure.axes[0].texts[: 2 * len(outlines) : 2]
    for outline, name in zip(outlines, names, strict=True):
        extent = name.get_window_extent()
        assert outline.x0 < extent.x0 and extent.x1 < outline.x1
    assert not any(a.overlaps(b) for a, b in combinations(outlines, 2))
    assert all(
        figure.bbox.x0 <= t.get_window_extent().x0 <= t.get_window_extent().x1 <= figure.bbox.x1
        for t in figure.axes[0].texts
    )


def test_long_rows_go_on_in_the_next_line() -> None:
    figure = trajectory_figure([written(range(60), range(60)), written([1], [0])], names=str)
    lines = [box.get_y() for box in boxes(figure)]
    assert len(set(lines)) == 4
    assert lines == sorted(lines)
    assert max(box.get_x() + box.get_width() for box in boxes(figure)) <= WIDEST
    hard = trajectory_figure([written(range(22), range(22))], names=str)
    assert len({box.get_y() for box in boxes(hard)}) == 1  # the longest published target fits into one line


# --- Panels


def easy(step: int = 1, marks: Sequence[bool] | None = None, title: str = "ILM", length: int = 8) -> Panel:
    """Two rows, `step` tokens at a time."""
    steps = [place // step for place in range(length)]
    rows = [written(range(length), range(length), steps=steps) for _ in range(2)]
    return Panel(rows, marks, title)


def titles(figure: Figure) -> list[str]:
    return [axes.texts[-1].get_text() for axes in figure.axes[:-1]]


def test_every_panel_has_its_title_rows_and_marks() -> None:
    figure = comparison_figure([easy(), easy(marks=[True, False], title="$IT")], str)
    assert titles(figure) == ["ILM", "$IT"]
    shown = [[text.get_text() for text in axes.texts] for axes in figure.axes[:-1]]
    assert [sum(text in "✓✗" for text in texts) for texts in shown] == [0, 2]
    assert shown[0][:16] == shown[1][:16]


def test_panels_share_the_scale_of_colours() -> None:
    figure = comparison_figure([easy(), easy(step=4)], str)
    slow, fast = ([patch.get_facecolor() for patch in axes.patches] for axes in figure.axes[:-1])
    assert fast[:8] == [slow[0]] * 4 + [slow[1]] * 4


def grid(figure: Figure) -> tuple[int, int]:
    """Lines and columns of panels."""
    places = [axes.get_position() for axes in figure.axes[:-1]]
    return len({round(place.y0, 6) for place in places}), len({round(place.x0, 6) for place in places})


@pytest.mark.parametrize(
    ("panels", "length", "expected"),
    [(1, 8, (1, 1)), (2, 8, (1, 2)), (3, 8, (2, 2)), (4, 8, (2, 2)), (4, 10, (2, 2)), (4, 2, (2, 2)), (4, 22, (4, 1))],
)
def test_panels_stand_side_by_side_where_they_fit(panels: int, length: int, expected: tuple[int, int]) -> None:
    figure = comparison_figure([easy(length=length)] * panels, str)
    assert grid(figure) == expected
    assert figure.get_size_inches()[0] <= WIDEST + 2 * SIDE


def extents(axes: Axes) -> list[Any]:
    return [artist.get_window_extent() for artist in (*axes.texts, *axes.patches)]


def test_panels_do_not_overlap() -> None:
    panels = [easy(marks=[True, False]), easy(title="ARM"), easy(title="MDM", length=7), Panel([], title="IT")]
    figure = comparison_figure(panels, WORDS.__getitem__)
    figure.draw_without_rendering()
    for one, other in combinations([extents(axes) for axes in figure.axes], 2):
        assert not any(a.overlaps(b) for a in one for b in other)
    everything = [extent for axes in figure.axes for extent in extents(axes)]
    assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in everything)
    assert all(figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1 for extent in everything)
