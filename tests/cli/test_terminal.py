"""What the terminal shows of a trajectory, with colours and without."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console, RenderableType

from insertlm.cli.terminal import results_table, show_trajectory, standard_output, verdict
from insertlm.core.progress import progress_bar
from insertlm.inference.trajectory import Insertion, Trajectory

EVENTS = [Insertion(0, 0, 7, -0.5, 0.0), Insertion(1, 0, 12, -1.25, 0.25), Insertion(2, 2, 3, -2.0, 0.5)]
PATH = Trajectory([], [], EVENTS, 0.999)  # 12 7 3


def printed(renderable: RenderableType, width: int = 100, colours: bool = False) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=colours, color_system="standard" if colours else None).print(
        renderable
    )
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_every_line_is_the_text_so_far_with_the_new_token_marked() -> None:
    lines = printed(show_trajectory(PATH, str, 100))
    assert lines[:5] == [
        " step  text           log p   stop",
        "    0     ·   ·   ·          0.000",
        "    1     ·  ›7   ·  -0.500  0.250",
        "    2   ›12   7   ·  -1.250  0.500",
        "    3    12   7  ›3  -2.000  0.999",
    ]


def test_tokens_move_closer_and_then_close_up_where_there_is_less_room() -> None:
    assert printed(show_trajectory(PATH, str, 35))[4] == "    3   12  7 ›3  -2.000  0.999"
    assert printed(show_trajectory(PATH, str, 34), 60)[2:5] == [
        "    1  ›7       -0.500  0.250",
        "    2  ›12 7    -1.250  0.500",
        "    3   12 7›3  -2.000  0.999",
    ]


def test_a_step_that_writes_several_tokens_is_one_line() -> None:
    """With the number of its step, all its tokens marked, and the sum of their log-probabilities."""
    events = [Insertion(0, 0, 12, -0.5, 0.0), Insertion(0, 1, 3, -1.0, 0.0), Insertion(4, 1, 7, -0.25, 0.75)]
    assert printed(show_trajectory(Trajectory([], [], events, 1.0), str, 100))[1:4] == [
        "    0     ·   ·   ·          0.000",
        "    1   ›12   ·  ›3  -1.500  0.750",
        "    5    12  ›7   3  -0.250  1.000",
    ]


def test_a_probability_the_model_cannot_tell_is_a_dash() -> None:
    event = Insertion(0, 0, 7, -0.5, None)
    assert printed(show_trajectory(Trajectory([], [], [event], None), str, 100))[1:3] == [
        "    0    ·              –",
        "    1   ›7   -0.500     –",
    ]


def test_given_tokens_are_there_from_the_start_and_never_marked() -> None:
    infilled = Trajectory([], [1, 2], [Insertion(0, 1, 9, -0.5, 0.1)], 0.9)
    assert printed(show_trajectory(infilled, str, 100))[1:3] == [
        "    0    1  ·  2          0.100",
        "    1    1 ›9  2  -0.500  0.900",
    ]


def test_an_empty_text_has_one_line() -> None:
    assert printed(show_trajectory(Trajectory([], [], [], 0.75), str, 100))[1] == "    0               0.750"


def test_names_are_text_not_markup_and_may_be_wide() -> None:
    lines = printed(show_trajectory(PATH, {7: "[b]", 12: "語", 3: "x"}.__getitem__, 100))
    assert lines[4].startswith("    3     語  [b]   ›x ")


def test_colour_only_repeats_what_the_mark_says() -> None:
    assert "\x1b[1;30;42m›7" in "".join(printed(show_trajectory(PATH, str, 100), colours=True))
    assert "\x1b" not in "".join(printed(show_trajectory(PATH, str, 100)))


def test_verdicts_and_results() -> None:
    assert printed(verdict(True, "[1] 2")) == ["✓ [1] 2"]
    assert printed(verdict(False, "1 2")) == ["✗ 1 2"]
    table = printed(results_table([("a", "1.00 %", "x"), ("bcd", "20", "")]))
    assert table == ["  a      1.00 %    x", "  bcd        20"]


def test_nothing_moves_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_left_is_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        standard_output().print("x")
