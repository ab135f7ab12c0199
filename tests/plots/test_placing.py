"""Labels beside points keep clear of lines, markers and one another."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random
from typing import Any

import pytest
from matplotlib.axes import Axes

from insertlm.plots.figure import chart
from insertlm.plots.placing import Label, place_labels


def canvas() -> Axes:
    _, axes = chart(["a"], "x", "y")
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return axes


def placed(axes: Axes, *labels: Label) -> list[Any]:
    """The place of each on the page."""
    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    place_labels(axes, labels)
    return [text.get_window_extent() for text in axes.texts]


@pytest.mark.parametrize("towards", [0.0, 0.5 * math.pi, math.pi, -0.5 * math.pi])
def test_where_there_is_room_a_label_stands_in_its_direction(towards: float) -> None:
    axes = canvas()
    [box] = placed(axes, Label("text", 5, 5, "black", towards))
    x, y = axes.transData.transform((5, 5))
    across, up = (box.x0 + box.x1) / 2 - x, (box.y0 + box.y1) / 2 - y
    assert math.cos(math.atan2(up, across) - towards) > 0.9


def test_it_keeps_clear_of_a_line_in_its_way() -> None:
    axes = canvas()
    axes.plot([5, 10], [5, 5])
    [box] = placed(axes, Label("text", 5, 5, "black", 0.0))
    _, y = axes.transData.transform((5, 5))
    assert not (box.y0 <= y <= box.y1 and box.x1 > axes.transData.transform((5, 5))[0])


def test_it_stays_in_the_chart() -> None:
    axes = canvas()
    frame = axes.get_window_extent
    [box] = placed(axes, Label("a long label", 9.9, 9.9, "black", 0.25 * math.pi))
    assert box.x1 <= frame().x1
    assert box.y1 <= frame().y1


@pytest.mark.parametrize("seed", range(3))
def test_labels_of_near_points_do_not_cover_one_another_or_the_points(seed: int) -> None:
    random = Random(seed)
    points = [(5 + random.uniform(-0.6, 0.6), 5 + random.uniform(-0.6, 0.6)) for _ in range(5)]
    axes = canvas()
    axes.plot(*zip(*points, strict=True), "o", linestyle="")
    boxes = placed(axes, *(Label("0.8", x, y, "black", 0.0) for x, y in points))
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    for x, y in axes.transData.transform(points):
        assert not any(box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1 for box in boxes)
