"""What the families that insert share while writing: a canvas, its hidden rows with the prefix computed once, and what
may be written where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from insertlm.backbone.attention import (
    Attention,
    CachedAttention,
    FullAttention,
    PrefixCache,
    bidirectional_attention,
)
from insertlm.decoding.canvas import Canvas
from insertlm.decoding.constraints import Move, RuledText
from insertlm.decoding.engine import Step
from insertlm.decoding.graphs import CachedBackbone
from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.families.base import Family
from insertlm.losses import slot_logsumexp
from insertlm.packing import Packing

__all__ = ["InsertionWriter", "Scope", "spread"]


class Scope(NamedTuple):
    """What the next step may do.

    complete, full: [B] bool, as in Step   slots: of the S cells of the canvas [B, C] that may be written behind
    barred: [S, W] bool, the words that are out of play in each; None: none is
    """

    complete: Tensor
    full: Tensor
    slots: Packing
    barred: Tensor | None = None

    def logits(self, rows: Tensor, words: Tensor, chosen: Tensor | None = None) -> Tensor:
        """rows: [N, d], of all slots or of the `chosen` [N]   words: [W, d]   Returns [N, W]."""
        logits = rows @ words.T
        if self.barred is None:
            return logits
        return logits.masked_fill(self.barred if chosen is None else self.barred[chosen], -torch.inf)

    def mass(self, rows: Tensor, words: Tensor) -> Tensor:
        """The log-sum-exp of each slot's logits, [S]; they are kept only where something is barred."""
        return slot_logsumexp(rows, words) if self.barred is None else self.logits(rows, words).logsumexp(1)


class InsertionWriter(ABC):
    """A model at work on one batch of canvases. With `prefix_lm` the prefix is computed here, once.

    longest: the most tokens of a row
    """

    def __init__(self, family: Family, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> None:
        self.family, self.settings, self.longest = family, settings, longest
        room = longest - min(len(prompt.prefix) + len(prompt.start) + family.framing for prompt in prompts)
        if settings.parallel == 1:
            room = min(room, settings.max_steps)
        specials = family.specials
        self.canvas = Canvas.start(prompts, specials.stop, specials.bos, room, family.device)
        self.rules: list[RuledText] | None = None
        if any(prompt.constrained for prompt in prompts):
            self.rules = [RuledText(prompt) for prompt in prompts]
            self.columns = {word: number for number, word in enumerate(family.writable.tolist())}
        self.cache = self._prefix_cache() if family.model.prefix_lm else None
        self.graphs: CachedBackbone | None = None
        if self.cache is not None and family.device.type == "cuda":
            self.graphs = family.cached_backbone(len(prompts), self.canvas.tokens.shape[1])
            self.graphs.load(self.cache)

    @property
    def row(self) -> Tensor:
        return self.canvas.row

    @property
    def full(self) -> Tensor:
        """[B] bool: no room, or no place."""
        return (self.canvas.length >= self.longest) | ~self.canvas.open.any(1)

    @abstractmethod
    def step(self, number: int) -> Step: ...

    def scope(self, number: int, done: Tensor) -> Scope:
        """done: [B] bool, which texts the model itself would end"""
        if self.rules is None:
            slots = Packing(self.canvas.slots, counts=self.canvas.counts.open.clip(min=1))
            return Scope(done, self.full, slots)
        left = np.minimum(self.longest - self.canvas.counts.length, self.settings.max_steps - number)
        moves = [text.move(*now) for text, *now in zip(self.rules, done.tolist(), left.tolist(), strict=True)]
        complete, full = torch.tensor([(move.complete, not move.slots) for move in moves], device=done.device).T
        shown = np.zeros(self.canvas.tokens.shape, dtype=bool)
        for b, move in enumerate(moves):
            shown[b, move.slots or self.canvas.counts.prefix[b] + 1] = True  # <bos>, where the text is over
        slots = Packing(torch.from_numpy(shown).to(done.device), counts=shown.sum(1))
        return Scope(complete, full | self.full, slots, self._barred(moves, slots))

    def _barred(self, moves: Sequence[Move], slots: Packing) -> Tensor | None:
        """What moves rule out, see Scope."""
        if all(move.words is None and not move.never and not move.barred for move in moves):
            return None
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
        return barred

    def select(self, rows: Tensor) -> None:
        self.canvas = self.canvas.select(rows)
        if self.rules is not None:
            self.rules = [self.rules[row] for row in rows.tolist()]
        if self.graphs is not None:
            self.graphs.select(rows)
        elif self.cache is not None:
            self.cache = self.cache.select(rows)

    def write(self, step: Step) -> Tensor:
        if self.rules is not None:
            for text, [slot], [token] in zip(self.rules, step.place.tolist(), step.token.tolist(), strict=True):
                if slot >= 0:
                    text.write(slot, token)
        return self.canvas.insert(step.place, step.token)

    def hidden(self) -> tuple[Tensor, Tensor]:
        """Hidden rows of all but the prefix, and in which of them each cell of the canvas lies: [T, d], [B, C]"""
        canvas = self.canvas
        length, prefix, _ = canvas.counts
        if self.graphs is not None:
            return self._replayed(int((length - prefix).max()))
        written = Packing(canvas.used & (canvas.columns >= canvas.prefix[:, None]), counts=length - prefix)
        if self.cache is None:
            everything = Packing(canvas.used, counts=length)
            attention = bidirectional_attention(everything, canvas.prefix, self.family.model.prefix_lm)
            return self._run(everything, attention, written.pack(everything.where)), written.where
        return self._run(written, CachedAttention(self.cache, written.segments)), written.where

    def _replayed(self, rows: int) -> tuple[Tensor, Tensor]:
        """The same with every text given as many rows as the longest has."""
        assert self.graphs is not None
        canvas = self.canvas
        first = canvas.prefix[:, None]
        cells = (first + canvas.columns[:rows]).clamp(max=canvas.tokens.shape[1] - 1)
        tokens, positions = canvas.tokens.gather(1, cells), canvas.ranks.gather(1, cells)
        hidden = self.graphs.run(tokens, positions, canvas.prefix, canvas.length)
        texts = torch.arange(len(canvas), device=first.device)[:, None]
        return hidden.flatten(0, 1), (texts * rows + canvas.columns - first).clamp(min=0)

    def _prefix_cache(self) -> PrefixCache | None:
        canvas = self.canvas
        if canvas.counts.prefix.min() == 0:
            return None
        packing = Packing(canvas.columns < canvas.prefix[:, None], counts=canvas.counts.prefix)
        record: list[tuple[Tensor, Tensor]] = []
        self._run(packing, FullAttention(packing.segments, record))
        room = int(canvas.tokens.shape[1] - canvas.counts.prefix.min())
        return PrefixCache.of(record, packing.segments, room)

    def _run(self, packing: Packing, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        tokens, positions = packing.pack(self.canvas.tokens), packing.pack(self.canvas.ranks)
        with self.family.backbone.autocast():
            hidden: Tensor = self.family.backbone(tokens, positions, attention, wanted=wanted)
        return hidden


def spread(values: Tensor, packing: Packing) -> Tensor:
    """Packed values [T, …] to [B, C, …], −inf where nothing is kept."""
    cells = packing.where.clamp(min=0).flatten()
    dense = values.index_select(0, cells).view(*packing.keep.shape, *values.shape[1:])
    keep = packing.keep.view(*packing.keep.shape, *[1] * (values.dim() - 1))
    return dense.masked_fill(~keep, -torch.inf)
