"""The writer that insertion families share: a canvas of texts, and hidden rows with the prefix computed only once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from insertlm.core.packing import Packing
from insertlm.families.base import Family
from insertlm.inference.canvas import Canvas
from insertlm.inference.scope import Rules, Scope
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import BatchWriter, Step
from insertlm.nn.attention import (
    Attention,
    CachedAttention,
    PackedAttention,
    PrefixCache,
    attention_over,
)
from insertlm.nn.graphs import CachedBackbone

__all__ = ["InsertionWriter", "spread"]

_PATIENCE = 4  # steps: a few useless rows cost less than waiting for the GPU after every step


class InsertionWriter(BatchWriter):
    """A model with one batch of texts. With `prefix_lm` the prefix is computed here, once.

    A place is a cell of the canvas and means "right behind this token". Texts may join, so steps must be counted with
    `own` and limits taken from the canvas.

    captured: whether to use CUDA graphs, which the family lends to one batch at a time
    """

    def __init__(self, family: Family, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> None:
        super().__init__(prompts, settings, family.device)
        self.family = family
        room = longest - np.array([len(prompt.prefix) + len(prompt.start) + family.framing for prompt in prompts])
        if settings.max_tokens is not None:
            room = room.clip(max=settings.max_tokens)
        if settings.parallel == 1:  # every step writes one token, so there need be no more cells than steps
            room = room.clip(max=settings.max_steps)
        specials = family.specials
        self.canvas = Canvas.start(prompts, specials.stop, specials.bos, room, family.device)
        ruled = any(prompt.constrained for prompt in prompts)
        self.rules = Rules(prompts, family.writable.tolist()) if ruled else None
        self.cache = self._prefix_cache() if family.model.prefix_lm else None
        self.captured = self.cache is not None and CachedBackbone.takes(family.backbone)
        self.patience = _PATIENCE if self.captured else 1
        self.graphs: CachedBackbone | None = None

    @property
    def full(self) -> Tensor:
        """[B] bool: a limit is reached, or no cell is open."""
        return (self.canvas.length >= self.canvas.limit) | ~self.canvas.open.any(1)

    def scope(self, done: Tensor) -> Scope:
        """What the next step may write. done: [B] bool, which texts the model would end"""
        if self.rules is not None:
            return self.rules.scope(self.canvas, done, self.canvas.counts.limit - self.canvas.counts.length)
        slots = Packing(self.canvas.slots, counts=self.canvas.counts.open.clip(min=1))
        return Scope(done, self.full, slots)

    # --- Joining

    @property
    def kind(self) -> Hashable:
        return super().kind, self.rules is None, self.cache is None

    def stay_open(self) -> None:
        self.captured, self.patience = False, 1

    def join(self, other: Self, number: int) -> None:
        super().join(other, number)
        self.canvas = self.canvas.join(other.canvas)
        if self.rules is not None and other.rules is not None:
            self.rules.join(other.rules)
        if self.cache is not None and other.cache is not None:
            room = self.canvas.tokens.shape[1] - int(self.canvas.counts.prefix.min())
            self.cache = self.cache.join(other.cache, room)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.canvas = self.canvas.select(rows)
        if self.rules is not None:
            self.rules.select(rows.tolist())
        if self.graphs is not None:
            self.graphs.select(rows)
        elif self.cache is not None:
            self.cache = self.cache.select(rows)

    def write(self, step: Step) -> Tensor:
        if self.rules is not None:
            self.rules.write(step.place.tolist(), step.token.tolist())
        return self.canvas.insert(step.place, step.token)

    # --- Computing

    def hidden(self) -> tuple[Tensor, Tensor]:
        """Hidden rows of all cells behind the prefix, and the row of each cell of the canvas: [T, d], [B, C]"""
        canvas = self.canvas
        length, prefix = canvas.counts.length, canvas.counts.prefix
        if self.captured:
            return self._replayed(int((length - prefix).max()))
        written = Packing(canvas.used & (canvas.columns >= canvas.prefix[:, None]), counts=length - prefix)
        if self.cache is None:
            everything = Packing(canvas.used, counts=length)
            attention = attention_over(everything, canvas.prefix, self.family.model.prefix_lm)
            return self._run(everything, attention, written.pack(everything.where)), written.where
        return self._run(written, CachedAttention(self.cache, written.segments)), written.where

    def _replayed(self, rows: int) -> tuple[Tensor, Tensor]:
        """The same from CUDA graphs, whose shapes are fixed: every text gets as many rows as the longest one."""
        canvas = self.canvas
        rows = min(rows, canvas.tokens.shape[1])  # the counts of texts that have ended go on growing
        if self.graphs is None:
            assert self.cache is not None
            self.graphs = self.family.cached_backbone(len(canvas), self.cache.longest)
            self.graphs.load(self.cache)
        first = canvas.prefix[:, None]
        cells = (first + canvas.columns[:rows]).clamp(max=canvas.tokens.shape[1] - 1)
        tokens, positions = canvas.tokens.gather(1, cells), canvas.ranks.gather(1, cells)
        hidden = self.graphs.run(tokens, positions, canvas.prefix, canvas.length)
        texts = torch.arange(len(canvas), device=first.device)[:, None]
        return hidden.flatten(0, 1), (texts * rows + canvas.columns - first).clamp(min=0)

    def _prefix_cache(self) -> PrefixCache | None:
        canvas = self.canvas
        if canvas.counts.prefix.min() == 0:  # one text without a prefix: the whole batch does without a cache
            return None
        packing = Packing(canvas.columns < canvas.prefix[:, None], counts=canvas.counts.prefix)
        record: list[tuple[Tensor, Tensor]] = []
        self._run(packing, PackedAttention(packing.segments, record=record))
        room = int(canvas.tokens.shape[1] - canvas.counts.prefix.min())
        return PrefixCache.of(record, packing.segments, room)

    def _run(self, packing: Packing, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        tokens, positions = packing.pack(self.canvas.tokens), packing.pack(self.canvas.ranks)
        with self.family.backbone.autocast():
            hidden: Tensor = self.family.backbone(tokens, positions, attention, wanted=wanted)
        return hidden


def spread(values: Tensor, packing: Packing) -> Tensor:
    """Packed values, [T, …], as a padded matrix, [B, C, …], with −inf in the padding."""
    cells = packing.where.clamp(min=0).flatten()
    dense = values.index_select(0, cells).view(*packing.keep.shape, *values.shape[1:])
    keep = packing.keep.view(*packing.keep.shape, *[1] * (values.dim() - 1))
    return dense.masked_fill(~keep, -torch.inf)
