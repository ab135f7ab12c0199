"""Training curves: one line per stage, one colour and one entry of the key per label, and time in a unit to read."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from matplotlib.figure import Figure

from insertlm.plots import Curve, Stage, training_figure
from insertlm.plots.figure import FAINT


def lines(figure: Figure) -> list[Any]:
    return list(figure.axes[0].lines)


def entries(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def notes(figure: Figure) -> dict[str, tuple[float, float]]:
    """What is written into the chart, and beside which point."""
    found: list[Any] = list(figure.axes[0].texts)
    return {note.get_text(): note.xy for note in found}


def curve(label: str, *accuracy: float) -> Curve:
    return Curve(label, [Stage(label, [60.0 * (1 + i) for i in range(len(accuracy))], accuracy)])


def draw(*curves: Curve, title: str = "star-hard: 500 validation graphs", over_steps: bool = False) -> Figure:
    return training_figure(curves, title, over_steps=over_steps)


def test_a_line_shows_its_run() -> None:
    figure = draw(Curve("ILM", [Stage("run", [30.0, 120.0], [10.0, 90.0])]))
    [line] = lines(figure)
    assert line.get_xydata().tolist() == [[0.5, 10.0], [2.0, 90.0]]
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("minutes of training", "validation accuracy, %")
    assert axes.get_xlim()[0] == 0
    low, high = axes.get_ylim()
    assert low < 0
    assert high > 100
    assert figure.legends[0].get_title().get_text() == "star-hard: 500 validation graphs"
    assert not notes(figure)  # there is only one stage


@pytest.mark.parametrize(
    ("seconds", "label", "shown"),
    [
        (0.04, "milliseconds of training", 40.0),
        (3.0, "seconds of training", 3.0),
        (119.0, "seconds of training", 119.0),
        (180.0, "minutes of training", 3.0),
        (9000.0, "hours of training", 2.5),
    ],
)
def test_time_has_a_unit_to_read(seconds: float, label: str, shown: float) -> None:
    figure = draw(Curve("ILM", [Stage("run", [seconds], [50.0])]))
    assert figure.axes[0].get_xlabel() == label
    assert lines(figure)[0].get_xdata() == pytest.approx([shown])


def test_steps_are_steps() -> None:
    figure = draw(Curve("ILM", [Stage("run", [5000], [50.0])]), over_steps=True)
    assert figure.axes[0].get_xlabel() == "steps"
    assert lines(figure)[0].get_xdata().tolist() == [5000]


def test_stages_are_named_and_a_dotted_line_leads_to_the_next() -> None:
    first, ilm, mdm = Stage("arm", [60, 120], [40, 50]), Stage("ilm", [180, 240], [20, 90]), Stage("mdm", [200], [80])
    figure = draw(Curve("ILM", [first, ilm]), Curve("MDM", [first, mdm]))
    found = [(line.get_linestyle(), line.get_color(), line.get_xdata().tolist()) for line in lines(figure)]
    blue, orange = (handle.get_color() for handle in figure.legends[0].legend_handles)  # type: ignore[union-attr]
    assert found[:3] == [("-", FAINT, [1.0, 2.0]), ("-", blue, [3.0, 4.0]), (":", blue, [2.0, 3.0])]
    assert found[3:] == [("-", FAINT, [1.0, 2.0]), ("-", orange, [200 / 60]), (":", orange, [2.0, 200 / 60])]
    assert notes(figure) == {"arm": (1.0, 40), "ilm": (3.0, 20), "mdm": (200 / 60, 80)}


def test_seeds_share_a_colour_and_an_entry() -> None:
    figure = draw(curve("ILM", 1, 2), curve("ARM", 3, 4), curve("ILM", 5, 6))
    first, other, second = lines(figure)
    assert (first.get_color(), first.get_marker()) == (second.get_color(), second.get_marker())
    assert first.get_color() != other.get_color()
    assert first.get_marker() != other.get_marker()
    assert entries(figure) == ["ILM", "ARM"]


def test_more_labels_than_colours_can_be_drawn() -> None:
    assert len(lines(draw(*(curve(str(i), i) for i in range(9))))) == 9


@pytest.mark.parametrize(
    "labels", [["ILM"], ["ILM", "ARM", "MDM", "IT"], [f"ILM (runs/{i}-{'x' * 70})" for i in range(6)]]
)
def test_no_text_overlaps_or_is_cut_off(labels: list[str]) -> None:
    figure = draw(*(curve(label, 0, 100) for label in labels), title=f"{'several tasks' * 5}: 500 validation graphs")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    ticks = [  # those beyond the axes are not drawn
        *(text for text, x in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True) if x <= axes.get_xlim()[1]),
        *(text for text, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True) if 0 <= y <= 100),
    ]
    texts = [figure.legends[0].get_title(), *figure.legends[0].get_texts(), axes.xaxis.label, axes.yaxis.label, *ticks]
    extents = [text.get_window_extent() for text in texts if text.get_text()]
    visible = [extent for extent in extents if extent.width]
    assert not any(a.overlaps(b) for a, b in combinations(visible, 2))
    for extent in [text.get_window_extent() for text in texts[: 1 + len(labels)]]:
        assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1
        assert axes.get_window_extent().y1 < extent.y0
