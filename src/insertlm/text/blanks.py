"""The syntax of blanks: a text that a user typed becomes the pieces between its blanks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from insertlm.core.checks import as_whole, shown
from insertlm.core.errors import InsertlmError
from insertlm.text.fields import Field, Span, find_fields

__all__ = ["check_characters", "cut_out", "decode_text", "is_control", "missing_blank", "parse_blanks", "parse_text"]

# Underscores and the backslashes before them.
_UNDERSCORES = re.compile(r"(?<!\\)(\\*)(_+)")
_BLANK = 3  # underscores
_EXPECTED = "expected text with ___ where something is missing"
# What stands for a blank elsewhere, and is plain text here.
_ELSEWHERE = re.compile(
    r"\[(?:blank|mask|gap|infill)\]|<(?:blank|mask|gap|infill|fill_me)>|\{\{?\s*\}?\}", re.IGNORECASE
)
_TOO_SHORT = re.compile(r"(?<![\\_])__(?!_)")


def parse_text(text: str) -> tuple[list[str], list[Field]]:
    """The pieces around the blanks, one more than there are blanks, and what the text says of each blank. Blanks are
    runs of underscores, see `parse_blanks`, and fields, see fields.py."""
    _check(text)
    pieces, fields, end = [""], list[Field](), 0
    for span in [*find_fields(text), Span(len(text), len(text), "", None)]:
        first, *others = _cut(text[end : span.start])
        pieces[-1] += first
        pieces += others
        fields += [Field()] * len(others)
        pieces[-1] += span.plain
        if span.field is not None:
            pieces.append("")
            fields.append(span.field)
        end = span.end
    names = [field.name for field in fields if field.name is not None]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InsertlmError(f"{{{repeated[0]}}} is there twice; expected a name of its own for every blank")
    return pieces, fields


def parse_blanks(text: str) -> list[str]:
    """The pieces around the runs of underscores that are blanks.

    Three or more underscores are a blank. A backslash makes the next underscore a plain one, so `\\___` is no blank but
    three plain underscores, since two are none. Before underscores, a plain backslash is written `\\\\`.
    """
    _check(text)
    return _cut(text)


def _cut(text: str) -> list[str]:
    pieces, end = [""], 0
    for match in _UNDERSCORES.finditer(text):
        slashes, run = match.groups()
        plain = "_" * (len(slashes) % 2)
        run = run.removeprefix(plain)
        pieces[-1] += text[end : match.start()] + slashes[: len(slashes) // 2] + plain
        if len(run) >= _BLANK:
            pieces.append("")
        else:
            pieces[-1] += run
        end = match.end()
    pieces[-1] += text[end:]
    return pieces


def cut_out(text: str, blanks: Sequence[tuple[int, int]]) -> list[str]:
    """The pieces that are left when these ranges of characters are cut out. An empty range is a blank, too; underscores
    have no meaning here."""
    _check(text)
    pieces, end = list[str](), 0
    for first, last in _ranges(blanks):
        if not end <= first <= last <= len(text) or (pieces and first == end):
            raise InsertlmError(
                f"blanks: expected ranges of the {len(text)} characters, in order and apart, got {first} … {last} "
                f"behind {end}"
            )
        pieces.append(text[end:first])
        end = last
    return [*pieces, text[end:]]


def decode_text(data: bytes) -> str:
    """A text from a file or pipe, without the line end."""
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InsertlmError(f"the text is not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start}") from error


def is_control(character: str) -> bool:
    """Whether it does not belong in a text. Tabs and line ends do."""
    return unicodedata.category(character) == "Cc" and character not in "\t\n\r"


def missing_blank(text: str) -> str:
    """What to say about a text without a blank."""
    if _TOO_SHORT.search(text):
        hint = "; __ is one underscore short of a blank"
    else:
        found = _ELSEWHERE.search(text)
        hint = f"; {found[0]} is plain text here" if found else ""
    return f"the text has no blank; expected ___ where something is missing (or anywhere){hint}"


def check_characters(text: str, name: str) -> None:
    """Refuse characters that belong in no text. name: of the text, for the message"""
    for place, character in enumerate(text):
        if unicodedata.category(character) == "Cs":  # so Python passes on bytes of the command line that are not UTF-8
            raise InsertlmError(f"{name} is not Unicode at character {place}; expected characters that UTF-8 can hold")
        if is_control(character):
            raise InsertlmError(
                f"{name} has the control character U+{ord(character):04X} at character {place}; expected none but "
                "tabs and line ends"
            )


def _check(text: str) -> None:
    if not text:
        raise InsertlmError(f"the text is empty; {_EXPECTED}")
    check_characters(text, "the text")


def _ranges(blanks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    try:
        ends = [(as_whole(first), as_whole(last)) for first, last in blanks]
    except (TypeError, ValueError):
        ends = [(None, None)]
    ranges = [(first, last) for first, last in ends if first is not None and last is not None]
    if len(ranges) < len(ends):
        raise InsertlmError(f"blanks: expected pairs of whole numbers, got {shown(blanks)}")
    return ranges
