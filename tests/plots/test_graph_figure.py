"""Star graphs are checked by the nodes and arrows on them, and that nothing overlaps."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from insertlm.plots import graph_figure
from insertlm.plots.figure import BAD, BLUE, FAINT
from insertlm.plots.graph import NODE, NODE_STYLES
from insertlm.tasks.star import PRESETS, Star, edges_of, path_of

EDGES = [(1, 2), (2, 3), (3, 4), (2, 5), (6, 2)]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def arrow_patches(figure: Figure, colour: str) -> list[FancyArrowPatch]:
    patches = (patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch))
    return [patch for patch in patches if to_hex(patch.get_edgecolor()) == colour]


def arrows(figure: Figure, colour: str) -> int:
    return len(arrow_patches(figure, colour))


def centres(figure: Figure) -> list[tuple[float, float]]:
    points = np.array([line.get_xydata() for line in figure.axes[0].lines], dtype=float)  # [nodes, 1, 2]
    return [(x, y) for x, y in points[:, 0].tolist()]


def place_of(figure: Figure, node: int) -> tuple[float, float]:
    return centres(figure)[texts(figure).index(str(node))]


def test_every_node_and_edge_is_drawn_and_the_path_stands_out() -> None:
    figure = graph_figure(EDGES, source=1, goal=4, path=[1, 2, 3, 4])
    assert sorted(texts(figure)) == list("123456")
    assert (arrows(figure, BLUE), arrows(figure, FAINT), arrows(figure, BAD)) == (3, 2, 0)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["source", "goal", "path"]


def test_source_and_goal_have_their_own_shapes() -> None:
    figure = graph_figure(EDGES, source=1, goal=4)
    shapes = {text: str(line.get_marker()) for text, line in zip(texts(figure), figure.axes[0].lines, strict=True)}
    assert (shapes["1"], shapes["4"]) == (NODE_STYLES["source"][0], NODE_STYLES["goal"][0])
    assert {shapes[node] for node in "2356"} == {"o"}


def test_steps_that_are_no_edges_are_red_and_dashed() -> None:
    figure = graph_figure(EDGES, source=1, goal=4, path=[1, 2, 99, 4])
    assert (arrows(figure, BLUE), arrows(figure, BAD)) == (1, 2)
    assert [patch.get_linestyle() for patch in arrow_patches(figure, BLUE)] == ["solid"]
    assert all(patch.get_linestyle() != "solid" for patch in arrow_patches(figure, BAD))
    assert "99" in texts(figure)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert legend.get_texts()[-1].get_text() == "no such edge"


def test_junction_is_in_the_middle_and_arms_flow_from_left_to_right() -> None:
    figure = graph_figure(EDGES, source=1, goal=4)
    assert place_of(figure, 2) == (0.0, 0.0)
    assert all(place_of(figure, node)[0] < 0 for node in (1, 6))
    assert math.hypot(*place_of(figure, 3)) < math.hypot(*place_of(figure, 4))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(0, 1000))
def test_no_two_nodes_of_a_star_touch(name: str, seed: int) -> None:
    prefix, target = Star(**PRESETS[name]).examples("test", 1, seed)[0]
    figure = graph_figure(edges_of(prefix[:-2]), prefix[-2], prefix[-1], path_of(target))
    assert arrows(figure, BLUE) == len(target) // 2
    assert arrows(figure, FAINT) == (len(prefix) - len(target)) // 2 - 1
    assert min(math.dist(a, b) for a, b in combinations(centres(figure), 2)) > 2.2 * NODE / 72
    width, height = figure.get_size_inches()
    axes = figure.axes[0]
    assert width == pytest.approx(axes.get_xlim()[1] - axes.get_xlim()[0])  # one unit is one inch in both directions
    assert height == pytest.approx(axes.get_ylim()[1] - axes.get_ylim()[0])


def test_many_arms_do_not_touch_either() -> None:
    edges = [edge for arm in range(15) for edge in ((100 + arm, 0), (0, 200 + arm))]
    figure = graph_figure(edges, source=100, goal=200)
    assert min(math.dist(a, b) for a, b in combinations(centres(figure), 2)) > 2.2 * NODE / 72


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8), st.lists(st.integers(0, 7), max_size=4))
def test_graphs_that_are_no_stars_are_drawn_too(edges: list[tuple[int, int]], path: list[int]) -> None:
    figure = graph_figure(edges, source=0, goal=1, path=path)
    assert len(texts(figure)) == len({node for edge in edges for node in edge} | {0, 1} | set(path))
    assert len(set(centres(figure))) == len(texts(figure))
