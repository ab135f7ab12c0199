"""Which underscores are blanks, and what is no text."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.text.blanks import cut_out, decode_text, parse_blanks

text = st.text("ab_\\ é", max_size=12)


@pytest.mark.parametrize(
    ("typed", "pieces"),
    [
        ("The conference, ___ was postponed.", ["The conference, ", " was postponed."]),
        ("___", ["", ""]),
        ("_______", ["", ""]),
        ("a__b_c", ["a__b_c"]),
        ("___ and ___", ["", " and ", ""]),
        (r"\___", ["___"]),
        (r"\____", ["_", ""]),
        (r"a\___ b___", ["a___ b", ""]),
        (r"\\___", ["\\", ""]),
        (r"\\\___", [r"\___"]),
        (r"C:\new\\n", [r"C:\new\\n"]),
    ],
)
def test_three_underscores_are_a_blank_and_a_backslash_makes_plain_ones(typed: str, pieces: list[str]) -> None:
    assert parse_blanks(typed) == pieces


@given(st.lists(text, min_size=2, max_size=4).filter(lambda pieces: all(pieces[1:-1])))
def test_any_pieces_can_be_typed(pieces: list[str]) -> None:
    """Before underscores, double every backslash; then a backslash before each."""
    typed = [re.sub(r"(\\*)_", r"\1\1\\_", piece) for piece in pieces]
    before = [re.sub(r"(\\*)$", r"\1\1", piece, count=1) for piece in typed[:-1]]  # behind it comes a blank
    assert parse_blanks("___".join([*before, typed[-1]])) == pieces


@given(text.filter(bool), st.data())
def test_ranges_are_cut_out(whole: str, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    blanks = list(zip(ends[::2], ends[1::2], strict=False))
    if any(last == first for (_, last), (first, _) in pairwise(blanks)):
        with pytest.raises(InsertlmError, match=r"^blanks: expected ranges of the \d+ characters, in order and apart"):
            cut_out(whole, blanks)
        return
    pieces = cut_out(whole, blanks)
    removed = [whole[first:last] for first, last in blanks]
    assert "".join(part for pair in zip(pieces, [*removed, ""], strict=True) for part in pair) == whole


@pytest.mark.parametrize("blanks", [[(3, 2)], [(0, 9)], [(-1, 1)], [(1, 2), (0, 1)]])
def test_ranges_that_are_none(blanks: list[tuple[int, int]]) -> None:
    with pytest.raises(InsertlmError, match=r"^blanks: expected ranges of the 3 characters"):
        cut_out("abc", blanks)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("", "the text is empty; expected text with ___ where something is missing"),
        ("a\0b", "the text has the control character U+0000 at character 1; expected none but tabs and line ends"),
        ("\x1b[0m", "the text has the control character U+001B at character 0; expected none but tabs and line ends"),
        ("ab\udcff", "the text is not Unicode at character 2; expected characters that UTF-8 can hold"),
    ],
)
def test_what_is_no_text(typed: str, line: str) -> None:
    for parse in (parse_blanks, lambda text: cut_out(text, [])):
        with pytest.raises(InsertlmError) as caught:
            parse(typed)
        assert str(caught.value) == line


def test_tabs_and_line_ends_are_text() -> None:
    assert parse_blanks("a\t___\r\nb") == ["a\t", "\r\nb"]


def test_many_backslashes_take_no_longer_than_other_text() -> None:
    """Looking at them again from each of them would take ten minutes here."""
    text = "\\" * 300_000 + "a"
    assert parse_blanks(text) == [text]


def test_characters_that_join_others_are_text() -> None:
    assert parse_blanks("\U0001f469\u200d\U0001f52c ___") == ["\U0001f469\u200d\U0001f52c ", ""]


def test_bytes_from_a_pipe() -> None:
    assert decode_text("é ___\n\n".encode()) == "é ___\n"
    assert decode_text(b"a\r\n") == "a"
    assert decode_text(b"a\r\r\n") == "a\r"
    with pytest.raises(InsertlmError, match=r"^the text is not UTF-8: byte 0xff at byte 3$"):
        decode_text("é ".encode() + b"\xff")
