"""Labels beside points, where they cover neither what is drawn nor one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

__all__ = ["Label", "place_labels"]

SIDES = 16  # directions in which a label may stand
REACHES = (6.0, 11.0, 18.0)  # how far from its point, in points
ROOM = 2.5  # pixels that stay free around a label
DENSE = 3.0  # pixels from point to point of a line, when what it covers is counted
COVERED, OUTSIDE = 1_000.0, 5_000.0  # what covering a label and leaving the chart cost, in points of a line


class Label(NamedTuple):
    """x, y: of its point, in the units of the axes   towards: the direction in which it stands if there is room, in
    radians on the page"""

    text: str
    x: float
    y: float
    colour: str
    towards: float


def place_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Put each label where it covers least: near its point, in its direction if that is as good as any other. All else
    must have been drawn, and the layout must be final."""
    obstacles, frame = _obstacles(axes), axes.get_window_extent()
    taken: list[tuple[float, float, float, float]] = []
    for label in labels:
        note = axes.annotate(
            label.text, (label.x, label.y), (0, 0), textcoords="offset points", fontsize=7.5, color=label.colour
        )
        best = math.inf
        for reach in REACHES:
            for turn in range(SIDES):
                # 0, 1, -1, 2, -2 …: of equally good places the one nearest to the wanted direction is tried first
                angle = label.towards + (turn + 1) // 2 * (-1) ** turn * 2 * math.pi / SIDES
                box = _box(note, reach, angle)
                cost = (
                    np.all((obstacles >= box[:2]) & (obstacles <= box[2:]), axis=1).sum()
                    + COVERED * sum(_overlap(box, other) for other in taken)
                    + OUTSIDE * (box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1)
                )
                if cost < best:
                    best, chosen = cost, (reach, angle)
        taken.append(_box(note, *chosen))


def _box(note: Annotation, reach: float, angle: float) -> tuple[float, float, float, float]:
    """Move the note there: its left, lower, right and upper edge in pixels, with the room around it."""
    across, up = math.cos(angle), math.sin(angle)
    note.set_position((reach * across, reach * up))
    note.set_horizontalalignment("left" if across > 0.3 else "right" if across < -0.3 else "center")
    note.set_verticalalignment("bottom" if up > 0.3 else "top" if up < -0.3 else "center")
    extent = note.get_window_extent()
    return extent.x0 - ROOM, extent.y0 - ROOM, extent.x1 + ROOM, extent.y1 + ROOM


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _obstacles(axes: Axes) -> NDArray[np.float64]:
    """Points on all lines and markers, in pixels: [N, 2]"""
    drawn = [axes.transData.transform(np.column_stack(line.get_data())) for line in axes.lines]
    drawn += [axes.transData.transform(points.get_offsets()) for points in axes.collections]
    found = [np.empty((0, 2))]
    for points in drawn:
        found.append(np.repeat(points, 8, axis=0))  # a marker is larger than a point of a line, and matters more
        for start, end in pairwise(points):
            steps = 1 + int(math.dist(start, end) / DENSE)
            found.append(np.linspace(start, end, steps))
    return np.concatenate(found)
