"""The decoding loop: prompts in, trajectories out. It knows ids only.

Each turn asks the writer, a family's model at work on a batch, for one `Step` of all texts under way, ends those that
are complete or full (both are asked before writing), and lets the writer carry out the step for the others. Finished
texts leave, at once or as soon as the loop looks.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Limit, Trajectory
from insertlm.inference.writer import Step, Writer

__all__ = ["Author", "check", "decode", "exclusively", "known", "limit_of"]

_LOCKS: dict[int, AbstractContextManager[object]] = {}  # by GPU


class Author(Protocol):
    """What decoding asks of a model: all that inference knows of families."""

    @property
    def device(self) -> torch.device: ...

    @property
    def framing(self) -> int:
        """How many special tokens a row has."""
        ...

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        """Refuse what cannot be decoded. Returns the most tokens of a row, for `writer`."""
        ...

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer: ...

    def decode(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> list[Trajectory]:
        """Write one text for every prompt, all at once."""
        ...


def check(prompts: Sequence[Prompt], longest: int, vocabulary: int, specials: int) -> None:
    """`longest`: the most tokens a row may have, `specials` special ones included."""
    for prompt in prompts:
        length = len(prompt.prefix) + len(prompt.start) + specials
        if length > longest:
            raise InsertlmError(f"a prompt has {length} tokens, {specials} of them special; {longest} are allowed")
        for ids in (prompt.prefix, prompt.start):
            if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
                wrong = next(token for token in ids if not 0 <= token < vocabulary)
                raise InsertlmError(f"a prompt has the id {wrong}; the vocabulary has {vocabulary}")
        for gap in prompt.open or ():
            if not 0 <= gap <= len(prompt.start):
                raise InsertlmError(
                    f"a prompt opens gap {gap}; its text of {len(prompt.start)} tokens has gaps 0 … {len(prompt.start)}"
                )


def exclusively(device: torch.device) -> AbstractContextManager[object]:
    """Only one thread at a time may work on a GPU: while one captures a graph, no other may ask for memory, and all
    batches share one set of graphs. GPUs do not wait for each other, and on a CPU threads work side by side."""
    if device.type != "cuda":
        return nullcontext()
    gpu = torch.cuda.current_device() if device.index is None else device.index
    return _LOCKS.setdefault(gpu, threading.RLock())


def limit_of(prompt: Prompt, settings: DecodeConfig, room: int, tokens: int, steps: int) -> Limit:
    """Which limit ended a text that its model would have gone on with. room: the most tokens of prefix and text
    tokens, steps: written so far, and taken"""
    if tokens == settings.max_tokens:
        return "max_tokens"
    if len(prompt.prefix) + len(prompt.start) + tokens >= room:
        return "max_length"
    return "max_steps" if steps >= settings.max_steps else "blanks"


@torch.inference_mode()
def decode(
    begin: Callable[[], Writer], prompts: Sequence[Prompt], settings: DecodeConfig, room: int
) -> list[Trajectory]:
    """begin: makes the writer, which may compute once and for all what stays the same   room: the most tokens of a
    prefix and its text"""
    if not prompts:
        return []
    writer = begin()
    record = _Record()
    alive = torch.ones_like(writer.row, dtype=torch.bool)
    for number in range(settings.max_steps + 1):
        step = writer.step(number)
        last = number == settings.max_steps
        ended = alive & (step.complete | step.full | last)
        record.endings.append((number, ended, writer.row, step.stop_probability, step.complete))
        alive = alive & ~ended
        if last or number % writer.patience == 0:
            stay = alive.nonzero().squeeze(1)  # the one place where the host waits for the device
            if not len(stay):
                break
            if len(stay) < len(alive):
                writer.select(stay)
                alive, step = alive[stay], Step(*(part.index_select(0, stay) for part in step))
        if writer.patience > 1:
            step = step._replace(place=step.place.masked_fill(~alive[:, None], -1))
        rank = writer.write(step)
        record.events.append((number, writer.row, step.stop_probability, rank, step.token, step.log_probability))
    return record.trajectories(prompts, settings, room)


class _Record:
    """What happened, kept on the device and read once at the end: the loop must not wait for the host.

    events: step, then row [B], stop probability [B], rank, token, log-probability [B, K]
    endings: step, then whether a text ended [B], and its row, stop probability and whether it is complete
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.endings: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []

    def trajectories(self, prompts: Sequence[Prompt], settings: DecodeConfig, room: int) -> list[Trajectory]:
        numbers, *parts = zip(*self.endings, strict=True)
        steps = torch.from_numpy(np.repeat(numbers, [part.numel() for part in parts[0]]))
        ended, *columns = (torch.cat(part).cpu() for part in parts)
        lines = zip(*(column[ended].tolist() for column in (*columns, steps)), strict=True)
        endings = {row: ending for row, *ending in lines}
        written = []
        for row, (prompt, events) in enumerate(zip(prompts, self._insertions(len(prompts)), strict=True)):
            stop, complete, taken = endings[row]
            limit = None if complete else limit_of(prompt, settings, room, len(events), taken)
            written.append(Trajectory(prompt.prefix, prompt.start, events, known(stop), limit))
        return written

    def _insertions(self, count: int) -> list[list[Insertion]]:
        """The events of each prompt by step, and in a step in reading order: inserted one after the other, each token
        ends up at its rank."""
        if not self.events:
            return [[] for _ in range(count)]
        steps, *columns = zip(*self.events, strict=True)
        ranks = columns[2]
        wide = (torch.cat([_flat(part, rank) for part, rank in zip(parts, ranks, strict=True)]) for parts in columns)
        row, stop, rank, token, score = (column.cpu().numpy() for column in wide)
        step = np.repeat(steps, [part.numel() for part in ranks])
        real = np.flatnonzero(rank >= 0)
        order = real[np.lexsort((rank[real], step[real], row[real]))]
        lines = zip(*(column[order].tolist() for column in (step, rank, token, score, stop)), strict=True)
        insertions = [Insertion(number, place, word, sure, known(over)) for number, place, word, sure, over in lines]
        bounds = np.searchsorted(row[order], np.arange(count + 1)).tolist()
        return [insertions[first:last] for first, last in itertools.pairwise(bounds)]


def _flat(part: Tensor, like: Tensor) -> Tensor:
    """[B] or [B, K] to [B*K]; like: [B, K]"""
    return (part[:, None].expand_as(like) if part.dim() == 1 else part).flatten()


def known(probability: float) -> float | None:
    """A stop probability, None where the model cannot tell."""
    return None if math.isnan(probability) else probability
