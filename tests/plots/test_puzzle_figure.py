"""Puzzles are checked by what stands in their cells, how these are outlined, and that nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from insertlm.plots import Written, puzzle_figure
from insertlm.plots.figure import BAD, BLUE, INK
from insertlm.plots.puzzle import OUTLINES
from insertlm.tasks.base import Example
from insertlm.tasks.zebra.clues import HOUSE, KINDS, SIDE, TOKENIZER, Clue, Street, read
from insertlm.tasks.zebra.task import Triple, Zebra

STREET = read("""3 houses, 3 attributes
left-of LHS c 2 2 RHS c 2 1 CLUE_END = LHS c 2 1 RHS c 1 2 CLUE_END
= LHS c 1 1 RHS c 2 2 CLUE_END nbr LHS c 2 1 RHS c 0 2 CLUE_END
inbetween LHS c 0 1 RHS c 1 1 c 2 1 CLUE_END
""")
TABLE = [["blue", "green", "red"], ["Anna", "Ben", "Clara"], ["cat", "fish", "dog"]]
SOLUTION: list[Triple] = [
    *((0, 0, 1), (0, 1, 2), (0, 2, 0)),
    *((1, 0, 0), (1, 1, 1), (1, 2, 2)),
    *((2, 0, 0), (2, 1, 2), (2, 2, 1)),
]
GREEN, CLARA = (0, 1, 2), (1, 2, 2)


def written(*triples: Triple) -> list[Written]:
    """One after the other, three turns each."""
    return [Written(ids, 3 * number, TOKENIZER.decode(ids)) for number, ids in enumerate(triples, start=1)]


def without(*left_out: Triple) -> list[Triple]:
    return [ids for ids in SOLUTION if ids not in left_out]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def patches(figure: Figure) -> list[Any]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def boxes(figure: Figure) -> list[Any]:
    """What is filled: cells and strips."""
    return [patch for patch in patches(figure) if patch.get_facecolor()[3] > 0]


def outlines(figure: Figure) -> list[Any]:
    return [patch for patch in patches(figure) if patch.get_facecolor()[3] == 0]


def inside(figure: Figure, box: Any) -> list[str]:
    left, top, width, height = box.get_x(), box.get_y(), box.get_width(), box.get_height()
    found = [(text.get_position(), text.get_text()) for text in figure.axes[0].texts]
    return [text for (x, y), text in found if left < x < left + width and top < y < top + height]


def legend(figure: Figure) -> list[str]:
    entries = figure.axes[0].get_legend()
    return [] if entries is None else [text.get_text() for text in entries.get_texts()]


# --- A solved puzzle


def test_every_cell_has_its_value_and_the_number_of_its_turn() -> None:
    order = [4, 0, 8, 1, 7, 2, 6, 3, 5]
    figure = puzzle_figure(STREET, written(*(SOLUTION[i] for i in order)), SOLUTION)
    found = [inside(figure, box) for box in boxes(figure)]
    assert found == [[TABLE[i // 3][i % 3], str(1 + order.index(i))] for i in range(9)]
    heads = [text for text in figure.axes[0].texts if text.get_text().startswith("house ")]
    assert [head.get_text() for head in heads] == ["house 0", "house 1", "house 2"]
    columns = [box.get_x() + box.get_width() / 2 for box in boxes(figure)[:3]]
    assert [head.get_position()[0] for head in heads] == pytest.approx(columns)
    assert {"colour", "person", "pet"} <= {*texts(figure)}
    assert figure.axes[1].get_xlabel() == "order in which cells were complete, 1 = first"


def test_later_is_darker_and_cells_of_one_turn_share_number_and_colour() -> None:
    turns = [2, 2, 2, 5, 5, 9, 30, 31, 40]
    done = [Written(ids, turn, "") for ids, turn in zip(SOLUTION, turns, strict=True)]
    figure = puzzle_figure(STREET, done, SOLUTION)
    assert [inside(figure, box)[1] for box in boxes(figure)] == list("111223456")
    colours = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    assert colours[0] == colours[1] == colours[2] != colours[3] == colours[4]
    brightness = [sum(box.get_facecolor()[:3]) for box in boxes(figure)[4:]]
    assert all(early > late for early, late in pairwise(brightness))


def test_a_solved_puzzle_has_a_tick_and_nothing_else() -> None:
    figure = puzzle_figure(STREET, written(*SOLUTION), SOLUTION)
    assert {"✓", "solved", "clues"} <= {*texts(figure)}
    assert not any("✗" in text for text in texts(figure))
    assert not outlines(figure)
    assert not legend(figure)


def test_clues_stand_beside_it_in_english() -> None:
    shown = texts(puzzle_figure(STREET, written(*SOLUTION), SOLUTION))
    start = shown.index("clues") + 1
    assert shown[start : start + 4] == ["1", "Fish is left of dog.", "2", "Dog and Clara share a house."]
    assert shown[start + 1 :: 2] == [clue.in_english() for clue in STREET.clues]


# --- Mistakes


def test_a_wrong_value_is_outlined_and_crossed_and_the_right_one_told() -> None:
    figure = puzzle_figure(STREET, written((0, 1, 5), *without(GREEN)), SOLUTION)
    assert inside(figure, boxes(figure)[1]) == ["black ✗", "1  (green)"]
    [outline] = outlines(figure)
    assert (to_hex(outline.get_edgecolor()), outline.get_linestyle()) == (BAD, "solid")
    assert outline.get_x() < boxes(figure)[1].get_x() < outline.get_x() + outline.get_width()
    assert legend(figure) == ["✗ wrong (right value)"]
    assert {"✗", "not solved: 8 of 9 cells are right"} <= {*texts(figure)}


def test_a_missing_value_is_a_dash_in_a_dashed_outline() -> None:
    figure = puzzle_figure(STREET, written(*without(CLARA)), SOLUTION)
    assert inside(figure, boxes(figure)[5]) == ["–", "(Clara)"]
    assert to_hex(boxes(figure)[5].get_facecolor()) == "#ffffff"
    [outline] = outlines(figure)
    assert to_hex(outline.get_edgecolor()) == BAD
    assert outline.get_linestyle() != "solid"
    assert legend(figure) == ["– missing (right value)"]
    assert len(boxes(puzzle_figure(STREET, [], SOLUTION))) == len(outlines(puzzle_figure(STREET, [], SOLUTION))) == 9


def test_a_cell_that_was_written_twice_shows_both() -> None:
    figure = puzzle_figure(STREET, written((0, 1, 0), *SOLUTION), SOLUTION)
    first, second = boxes(figure)[1:3]
    assert (inside(figure, first), inside(figure, second)) == (["red ✗", "1"], ["green", "3"])
    assert first.get_facecolor() != second.get_facecolor()
    [outline] = outlines(figure)
    assert to_hex(outline.get_edgecolor()) == BLUE
    assert legend(figure) == ["written more than once"]
    assert "not solved: 8 of 9 cells are right" in texts(figure)


def test_of_many_values_of_a_cell_the_first_are_shown() -> None:
    figure = puzzle_figure(STREET, written(*[(0, 1, value) for value in range(6)], *SOLUTION), SOLUTION)
    assert [inside(figure, box) for box in boxes(figure)[1:4]] == [["red ✗", "1"], ["blue ✗", "2"], ["5 more", ""]]


def test_what_has_no_place_in_the_table_is_told() -> None:
    stray = [(3, 0, 0), (0, 3, 0), (0, 0, TOKENIZER.encode("left-of")[0])]
    shown = texts(puzzle_figure(STREET, written(*SOLUTION, *stray, (1, 1)), SOLUTION))
    assert "✗ not in the table: 3 0 0, 0 3 0, 0 0 left-of and 1 more" in shown
    assert "not solved: 9 of 9 cells are right" in shown
    assert "✗ not in the table: 1" in texts(puzzle_figure(STREET, written(*SOLUTION, (1,)), SOLUTION))


def test_clues_that_do_not_hold_are_crossed() -> None:
    figure = puzzle_figure(STREET, written((2, 2, 2), (2, 1, 1), *SOLUTION[:7]), SOLUTION)  # dog and fish swapped
    shown = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert shown["Fish is left of dog. ✗"] == BAD
    assert shown["Dog is next to green. ✗"] == BAD
    assert shown["Ben is between blue and dog. ✗"] == BAD
    assert "clues (✗ does not hold)" in shown
    figure = puzzle_figure(STREET, written(*without(SOLUTION[3])), SOLUTION)  # no clue names Anna
    shown = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert shown["Fish is left of dog."] == INK


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*SOLUTION, (0, 1, 0), (5, 5, 5)]), max_size=4), st.lists(st.sampled_from(SOLUTION)))
def test_it_is_solved_if_the_task_says_so(more: list[Triple], left_out: list[Triple]) -> None:
    triples = [*without(*left_out), *more]
    ids = [number for triple in triples for number in triple]
    prefix = TOKENIZER.encode(" ".join(map(str, STREET.clues)))
    scores = Zebra().scores(Example(prefix, [number for triple in SOLUTION for number in triple]), ids)
    assert Zebra().triples(ids) == triples
    solved = "solved" in texts(puzzle_figure(STREET, written(*triples), SOLUTION))
    assert solved == (scores["sequence_accuracy"] == 1)


# --- All sizes


def street_of_size(size: int, attributes: int, clues: int) -> Street:
    """Its clues are as long as clues can be, but one, and mean nothing."""
    largest = SIDE * (attributes - 1) + size - 1
    longest = [Clue(KINDS.index("!="), (largest, SIDE + size - 1)), Clue(KINDS.index("inbetween"), (4, SIDE + 2, 8))]
    return Street(size, attributes, [Clue(0, (0, HOUSE + size - 1)), *longest * clues][:clues])


def extents(figure: Figure) -> list[Any]:
    entries = figure.axes[0].get_legend()
    told = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    told += [] if entries is None else entries.get_texts()
    return [text.get_window_extent() for text in [*told, figure.axes[1].xaxis.label]]


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(st.integers(3, 6), st.integers(3, 6)),
    st.sampled_from([1, 12, 30]),
    st.lists(st.lists(st.integers(0, SIDE + 2), min_size=3, max_size=3), max_size=60),
)
@example((3, 4), 30, [[SIDE + 3] * 3] * 4)  # the longest words
def test_no_text_overlaps_or_is_cut_off(size: tuple[int, int], clues: int, random: Sequence[Sequence[int]]) -> None:
    houses, attributes = size
    solution = [(a, h, (h + a) % houses) for a in range(attributes) for h in range(houses)]
    triples = [*map(tuple, random), *solution[: len(random)]]
    figure = puzzle_figure(street_of_size(houses, attributes, clues), written(*triples), solution)
    figure.draw_without_rendering()
    assert not any(a.overlaps(b) for a, b in combinations(extents(figure), 2))
    everything = [*extents(figure), *(patch.get_window_extent() for patch in patches(figure))]
    assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in everything)
    assert all(figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1 for extent in everything)


def test_every_kind_of_mistake_has_its_own_outline() -> None:
    assert len({(style["edgecolor"], str(style["linestyle"])) for style in OUTLINES.values()}) == len(OUTLINES) == 3
