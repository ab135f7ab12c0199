"""Drafts while they are written: events as they happen, and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from insertlm.inference.engine import Author
from insertlm.inference.scheduler import Scheduler
from insertlm.inference.settings import DecodeConfig
from insertlm.infill.drafts import Draft, Event

__all__ = ["Stream"]

Result = TypeVar("Result")


class Stream(Generic[Result]):
    """Iterating gives the events of all texts as they happen. `results` are the finished texts; reading it runs
    everything to the end. Whoever has seen enough calls `stop`.

    batch_size: how many texts run at once; when one ends the next begins
    watched: False if only results are needed, which then come faster, and without events
    progress: called with the number of finished texts
    """

    def __init__(
        self,
        family: Author,
        drafts: Sequence[Draft[Result]],
        settings: DecodeConfig,
        batch_size: int,
        *,
        watched: bool = True,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._done: dict[int, Result] = {}
        self._stopped = False
        # A generator: nothing is computed before the first event or result is asked for.
        self._events = self._write(Scheduler(family, batch_size, watched=watched), drafts, settings, progress)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def stop(self) -> None:
        """End all texts where they are, from the next step on: `results` are then the texts as far as they were
        written, and `complete` is false. What was asked of a text, such as required words, may be missing in it."""
        self._stopped = True

    @property
    def results(self) -> list[Result]:
        deque(self._events, maxlen=0)
        return [self._done[number] for number in sorted(self._done)]

    def _write(
        self,
        scheduler: Scheduler,
        drafts: Sequence[Draft[Result]],
        settings: DecodeConfig,
        progress: Callable[[int], None],
    ) -> Iterator[Event]:
        places = [(number, which) for number, draft in enumerate(drafts) for which in range(len(draft.prompts))]
        keys = scheduler.submit([prompt for draft in drafts for prompt in draft.prompts], settings)
        place_of = dict(zip(keys, places, strict=True))
        while len(scheduler):
            # What has happened in a step is shown to its end, whenever somebody stops.
            for each in scheduler.stop() if self._stopped else scheduler.advance():
                number, which = place_of.pop(each.key) if each.ended else place_of[each.key]
                events, result, again = drafts[number].see(each, number, which)
                yield from events
                if result is not None:
                    self._done[number] = result
                if again is not None:
                    [key] = scheduler.submit([again], settings, first=True)
                    place_of[key] = number, which
            progress(len(self._done))
