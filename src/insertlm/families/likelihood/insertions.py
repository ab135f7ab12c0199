"""The probability of a text under an ILM: the exact sum over all ways to write it, and a lower bound.

**The process.** At a text x an ILM ends with probability s(x), the stop classifier's, or it inserts a token v into the
open slot k with probability p(k, v | x), the softmax over the open slots and the words. That process gives every
text a probability. It is what decoding does with `joint` at temperature 1, but for the end: decoding compares s with a
threshold, where the process draws.

**Ways.** A target of L tokens is written by inserting its tokens in some order σ. The slots determine σ, as the indices
of `list.insert` determine a permutation. So there are L! ways to write the target, one for each order, even if some of
its tokens are equal: which of two equal tokens came first is told by the slot of the second. Given tokens are always
there. With x_S the text of which the tokens S are written,

    P(target) = s(x_full) Σ_σ Π_t (1 − s(x_S)) p(the next token of σ, in its slot | x_S),   S = the first t tokens of σ.

**The exact sum.** The L! ways lead through only 2^L states. With F(S) the probability of going on from S to the whole
text and ending there,

    F(full) = s(x_full),   F(S) = (1 − s(x_S)) Σ_{j ∉ S} p(token j, in its slot | x_S) F(S ∪ {j}),   P(target) = F(∅).

Sets S that leave the same text in view are one state for the network, which computes it once; but a token that is still
missing has another slot in each of them, so their F differ, and the sum goes over the sets.

**The bound**, for longer texts: the sum is L! times a mean over uniform σ, so

    log P(target) ≥ log s(x_full) + log L! + E_σ log w(σ),   w(σ) = the product above,

see states.py. The mean log-probability of a missing token is minus the token loss of training. (So the training loss
with stop_weight 1, times L + 1, minus log L!, is this bound on −log P, apart from the slots and words that decoding
leaves out.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from insertlm.core.packing import Packing
from insertlm.families.ilm import ILM
from insertlm.families.likelihood.states import IMPOSSIBLE, Effort, Estimate, all_states, sum_over_states
from insertlm.inference.score import Completion
from insertlm.nn.attention import Attention, CachedAttention, PackedAttention, PrefixCache
from insertlm.nn.losses import slot_logsumexp

__all__ = ["Insertions", "exact_sum", "lower_bound", "probability_of_text"]


def probability_of_text(family: ILM, completion: Completion, effort: Effort) -> Estimate:
    ways = Insertions(family, completion, effort.batch_size)
    if not ways.writable:
        return IMPOSSIBLE
    # There is one way to write nothing, and to write one token.
    if completion.size <= max(1, effort.exact):
        value = exact_sum(ways)
        return Estimate(value, 0.0, True, (value,) if len(completion.fills) == 1 else None)
    return Estimate(*lower_bound(ways, effort), False)


def exact_sum(ways: Insertions) -> float:
    """log P(target), from the whole text back to the state in which nothing is written."""
    size = ways.size
    missing = all_states(size, ways.device)
    stop, inserted = ways.look(missing)
    going = stop[:, 1:] + inserted  # to each next state, [2^L, L]
    value = torch.full_like(going[:, 0], -torch.inf) if size else stop[:, 0]
    value[0] = stop[0, 0]
    bit = 1 << torch.arange(size, device=ways.device)
    count = missing.sum(1)
    for number in range(1, size + 1):
        states = (count == number).nonzero()  # [K, 1]
        value[states[:, 0]] = (going[states[:, 0]] + value[states & ~bit]).logsumexp(1)
    return float(value[-1])


def lower_bound(ways: Insertions, effort: Effort) -> tuple[float, float]:
    """The bound and its standard error."""
    stop, _ = ways.look(torch.zeros(1, ways.size, dtype=torch.bool, device=ways.device))
    value, error = sum_over_states(ways.terms, ways.size, ways.device, effort)
    return float(stop[0, 0]) + math.lgamma(ways.size + 1) + value, error  # lgamma(L + 1) = log L!


class Insertions:
    """An ILM on its way to one text: what it would do in states where some of the target's tokens are missing.

    cells: [C], `prefix <stop> <bos> text`, or without the prefix if that sees nothing behind it and so is computed once
    stop: which cell is <stop>   before: tokens of the prefix   cache: of the prefix that is computed once
    wanted: [L] the cells of the target   gap: [L], the gap each belongs to
    open: [C] bool, behind which cells may be written, as far as they are there
    """

    def __init__(self, family: ILM, completion: Completion, batch_size: int) -> None:
        special, prefix, device = family.specials, completion.prompt.prefix, family.device
        self.family, self.batch_size, self.device, self.size = family, batch_size, device, completion.size
        self.before = len(prefix)
        room = len(completion.text) + 2
        self.cache = self._prefix_cache(prefix, room) if family.model.prefix_lm and prefix else None
        front = prefix if self.cache is None else []
        self.stop, first = len(front), len(front) + 2
        self.cells = torch.tensor([*front, special.stop, special.bos, *completion.text], device=device)
        places = [first + place for begin, end in completion.ranges for place in range(begin, end)]
        self.wanted = torch.tensor(places, dtype=torch.int64, device=device)
        sizes = torch.tensor([len(fill) for fill in completion.fills], dtype=torch.int64, device=device)
        self.gap = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        self.open = torch.zeros_like(self.cells, dtype=torch.bool)
        self.open[[first + begin - 1 for begin, _ in completion.ranges] + places] = True
        self.target = self.cells[self.wanted]
        self.words = family.unembedding.weight[family.writable]
        self.writable = bool(torch.isin(self.target, family.writable).all())

    def look(self, missing: Tensor) -> tuple[Tensor, Tensor]:
        """In each of K states, [K, L] bool: the log-probabilities of ending and of going on, [K, 2], and if it goes on
        of inserting each missing token in its slot, [K, L], −inf for those that are there. Float64"""
        stop = torch.empty(len(missing), 2, dtype=torch.float64, device=self.device)
        inserted = torch.empty_like(missing, dtype=torch.float64)
        same = self._same_texts(missing)
        texts = int(same.max()) + 1
        number = torch.arange(len(missing), device=self.device)
        # Of the states with one text in view, any will do.
        shown = torch.zeros(texts, dtype=torch.int64, device=self.device).scatter(0, same, number)
        for first in range(0, texts, self.batch_size):
            here = ((same >= first) & (same < first + self.batch_size)).nonzero().squeeze(1)
            text = same[here] - first
            ends, hidden, starts, mass = self._compute(missing[shown[first : first + self.batch_size]])
            # The slot of a missing token is the nearest token to its left that is there.
            gone = missing[here].cumsum(1) - missing[here].long()
            slot = starts[text, None] + self.wanted - gone - 1
            score = (hidden[slot] * self.family.unembedding.weight[self.target]).sum(-1)
            stop[here] = ends[text].double()
            inserted[here] = (score - mass[text, None]).double().masked_fill(~missing[here], -torch.inf)
        return stop, inserted

    def terms(self, missing: Tensor) -> Tensor:
        """Of states in which something is missing: the log-probability of not ending, plus the mean one of inserting a
        missing token. [K, L] to [K]"""
        stop, inserted = self.look(missing)
        return stop[:, 1] + inserted.masked_fill(~missing, 0.0).sum(1) / missing.sum(1)

    def _same_texts(self, missing: Tensor) -> Tensor:
        """A number for each state, [K], equal for states in which the same text is in view, gap by gap."""
        size = missing.shape[1]
        place = torch.where(missing, size, (~missing).cumsum(1) - 1)
        token = 1 + self.target + self.gap * self.family.vocabulary
        closed_up = torch.zeros(len(missing), size + 1, dtype=torch.int64, device=self.device)
        closed_up.scatter_(1, place, token.expand_as(missing))
        closed_up[:, size] = 0  # where those went that are not in view
        same: Tensor = torch.unique(closed_up, dim=0, return_inverse=True)[1]
        return same

    def _compute(self, missing: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of states: both logarithms of the stop classifier [K, 2], all hidden rows [T, d], the first row of each state
        [K], and its log-mass over open slots and words [K]."""
        family = self.family
        keep = torch.ones(len(missing), len(self.cells), dtype=torch.bool, device=self.device)
        keep[:, self.wanted] = ~missing
        packing = Packing(keep)
        if self.cache is None:
            attention: Attention = PackedAttention(packing.segments)
        else:
            copies = self.cache.select(torch.zeros(len(missing), dtype=torch.int64, device=self.device))
            attention = CachedAttention(copies, packing.segments)
        # <stop> is stored behind the prefix but has position 0; survivors are numbered without gaps.
        place, column = packing.where - packing.starts[:, None], torch.arange(len(self.cells), device=self.device)
        place = torch.where(column < self.stop, place + 1, place + self.before - self.stop)
        place[:, self.stop] = 0
        with family.backbone.autocast():
            hidden = family.backbone(packing.pack(self.cells.expand_as(keep)), packing.pack(place), attention)
        stop = family.stop(hidden.index_select(0, packing.starts + self.stop)).log_softmax(-1)
        is_slot = keep & self.open
        mass = torch.full(keep.shape, -torch.inf, dtype=hidden.dtype, device=self.device)
        mass[is_slot] = slot_logsumexp(hidden[packing.where[is_slot]], self.words)
        return stop, hidden, packing.starts, mass.logsumexp(1)

    def _prefix_cache(self, prefix: Sequence[int], room: int) -> PrefixCache:
        """room: how many tokens may come behind the prefix"""
        family, record = self.family, list[tuple[Tensor, Tensor]]()
        packing = Packing(torch.ones(1, len(prefix), dtype=torch.bool, device=self.device))
        tokens = torch.tensor(prefix, device=self.device)
        with family.backbone.autocast():
            attention = PackedAttention(packing.segments, record=record)
            family.backbone(tokens, torch.arange(1, 1 + len(prefix), device=self.device), attention)
        return PrefixCache.of(record, packing.segments, room)
