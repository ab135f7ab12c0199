"""Who is written when: texts wait, are admitted up to a limit, advance together, and end or are cancelled.

Everything that writes more than one batch goes through a `Scheduler`: lists of prompts (`generate`), streams that are
watched (infill/stream.py) and the texts of a server (server/worker.py). It works at one of two paces:

- Watched: an advance is one step of every text, and tells what happened in it, so the host waits for the device in
  every step. Texts join the batch that is under way as soon as there is room, and leave it when they end. They are
  written in one batch by one writer; what texts must have in common for that is for the writers to say (`Writer.kind`).
  Texts of different kinds take turns within a step.
- Unwatched: an advance writes a batch from beginning to end. The host looks only now and then whether texts have
  ended, and reads what was written once, at the end (engine.py). This is several times faster on a GPU, where a batch
  may be replayed from captured graphs; but nothing can join what is captured, and nothing can be told before the end.

A text's noise, limits and rules count from its own first step. So its result is that of a lone request, whoever else is
there (in exact arithmetic: how a machine rounds may depend on the size of a batch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from insertlm.core.processes import Processes
from insertlm.inference.engine import Author, exclusively, known, limit_of
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.inference.writer import Step, Writer

__all__ = ["Progress", "Scheduler", "generate"]


class Progress(NamedTuple):
    """What an advance did to a text. events: in reading order   ended: the whole, if it is over"""

    key: int
    events: list[Insertion]
    ended: Trajectory | None


@dataclass
class _Text:
    """longest: the most tokens of its row, `room` without special ones   begun: the step of its batch that was its
    first"""

    key: int
    prompt: Prompt
    settings: DecodeConfig
    longest: int
    room: int
    begun: int = 0
    events: list[Insertion] = field(default_factory=list)


@dataclass
class _Batch:
    """Texts that are written together, in the order of the writer's rows. number: of the next step"""

    writer: Writer
    texts: list[_Text]
    number: int = 0


class Scheduler:
    """limit: how many texts may be under way at once. Belongs to one thread at a time."""

    def __init__(self, family: Author, limit: int, *, watched: bool) -> None:
        self.family, self.limit, self.watched = family, limit, watched
        self._waiting: deque[_Text] = deque()
        self._admitted: list[_Text] = []  # of which no step has been taken
        self._batches: list[_Batch] = []
        self._submitted = 0

    def __len__(self) -> int:
        """How many texts wait or are under way."""
        return len(self._waiting) + self.running

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    @property
    def _under_way(self) -> list[_Text]:
        return [*self._admitted, *(text for batch in self._batches for text in batch.texts)]

    def submit(self, prompts: Sequence[Prompt], settings: DecodeConfig, *, first: bool = False) -> list[int]:
        """Refuses what cannot be decoded. Returns a key for each text. first: before all that wait"""
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
        """Let those begin for which there is room. Returns their keys. `advance` does it too."""
        room = min(self.limit - self.running, len(self._waiting))
        begun = [self._waiting.popleft() for _ in range(room)]
        self._admitted += begun
        return [text.key for text in begun]

    def advance(self) -> list[Progress]:
        """One step of every text, or if nobody watches, all steps of a batch."""
        self.admit()
        return self._step() if self.watched else self._write_batch()

    @torch.inference_mode()
    def cancel(self, key: int) -> None:
        """Forget a text; one that is over, or never was, is forgotten already."""
        self._waiting = deque(text for text in self._waiting if text.key != key)
        self._admitted = [text for text in self._admitted if text.key != key]
        with exclusively(self.family.device):
            for batch in [*self._batches]:
                stay = [row for row, text in enumerate(batch.texts) if text.key != key]
                if len(stay) < len(batch.texts):
                    self._keep(batch, stay)

    def abandon(self) -> list[int]:
        """Forget all that is under way, such as when a step has failed. Returns their keys; what waits goes on."""
        keys = [text.key for text in self._under_way]
        self._admitted, self._batches = [], []
        return keys

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
                self._seat(_Batch(writer, texts))
            self._admitted = []
            return [progress for batch in [*self._batches] for progress in self._advance(batch)]

    def _seat(self, new: _Batch) -> None:
        """Join the batch of the same kind, if there is one."""
        new.writer.stay_open()
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
        ending = list(zip(step.complete.tolist(), step.full.tolist(), step.stop_probability.tolist(), strict=True))
        over, stay = list[Progress](), list[int]()
        for row, (text, (complete, full, stop)) in enumerate(zip(batch.texts, ending, strict=True)):
            steps = batch.number - text.begun
            if complete or full or steps == text.settings.max_steps:
                limit = None if complete else limit_of(text.prompt, text.settings, text.room, len(text.events), steps)
                whole = Trajectory(text.prompt.prefix, text.prompt.start, text.events, known(stop), limit)
                over.append(Progress(text.key, [], whole))
            else:
                stay.append(row)
        if over:
            rows = torch.tensor(stay, dtype=torch.int64, device=self.family.device)
            step = Step(*(part.index_select(0, rows) for part in step))
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
    """Decode any number of prompts, `batch_size` at a time. `progress` is told how many are done.

    Several processes share the batches, which are those of one process, and all get all texts.
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
