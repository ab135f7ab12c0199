"""Results: a text with its blanks filled, with what was given, what was written, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from insertlm.inference.trajectory import Limit, Trajectory, explain
from insertlm.infill.requests import Given, Run, whole_word
from insertlm.text.fields import Field
from insertlm.text.tokenizers import Tokenizer

__all__ = ["Infilling", "Piece", "Span", "spell"]


# What Python users know the limits by.
_LIMITS: dict[Limit, str] = {
    "max_tokens": "max_tokens",
    "max_steps": "max_steps",
    "max_length": "the model",
    "blanks": "the most of a blank (max_length, or what the text says of it)",
}


class Span(NamedTuple):
    """A part of a text. new: written, not given   latest: written in the latest step"""

    text: str
    new: bool
    latest: bool = False


class Piece(NamedTuple):
    """A part of a finished text. order: the number of the event that wrote it; None: given"""

    text: str
    order: int | None


@dataclass(frozen=True)
class Infilling:
    """A text with its blanks filled. trajectory: how it was written, in ids   fields: what is said of each blank
    weights: of each blank, the log-probabilities of its choices"""

    trajectory: Trajectory
    given: Given
    tokenizer: Tokenizer
    fields: Sequence[Field] = ()
    weights: Sequence[Sequence[float]] = ()

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    @property
    def spans(self) -> list[Span]:
        """The whole text, in order."""
        return self._joined({gap: [Span(text, True)] for gap, text in self._texts.items() if text})

    @property
    def fills(self) -> list[str]:
        """What was written into each blank."""
        return [self._texts.get(gap, "") for gap in self.given.blanks]

    @property
    def named(self) -> dict[str, str]:
        """What was written into each blank that has a name."""
        fills = zip(self.fields, self.fills, strict=False)
        return {field.name: fill for field, fill in fills if field.name is not None}

    @property
    def probabilities(self) -> dict[str, dict[str, float]]:
        """By name, the probability of each choice of a blank, among all its choices: that the model writes just this
        there and ends, given what was written into the blanks before it. The likeliest come first."""
        found = {}
        for field, weights in zip(self.fields, self.weights, strict=False):
            if field.name is not None and weights:
                most = max(weights)
                parts = [math.exp(weight - most) for weight in weights]
                shares = {choice: part / sum(parts) for choice, part in zip(field.choices, parts, strict=True)}
                found[field.name] = dict(sorted(shares.items(), key=lambda item: -item[1]))
        return found

    @property
    def complete(self) -> bool:
        """Whether the model ended the text, with all constraints met; otherwise a limit did, see `note`."""
        return self.trajectory.complete

    @property
    def note(self) -> str | None:
        """Which limit ended the text, and what to do about it; None if the model ended it."""
        return explain(self.trajectory, _LIMITS)

    @property
    def pieces(self) -> list[Piece]:
        """The whole text, in order: what was given, and what each event wrote."""
        given, pieces, end = self.given, list[Piece](), 0
        for gap, numbers in sorted(self._inserted.items()):
            pieces.append(Piece(given.text[end : given.places[gap]], None))
            end = given.places[gap]
            parts = spell(self.tokenizer, self._ids(numbers), " " if gap in given.spaces else "")
            pieces += map(Piece, parts, numbers)
        return [piece for piece in (*pieces, Piece(given.text[end:], None)) if piece.text]

    @property
    def frames(self) -> Iterator[list[Span]]:
        """The text after each step that wrote something, with the new parts marked; see `_frame`."""
        done = 0
        for events in self.trajectory.steps:
            before, done = done, done + len(events)
            yield self._frame(done, before)

    @property
    def outcome(self) -> list[Span]:
        """The last of the frames, with nothing marked as new."""
        done = len(self.trajectory.events)
        return self._frame(done, done)

    def _frame(self, done: int, before: int) -> list[Span]:
        """The text after so many events, of which those up to `before` are not the latest. A blank that is still empty
        is a span without text."""
        here = {gap: [n for n in numbers if n < done] for gap, numbers in self._inserted.items()}
        parts = {gap: [span for span in self._parts(gap, ns, before) if span.text] for gap, ns in here.items()}
        empty = {gap: [Span("", True)] for gap in self.given.blanks if not parts.get(gap)}
        return self._joined({**parts, **empty})

    def spelling(self, words: Sequence[str]) -> Run:
        """The inserted ids that spell one of these words; empty if none of them was written."""
        # Matches are searched in the whole text, because a fill and its neighbours may form the word together.
        text, before = self.text, 0
        found = [match.span() for word in words for match in whole_word(word).finditer(text)]
        for gap, fill in sorted(self._texts.items()):
            first = self.given.places[gap] + before
            before += len(fill)
            for start, end in found:
                if start < first + len(fill) and end > first:
                    return self._spelt(gap, start - first, end - first)
        return ()

    @cached_property
    def _inserted(self) -> dict[int, list[int]]:
        """The numbers of the events that wrote into each gap, in reading order."""
        found: dict[int, list[int]] = {}
        gap = 0
        for event in self.trajectory.order:
            if event < 0:
                gap += 1
            else:
                found.setdefault(gap, []).append(event)
        return found

    @cached_property
    def _texts(self) -> dict[int, str]:
        """What was written into each gap."""
        return {gap: self._text(gap, numbers) for gap, numbers in self._inserted.items()}

    def _text(self, gap: int, numbers: Sequence[int]) -> str:
        text = self.tokenizer.decode(self._ids(numbers))
        return text.removeprefix(" ") if gap in self.given.spaces else text

    def _ids(self, numbers: Sequence[int]) -> list[int]:
        return [self.trajectory.events[number].token for number in numbers]

    def _parts(self, gap: int, numbers: Sequence[int], latest: int) -> list[Span]:
        """What some events wrote in a gap. latest: the first of the latest events"""
        # Always decode from the first token of the gap on: how a token reads may depend on those before it.
        parts, whole = list[Span](), ""
        for new, run in groupby(range(len(numbers)), key=lambda k: numbers[k] >= latest):
            *_, last = run
            text = self._text(gap, numbers[: last + 1])
            parts.append(Span(text[len(whole) :], True, new))
            whole = text
        return parts

    def _joined(self, fills: Mapping[int, Sequence[Span]]) -> list[Span]:
        given, spans, end = self.given, list[Span](), 0
        for gap in sorted(fills):
            spans += [Span(given.text[end : given.places[gap]], False), *fills[gap]]
            end = given.places[gap]
        return [span for span in (*spans, Span(given.text[end:], False)) if span.text or span.new]

    def _spelt(self, gap: int, start: int, end: int) -> Run:
        """The ids that cover the characters from start to end of a gap's text."""
        numbers = self._inserted[gap]
        lengths = [len(self._text(gap, numbers[:k])) for k in range(len(numbers) + 1)]
        first = max(k for k in range(len(numbers)) if k == 0 or lengths[k] <= start)
        last = min(k for k in range(first + 1, len(lengths)) if k == len(numbers) or lengths[k] >= end)
        return tuple(self._ids(numbers[first:last]))


def spell(tokenizer: Tokenizer, ids: Sequence[int], without: str = "") -> list[str]:
    """What each id adds to the text; joined, they are the whole text. A character of several ids belongs to the last
    one. without: removed from the beginning of the text, if it begins so"""
    whole = tokenizer.decode(ids).removeprefix(without)
    ends = (_shared(tokenizer.decode(ids[: k + 1]).removeprefix(without), whole) for k in range(len(ids) - 1))
    places = [0, *accumulate(ends, max), len(whole)] if ids else []
    return [whole[first:last] for first, last in pairwise(places)]


def _shared(one: str, other: str) -> int:
    """The length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
