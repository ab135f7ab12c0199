"""Texts that grow: what is to be decoded, what readers see of it on the way, and what it is in the end.

What is promised of filling in blanks:

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

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.inference.constraints import contradicts
from insertlm.inference.scheduler import Progress
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.infill.requests import EncodedRequest, Request
from insertlm.infill.results import Infilling
from insertlm.text.tokenizers import Tokenizer

__all__ = ["Draft", "Event", "InfillDraft", "PlainDraft", "begin"]

_ATTEMPTS = 50  # at keeping banned words out of a sample

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


class PlainDraft(Draft[Trajectory]):
    """A text written from nothing, or from a prompt: the ids are the result."""

    def finish(self, trajectory: Trajectory) -> Trajectory:
        return trajectory


class InfillDraft(Draft[Infilling]):
    """A sample of a request under way. With banned words it may have to be written again, so it is not shown before it
    is done."""

    def __init__(self, encoded: EncodedRequest, request: Request, tokenizer: Tokenizer, seed: int) -> None:
        given = encoded.given
        super().__init__(encoded.prompt(seed), tokenizer, given.cells, sorted(given.places))
        self.given, self.banned, self.seed, self.attempts = given, request.banned, seed, 0
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


def begin(
    family: Family, tokenizer: Tokenizer, requests: Sequence[Request], settings: DecodeConfig, seed: int
) -> list[InfillDraft]:
    """What to decode for requests, the i-th with the seed `seed + i`. Several samples of one share their ids."""
    encoded: dict[int, EncodedRequest] = {}
    for number, request in enumerate(requests, start=1):
        if id(request) not in encoded:
            try:
                encoded[id(request)] = EncodedRequest.of(family, tokenizer, request, settings)
            except InsertlmError as error:
                where = f"text {number}: " if requests[0] is not requests[-1] else ""
                raise InsertlmError(f"{where}{error}") from error
    return [InfillDraft(encoded[id(request)], request, tokenizer, seed + i) for i, request in enumerate(requests)]
