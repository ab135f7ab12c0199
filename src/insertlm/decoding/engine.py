"""The decoding loop: prompts in, trajectories out. It knows ids only.

Each turn asks the family for one `Step` of all rows under way, ends the rows whose stop probability reached the
threshold (stop is asked before inserting), and inserts one token into each of the others. Finished rows leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from insertlm.decoding.canvas import Canvas
from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Insertion, Trajectory
from insertlm.errors import InsertlmError

__all__ = ["Inserter", "Step", "check", "decode"]


class Step(NamedTuple):
    """What the model wants to do next. slot: [B] cells of the canvas, token: [B], log_probability: [B] of the pair,
    stop_probability: [B]"""

    slot: Tensor
    token: Tensor
    log_probability: Tensor
    stop_probability: Tensor


class Inserter(Protocol):
    """A model under way on one batch: holds what it has computed once for all steps."""

    def step(self, canvas: Canvas, number: int) -> Step: ...


def check(prompts: Sequence[Prompt], longest: int, vocabulary: int) -> None:
    """`longest`: the most tokens a row may have."""
    for prompt in prompts:
        length = len(prompt.prefix) + len(prompt.start) + 2
        if length > longest:
            raise InsertlmError(f"a prompt has {length} tokens with <stop> and <bos>; {longest} are allowed")
        for token in (*prompt.prefix, *prompt.start):
            if not 0 <= token < vocabulary:
                raise InsertlmError(f"a prompt has the id {token}; the vocabulary has {vocabulary}")
        for gap in prompt.open or ():
            if not 0 <= gap <= len(prompt.start):
                raise InsertlmError(
                    f"a prompt opens gap {gap}; its text of {len(prompt.start)} tokens has gaps 0 … {len(prompt.start)}"
                )


@torch.inference_mode()
def decode(
    begin: Callable[[Canvas], Inserter],
    prompts: Sequence[Prompt],
    settings: DecodeConfig,
    longest: int,
    stop: int,
    bos: int,
    device: torch.device,
) -> list[Trajectory]:
    """`begin` prepares the model for a fresh canvas (and may compute the prefix once and for all); a row ends when it
    has `longest` tokens."""
    if not prompts:
        return []
    shortest = min(len(prompt.prefix) + len(prompt.start) + 2 for prompt in prompts)
    room = min(settings.max_steps, longest - shortest)
    canvas = Canvas.start(prompts, stop, bos, room, device)
    inserter = begin(canvas)
    record = _Record()
    for number in range(settings.max_steps + 1):
        step = inserter.step(canvas, number)
        complete = step.stop_probability >= settings.stop_threshold
        full = (canvas.length >= longest) | ~canvas.open.any(1) | (number == settings.max_steps)
        ended = complete | full
        if bool(ended.any()):
            record.endings.append((canvas.row[ended], step.stop_probability[ended], complete[ended]))
            stay = (~ended).nonzero().squeeze(1)
            if not len(stay):
                break
            canvas, step = canvas.select(stay), Step(*(part.index_select(0, stay) for part in step))
        rank = canvas.insert(step.slot, step.token)
        record.events.append((canvas.row, rank, step.token, step.log_probability, step.stop_probability))
    return record.trajectories(prompts)


class _Record:
    """What happened, kept on the device and read once at the end: the loop must not wait for the host."""

    def __init__(self) -> None:
        self.events: list[tuple[Tensor, ...]] = []
        self.endings: list[tuple[Tensor, ...]] = []

    def trajectories(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        events: list[list[Insertion]] = [[] for _ in prompts]
        for number, columns in enumerate(self.events):
            for row, *event in zip(*(column.tolist() for column in columns), strict=True):
                events[row].append(Insertion(number, *event))
        endings = {
            row: end for columns in self.endings for row, *end in zip(*(c.tolist() for c in columns), strict=True)
        }
        return [
            Trajectory(prompt.prefix, prompt.start, events[row], *endings[row]) for row, prompt in enumerate(prompts)
        ]
