"""Pictures of what evaluations of texts found: every number is where it belongs, and no label covers another."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from matplotlib.figure import Figure

from insertlm.plots import Judged, Trace, frontier_figure, judge_figure, timing_figure

ILM = Trace("ILM", "temperature", [3.4, 3.8, 4.2], [1.6, 1.9, 2.5], ["0.6", "0.8", "1.0"])
TITLE = "128 texts a point, written from nothing, scored by SmolLM2-135M"
MDM = Trace("MDM", "steps", [5.1, 5.0, 4.8], [3.3, 3.0, 2.6], ["128", "512", "1024"])


def entries(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def notes(figure: Figure) -> list[Any]:
    return [text for text in figure.axes[0].texts if text.get_text()]


def center(text: Any) -> tuple[float, float]:
    extent = text.get_window_extent()
    return (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2


def clear(figure: Figure) -> None:
    """No text covers another or is cut off."""
    figure.draw_without_rendering()
    axes = figure.axes[0]
    frame = axes.get_window_extent()
    ticks = [tick for tick in axes.get_xticklabels() if frame.x0 <= center(tick)[0] <= frame.x1]  # the others are not
    ticks += [tick for tick in axes.get_yticklabels() if frame.y0 <= center(tick)[1] <= frame.y1]  # drawn
    texts = [
        figure.legends[0].get_title(),
        *figure.legends[0].get_texts(),
        axes.xaxis.label,
        axes.yaxis.label,
        *ticks,
        *notes(figure),
    ]
    extents = [text.get_window_extent() for text in texts if text.get_text()]
    assert not any(a.overlaps(b) for a, b in combinations(extents, 2))
    for note in notes(figure):
        extent = note.get_window_extent()
        assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1


def test_the_frontier_has_a_line_a_model_and_the_data() -> None:
    figure = frontier_figure([ILM, MDM], TITLE, (4.1, 2.2))
    first, second = figure.axes[0].lines
    assert first.get_xydata().tolist() == [[3.4, 1.6], [3.8, 1.9], [4.2, 2.5]]  # type: ignore[union-attr]
    assert first.get_color() != second.get_color()
    [data] = figure.axes[0].collections
    assert data.get_offsets().tolist() == [[4.1, 2.2]]  # type: ignore[union-attr]
    assert entries(figure) == ["ILM, temperature", "MDM, steps", "data"]
    assert sorted(note.get_text() for note in notes(figure)) == ["0.6", "1.0", "1024", "128"]
    clear(figure)
    assert entries(frontier_figure([ILM], TITLE)) == ["ILM, temperature"]


def test_a_model_has_a_colour_and_a_setting_a_kind_of_line() -> None:
    traces = [Trace(model, key, [1, 2], [1, 2], ["a", "b"]) for model in ("ILM", "MDM") for key in ("top_p", "steps")]
    lines = frontier_figure(traces, TITLE).axes[0].lines
    colours, dashes = [line.get_color() for line in lines], [line.get_linestyle() for line in lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert dashes[0] == dashes[2] != dashes[1] == dashes[3]


def test_labels_stand_beyond_the_ends() -> None:
    figure = frontier_figure([ILM], TITLE)
    figure.draw_without_rendering()
    boxes = {note.get_text(): note.get_window_extent() for note in notes(figure)}
    ends = figure.axes[0].transData.transform([(3.4, 1.6), (4.2, 2.5)])
    assert boxes["0.6"].x1 < ends[0][0]
    assert boxes["1.0"].x0 > ends[1][0]


@pytest.mark.parametrize("trace", [Trace("a", "b", [1], [2], ["x"]), Trace("a", "b", [1, 1], [2, 2], ["x", "y"])])
def test_points_without_a_direction(trace: Trace) -> None:
    assert notes(frontier_figure([trace], TITLE))


def test_time_is_drawn_on_a_log_scale_with_plain_numbers() -> None:
    figure = timing_figure([Trace("MDM", "steps", [0.25, 0.5, 2.0], [3.3, 3.0, 2.6], ["128", "512", "1024"])], TITLE)
    clear(figure)
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    shown = [text.get_text() for text in axes.get_xticklabels()]
    assert {"0.2", "0.5", "1", "2"} <= {*shown}
    assert axes.get_xlabel() == "seconds per text, log scale"


def test_times_below_a_second_are_milliseconds() -> None:
    figure = timing_figure([Trace("ILM", "top_p", [0.02, 0.04], [3.0, 2.6], ["0.5", "1.0"])], TITLE)
    assert figure.axes[0].get_xlabel() == "milliseconds per text, log scale"
    assert figure.axes[0].lines[0].get_xdata() == pytest.approx([20, 40])


def test_bars_grow_from_the_lowest_score() -> None:
    ilm = Judged("ILM", {"fluency": (4.2, 0.1), "coherence": (1.0, 0.0)})
    mdm = Judged("MDM", {"fluency": None, "coherence": (5.0, 0.0)})
    figure = judge_figure([ilm, mdm], TITLE)
    bars: list[Any] = list(figure.axes[0].patches)
    assert [(bar.get_y(), round(bar.get_y() + bar.get_height(), 6)) for bar in bars] == [
        (1, 4.2),
        (1, 1.0),
        (1, 1.0),
        (1, 5.0),
    ]
    lines: Any = figure.axes[0].collections
    errors = [segment[:, 1].tolist() for line in lines for segment in line.get_segments()]
    assert errors[0] == pytest.approx([4.1, 4.3])
    assert [note.get_text() for note in notes(figure)] == ["4.2", "1.0", "none", "5.0"]
    assert entries(figure) == ["ILM", "MDM"]
    clear(figure)


def test_many_models_get_no_numbers() -> None:
    rubrics = ["coherence", "consistency", "fluency", "spelling accuracy", "grammaticality", "non-redundancy"]
    figure = judge_figure([Judged(f"model {i}", dict.fromkeys(rubrics, (3.0, 0.1))) for i in range(8)], TITLE)
    assert not notes(figure)
    clear(figure)
    clear(judge_figure([Judged(f"model {i}", dict.fromkeys(rubrics, (3.0, 0.1))) for i in range(4)], TITLE))
