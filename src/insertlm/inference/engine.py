"""The decoding loop for a whole batch: prompts in, trajectories out, in ids.

In every step the loop asks the writer (writer.py) for a `Step` of all running texts, ends the texts that are complete
or full, and lets the writer carry out the step for the others. A text is judged before it is written to, so a text that
is complete as given gets no token. Texts that have ended leave the batch when the loop looks, every few steps.
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
from insertlm.inference.trajectory import LIMITS, Insertion, Limit, Trajectory
from insertlm.inference.writer import Writer

__all__ = ["Author", "check", "decode", "exclusively", "known", "limit_of"]

_LOCKS: dict[int, AbstractContextManager[object]] = {}  # one for each GPU in use


class Author(Protocol):
    """A model as decoding sees it. This is all that the inference layer knows about families."""

    @property
    def device(self) -> torch.device: ...

    @property
    def framing(self) -> int:
        """The number of special tokens in a row."""
        ...

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        """Refuse what cannot be decoded. Returns the maximum length of a row, which `writer` needs."""
        ...

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer: ...

    def decode(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> list[Trajectory]:
        """Write one text for every prompt, all in one batch."""
        ...


def check(prompts: Sequence[Prompt], longest: int, vocabulary: int, specials: int) -> None:
    """Refuse prompts that do not fit. longest: the maximum length of a row, with its `specials` special tokens"""
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
    """A lock for one GPU. Only one thread may work on it at a time: no other thread may allocate memory while a graph
    is captured, and all batches share one set of graphs. On a CPU threads run side by side without a lock."""
    if device.type != "cuda":
        return nullcontext()
    gpu = torch.cuda.current_device() if device.index is None else device.index
    return _LOCKS.setdefault(gpu, threading.RLock())  # setdefault is atomic, so all threads get the same lock


def limit_of(prompt: Prompt, settings: DecodeConfig, room: int, tokens: int, steps: int, named: int = 0) -> Limit:
    """Which limit ended a text that its model would have continued.

    room: the most tokens that prefix and text may have together   tokens, steps: how many were written and taken
    named: what its writer says, see Step.limit; 0 for nothing
    """
    if named:
        return LIMITS[named - 1]
    # Several limits may be reached at once. The one that users set most often is named first, and blanks come last:
    # that they are full is what remains when nothing else explains the end.
    if tokens == settings.max_tokens:
        return "max_tokens"
    if len(prompt.prefix) + len(prompt.start) + tokens >= room:
        return "max_length"
    return "max_steps" if steps >= settings.max_steps else "blanks"


@torch.inference_mode()
def decode(
    begin: Callable[[], Writer], prompts: Sequence[Prompt], settings: DecodeConfig, room: int
) -> list[Trajectory]:
    """Write a text for every prompt. begin: makes the writer, which may already compute what stays the same in all
    steps   room: the most tokens that a prefix and its text may have together"""
    if not prompts:
        return []
    writer = begin()
    record = _Record()
    alive = torch.ones_like(writer.row, dtype=torch.bool)
    for number in range(settings.max_steps + 1):  # the last step only judges whether the text is complete
        step = writer.step(number)
        last = number == settings.max_steps
        ended = alive & (step.complete | step.full | last)
        named = torch.zeros_like(writer.row) if step.limit is None else step.limit
        record.endings.append((number, ended, writer.row, step.stop_probability, step.complete, named))
        alive = alive & ~ended
        if last or number % writer.patience == 0:
            stay = alive.nonzero().squeeze(1)  # the only place where the host waits for the device
            if not len(stay):
                break
            if len(stay) < len(alive):
                writer.select(stay)
                alive, step = alive[stay], step.select(stay)
        if writer.patience > 1:  # texts that have ended may still be in the batch; nothing is written to them
            step = step._replace(place=step.place.masked_fill(~alive[:, None], -1))
        rank = writer.write(step)
        record.events.append((number, writer.row, step.stop_probability, rank, step.token, step.log_probability))
    return record.trajectories(prompts, settings, room)


class _Record:
    """What happened, kept on the device and read once at the end, so that no step waits for a copy to the host.

    events: of each step its number, row [B], stop probability [B], and rank, token and log-probability [B, K]
    endings: of each step its number, which texts ended [B], their rows, stop probabilities, which are complete, and the
    limits that writers name
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.endings: list[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]] = []

    def trajectories(self, prompts: Sequence[Prompt], settings: DecodeConfig, room: int) -> list[Trajectory]:
        numbers, *parts = zip(*self.endings, strict=True)
        steps = torch.from_numpy(np.repeat(numbers, [part.numel() for part in parts[0]]))
        ended, *columns = (torch.cat(part).cpu() for part in parts)
        lines = zip(*(column[ended].tolist() for column in (*columns, steps)), strict=True)
        endings = {row: ending for row, *ending in lines}
        written = []
        for row, (prompt, events) in enumerate(zip(prompts, self._insertions(len(prompts)), strict=True)):
            stop, complete, named, taken = endings[row]
            limit = None if complete else limit_of(prompt, settings, room, len(events), taken, named)
            written.append(Trajectory(prompt.prefix, prompt.start, events, known(stop), limit))
        return written

    def _insertions(self, count: int) -> list[list[Insertion]]:
        """The insertions of each prompt, ordered by step and within a step by rank. Ranks are those after the step, so
        tokens inserted in this order end up where they belong."""
        if not self.events:
            return [[] for _ in range(count)]
        steps, *columns = zip(*self.events, strict=True)
        ranks = columns[2]
        wide = (torch.cat([_flat(part, rank) for part, rank in zip(parts, ranks, strict=True)]) for parts in columns)
        row, stop, rank, token, score = (column.cpu().numpy() for column in wide)
        step = np.repeat(steps, [part.numel() for part in ranks])
        real = np.flatnonzero(rank >= 0)
        # One sort of all insertions by (row, step, rank), then one slice for each row.
        order = real[np.lexsort((rank[real], step[real], row[real]))]
        lines = zip(*(column[order].tolist() for column in (step, rank, token, score, stop)), strict=True)
        insertions = [Insertion(number, place, word, sure, known(over)) for number, place, word, sure, over in lines]
        bounds = np.searchsorted(row[order], np.arange(count + 1)).tolist()
        return [insertions[first:last] for first, last in itertools.pairwise(bounds)]


def _flat(part: Tensor, like: Tensor) -> Tensor:
    """[B] or [B, K] to [B*K]; like: [B, K]"""
    return (part[:, None].expand_as(like) if part.dim() == 1 else part).flatten()


def known(probability: float) -> float | None:
    """A stop probability; None where the model cannot tell, which tensors hold as NaN."""
    return None if math.isnan(probability) else probability
