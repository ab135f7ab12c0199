"""The syntax of blanks: a text that a user typed becomes the pieces between its blanks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from insertlm.core.errors import InsertlmError

__all__ = ["cut_out", "decode_text", "is_control", "parse_blanks"]

# Underscores and the backslashes before them.
_UNDERSCORES = re.compile(r"(?<!\\)(\\*)(_+)")
_BLANK = 3  # underscores
_EXPECTED = "expected text with ___ where something is missing"


def parse_blanks(text: str) -> list[str]:
    """The pieces around the blanks, one more than there are blanks.

    Three or more underscores are a blank. A backslash makes the next underscore a plain one, so `\\___` is no blank but
    three plain underscores, since two are none. Before underscores, a plain backslash is written `\\\\`.
    """
    _check(text)
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
    for first, last in blanks:
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


def _check(text: str) -> None:
    if not text:
        raise InsertlmError(f"the text is empty; {_EXPECTED}")
    for place, character in enumerate(text):
        if unicodedata.category(character) == "Cs":  # so Python passes on bytes of the command line that are not UTF-8
            raise InsertlmError(f"the text is not Unicode at character {place}; {_EXPECTED}")
        if is_control(character):
            raise InsertlmError(
                f"the text has the control character U+{ord(character):04X} at character {place}; expected none but "
                "tabs and line ends"
            )
