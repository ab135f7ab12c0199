"""The constraints of constraints.py for a whole batch, as tensors: what a step may write, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insertlm.core.packing import Packing
from insertlm.inference.canvas import Canvas
from insertlm.inference.constraints import Move, RuledText
from insertlm.inference.settings import Prompt

__all__ = ["Rules", "Scope"]


class Scope(NamedTuple):
    """What the next step may do.

    complete, full: [B] bool, as in Step   slots: packs the S cells of the canvas [B, C] behind which tokens may go
    barred: [S, W] bool, the words that must not go there; None: all may
    closed: [B, C] bool, cells of these behind which nothing is missing after all; None: there are none
    """

    complete: Tensor
    full: Tensor
    slots: Packing
    barred: Tensor | None = None
    closed: Tensor | None = None

    def among(self, values: Tensor) -> Tensor:
        """Values of cells, [B, C, …], with −inf where they are closed."""
        if self.closed is None:
            return values
        return values.masked_fill(self.closed.view(*self.closed.shape, *[1] * (values.dim() - 2)), -torch.inf)

    def logits(self, rows: Tensor, words: Tensor, chosen: Tensor | None = None) -> Tensor:
        """rows: [N, d], hidden rows of all slots, or of the `chosen` ones [N]   words: [W, d]   Returns [N, W]."""
        logits = rows @ words.T
        if self.barred is None:
            return logits
        return logits.masked_fill(self.barred if chosen is None else self.barred[chosen], -torch.inf)


class Rules:
    """The constraints of all texts in a batch, of which some may have none. words: the ids that can be written"""

    def __init__(self, prompts: Sequence[Prompt], words: Sequence[int]) -> None:
        self.texts = [RuledText(prompt) for prompt in prompts]
        self.columns = {word: number for number, word in enumerate(words)}
        self._shared: dict[frozenset[int], Tensor] = {}

    def scope(self, canvas: Canvas, done: Tensor, closed: Tensor | None, steps: NDArray[np.int64]) -> Scope:
        """done: [B] bool, which texts the model would end   closed: [B, C] bool, behind which cells it says that
        nothing is missing   steps: [B], how many more the limits allow"""
        # `done` comes from the device, so a batch with constraints waits for it in every step.
        shut = [set[int]() for _ in self.texts]
        for b, cell in [] if closed is None else closed.nonzero().tolist():
            shut[b].add(cell)
        left = canvas.counts.limit - canvas.counts.length
        asked = zip(self.texts, done.tolist(), left.tolist(), shut, steps.tolist(), strict=True)
        moves = [text.move(*now) for text, *now in asked]
        complete, full = torch.tensor([(move.complete, not move.slots) for move in moves], device=done.device).T
        shown = np.zeros(canvas.tokens.shape, dtype=bool)
        for b, move in enumerate(moves):
            shown[b, move.slots or canvas.counts.prefix[b] + 1] = True  # <bos>, if the text has ended
        slots = Packing(torch.from_numpy(shown).to(done.device), counts=shown.sum(1))
        none_left = torch.from_numpy(left <= 0).to(done.device)
        return Scope(complete, full | none_left, slots, self._barred(moves, slots))

    def join(self, other: Rules) -> None:
        self.texts += other.texts

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]

    def write(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """The slots in which tokens may be inserted together, the best first; -1 for the others. All [B, K]"""
        pairs = [list(zip(*row, strict=True)) for row in zip(slots.tolist(), tokens.tolist(), strict=True)]
        written = [text.write_all(each) for text, each in zip(self.texts, pairs, strict=True)]
        return slots.masked_fill(~torch.tensor(written, device=slots.device), -1)

    def _barred(self, moves: Sequence[Move], slots: Packing) -> Tensor | None:
        """The words that moves rule out for each slot, see Scope."""
        if not any(move.words is not None or move.never or move.barred or move.edges for move in moves):
            return None
        # First the words that are ruled out in all slots of a text, then single pairs, then the edges of headed gaps.
        out = np.zeros((len(moves), len(self.columns)), dtype=bool)
        for words, move in zip(out, moves, strict=True):
            if move.words is not None:
                words[:] = True
                words[[self.columns[word] for word in move.words]] = False
            words[[self.columns[word] for word in move.never]] = True
        owner = torch.arange(len(moves), device=slots.keep.device)[:, None].expand_as(slots.where)
        barred = torch.from_numpy(out).to(owner.device)[slots.pack(owner)]
        pairs = [(b, slot, self.columns[word]) for b, move in enumerate(moves) for slot, word in move.barred]
        if pairs:
            text, slot, word = torch.tensor(pairs, device=owner.device).T
            barred[slots.where[text, slot], word] = True
        for b, move in enumerate(moves):
            if move.edges:
                barred[slots.where[b, move.edges]] |= ~self._in_play(move.heads).to(owner.device)
        return barred

    def _in_play(self, words: frozenset[int]) -> Tensor:
        """[W] bool. Kept, because a set of heads holds thousands of ids and all texts share it."""
        if words not in self._shared:
            mask = torch.zeros(len(self.columns), dtype=torch.bool)
            mask[[self.columns[word] for word in words if word in self.columns]] = True
            self._shared[words] = mask
        return self._shared[words]
