"""A star graph around its junction, with the path through it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from insertlm.plots.figure import (
    AMBER,
    BAD,
    BLUE,
    FAINT,
    GOOD,
    GREY,
    INK,
    TINT,
    TITLE,
    TITLE_LETTER,
    figure_title,
    readable_on,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["graph_figure"]

HOP, MARGIN, KEY = 0.46, 0.35, 0.35  # between nodes, around them, and for the key, in inches
NARROWEST = 3.0  # of a figure, in inches
NODE = 9.0  # radius of a node, in points
NODE_SIZES = {"o": 1.0, "s": 0.9, "D": 0.82}  # shapes that look equally large
# Marker, fill and outline. Kinds differ in shape as well, for readers and printers without colour.
NODE_STYLES = {
    "source": ("s", AMBER, INK),
    "goal": ("D", GOOD, INK),
    "path": ("o", TINT, BLUE),
    "other": ("o", GREY, GREY),
}

Edge = tuple[int, int]
Point = tuple[float, float]


def graph_figure(edges: Sequence[Edge], source: int, goal: int, path: Sequence[int] = (), title: str = "") -> Figure:
    """A star graph around its junction: arms that lead to it on the left, arms that leave it on the right.

    `path` (nodes, true or predicted) is highlighted; a step of it that is not an edge is dashed and red.
    """
    nodes = list(dict.fromkeys([*chain.from_iterable(edges), source, goal, *path]))
    places = _layout(edges, nodes, source, goal)
    xs, ys = zip(*places.values(), strict=True)
    least = max(NARROWEST, TITLE_LETTER * len(title) + MARGIN)
    spare = max(0.0, least - (max(xs) - min(xs) + 2 * MARGIN)) / 2
    head = MARGIN + (TITLE if title else 0.0)
    figure, axes = sheet(
        min(xs) - MARGIN - spare, max(xs) + MARGIN + spare, bottom=min(ys) - MARGIN - KEY, top=max(ys) + head
    )
    figure_title(figure, MARGIN / 2, title)
    steps = set(pairwise(path))
    for edge in dict.fromkeys([*edges, *steps]):
        _draw_edge(axes, places[edge[0]], places[edge[1]], strong=edge in steps, real=edge in edges)
    for node in nodes:
        kind = "source" if node == source else "goal" if node == goal else "path" if node in path else "other"
        _draw_node(axes, places[node], str(node), kind)
    _draw_key(axes, right=not steps.isdisjoint(edges), wrong=not steps.issubset(edges))
    return figure


def _layout(edges: Sequence[Edge], nodes: Sequence[int], source: int, goal: int) -> dict[int, Point]:
    """The place of each node, in inches from the junction. Any graph can be drawn, but only stars look like stars."""
    after, before = defaultdict(list), defaultdict(list)
    for tail, head in edges:
        after[tail].append(head)
        before[head].append(tail)
    junction = max(nodes, key=lambda node: (len(after[node]), node == source))
    places = {junction: (0.0, 0.0)}
    leaving = _centred(_arms(junction, after, {junction}), goal)
    leading = _centred(_arms(junction, before, {junction, *chain.from_iterable(leaving)}), source)
    angle = 2 * math.pi / max(2, len(leaving) + len(leading))
    first = max(
        1.3, 0.34 / HOP / (2 * math.sin(angle / 2))
    )  # far enough from the junction that neighbouring arms do not touch
    for arms, middle in ((leaving, 0.0), (leading, math.pi)):
        for i, arm in enumerate(arms):
            direction = middle + (i - (len(arms) - 1) / 2) * angle
            for hop, node in enumerate(arm):
                radius = HOP * (first + hop)
                places[node] = (radius * math.cos(direction), radius * math.sin(direction))
    return places | _row_below(places, [node for node in nodes if node not in places])


def _arms(junction: int, following: Mapping[int, Sequence[int]], seen: set[int]) -> list[list[int]]:
    """The chains of nodes, not yet in `seen`, that start at the junction."""
    arms = []
    for start in following.get(junction, ()):
        arm, ahead = [], [start]
        while ahead and ahead[0] not in seen:
            arm.append(ahead[0])
            seen.add(ahead[0])
            ahead = list(following.get(ahead[0], ()))
        arms.append(arm)
    return [arm for arm in arms if arm]


def _centred(arms: list[list[int]], node: int) -> list[list[int]]:
    """The arms with that of `node` in the middle, so that the path runs from left to right."""
    others = [arm for arm in arms if node not in arm]
    half = len(others) // 2
    return [*others[:half], *(arm for arm in arms if node in arm), *others[half:]]


def _row_below(places: Mapping[int, Point], nodes: Sequence[int]) -> dict[int, Point]:
    """Places for nodes on no arm: of a path that leaves the graph, or of a graph that is not a star."""
    bottom = min(y for _, y in places.values()) - 1.5 * HOP
    return {node: (HOP * (i - (len(nodes) - 1) / 2), bottom) for i, node in enumerate(nodes)}


def _draw_edge(axes: Axes, tail: Point, head: Point, *, strong: bool, real: bool) -> None:
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        tail,
        head,
        arrowstyle="-|>,head_length=4,head_width=2.2" if strong else "-|>,head_length=3.2,head_width=1.7",
        connectionstyle="arc3" if real else "arc3,rad=0.25",
        linestyle="solid" if real else (0, (3, 2)),
        shrinkA=NODE,
        shrinkB=1.18 * NODE,
        linewidth=2.2 if strong else 1.0,
        color=(BLUE if strong else FAINT) if real else BAD,
        zorder=2 if strong else 1,
    )
    axes.add_patch(arrow)


def _draw_node(axes: Axes, place: Point, name: str, kind: str) -> None:
    marker, fill, outline = NODE_STYLES[kind]
    axes.plot(*place, marker, markersize=2 * NODE * NODE_SIZES[marker], color=fill, markeredgecolor=outline, zorder=3)
    axes.text(*place, name, ha="center", va="center_baseline", fontsize=8, color=readable_on(fill), zorder=4)


def _draw_key(axes: Axes, *, right: bool, wrong: bool) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for kind in ("source", "goal"):
        marker, fill, outline = NODE_STYLES[kind]
        handles.append(Line2D([], [], linestyle="", marker=marker, color=fill, markeredgecolor=outline, label=kind))
    if right:
        handles.append(Line2D([], [], color=BLUE, linewidth=2.2, label="path"))
    if wrong:
        handles.append(Line2D([], [], color=BAD, linewidth=2.2, linestyle=(0, (3, 2)), label="no such edge"))
    axes.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, handletextpad=0.4)
