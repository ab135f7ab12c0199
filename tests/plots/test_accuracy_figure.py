"""Pictures of accuracies: a bar and a line of cells for each evaluation, with their numbers."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from insertlm.plots import Result, accuracy_figure
from insertlm.plots.accuracy import SIZES

ILM = Result("ILM, order mass", 90.0, 100, {(3, 3): 99.7, (3, 4): 75.2, (4, 3): 0.0, (4, 4): 100.0})
ARM = Result("ARM", 45.5, 10_000, {(3, 3): 80.0, (4, 4): 11.0})


def bars(figure: Figure) -> list[Any]:
    return list(figure.axes[1].patches)


def cells(figure: Figure) -> dict[tuple[float, float], Any]:
    """By the middle of each."""
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    middles = [(box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2) for box in boxes]
    return {(round(x, 3), round(y, 3)): box for (x, y), box in zip(middles, boxes, strict=True)}


def notes(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[1].texts]


def test_every_evaluation_has_a_bar_with_its_number_and_interval() -> None:
    figure = accuracy_figure([ILM, ARM], "zebra: 100 test puzzles")
    assert [bar.get_width() for bar in bars(figure)] == [90.0, 45.5]
    assert notes(figure) == ["90.00 [82.56, 94.48]", "45.50 [44.53, 46.48]"]
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == ["ILM, order mass", "ARM"]
    [whiskers] = figure.axes[1].collections
    ends = [path.vertices[:, 0].tolist() for path in whiskers.get_paths()]  # type: ignore[index,union-attr]
    assert ends[0] == pytest.approx([82.56, 94.48], abs=0.01)
    low, high = figure.axes[1].get_ylim()
    assert low > high  # the first one is on top
    assert [text.get_text() for text in figure.texts] == ["zebra: 100 test puzzles"]


def test_the_best_is_on_top() -> None:
    figure = accuracy_figure([ARM, ILM, Result("IT", 99.0, 100, {})], "")
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == ["IT", "ILM, order mass", "ARM"]


def test_all_and_none_have_an_interval() -> None:
    results = [Result("a", 100.0, 5, {}), Result("b", 0.0, 5, {})]
    assert notes(accuracy_figure(results, "")) == ["100.00 [56.55, 100.00]", "0.00 [0.00, 43.45]"]


def test_sizes_are_cells_beside_the_bar_of_their_evaluation() -> None:
    figure = accuracy_figure([ILM, ARM], "")
    texts = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    heads = [texts[head][0] for head in ("3×3", "3×4", "4×3", "4×4")]
    assert heads == sorted(heads)
    gaps = [right - left for left, right in pairwise(heads)]
    assert gaps[0] == pytest.approx(gaps[2]) and gaps[1] > gaps[0]  # other numbers of houses stand apart
    numbers = {
        (round(x, 3), round(y, 3)): text.get_text() for text in figure.axes[0].texts for x, y in [text.get_position()]
    }
    found = sorted((y, x, numbers[x, y]) for x, y in cells(figure))
    assert [number for _, _, number in found] == ["99", "75", "0", "100", "80", "11"]  # 100 is said only of all
    assert [x for _, x, _ in found[:4]] == pytest.approx(heads, abs=1e-3)
    assert [x for _, x, _ in found[4:]] == pytest.approx([heads[0], heads[3]], abs=1e-3)
    shades = [sum(cells(figure)[x, y].get_facecolor()[:3]) for y, x, _ in found[:4]]
    assert shades[3] < shades[0] < shades[1] < shades[2]  # the better the darker
    assert SIZES in texts


def test_tasks_without_sizes_have_no_cells() -> None:
    figure = accuracy_figure([Result("ILM", 99.98, 5000, {})], "")
    assert not cells(figure)
    assert not figure.axes[0].texts


EVERY = dict.fromkeys(product(range(3, 7), range(3, 7)), 50.0)


@pytest.mark.parametrize(
    "results",
    [
        [Result("ILM", 100.0, 5000, {})],
        [Result("ILM", 100.0, 5000, {(3, 3): 100.0})],
        [ILM, ARM],
        [Result(f"ILM (runs/zebra-{number}), order $certainty$", 8.0 * number, 12, EVERY) for number in range(12)],
    ],
)
def test_no_text_overlaps_or_is_cut_off(results: list[Result]) -> None:
    figure = accuracy_figure(results, f"zebra: 12 test puzzles{' of a generator with a long name' * 2}")
    figure.draw_without_rendering()
    sheet, axes = figure.axes
    ticks = [tick for tick in [*axes.get_xticklabels(), *axes.get_yticklabels()] if tick.get_text()]
    extents = [
        text.get_window_extent() for text in [*figure.texts, *sheet.texts, *axes.texts, *ticks, axes.xaxis.label]
    ]
    assert not any(a.overlaps(b) for a, b in combinations(extents, 2))
    extents += [patch.get_window_extent() for patch in sheet.patches]
    assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in extents)
    assert all(figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1 for extent in extents)
