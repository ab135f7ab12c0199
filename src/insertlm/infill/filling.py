"""Filling in blanks, from text to text.

- What was given comes back byte for byte: a filled text is put together from the user's own pieces and the fills, never
  from decoded ids of what was given.
- A single space before a blank is not shown to the model, which then reads on from a word as in its training texts and
  writes the space itself: the first token of the fill must begin with a space and go on (or be a space, if the
  vocabulary has no such; it may be anything if it has none with spaces, or if the family cannot be told). In the result
  that space is the given one and no part of the fill. It is given back in any case, and a piece that is nothing but a
  space between two blanks is shown.
- With `anywhere` the model may insert outside of blanks too, wherever two tokens of the given text meet without sharing
  a character. The given text is then still there, in order, in `spans`.
- A required word is written as its tokens, with a space before it, in one piece: it is in a fill letter for letter, if
  need be as a part of a longer word.
- A banned word, as a whole word, is in no fill, nor made by a fill together with the text beside it. Its usual tokens
  are barred; should it come about by others, these are barred too and the sample is written again (with another seed
  if they cannot be barred, since a required word has them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.inference.batches import generate
from insertlm.inference.constraints import contradicts
from insertlm.inference.settings import DecodeConfig
from insertlm.inference.trajectory import Trajectory
from insertlm.infill.drafts import Draft, Piece, spell
from insertlm.infill.requests import Given, Lengths, Request, Run, Task, whole_word
from insertlm.text.tokenizers import Tokenizer

__all__ = ["Filling", "Infilling", "Lengths", "Request", "Span", "begin", "infill"]

_ATTEMPTS = 50  # at keeping banned words out of a sample


class Span(NamedTuple):
    """A part of a text: given or new, and of what is new perhaps the latest."""

    text: str
    new: bool
    latest: bool = False


def infill(
    family: Family,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    settings: DecodeConfig,
    seed: int = 0,
    batch_size: int = 64,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Infilling]:
    """A text for every request, the i-th with the seed `seed + i`; it depends on these and the model alone."""
    fillings = begin(family, tokenizer, requests, settings, seed)
    done: dict[Filling, Infilling] = {}
    left = fillings
    while left:
        written = generate(family, [filling.prompt for filling in left], settings, batch_size, progress)
        for filling, trajectory in zip(left, written, strict=True):
            if (result := filling.finish(trajectory)) is not None:
                done[filling] = result
        left, progress = [filling for filling in left if filling not in done], lambda done: None
    return [done[filling] for filling in fillings]


def begin(
    family: Family, tokenizer: Tokenizer, requests: Sequence[Request], settings: DecodeConfig, seed: int
) -> list[Filling]:
    """What to decode for requests, the i-th with the seed `seed + i`. Several samples of one share their ids."""
    tasks: dict[int, Task] = {}
    for number, request in enumerate(requests, start=1):
        if id(request) not in tasks:
            try:
                tasks[id(request)] = Task.of(family, tokenizer, request, settings)
            except InsertlmError as error:
                where = f"text {number}: " if requests[0] is not requests[-1] else ""
                raise InsertlmError(f"{where}{error}") from error
    return [Filling(tasks[id(request)], request, tokenizer, seed + i) for i, request in enumerate(requests)]


class Filling(Draft["Infilling"]):
    """A sample of a request under way. With banned words it may have to be written again, so it is not shown before it
    is done."""

    def __init__(self, task: Task, request: Request, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(task.prompt(seed), tokenizer, task.given.cells, sorted(task.given.places))
        self.given, self.banned, self.seed, self.attempts = task.given, request.banned, seed, 0
        self.held = bool(request.banned)

    def finish(self, trajectory: Trajectory) -> Infilling | None:
        result = Infilling(trajectory, self.given, self.tokenizer)
        spelling = result.spelling(self.banned)
        if not spelling:
            return result
        self.attempts += 1
        if self.attempts == _ATTEMPTS:
            words = " and ".join(map(repr, self.banned))
            raise InsertlmError(f"cannot keep {words} out of the text; expected other banned words")
        again = replace(self.prompt, banned=(*self.prompt.banned, spelling))
        if contradicts(again):
            again = replace(self.prompt, seed=self.seed + (self.attempts << 32))
        self.prompt = again
        return None


@dataclass(frozen=True)
class Infilling:
    """A text with its blanks filled. trajectory: how it came about, in ids"""

    trajectory: Trajectory
    given: Given
    tokenizer: Tokenizer

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    @property
    def spans(self) -> list[Span]:
        """All of the text, in order."""
        return self._joined({gap: [Span(text, True)] for gap, text in self._texts.items()})

    @property
    def fills(self) -> list[str]:
        """What went into each blank."""
        return [self._texts.get(gap, "") for gap in self.given.blanks]

    @property
    def complete(self) -> bool:
        """Whether the model ended it, with all demands met; else a limit on length or steps did."""
        return self.trajectory.complete

    @property
    def pieces(self) -> list[Piece]:
        """All of the text, in order: what was given, and what each event wrote."""
        given, pieces, end = self.given, list[Piece](), 0
        for gap, numbers in sorted(self._inserted.items()):
            pieces.append(Piece(given.text[end : given.places[gap]], None))
            end = given.places[gap]
            parts = spell(self.tokenizer, self._ids(numbers), " " if gap in given.spaces else "")
            pieces += map(Piece, parts, numbers)
        return [piece for piece in (*pieces, Piece(given.text[end:], None)) if piece.text]

    @property
    def frames(self) -> Iterator[list[Span]]:
        """The text after every step that wrote something, with what it wrote marked."""
        done = 0
        for events in self.trajectory.steps:
            before, done = done, done + len(events)
            here = {gap: [n for n in numbers if n < done] for gap, numbers in self._inserted.items()}
            yield self._joined({gap: self._parts(gap, numbers, before) for gap, numbers in here.items()})

    def spelling(self, words: Sequence[str]) -> Run:
        """The inserted ids of one of these words, if there is one."""
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
        """By gap, the numbers of the events that wrote there, in reading order."""
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
        """By gap, what was written there."""
        return {gap: self._text(gap, numbers) for gap, numbers in self._inserted.items()}

    def _text(self, gap: int, numbers: Sequence[int]) -> str:
        text = self.tokenizer.decode(self._ids(numbers))
        return text.removeprefix(" ") if gap in self.given.spaces else text

    def _ids(self, numbers: Sequence[int]) -> list[int]:
        return [self.trajectory.events[number].token for number in numbers]

    def _parts(self, gap: int, numbers: Sequence[int], latest: int) -> list[Span]:
        """What some events wrote in a gap. latest: the first of the latest events"""
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
        return [span for span in (*spans, Span(given.text[end:], False)) if span.text]

    def _spelt(self, gap: int, start: int, end: int) -> Run:
        """The ids that hold the characters from start to end of what is in a gap."""
        numbers = self._inserted[gap]
        lengths = [len(self._text(gap, numbers[:k])) for k in range(len(numbers) + 1)]
        first = max(k for k in range(len(numbers)) if k == 0 or lengths[k] <= start)
        last = min(k for k in range(first + 1, len(lengths)) if k == len(numbers) or lengths[k] >= end)
        return tuple(self._ids(numbers[first:last]))
