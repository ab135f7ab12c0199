"""Drafts: texts while they are written. A draft knows what to decode, what to show, and what the result is.

Guarantees of infilling:

- The given text comes back byte for byte. A filled text is made of the user's own pieces and the fills, never of
  decoded ids of what was given.
- A single space before a blank is not shown to the model. The model then continues a word as in its training texts and
  writes the space itself: the first token of the fill must begin with a space and have more characters (or be a space,
  if the vocabulary has no such tokens; it may be any token if no token has spaces, or if the family does not support
  constraints). In the result that space counts as given and not as part of the fill. It is given back in any case. A
  piece that is only a space between two blanks is shown.
- With `anywhere` the model may also insert outside blanks, wherever two tokens of the given text meet without sharing a
  character. The given text is still there, in order, in `spans`.
- A blank with a number of words, choices or a regular expression gets what these allow; see words.py and patterns.py.
- A required word is written as its tokens, with a space before it, without interruption: it is in a fill letter for
  letter, perhaps as a part of a longer word.
- A banned word is not in a fill as a whole word, nor made by a fill together with the text beside it. Its usual tokens
  are banned. If it comes about by other tokens, these are banned too and the sample is written again (with another seed
  if they cannot be banned because a required word has them, or a blank has choices or a regular expression).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.inference.constraints import contradicts
from insertlm.inference.rules import Choice
from insertlm.inference.scheduler import Progress
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.infill.requests import EncodedRequest, Request
from insertlm.infill.results import Infilling
from insertlm.infill.weighing import likeliest
from insertlm.text.tokenizers import Tokenizer

__all__ = ["BestOf", "Draft", "Event", "InfillDraft", "PlainDraft", "Seen", "begin"]

_APART = 40  # bits between the seeds of drafts of which one is kept; below are those of samples and of attempts
_ATTEMPTS = 50  # how often a sample is written before banned words count as unavoidable

Result = TypeVar("Result")


class Event(NamedTuple):
    """One insertion, as readers see it: a new cell in the list of cells that are the text.

    sample: the number of the text among all samples   order: the number of the insertion in its text
    step: in which it happened   at: the place of the new cell, as in `list.insert(at, text)`   token: its id
    text: the token decoded by itself   probability: of this token in this place, among all that were allowed
    stop_probability: how sure the model was before it that nothing is missing (None: its family cannot tell)
    """

    sample: int
    order: int
    step: int
    at: int
    token: int
    text: str
    probability: float
    stop_probability: float | None


class Seen(NamedTuple, Generic[Result]):
    """What a step did to a draft. events: to show now   result: if that was its end
    again: what to write now, because the text that has just ended is not kept"""

    events: list[Event]
    result: Result | None = None
    again: Prompt | None = None


class Draft(ABC, Generic[Result]):
    """A text that is being written.

    prompt: what to decode   prompts: all that is to be written side by side
    cells: the given text, cut wherever tokens may be inserted
    gaps: the ranks of these cuts; both are empty if nothing is given   opened: see Given
    held: nothing is shown before the end
    """

    opened: frozenset[int] = frozenset()

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, cells: Sequence[str] = (), gaps: Sequence[int] = ()
    ) -> None:
        self.prompt, self.tokenizer, self.cells, self.held = prompt, tokenizer, list(cells), False
        self._before = {gap: number for number, gap in enumerate(gaps, start=1)}
        self._given = [True] * len(prompt.start)

    @property
    def prompts(self) -> list[Prompt]:
        return [self.prompt]

    @abstractmethod
    def finish(self, trajectory: Trajectory) -> Result | None:
        """The result. None: the text must be written again, from `prompt`, which has changed."""

    def see(self, progress: Progress, sample: int = 0, number: int = 0) -> Seen[Result]:
        """What a step did to the text of prompt `number`. sample: the number of the draft, for its events"""
        if progress.ended is None:
            return Seen([] if self.held else self._show(progress.events, sample))
        result = self.finish(progress.ended)
        if result is None:
            return Seen([], again=self.prompt)
        # A held draft shows all its events now, since only the last attempt is the text.
        return Seen(self._show(progress.ended.events if self.held else [], sample), result)

    def _show(self, insertions: Sequence[Insertion], sample: int) -> list[Event]:
        return [self._event(insertion, sample) for insertion in insertions]

    def _event(self, insertion: Insertion, sample: int) -> Event:
        step, rank, token, log_probability, stop = insertion
        # Ranks count tokens, but cells may hold many given tokens: count the gaps before the token and its neighbours.
        gap = sum(self._given[:rank])
        order = len(self._given) - len(self.prompt.start)
        self._given.insert(rank, False)
        at = rank - gap + self._before.get(gap, 0)
        text = self.tokenizer.decode([token])
        if gap in self.opened and self._given[rank - 1]:
            text = text.removeprefix(" ")
        return Event(sample, order, step, at, token, text, math.exp(log_probability), stop)


class PlainDraft(Draft[Trajectory]):
    """A text written from a prompt or from nothing. Its result is the trajectory."""

    def finish(self, trajectory: Trajectory) -> Trajectory:
        return trajectory


class InfillDraft(Draft[Infilling]):
    """One sample of a request. With banned words it may have to be written again, so it is held until its end."""

    def __init__(self, encoded: EncodedRequest, request: Request, tokenizer: Tokenizer, seed: int) -> None:
        given = encoded.given
        super().__init__(encoded.prompt(seed), tokenizer, given.cells, sorted(given.places))
        self.given, self.fields, self.banned, self.seed, self.attempts = given, request.fields, request.banned, seed, 0
        self.opened = given.opened
        self.held = bool(request.banned)

    def finish(self, trajectory: Trajectory) -> Infilling | None:
        choices = {gap: rule for gap, rule in self.prompt.rules.items() if isinstance(rule, Choice)}
        weights = [choices[gap].weights if gap in choices else () for gap in self.given.blanks]
        result = Infilling(trajectory, self.given, self.tokenizer, self.fields, weights)
        spelling = () if trajectory.stopped else result.spelling(self.banned)
        if not spelling:
            return result
        self.attempts += 1
        if self.attempts == _ATTEMPTS:
            words = " and ".join(map(repr, self.banned))
            raise InsertlmError(f"cannot keep {words} out of the text; expected other banned words")
        # The same seed and one more banned run: everything before the banned word stays as it was.
        again = replace(self.prompt, banned=(*self.prompt.banned, spelling))
        if contradicts(again) or not all(rule.free for rule in self.prompt.rules.values()):
            again = replace(self.prompt, seed=self.seed + (self.attempts << 32))
        self.prompt = again
        return None


class BestOf(Draft[Infilling]):
    """Several drafts of one sample, written side by side, of which the best is kept. Nothing is shown before."""

    def __init__(self, drafts: Sequence[InfillDraft], choose: Callable[[Sequence[Infilling]], int]) -> None:
        first = drafts[0]
        super().__init__(first.prompt, first.tokenizer, first.cells, sorted(first.given.places))
        self.given, self.opened, self.held = first.given, first.opened, True
        self._drafts, self._choose = drafts, choose
        self._seen: dict[int, tuple[list[Event], Infilling]] = {}
        for draft in drafts:
            draft.held = True

    @property
    def prompts(self) -> list[Prompt]:
        return [draft.prompt for draft in self._drafts]

    def finish(self, trajectory: Trajectory) -> Infilling | None:
        raise AssertionError("its drafts are finished one by one")

    def see(self, progress: Progress, sample: int = 0, number: int = 0) -> Seen[Infilling]:
        events, result, again = self._drafts[number].see(progress, sample)
        if result is None:
            return Seen([], again=again)
        self._seen[number] = events, result
        if len(self._seen) < len(self._drafts):
            return Seen([])
        seen = [self._seen[number] for number in range(len(self._drafts))]
        return Seen(*seen[self._choose([result for _, result in seen])])


def begin(
    family: Family, tokenizer: Tokenizer, requests: Sequence[Request], settings: DecodeConfig, seed: int
) -> list[InfillDraft | BestOf]:
    """A draft for every request, the i-th with the seed `seed + i`."""
    encoded: dict[int, EncodedRequest] = {}  # by identity: samples of one request are encoded once
    for number, request in enumerate(requests, start=1):
        if id(request) not in encoded:
            try:
                encoded[id(request)] = EncodedRequest.of(family, tokenizer, request, settings)
            except InsertlmError as error:
                where = f"text {number}: " if requests[0] is not requests[-1] else ""
                raise InsertlmError(f"{where}{error}") from error
    choose = partial(likeliest, family, tokenizer)

    def draft(request: Request, seed: int) -> InfillDraft | BestOf:
        seeds = [seed + (number << _APART) for number in range(settings.best_of)]
        drafts = [InfillDraft(encoded[id(request)], request, tokenizer, each) for each in seeds]
        return drafts[0] if len(drafts) == 1 else BestOf(drafts, choose)

    return [draft(request, seed + i) for i, request in enumerate(requests)]
