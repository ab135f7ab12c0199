"""The writer that insertion families share: a canvas of texts, and hidden rows with the prefix computed only once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from insertlm.core.noise import hash32
from insertlm.core.packing import Packing
from insertlm.families.base import Family
from insertlm.inference.canvas import Canvas
from insertlm.inference.sampling import draws
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

_CELL, _WORD = 0, 1  # streams of noise in decoding
_AT_ONCE = 1024  # cells whose logits are held at the same time
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

    @property
    def slots(self) -> Packing:
        """The open cells, which the host can count without asking the device."""
        return Packing(self.canvas.slots, counts=self.canvas.counts.open.clip(min=1))

    def scope(self, number: int, done: Tensor, closed: Tensor | None = None) -> Scope:
        """What step `number` may write. done: [B] bool, which texts the model would end   closed: [B, C] bool, behind
        which cells it says that nothing is missing"""
        if self.rules is not None:
            steps = np.array([settings.max_steps for settings in self.mixed or [self.settings]]) - number + self.begun
            return self.rules.scope(self.canvas, done, closed, steps)
        return Scope(done, self.full, self.slots, closed=closed)

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
        place = step.place if self.rules is None else self.rules.write(step.place, step.token)
        return self.canvas.insert(place, step.token)

    # --- Several tokens in a step

    def best(self, score: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The cells to write behind, best first, and which of these count: those that have a score and room. There are
        no more than `decode.parallel` asks for, nor more than `most`. score: [B, C], −inf behind which nothing may go
        Returns [B, K] twice"""
        most = int(self.canvas.counts.open.max()) if most is None else most
        order = score.argsort(stable=True, dim=1, descending=True)
        cell = order[:, : max(1, min(self.settings.parallel or most, most))]
        room = (self.canvas.limit - self.canvas.length)[:, None]
        in_play = score.gather(1, cell) > -torch.inf
        return cell, in_play & (torch.arange(cell.shape[1], device=cell.device) < room)

    def choose_several(
        self, number: int, cell: Tensor, logits_of: Callable[[slice], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A word for each cell, its logit, and the share of the likeliest word there, all [B, K]. logits_of: those of
        some of the B * K cells, [R, W]"""
        words, logits, sure = [], [], []
        count = cell.shape[1]
        texts = torch.arange(len(cell)).repeat_interleave(count).tolist()
        seed = hash32(_CELL, self.seed[:, None], cell).flatten()  # cells of one text draw independently
        own = self.own(number)
        numbers = torch.full_like(seed, own) if isinstance(own, int) else own.repeat_interleave(count)
        for first in range(0, len(seed), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            table = logits_of(part)
            words.append(self.choose(table, draws(_WORD, seed[part], numbers[part]), texts[part]))
            logits.append(table.gather(1, words[-1][:, None]).squeeze(1))
            sure.append(table.amax(1))
        word, logit, best = (torch.cat(each).view_as(cell) for each in (words, logits, sure))
        return word, logit, best

    def repeats(self, cell: Tensor, token: Tensor) -> Tensor:
        """Which insertions repeat a word on their left while it is repeated on its right too, [B, K] bool: one of the
        two is meant. cell: [B, K], -1 for none"""
        if cell.shape[1] == 1:
            return torch.zeros_like(cell, dtype=torch.bool)
        canvas, nobody = self.canvas, torch.full_like(self.canvas.tokens, -1)
        last = nobody.shape[1] - 1  # a place that no word has
        there = nobody.scatter(1, torch.where(canvas.used, canvas.ranks, last), canvas.tokens)
        rank = torch.where(cell >= 0, canvas.ranks.gather(1, cell.clamp(min=0)), last)
        written = nobody.scatter(1, rank, token)
        right = (rank + 1).clamp(max=last)
        return (cell >= 0) & (there.gather(1, right) == token) & (written.gather(1, right) == token)

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
