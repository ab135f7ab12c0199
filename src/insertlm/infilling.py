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
  are barred; should it come about by others, these are barred too and the sample is written again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from insertlm.blanks import cut_out, parse_blanks
from insertlm.decoding.settings import Bounds, DecodeConfig, Prompt
from insertlm.decoding.trajectory import Trajectory
from insertlm.errors import InsertlmError
from insertlm.evaluation.accuracy import generate
from insertlm.families.base import Family
from insertlm.tokenizers import Tokenizer

__all__ = ["Infilling", "Lengths", "Request", "Span", "infill"]

Run = tuple[int, ...]
Lengths = int | None | Sequence[int | None]
_ATTEMPTS = 50  # at keeping banned words out of a sample


class Span(NamedTuple):
    """A part of a text: given or new, and of what is new perhaps the latest."""

    text: str
    new: bool
    latest: bool = False


@dataclass(frozen=True)
class Request:
    """What is asked of a text with blanks.

    text: with `___` for blanks, see `parse_blanks`   blanks: ranges of its characters instead, see `cut_out`
    min_length, max_length: of every blank in tokens, or a list with one for each (None: at least one token, if the
    model's family can be told so; no maximum)   lengths_of: texts for the blanks, whose numbers of tokens are taken for
    both: a masked model needs to know them   banned, required: words, as they are written
    """

    text: str
    blanks: Sequence[tuple[int, int]] | None = None
    anywhere: bool = False
    min_length: Lengths = None
    max_length: Lengths = None
    banned: Sequence[str] = ()
    required: Sequence[str] = ()
    lengths_of: Sequence[str] | None = None


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
    tasks = _tasks(family, tokenizer, requests, settings)
    prompts = {number: task.prompt(seed + number) for number, task in enumerate(tasks)}
    done: dict[int, Infilling] = {}
    for _ in range(_ATTEMPTS):
        written = generate(family, list(prompts.values()), settings, batch_size, progress)
        again: dict[int, Prompt] = {}
        for (number, prompt), trajectory in zip(prompts.items(), written, strict=True):
            done[number] = Infilling(trajectory, tasks[number].given, tokenizer)
            if spelling := done[number].spelling(requests[number].banned):
                again[number] = replace(prompt, banned=(*prompt.banned, spelling))
        if not again:
            return [done[number] for number in range(len(tasks))]
        prompts, progress = again, lambda done: None
    stuck = requests[min(prompts)].banned
    raise InsertlmError(f"cannot keep {' and '.join(map(repr, stuck))} out of the text; expected other banned words")


def _tasks(family: Family, tokenizer: Tokenizer, requests: Sequence[Request], settings: DecodeConfig) -> list[_Task]:
    """Requests in ids; several samples of one share it."""
    heads = _heads(tokenizer) if family.obedient else frozenset()
    tasks: dict[int, _Task] = {}
    for number, request in enumerate(requests, start=1):
        if id(request) not in tasks:
            try:
                tasks[id(request)] = _Task.of(family, tokenizer, request, settings, heads)
            except InsertlmError as error:
                where = f"text {number}: " if requests[0] is not requests[-1] else ""
                raise InsertlmError(f"{where}{error}") from error
    return [tasks[id(request)] for request in requests]


@dataclass(frozen=True)
class _Given:
    """What was given, in ids.

    text: all pieces, joined   ids: what the model sees of them   places: by open gap, where it is in the text
    blanks: the gap of each blank   spaces: the gaps before which a space is hidden
    """

    text: str
    ids: list[int]
    places: Mapping[int, int]
    blanks: list[int]
    spaces: frozenset[int]

    @classmethod
    def of(cls, pieces: Sequence[str], tokenizer: Tokenizer, anywhere: bool) -> _Given:
        ids, places, blanks, spaces, end = list[int](), dict[int, int](), list[int](), list[int](), 0
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            hidden = not last and piece.endswith(" ") and (number == 0 or len(piece) > 1)
            seen = piece[:-1] if hidden else piece
            tokens = tokenizer.encode(seen)
            if anywhere:
                places |= {len(ids) + k: end + at for k, at in _boundaries(tokenizer, seen, tokens).items()}
            ids += tokens
            end += len(piece)
            if not last:
                if blanks and blanks[-1] == len(ids):
                    raise InsertlmError(f"blanks {number} and {number + 1}: the model sees nothing between them")
                blanks.append(len(ids))
                places[len(ids)] = end  # behind the space, and no longer a boundary of the piece
                spaces += [len(ids)] if hidden else []
        return cls("".join(pieces), ids, places, blanks, frozenset(spaces))

    def bounds_for(self, fills: Sequence[str], tokenizer: Tokenizer) -> dict[int, Bounds]:
        """As many tokens for every blank as such a fill has."""
        if len(fills) != len(self.blanks):
            raise InsertlmError(f"lengths_of: expected a text for each of {len(self.blanks)} blanks, got {len(fills)}")
        written = {
            gap: f" {fill}" if gap in self.spaces else fill for gap, fill in zip(self.blanks, fills, strict=True)
        }
        counts = {gap: len(tokenizer.encode(fill)) for gap, fill in written.items()}
        return {gap: Bounds(count, count) for gap, count in counts.items()}


@dataclass(frozen=True)
class Infilling:
    """A text with its blanks filled. trajectory: how it came about, in ids"""

    trajectory: Trajectory
    given: _Given
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
        found = [match.span() for word in words for match in _whole(word).finditer(text)]
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


@dataclass(frozen=True)
class _Task:
    """A request in ids, see Prompt."""

    given: _Given
    bounds: Mapping[int, Bounds]
    banned: tuple[Run, ...]
    required: tuple[Run, ...]
    heads: frozenset[int]

    @classmethod
    def of(
        cls, family: Family, tokenizer: Tokenizer, request: Request, settings: DecodeConfig, heads: frozenset[int]
    ) -> _Task:
        pieces = parse_blanks(request.text) if request.blanks is None else cut_out(request.text, request.blanks)
        if len(pieces) == 1 and not request.anywhere:
            raise InsertlmError("the text has no blank; expected ___ where something is missing (or anywhere)")
        given = _Given.of(pieces, tokenizer, anywhere=False)
        if request.lengths_of is None:
            bounds = _bounds(request, given.blanks, 1 if family.obedient else 0)
        else:
            bounds = given.bounds_for(request.lengths_of, tokenizer)
        _check_room(family, settings, given, bounds)
        if request.anywhere:
            given = _Given.of(pieces, tokenizer, anywhere=True)  # takes long for texts that have no room anyway
        banned, required = _banned(family, tokenizer, request), _required(family, tokenizer, request)
        return cls(given, bounds, banned, required, heads if given.spaces else frozenset())

    def prompt(self, seed: int) -> Prompt:
        given = self.given
        heads = (given.spaces, self.heads) if self.heads else ()
        return Prompt([], seed, given.ids, frozenset(given.places), self.bounds, self.banned, self.required, *heads)


def _boundaries(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> dict[int, int]:
    """Where a text can be taken apart between its tokens: how many tokens and how many characters are before it."""
    if tokenizer.decode(ids) != text:
        raise InsertlmError("anywhere: the model's tokenizer does not give back what it reads; expected blanks alone")
    found = {}
    for k in range(len(ids) + 1):
        before = tokenizer.decode(ids[:k])
        if before + tokenizer.decode(ids[k:]) == text:
            found[k] = len(before)
    return found


def _bounds(request: Request, blanks: Sequence[int], least: int) -> dict[int, Bounds]:
    lows = _each("min_length", request.min_length, len(blanks))
    highs = _each("max_length", request.max_length, len(blanks))
    bounds = {}
    for gap, low, high in zip(blanks, lows, highs, strict=True):
        default = least if high is None else min(least, high)
        bound = Bounds(default if low is None else low, high)
        if bound.least < 0 or (high is not None and high < bound.least):
            raise InsertlmError(f"expected 0 <= min_length <= max_length, got {bound.least} and {high}")
        if bound != Bounds():
            bounds[gap] = bound
    return bounds


def _each(name: str, lengths: Lengths, count: int) -> list[int | None]:
    if lengths is None or isinstance(lengths, int):
        return [lengths] * count
    if len(lengths) != count:
        raise InsertlmError(f"{name}: expected a number, or one for each of the {count} blanks, got {len(lengths)}")
    return list(lengths)


def _check_room(family: Family, settings: DecodeConfig, given: _Given, bounds: Mapping[int, Bounds]) -> None:
    longest = min(settings.max_length or family.model.max_length, family.model.max_length) - family.framing
    owed = sum(least for least, _ in bounds.values())
    if len(given.ids) + owed > longest:
        raise InsertlmError(
            f"the text has {len(given.ids):,} tokens and its {len(given.blanks):,} blanks need {owed:,} or more; "
            f"the model takes {longest:,}"
        )


def _required(family: Family, tokenizer: Tokenizer, request: Request) -> tuple[Run, ...]:
    runs = {word: tuple(tokenizer.encode(f" {word}")) for word in request.required}
    for word, run in runs.items():
        if not word.strip() or not _can_write(family, run) or word not in tokenizer.decode(run):
            raise InsertlmError(f"the model cannot write {word!r}; expected other required words")
        if banned := [other for other in request.banned if _whole(other).search(word)]:
            raise InsertlmError(f"{word!r} is required and {banned[0]!r} is banned; expected one of the two")
    return tuple(runs.values())


def _banned(family: Family, tokenizer: Tokenizer, request: Request) -> tuple[Run, ...]:
    if not all(word.strip() for word in request.banned):
        raise InsertlmError("banned: expected words, got an empty one")
    runs = (tuple(tokenizer.encode(form)) for word in request.banned for form in (word, f" {word}"))
    return tuple(run for run in dict.fromkeys(runs) if run and _can_write(family, run))


def _heads(tokenizer: Tokenizer) -> frozenset[int]:
    """What begins with a space."""
    spaced = {token: text for token in tokenizer.writable if (text := tokenizer.decode([token])).startswith(" ")}
    return frozenset(token for token, text in spaced.items() if text.strip()) or frozenset(spaced)


def _can_write(family: Family, run: Run) -> bool:
    return bool(torch.isin(torch.tensor(run), family.writable.cpu()).all())


def _whole(word: str) -> re.Pattern[str]:
    """As a word of its own: not next to letters or digits, where the word itself has one."""
    before, behind = (r"\b" if re.match(r"\w", edge) else "" for edge in (word[0], word[-1]))
    return re.compile(before + re.escape(word) + behind)
