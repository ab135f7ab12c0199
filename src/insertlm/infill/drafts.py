"""Texts as readers see them while they are written: cells, among which every insertion puts a new one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

from insertlm.families.base import Family
from insertlm.inference.session import Progress, Session
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.text.tokenizers import Tokenizer

__all__ = ["Draft", "Event", "Piece", "Stream", "Writing", "spell"]

Result = TypeVar("Result")


class Event(NamedTuple):
    """One insertion.

    sample: the number of the text among those asked for   order: the number of the insertion in its text
    step: at which it happened   at: the place of the new cell, as in `list.insert(at, text)`   token: its id
    text: what that token alone spells   probability: of this token in this place among all that was in play
    stop_probability: how sure the model was, before, that nothing is missing (None: its family cannot tell)
    """

    sample: int
    order: int
    step: int
    at: int
    token: int
    text: str
    probability: float
    stop_probability: float | None


class Piece(NamedTuple):
    """A part of a finished text. order: of the event that wrote it; None: it was given"""

    text: str
    order: int | None


class Draft(ABC, Generic[Result]):
    """A text under way.

    prompt: what is to be decoded   cells: the given text, cut wherever something may be inserted
    gaps: the ranks of these places; none of either if nothing is given   held: it is not shown before it is done
    """

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, cells: Sequence[str] = (), gaps: Sequence[int] = ()
    ) -> None:
        self.prompt, self.tokenizer, self.cells, self.held = prompt, tokenizer, list(cells), False
        self._before = {gap: number for number, gap in enumerate(gaps, start=1)}
        self._given = [True] * len(prompt.start)

    @abstractmethod
    def finish(self, trajectory: Trajectory) -> Result | None:
        """What the text is in the end. None: `prompt`, which is another now, is to be decoded instead."""

    def see(self, progress: Progress, sample: int = 0) -> tuple[list[Event], Result | None]:
        """What is to be shown after a step, and the result, if this was the last."""
        if progress.ended is None:
            return [] if self.held else self._show(progress.events, sample), None
        result = self.finish(progress.ended)
        late = progress.ended.events if self.held and result is not None else []
        return self._show(late, sample), result

    def _show(self, insertions: Sequence[Insertion], sample: int) -> list[Event]:
        return [self._event(insertion, sample) for insertion in insertions]

    def _event(self, insertion: Insertion, sample: int) -> Event:
        step, rank, token, log_probability, stop = insertion
        gap = sum(self._given[:rank])
        order = len(self._given) - len(self.prompt.start)
        self._given.insert(rank, False)
        at = rank - gap + self._before.get(gap, 0)
        return Event(sample, order, step, at, token, self.tokenizer.decode([token]), math.exp(log_probability), stop)


class Writing(Draft[Trajectory]):
    """A text written from nothing."""

    def finish(self, trajectory: Trajectory) -> Trajectory:
        return trajectory


class Stream(Generic[Result]):
    """Events of texts as they happen. `results` are the finished texts; to ask for them is to wait for the end."""

    def __init__(
        self, family: Family, drafts: Sequence[Draft[Result]], settings: DecodeConfig, batch_size: int
    ) -> None:
        self._results: dict[int, Result] = {}
        self._events = self._write(family, drafts, settings, batch_size)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    @property
    def results(self) -> list[Result]:
        deque(self._events, maxlen=0)
        return [self._results[number] for number in sorted(self._results)]

    def _write(
        self, family: Family, drafts: Sequence[Draft[Result]], settings: DecodeConfig, batch_size: int
    ) -> Iterator[Event]:
        """At most `batch_size` are under way; when one ends another begins."""
        session, waiting, under_way = Session(family), deque(range(len(drafts))), dict[int, int]()
        while waiting or under_way:
            begin = [waiting.popleft() for _ in range(min(len(waiting), batch_size - len(under_way)))]
            keys = session.add([drafts[number].prompt for number in begin], settings)
            under_way |= dict(zip(keys, begin, strict=True))
            for progress in session.step():
                number = under_way[progress.key]
                events, result = drafts[number].see(progress, number)
                yield from events
                if progress.ended is not None:
                    del under_way[progress.key]
                    if result is None:
                        waiting.appendleft(number)
                    else:
                        self._results[number] = result


def spell(tokenizer: Tokenizer, ids: Sequence[int], without: str = "") -> list[str]:
    """What each id adds to the text; joined, they are the whole text. A character of several ids belongs to the last of
    them. without: what the text is to be shown without, if it begins so"""
    whole = tokenizer.decode(ids).removeprefix(without)
    ends = (_shared(tokenizer.decode(ids[: k + 1]).removeprefix(without), whole) for k in range(len(ids) - 1))
    places = [0, *accumulate(ends, max), len(whole)] if ids else []
    return [whole[first:last] for first, last in pairwise(places)]


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
