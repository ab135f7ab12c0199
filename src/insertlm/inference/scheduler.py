"""The scheduler: texts wait, are admitted up to a limit, advance together, and end or are cancelled.

Lists of prompts (`generate`), drafts (infill/stream.py) and the texts of a server (server/worker.py) all go through it.
It runs at one of two paces:

- Watched: each call of `advance` is one step of every running text and returns what happened in it, so the host waits
  for the device in every step. New texts join the running batch as soon as there is room. Texts whose writers have the
  same `kind` are one batch; batches of different kinds advance one after the other.
- Unwatched: each call of `advance` writes a batch from beginning to end with the loop in engine.py. The host looks only
  every few steps whether texts have ended, and copies what was written once, at the end. On a GPU this is several times
  faster, because a batch can be replayed from captured graphs. But no text can join a captured batch, and nothing is
  known before its end. That is why the two paces do not share a loop.

A text's noise, limits and constraints count from its own first step. So its result does not depend on the other texts
(in exact arithmetic; rounding may depend on the size of the batch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.inference.engine import Author, exclusively, known, limit_of
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.inference.writer import Step, Writer

__all__ = ["Progress", "Scheduler", "generate"]


class Progress(NamedTuple):
    """What an advance did to one text. events: in reading order   ended: the whole text, if this was its end"""

    key: int
    events: list[Insertion]
    ended: Trajectory | None


@dataclass
class _Text:
    """longest: the maximum length of its row   room: the same without special tokens
    begun: the step of its batch that was its own first step"""

    key: int
    prompt: Prompt
    settings: DecodeConfig
    longest: int
    room: int
    begun: int = 0
    events: list[Insertion] = field(default_factory=list)


@dataclass
class _Batch:
    """Texts that are written together, in the order of the writer's rows. number: the next step"""

    writer: Writer
    texts: list[_Text]
    number: int = 0


class Scheduler:
    """limit: how many texts may run at once. Only one thread may use a scheduler at a time."""

    def __init__(self, family: Author, limit: int, *, watched: bool) -> None:
        if limit < 1:  # nothing would ever begin
            raise InsertlmError(f"batch_size: expected 1 or more texts at once, got {limit}")
        self.family, self.limit, self.watched = family, limit, watched
        self._waiting: deque[_Text] = deque()
        self._admitted: list[_Text] = []  # running, but before their first step
        self._batches: list[_Batch] = []
        self._submitted = 0

    def __len__(self) -> int:
        """How many texts wait or run."""
        return len(self._waiting) + self.running

    @property
    def running(self) -> int:
        """How many texts run."""
        return len(self._running)

    @property
    def _running(self) -> list[_Text]:
        return [*self._admitted, *(text for batch in self._batches for text in batch.texts)]

    def submit(self, prompts: Sequence[Prompt], settings: DecodeConfig, *, first: bool = False) -> list[int]:
        """Queue a text for every prompt; refuse what cannot be decoded. Returns their keys. first: at the front of the
        queue, for a text that has to be written again"""
        longest = self.family.check(prompts, settings)
        room = longest - self.family.framing
        texts = [_Text(key, prompt, settings, longest, room) for key, prompt in enumerate(prompts, self._submitted)]
        self._submitted += len(texts)
        if first:
            self._waiting.extendleft(reversed(texts))
        else:
            self._waiting.extend(texts)
        return [text.key for text in texts]

    def admit(self) -> list[int]:
        """Let as many texts start as there is room for. Returns their keys. `advance` calls this too."""
        room = min(self.limit - self.running, len(self._waiting))
        begun = [self._waiting.popleft() for _ in range(room)]
        self._admitted += begun
        return [text.key for text in begun]

    def advance(self) -> list[Progress]:
        """One step of every running text; if unwatched, all steps of a batch."""
        self.admit()
        return self._step() if self.watched else self._write_batch()

    @torch.inference_mode()
    def cancel(self, key: int) -> None:
        """Drop a text. Nothing happens if it has ended already."""
        self._waiting = deque(text for text in self._waiting if text.key != key)
        self._admitted = [text for text in self._admitted if text.key != key]
        with exclusively(self.family.device):
            for batch in [*self._batches]:
                stay = [row for row, text in enumerate(batch.texts) if text.key != key]
                if len(stay) < len(batch.texts):
                    self._keep(batch, stay)

    def abandon(self) -> list[int]:
        """Drop all running texts after a step has failed, because their state is unknown. Returns their keys; texts
        that wait are kept."""
        keys = [text.key for text in self._running]
        self._admitted, self._batches = [], []
        return keys

    def stop(self) -> list[Progress]:
        """End all texts where they are, also those that have not begun."""
        texts = [*self._running, *self._waiting]
        self.abandon()
        self._waiting.clear()
        return [
            Progress(text.key, [], Trajectory(text.prompt.prefix, text.prompt.start, text.events, None, stopped=True))
            for text in texts
        ]

    # --- Unwatched

    def _write_batch(self) -> list[Progress]:
        written = []
        for settings, texts in _by_settings(self._admitted):
            trajectories = self.family.decode([text.prompt for text in texts], settings)
            written += [Progress(text.key, [], whole) for text, whole in zip(texts, trajectories, strict=True)]
        self._admitted = []
        return written

    # --- Watched

    @torch.inference_mode()
    def _step(self) -> list[Progress]:
        with exclusively(self.family.device):
            for settings, texts in _by_settings(self._admitted):
                writer = self.family.writer([text.prompt for text in texts], settings, texts[0].longest)
                self._merge(_Batch(writer, texts))
            self._admitted = []
            # A copy, because a batch whose last text ends is removed.
            return [progress for batch in [*self._batches] for progress in self._advance(batch)]

    def _merge(self, new: _Batch) -> None:
        """Join the running batch of the same kind, if there is one."""
        new.writer.stay_open()  # others may join later, also if this one joins nobody
        kind = new.writer.kind
        for batch in self._batches:
            if kind is not None and batch.writer.kind == kind:
                batch.writer.join(new.writer, batch.number)
                for text in new.texts:
                    text.begun = batch.number
                batch.texts += new.texts
                return
        self._batches.append(new)

    def _keep(self, batch: _Batch, rows: Sequence[int]) -> None:
        batch.texts = [batch.texts[row] for row in rows]
        if rows:
            batch.writer.select(torch.tensor(rows, device=self.family.device))
        else:
            self._batches.remove(batch)

    def _advance(self, batch: _Batch) -> list[Progress]:
        step = batch.writer.step(batch.number)
        named = [0] * len(batch.texts) if step.limit is None else step.limit.tolist()
        judged = (step.complete.tolist(), step.full.tolist(), step.stop_probability.tolist(), named)
        ending = list(zip(*judged, strict=True))
        over, stay = list[Progress](), list[int]()
        for row, (text, (complete, full, stop, said)) in enumerate(zip(batch.texts, ending, strict=True)):
            steps = batch.number - text.begun
            if complete or full or steps == text.settings.max_steps:
                reached = text.prompt, text.settings, text.room, len(text.events), steps, said
                limit = None if complete else limit_of(*reached)
                whole = Trajectory(text.prompt.prefix, text.prompt.start, text.events, known(stop), limit)
                over.append(Progress(text.key, [], whole))
            else:
                stay.append(row)
        if over:
            # The step was computed for all rows; only those of the remaining texts are carried out.
            rows = torch.tensor(stay, dtype=torch.int64, device=self.family.device)
            step = step.select(rows)
            self._keep(batch, stay)
        return over + self._write(batch, step) if stay else over

    def _write(self, batch: _Batch, step: Step) -> list[Progress]:
        ranks = batch.writer.write(step).tolist()
        columns = zip(ranks, step.token.tolist(), step.log_probability.tolist(), strict=True)
        written = []
        for text, line, stop in zip(batch.texts, columns, step.stop_probability.tolist(), strict=True):
            number = batch.number - text.begun
            events = [Insertion(number, *event, known(stop)) for event in zip(*line, strict=True) if event[0] >= 0]
            events.sort(key=lambda event: event.rank)
            text.events += events
            written.append(Progress(text.key, events, None))
        batch.number += 1
        return written


def _by_settings(texts: Sequence[_Text]) -> list[tuple[DecodeConfig, list[_Text]]]:
    # A writer is made for texts of one setting; texts of other settings may then join it, if their kinds agree.
    groups: dict[DecodeConfig, list[_Text]] = {}
    for text in texts:
        groups.setdefault(text.settings, []).append(text)
    return [*groups.items()]


def generate(
    family: Author,
    prompts: Sequence[Prompt],
    settings: DecodeConfig,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
    processes: Processes | None = None,
) -> Iterator[Trajectory]:
    """Decode any number of prompts, `batch_size` at a time. progress: called with the number of finished texts

    Several processes share the batches. The batches are the same as with one process, so that rounding is the same, and
    every process gets all texts.
    """

    scheduler = Scheduler(family, batch_size, watched=False)

    def write(first: int) -> list[Trajectory]:
        batch = prompts[first : first + batch_size]
        scheduler.submit(batch, settings)
        texts = [each.ended for each in scheduler.advance() if each.ended is not None]
        progress(first + len(batch))
        return texts

    starts = range(0, len(prompts), batch_size)
    yield from chain.from_iterable(map(write, starts) if processes is None else processes.map(write, starts))
