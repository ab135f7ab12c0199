"""The decoding loop: prompts in, trajectories out. It knows ids only.

Each turn asks the writer, a family's model at work on a batch, for one `Step` of all texts under way, ends those that
are complete or full (both are asked before writing), and lets the writer carry out the step for the others. Finished
texts leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Insertion, Trajectory
from insertlm.errors import InsertlmError

__all__ = ["Step", "Writer", "check", "decode"]


class Step(NamedTuple):
    """What a model would do next to each text, before it is done.

    complete: [B] bool, nothing is missing   full: [B] bool, there is no room or place for more
    stop_probability: [B], how sure the model is that nothing is missing; NaN where it cannot tell
    place, token, log_probability: [B, K], up to K tokens at once; what a place is, is the writer's business
    """

    complete: Tensor
    full: Tensor
    stop_probability: Tensor
    place: Tensor
    token: Tensor
    log_probability: Tensor


class Writer(Protocol):
    """A model at work on a batch of texts: holds them, and what it has computed once for all steps."""

    @property
    def row(self) -> Tensor:
        """[B]: the prompt of each text under way."""
        ...

    def step(self, number: int) -> Step: ...

    def select(self, rows: Tensor) -> None:
        """Only these texts go on; rows: [B'] indices, ascending."""
        ...

    def write(self, step: Step) -> Tensor:
        """Carry out a step. Returns the rank of every token in its text after the step, -1 where none came, [B, K]"""
        ...


def check(prompts: Sequence[Prompt], longest: int, vocabulary: int, specials: int) -> None:
    """`longest`: the most tokens a row may have, `specials` special ones included."""
    for prompt in prompts:
        length = len(prompt.prefix) + len(prompt.start) + specials
        if length > longest:
            raise InsertlmError(f"a prompt has {length} tokens, {specials} of them special; {longest} are allowed")
        for token in (*prompt.prefix, *prompt.start):
            if not 0 <= token < vocabulary:
                raise InsertlmError(f"a prompt has the id {token}; the vocabulary has {vocabulary}")
        for gap in prompt.open or ():
            if not 0 <= gap <= len(prompt.start):
                raise InsertlmError(
                    f"a prompt opens gap {gap}; its text of {len(prompt.start)} tokens has gaps 0 … {len(prompt.start)}"
                )


@torch.inference_mode()
def decode(begin: Callable[[], Writer], prompts: Sequence[Prompt], settings: DecodeConfig) -> list[Trajectory]:
    """`begin` makes the writer, which may compute once and for all what stays the same."""
    if not prompts:
        return []
    writer = begin()
    record = _Record()
    for number in range(settings.max_steps + 1):
        step = writer.step(number)
        ended = step.complete | step.full | (number == settings.max_steps)
        if bool(ended.any()):
            record.endings.append((writer.row[ended], step.stop_probability[ended], step.complete[ended]))
            stay = (~ended).nonzero().squeeze(1)
            if not len(stay):
                break
            writer.select(stay)
            step = Step(*(part.index_select(0, stay) for part in step))
        rank = writer.write(step)
        record.events.append((writer.row, step.stop_probability, rank, step.token, step.log_probability))
    return record.trajectories(prompts)


class _Record:
    """What happened, kept on the device and read once at the end: the loop must not wait for the host."""

    def __init__(self) -> None:
        self.events: list[tuple[Tensor, ...]] = []
        self.endings: list[tuple[Tensor, ...]] = []

    def trajectories(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        events: list[list[Insertion]] = [[] for _ in prompts]
        for number, columns in enumerate(self.events):
            for row, stop, *written in zip(*(column.tolist() for column in columns), strict=True):
                # Tokens of one step in reading order: inserted one after the other, each ends up at its rank.
                for rank, token, score in sorted(zip(*written, strict=True)):
                    if rank >= 0:
                        events[row].append(Insertion(number, rank, token, score, _known(stop)))
        endings = {
            row: (_known(stop), complete)
            for columns in self.endings
            for row, stop, complete in zip(*(column.tolist() for column in columns), strict=True)
        }
        return [
            Trajectory(prompt.prefix, prompt.start, events[row], *endings[row]) for row, prompt in enumerate(prompts)
        ]


def _known(probability: float) -> float | None:
    return None if math.isnan(probability) else probability
