"""Fields: blanks with a name, and with what may be written into them. `{name}`, `{name:3-8 words}`, `{day|Mon|Tue}`.

What is a field:

- A brace, a name (a letter, then letters, digits and underscores), and then `}`; or `|` and choices; or `:` and a
  length or a pattern, which begin with a digit, `about `, `up to ` or `/`. All of it in one line.
- Once so much is there, the rest must be right: a mistake is refused, and no field turns into plain text silently.
- Every other brace is plain text: `{}`, `{ x }`, `{"a": 1}`, `{color: red}`, and so is one behind another, `{{name}}`.
- A backslash makes the brace of a field a plain one: `\\{name}`. Before a field, a plain backslash is written `\\\\`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from insertlm.core.errors import InsertlmError

__all__ = ["Field", "Span", "find_fields"]

_NAME = r"(?P<name>[^\W\d_](?:(?!___)\w)*)"
# What is read has a bound, so that a text of many braces takes no longer than others of its length.
_CHOICES = r"\|(?P<choices>(?:\\.|[^\\{}\n]){0,4000})"
# A pattern ends at the first slash with a brace behind it.
_PATTERN = r"[^/{}\n]*/(?P<pattern>(?:\\.|(?!/\})[^\\\n]){1,300})/(?=\})"
_SPEC = rf":(?P<spec>(?=\d|about |up to |/)(?:{_PATTERN}|[^{{}}\n]*))"
_FIELD = re.compile(rf"(?<![\\{{])(?P<slashes>\\*)\{{{_NAME}(?:{_CHOICES}|{_SPEC})?\}}")
_LENGTH = re.compile(
    r"about (?P<about>\d{1,9}) words?"
    r"|(?:up to (?P<up>\d{1,9})|(?P<least>\d{1,9})(?:-(?P<most>\d{1,9})|(?P<open>\+))?) (?P<unit>word|token)s?"
)
_BY_ARGUMENT = "choices"  # what {day|choices} says in place of choices
Range = tuple[int, int | None]


@dataclass(frozen=True)
class Field:
    """What a text says of one of its blanks. Of `___` it says nothing.

    words, tokens: least and most (None: no maximum)   about: how many words belong there, a hint
    pattern: a regular expression   choices: as written in the text   listed: whether they are given by argument
    """

    name: str | None = None
    words: Range | None = None
    tokens: Range | None = None
    about: int | None = None
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    listed: bool = False


class Span(NamedTuple):
    """A field in a text, from `start` to `end` with the backslashes before it, or a brace that a backslash makes a
    plain one (field: None). plain: the characters of it that are plain text"""

    start: int
    end: int
    plain: str
    field: Field | None


def find_fields(text: str) -> Iterator[Span]:
    """All fields of a text, from left to right."""
    place = 0
    while match := _FIELD.search(text, place):
        slashes = len(match["slashes"])
        plain = slashes % 2 == 1
        place = match.start() + slashes + 1 if plain else match.end()
        halved = "\\" * (slashes // 2)
        yield Span(match.start(), place, halved + "{" * plain, None if plain else _read(match))


def _read(match: re.Match[str]) -> Field:
    name, whole = match["name"], _shortened(match[0][len(match["slashes"]) :])
    if match["choices"] is not None:
        choices = tuple(re.sub(r"\\([|}\\])", r"\1", part) for part in _parts(match["choices"]))
        if choices == (_BY_ARGUMENT,):
            return Field(name, listed=True)
        if len(choices) == 1:
            raise InsertlmError(
                f"{whole}: expected two choices or more, or {{{name}|choices}} and the argument choices"
            )
        if len({*choices}) < len(choices):
            raise InsertlmError(f"{whole}: a choice is there twice; expected different ones")
        return Field(name, choices=choices)
    if match["spec"] is None:
        return Field(name)
    pattern, lengths = match["pattern"], match["spec"]
    if pattern is not None:
        lengths = lengths[: -len(pattern) - 2].strip().removesuffix(",")
    parts = [part.strip() for part in lengths.split(",")] if lengths or pattern is None else []
    return replace(Field(name, pattern=pattern), **_lengths(name, parts, whole, pattern is not None))


def _lengths(name: str, parts: list[str], whole: str, by_pattern: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        match = _LENGTH.fullmatch(part)
        if match is None:
            forms = ("", ":3-8 words", ":about 5 words", ":up to 9 tokens", ":/regular expression/", "|one|two")
            known = ", ".join(f"{{{name}{form}}}" for form in forms)
            raise InsertlmError(f"{whole}: expected one of {known}; for a plain brace write \\{{")
        kind = "about" if match["about"] else match["unit"] + "s"
        if kind in found:
            raise InsertlmError(f"{whole}: {part!r} comes second; expected one length of a kind")
        found[kind] = int(match["about"]) if match["about"] else _range(match, whole)
    if by_pattern and found.keys() - {"tokens"}:
        raise InsertlmError(f"{whole}: expected a number of words or a regular expression, not both")
    return found


def _range(match: re.Match[str], whole: str) -> Range:
    if match["up"]:
        most = int(match["up"])
        return min(1, most), most
    least = int(match["least"])
    most = int(match["most"] or least)
    if most < least:
        raise InsertlmError(f"{whole}: expected the smaller number first")
    return least, None if match["open"] else most


def _shortened(whole: str) -> str:
    return whole if len(whole) < 60 else f"{whole[:59]}…"


def _parts(choices: str) -> list[str]:
    """Cut at every | without a backslash before it."""
    return re.findall(r"(?:^|\|)((?:\\.|[^\\|])*)", choices)
