"""What the families that insert share while writing: a canvas, and its hidden rows with the prefix computed once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from insertlm.core.packing import Packing
from insertlm.families.base import Family
from insertlm.inference.canvas import Canvas
from insertlm.inference.engine import Step
from insertlm.inference.sampling import choose, choose_each
from insertlm.inference.scope import Rules, Scope
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.attention import (
    Attention,
    CachedAttention,
    FullAttention,
    PrefixCache,
    attention_over,
)
from insertlm.nn.graphs import CachedBackbone

__all__ = ["InsertionWriter", "spread"]

_PATIENCE = 4  # steps


class InsertionWriter(ABC):
    """A model at work on one batch of canvases. With `prefix_lm` the prefix is computed here, once.

    Texts may join, see Joinable: so a step counts with `own` and keeps to the canvas's limits. Where it also ends texts
    with `done` and chooses tokens with `choose`, the settings of texts may differ in these.

    mixes: whether it does so   mixed: the settings of each text, if they differ
    captured: whether to work with CUDA graphs, which the family lends to one batch at a time
    """

    mixes: ClassVar[bool] = False

    def __init__(self, family: Family, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> None:
        self.family, self.settings = family, settings
        room = longest - np.array([len(prompt.prefix) + len(prompt.start) + family.framing for prompt in prompts])
        if settings.parallel == 1:
            room = room.clip(max=settings.max_steps)
        specials = family.specials
        self.canvas = Canvas.start(prompts, specials.stop, specials.bos, room, family.device)
        ruled = any(prompt.constrained for prompt in prompts)
        self.rules = Rules(prompts, family.writable.tolist()) if ruled else None
        self.cache = self._prefix_cache() if family.model.prefix_lm else None
        self.captured = self.cache is not None and CachedBackbone.takes(family.backbone)
        self.graphs: CachedBackbone | None = None
        self.mixed: list[DecodeConfig] | None = None

    @property
    def row(self) -> Tensor:
        return self.canvas.row

    @property
    def patience(self) -> int:
        return _PATIENCE if self.captured else 1

    @property
    def full(self) -> Tensor:
        """[B] bool: no room, or no place."""
        return (self.canvas.length >= self.canvas.limit) | ~self.canvas.open.any(1)

    @abstractmethod
    def step(self, number: int) -> Step: ...

    def scope(self, done: Tensor) -> Scope:
        """done: [B] bool, as of `done`"""
        if self.rules is not None:
            return self.rules.scope(self.canvas, done, self.canvas.counts.limit - self.canvas.counts.length)
        slots = Packing(self.canvas.slots, counts=self.canvas.counts.open.clip(min=1))
        return Scope(done, self.full, slots)

    def own(self, number: int) -> Tensor | int:
        """Step `number` as each text counts it: [B], or one number for all."""
        begun = self.canvas.counts.begun
        if (begun == begun[0]).all():
            return number - int(begun[0])
        return torch.from_numpy(number - begun).to(self.canvas.seed.device)

    def done(self, stop: Tensor) -> Tensor:
        """Which texts the model itself would end, [B] bool. stop: [B] probabilities"""
        if self.mixed is None:
            return stop >= self.settings.stop_threshold
        return stop >= stop.new_tensor([each.stop_threshold for each in self.mixed])

    def choose(self, logits: Tensor, noise: Callable[[int], Tensor]) -> Tensor:
        """One index per row, [B*K], as `choose` of sampling.py. logits: [B*K, N], K rows for each text"""
        if self.mixed is None:
            return choose(logits, noise, *_way(self.settings))
        return choose_each(logits, noise, [_way(settings) for settings in self.mixed])

    # --- Joining

    @property
    def kind(self) -> Hashable:
        """Pairs of slot and token are chosen as the settings of the writer say, so these must be the same then."""
        free: dict[str, Any] = {"max_steps": 1, "max_length": None}
        if self.mixes and not self.settings.joint:
            free |= {"stop_threshold": 0.5, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
        fixed = msgspec.structs.astuple(msgspec.structs.replace(self.settings, **free))
        return fixed, self.rules is None, self.cache is None

    def stay_open(self) -> None:
        self.captured = False

    def join(self, other: Self, number: int) -> None:
        if self.mixed is not None or self.settings != other.settings:
            mine = self.mixed or [self.settings] * len(self.canvas)
            self.mixed = [*mine, *(other.mixed or [other.settings] * len(other.canvas))]
        self.canvas = self.canvas.join(other.canvas, number)
        if self.rules is not None and other.rules is not None:
            self.rules.join(other.rules)
        if self.cache is not None and other.cache is not None:
            room = self.canvas.tokens.shape[1] - int(self.canvas.counts.prefix.min())
            self.cache = self.cache.join(other.cache, room)

    def select(self, rows: Tensor) -> None:
        self.canvas = self.canvas.select(rows)
        if self.mixed is not None:
            self.mixed = [self.mixed[row] for row in rows.tolist()]
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

    def hidden(self) -> tuple[Tensor, Tensor]:
        """Hidden rows of all but the prefix, and in which of them each cell of the canvas lies: [T, d], [B, C]"""
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
        """The same with every text given as many rows as the longest has."""
        canvas = self.canvas
        rows = min(rows, canvas.tokens.shape[1])  # counts of texts that have ended run on
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


def _way(settings: DecodeConfig) -> tuple[float, int, float]:
    return settings.temperature, settings.top_k, settings.top_p


def spread(values: Tensor, packing: Packing) -> Tensor:
    """Packed values [T, …] to [B, C, …], −inf where nothing is kept."""
    cells = packing.where.clamp(min=0).flatten()
    dense = values.index_select(0, cells).view(*packing.keep.shape, *values.shape[1:])
    keep = packing.keep.view(*packing.keep.shape, *[1] * (values.dim() - 1))
    return dense.masked_fill(~keep, -torch.inf)
