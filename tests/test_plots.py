"""Figures are checked by what they show: the texts, colours and arrows on them, and that nothing overlaps."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from insertlm.decoding.trajectory import Insertion, Trajectory
from insertlm.errors import InsertlmError
from insertlm.plots import BAD, BLUE, FAINT, GREY, NODE, NODE_STYLES, WIDEST, graph_figure, save, trajectory_figure
from insertlm.tasks.star import PRESETS, Star, edges_of, path_of

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
    return Trajectory([], list(start), events, stop_probability=1.0, complete=True)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def boxes(figure: Figure) -> list[FancyBboxPatch]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def arrow_patches(figure: Figure, colour: str) -> list[FancyArrowPatch]:
    patches = (patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch))
    return [patch for patch in patches if to_hex(patch.get_edgecolor()) == colour]


def arrows(figure: Figure, colour: str) -> int:
    return len(arrow_patches(figure, colour))


def luminance(colour: Any) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# --- Generation order


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


# --- Star graphs

EDGES = [(1, 2), (2, 3), (3, 4), (2, 5), (6, 2)]


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


# --- Files


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_save_writes_the_format_of_the_suffix(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"figure{suffix}"
    save(graph_figure(EDGES, 1, 4), path)
    assert path.read_bytes().startswith(start)


def test_save_takes_a_string(tmp_path: Path) -> None:
    save(trajectory_figure([written([1], [0])], str), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.bmp", "unknown suffix '.bmp'; expected .png, .svg, .pdf"),
        ("a", "unknown suffix ''; expected .png, .svg, .pdf"),
        ("missing/a.png", "No such file or directory"),
        ("file/a.svg", "Not a directory"),
    ],
)
def test_what_cannot_be_saved_is_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InsertlmError) as caught:
        save(graph_figure(EDGES, 1, 4), tmp_path / name)
    assert str(caught.value) == f"cannot write {tmp_path / name}: {reason}"


# --- Without matplotlib


def test_missing_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InsertlmError) as caught:
        trajectory_figure([], str)
    assert str(caught.value) == "plots need matplotlib: pip install insertlm[plot]"
    with pytest.raises(InsertlmError) as caught:
        graph_figure(EDGES, 1, 4)
    assert str(caught.value) == "plots need matplotlib: pip install insertlm[plot]"


def test_import_does_not_load_matplotlib() -> None:
    check = "import sys, insertlm.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
