"""A filler at work: how its blanks are written, and how they end.

What a row is and sees: fill.py. Given rows are computed once, and from then on one row for every token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from insertlm.core.noise import uniform
from insertlm.core.packing import Packing, Segments
from insertlm.families.base import Family
from insertlm.families.corruption.laid_out import Layout
from insertlm.inference.sampling import draws
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.writer import BatchWriter, Step
from insertlm.nn.attention import Attention, CachedAttention, PackedAttention, PrefixCache

__all__ = ["FillWriter"]

_TOKEN, _END = 0, 1  # streams of noise in decoding
_ENDLESS = 1 << 40  # the most tokens of a blank without a limit

_HELD = (
    "limit",
    "most_tokens",
    "gaps",
    "count",
    "least",
    "most",
    "at",
    "gap",
    "size",
    "written",
    "used",
    "hidden",
    "barred",
    "headed",
    "headless",
    "token",
    "ended",
    "kept_tokens",
    "kept_scores",
    "kept_ends",
    "cut",
)


class FillWriter(BatchWriter):
    """One blank after the other, from left to right.

    Of each text, [B]: limit, the most rows it may have   used: rows so far   most_tokens: of all blanks
    written: tokens so far
    count: its blanks   gap: the one at work, from 0   size: tokens in it so far   hidden: [B, d], of the last row
    Of each blank, [B, G]: gaps, its rank in the given text   at: its position   least, most: its bounds
    barred: [B, W] bool, words that are never in play   headed: [B, G] bool   headless: [B, W], no heads
    token: [B], what comes next   ended: [B] bool, whether the blank at work ends instead
    A blank that has a most is shown when it is done, for it may be cut back. Until then, [B, K]:
    kept_tokens, kept_scores: what was written there   kept_ends: how likely its end was before each, and now
    cut: [B], how many of these stay, once it has ended
    """

    def __init__(
        self,
        family: Family,
        unembedding: nn.Linear,
        layout: Layout,
        prompts: Sequence[Prompt],
        settings: DecodeConfig,
        longest: int,
    ) -> None:
        super().__init__(prompts, settings, family.device)
        self.family, self.layout, device = family, layout, family.device
        self.words = family.writable
        self.vectors = unembedding.weight[torch.cat([self.words, self.words.new_tensor([family.specials.eos])])]
        places = [sorted(prompt.gaps) for prompt in prompts]
        width = max(map(len, places))
        bounds = [
            [prompt.bounds.get(gap, Bounds()) for gap in gaps] for prompt, gaps in zip(prompts, places, strict=True)
        ]
        self.count = torch.tensor([len(gaps) for gaps in places], device=device)
        self.gaps = _padded(places, width, device)
        self.least = _padded([[bound.least for bound in each] for each in bounds], width, device)
        self.most = _padded([[_ENDLESS if b.most is None else b.most for b in each] for each in bounds], width, device)
        self.headed = _padded(
            [[gap in prompt.headed for gap in gaps] for prompt, gaps in zip(prompts, places, strict=True)],
            width,
            device,
        ).bool()
        self.barred = torch.stack([self._among_words([run[0] for run in prompt.banned]) for prompt in prompts])
        self.headless = torch.stack([~self._among_words(prompt.heads) for prompt in prompts])
        number = torch.arange(width, device=device)
        before = torch.tensor([len(prompt.prefix) + 1 for prompt in prompts], device=device)
        self.at = before[:, None] + self.gaps + number * (1 + layout.jump)
        self.gap, self.size, self.written, self.cut = (torch.zeros_like(self.count) for _ in range(4))
        self.token, self.ended = torch.zeros_like(self.count), torch.zeros_like(self.count, dtype=torch.bool)
        rows = [self._given(prompt, gaps) for prompt, gaps in zip(prompts, places, strict=True)]
        lengths = np.array([len(tokens) for tokens, _ in rows])
        self.used = torch.from_numpy(lengths).to(device)
        self.limit = torch.full_like(self.used, longest)
        self.most_tokens = torch.full_like(self.used, settings.max_tokens or _ENDLESS)
        left = int((longest - lengths).clip(max=settings.max_steps + width + 1).max())
        bounded = [b.most for each in bounds for b in each if b.most is not None]
        room = max(bounded, default=0)
        self.kept_tokens = torch.zeros(len(prompts), room, dtype=torch.int64, device=device)
        self.kept_scores = torch.zeros(len(prompts), room, device=device)
        self.kept_ends = torch.zeros(len(prompts), room + 1, device=device)
        self.cache = self._read(rows, lengths, left)
        self.hidden = self._append(torch.full_like(self.used, family.specials.stop), self._position())

    def step(self, number: int) -> Step:
        """The next token of every text, the end of the blank at work, or of the text."""
        own = self.own(number)
        logits = self.hidden @ self.vectors.T
        scores = logits.log_softmax(-1)
        end = scores[:, -1].exp()
        gap = self.gap.clamp(max=self.gaps.shape[1] - 1)[:, None]
        least, most, headed = (part.gather(1, gap).squeeze(1) for part in (self.least, self.most, self.headed))
        out = self.barred | (self.headless & (headed & (self.size == 0))[:, None])
        self.token = self.choose(logits[:, :-1].masked_fill(out, -torch.inf), draws(_TOKEN, self.seed, own))
        drawn = uniform(_END, self.seed, own) < end
        over_threshold = end >= self.settings.stop_threshold
        ends = over_threshold if self.settings.temperature == 0.0 else drawn
        self.ended = ends & (self.size >= least) | (self.size >= most)
        over = self.gap >= self.count
        spent = self.written >= self.most_tokens
        self.ended = self.ended | (spent & (most < _ENDLESS))  # what is kept back is shown all the same
        full = (self.used + (self.count - self.gap) > self.limit) | (spent & ((most == _ENDLESS) | (self.size == 0)))
        last = self.gap >= self.count - 1
        score = scores.gather(1, self.token[:, None]).squeeze(1)
        complete = over | (self.ended & last & (most == _ENDLESS))
        stop = torch.where(last, end, torch.nan)
        place = self.gaps.gather(1, gap).squeeze(1) + self.written
        if not self.kept_tokens.shape[1]:
            shown = torch.where(self.ended, -1, place)
            return Step(
                complete, full & ~complete, stop, shown[:, None], self.words[self.token][:, None], score[:, None]
            )
        return self._bounded(complete, full, stop, place, score, end, least, most)

    def _bounded(
        self,
        complete: Tensor,
        full: Tensor,
        stop: Tensor,
        place: Tensor,
        score: Tensor,
        end: Tensor,
        least: Tensor,
        most: Tensor,
    ) -> Step:
        """As `step`, where some blank has a most: it is shown when it is done, cut back to its likeliest end."""
        column = torch.arange(self.kept_ends.shape[1], device=end.device)
        here = column == self.size[:, None]
        held = (most < _ENDLESS) & (self.gap < self.count)
        self.kept_ends = torch.where(here & held[:, None], end[:, None], self.kept_ends)
        may_end = (column >= least[:, None]) & (column <= self.size[:, None])
        best = self.kept_ends.masked_fill(~may_end, -1.0).argmax(1)
        at_most = (self.size >= most) | (self.written >= self.most_tokens)
        self.cut = torch.where(held & self.ended & at_most, best, self.size)
        keep = here[:, :-1] & (held & ~self.ended)[:, None]
        self.kept_tokens = torch.where(keep, self.words[self.token][:, None], self.kept_tokens)
        self.kept_scores = torch.where(keep, score[:, None], self.kept_scores)
        several = column[:-1] < (self.cut * (held & self.ended))[:, None]
        first = torch.where(held | self.ended, -1, place)
        places = torch.where(
            several,
            self.gaps.gather(1, self.gap.clamp(max=self.gaps.shape[1] - 1)[:, None])
            + (self.written - self.size)[:, None]
            + column[:-1],
            -1,
        )
        return Step(
            complete,
            full & ~complete,
            stop,
            torch.cat([first[:, None], places], 1),
            torch.cat([self.words[self.token][:, None], self.kept_tokens], 1),
            torch.cat([score[:, None], self.kept_scores], 1),
        )

    def write(self, step: Step) -> Tensor:
        """Append the token, or the beginning of the next blank, and compute its row."""
        if self.kept_tokens.shape[1]:
            gone = torch.where(self.ended, self.size - self.cut, 0)
            self.size, self.written, self.used = self.size - gone, self.written - gone, self.used - gone
            self.cache = replace(self.cache, length=self.cache.length - gone.int())
        self.gap = self.gap + self.ended
        self.size = torch.where(self.ended, 0, self.size + 1)
        self.written = self.written + ~self.ended
        fed = torch.where(self.ended, self.family.specials.stop, self.words[self.token])
        self.hidden = self._append(fed, self._position())
        return step.place

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        for name in _HELD:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self.cache = self.cache.select(rows)

    @property
    def kind(self) -> None:
        """Texts do not join yet."""
        return None

    def _among_words(self, ids: Collection[int]) -> Tensor:
        """[W] bool"""
        return torch.isin(self.words, torch.tensor([*ids], dtype=torch.int64, device=self.words.device))

    def _given(self, prompt: Prompt, gaps: Sequence[int]) -> tuple[list[int], list[int]]:
        """The given row with its blanks, and the positions of its tokens."""
        special, jump = self.family.specials, self.layout.jump
        tokens, positions = [*prompt.prefix, special.bos], [*range(len(prompt.prefix) + 1)]
        for gap, token in enumerate([*prompt.start, None]):
            if gap in gaps:
                tokens.append(special.mask)
                positions.append(positions[-1] + 1)
            if token is not None:
                tokens.append(token)
                positions.append(positions[-1] + 1 + jump * (gap in gaps))
        return tokens, positions

    def _position(self) -> Tensor:
        gap = self.gap.clamp(max=self.at.shape[1] - 1)[:, None]
        return self.at.gather(1, gap).squeeze(1) + self.size

    def _read(self, rows: Sequence[tuple[list[int], list[int]]], lengths: NDArray[np.int64], left: int) -> PrefixCache:
        """Compute what is given, with room for so many more rows."""
        device = self.family.device
        tokens, positions = (
            torch.tensor([x for row in part for x in row], device=device) for part in zip(*rows, strict=True)
        )
        columns = torch.arange(lengths.max(), device=device)
        packing = Packing(columns < self.used[:, None], counts=lengths)
        record: list[tuple[Tensor, Tensor]] = []
        self._run(tokens, positions, PackedAttention(packing.segments, record=record))
        return PrefixCache.of(record, packing.segments, left)

    def _append(self, token: Tensor, position: Tensor) -> Tensor:
        count = len(token)
        segments = Segments(torch.arange(count + 1, dtype=torch.int32, device=token.device), 1, count)
        attention = CachedAttention(self.cache, segments)
        hidden = self._run(token, position, attention)
        self.cache = attention.kept
        self.used = self.used + 1
        return hidden

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        with self.family.backbone.autocast():
            hidden: Tensor = self.family.backbone(tokens, positions, attention)
        return hidden


def _padded(lists: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor([[*each, *[0] * (width - len(each))] for each in lists], device=device).view(len(lists), width)
