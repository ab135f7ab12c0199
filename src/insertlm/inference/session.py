"""Continuous decoding: texts under way that others may join at any time, and leave when they end or are cancelled.

`engine.decode` writes a batch to its end and looks at it then. A session is for those who watch, or come and go: it is
asked for one step at a time and tells what happened in it, so the host waits for the device in every step.

- Texts are written in one batch, by one writer: those that come get a writer of their own, which joins the one that is
  there. What must be the same for that is the writers' business; groups that differ take turns within a step. Families
  whose writers cannot be joined work on the texts that were added together.
- A text's noise, limits and rules count from its own first step. So its result is that of a lone request, whoever else
  is there (in exact arithmetic: how a machine rounds may depend on the size of a batch).
- A session belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from insertlm.inference.engine import Author, Joinable, Step, Writer, known, turn
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory

__all__ = ["Progress", "Session"]


class Progress(NamedTuple):
    """What a step did to a text. key: of the text   events: in reading order   ended: the whole, if it is over"""

    key: int
    events: list[Insertion]
    ended: Trajectory | None


@dataclass
class _Text:
    """A text under way. begun: the step of its group that is its first   steps: the most it may have"""

    key: int
    prompt: Prompt
    begun: int
    steps: int
    events: list[Insertion] = field(default_factory=list)


@dataclass
class _Group:
    """Texts that are written together, in the order of the writer's rows."""

    writer: Writer
    texts: list[_Text]
    number: int = 0


class Session:
    """Texts under way."""

    def __init__(self, family: Author) -> None:
        self.family = family
        self._groups: list[_Group] = []
        self._added = 0

    def __len__(self) -> int:
        return sum(len(group.texts) for group in self._groups)

    @torch.inference_mode()
    def add(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> list[int]:
        """Texts for these prompts begin with the next step. Returns a key for each."""
        longest = self.family.check(prompts, settings)
        if prompts:
            with turn(self.family.device):
                writer = self.family.writer(prompts, settings, longest)
                texts = [_Text(key, prompt, 0, settings.max_steps) for key, prompt in enumerate(prompts, self._added)]
                self._seat(_Group(writer, texts))
        self._added += len(prompts)
        return list(range(self._added - len(prompts), self._added))

    @torch.inference_mode()
    def cancel(self, key: int) -> None:
        """Forget a text; one that is over, or never was, is forgotten already."""
        with turn(self.family.device):
            for group in self._groups:
                stay = [row for row, text in enumerate(group.texts) if text.key != key]
                if len(stay) < len(group.texts):
                    self._keep(group, stay)

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One step of every text."""
        with turn(self.family.device):
            return [progress for group in [*self._groups] for progress in self._advance(group)]

    def _seat(self, new: _Group) -> None:
        """Join the group of the same kind, if there is one that can be joined."""
        if not isinstance(new.writer, Joinable):
            self._groups.append(new)
            return
        new.writer.stay_open()
        for group in self._groups:
            if isinstance(group.writer, Joinable) and group.writer.kind == new.writer.kind:
                group.writer.join(new.writer, group.number)
                for text in new.texts:
                    text.begun = group.number
                group.texts += new.texts
                return
        self._groups.append(new)

    def _keep(self, group: _Group, rows: Sequence[int]) -> None:
        group.texts = [group.texts[row] for row in rows]
        if rows:
            group.writer.select(torch.tensor(rows, device=self.family.device))
        else:
            self._groups.remove(group)

    def _advance(self, group: _Group) -> list[Progress]:
        step = group.writer.step(group.number)
        ending = list(zip(step.complete.tolist(), step.full.tolist(), step.stop_probability.tolist(), strict=True))
        over, stay = list[Progress](), list[int]()
        for row, (text, (complete, full, stop)) in enumerate(zip(group.texts, ending, strict=True)):
            if complete or full or group.number - text.begun == text.steps:
                prompt = text.prompt
                whole = Trajectory(prompt.prefix, prompt.start, text.events, known(stop), complete)
                over.append(Progress(text.key, [], whole))
            else:
                stay.append(row)
        if over:
            rows = torch.tensor(stay, dtype=torch.int64, device=self.family.device)
            step = Step(*(part.index_select(0, rows) for part in step))
            self._keep(group, stay)
        return over + self._write(group, step) if stay else over

    def _write(self, group: _Group, step: Step) -> list[Progress]:
        ranks = group.writer.write(step).tolist()
        columns = zip(ranks, step.token.tolist(), step.log_probability.tolist(), strict=True)
        written = []
        for text, line, stop in zip(group.texts, columns, step.stop_probability.tolist(), strict=True):
            number = group.number - text.begun
            events = [Insertion(number, *event, known(stop)) for event in zip(*line, strict=True) if event[0] >= 0]
            events.sort(key=lambda event: event.rank)
            text.events += events
            written.append(Progress(text.key, events, None))
        group.number += 1
        return written
