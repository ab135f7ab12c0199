"""How likely a model is to write a given text: exactly, or as a lower bound with a standard error.

The question is the same for every family: a text begins with `given` (perhaps nothing), the model goes on at its end;
what is the probability that it writes `target`, and ends there? The end counts: an insertion model knows no other
events than whole texts.

**ARM: exact.** The sum of the logarithms of what the target's tokens and <eos> get, among words and <eos>.

**ILM: a bound.** The model as a distribution: at a text x it ends with probability s(x), the stop classifier's, or it
inserts a token v behind the k-th token with probability p(k, v | x), the softmax over the open slots and the words.
(The decoder with `joint` at temperature 1 draws from this p; it compares s with a threshold instead of drawing.)
A target of L tokens is written by inserting its tokens in some order σ. The slots tell σ back, as the places of
`list.insert` tell a permutation, so orders and ways to write the target are the same, equal tokens or not: L! of them.
With x_t the given text and the first t tokens of σ, in reading order,

    P(target) = s(x_L) Σ_σ w(σ),   w(σ) = Π_{t<L} (1 − s(x_t)) p(the next token of σ, in its slot | x_t).

A sum is L! times a mean, and the logarithm of a mean is no less than the mean of logarithms (Jensen):

    log P(target) ≥ log s(x_L) + log L! + E_σ log w(σ),   σ uniform.

In E_σ the t-th term depends on the set of the first t tokens and the next one. The set is uniform among those of its
size, and the next token uniform among the n = L − t missing ones: the mean over these is taken exactly, and is minus
the token loss of training. (So the training loss, stop_weight 1, times L + 1, less log L!, is this bound on −log P, but
for the slots and words that decoding leaves out.)

**MDM: a bound.** Cells of the block behind what is given, N with the pads, are unmasked one by one in an order drawn
beforehand, uniformly; the network is told the masked share of the block as its time. Given the order P is a product, so
that log P ≥ E_σ Σ_t log p, with no L!: here the order is part of what is drawn, and an MDM's text is one event under
every order. The mean over the next cell is exact again. It is the bound of training, in discrete time.

**Monte Carlo.** Each of several orders gives an estimate of the bound: of its N states, `states` are looked at, evenly
spaced from a random start, which leaves the expectation as it is. The value is the mean over orders; the error is its
standard error. Orders come from a hash of the seed, so that texts of one length see the same ones. A target so short
that all its states are no more than would be drawn gets them all: its bound has no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import hash32, uniform
from insertlm.core.packing import Packing
from insertlm.families.arm import ARM
from insertlm.families.base import Family
from insertlm.families.ilm import ILM
from insertlm.families.mdm import MDM, lay_out
from insertlm.nn.attention import PackedAttention
from insertlm.nn.losses import slot_logsumexp

__all__ = ["Effort", "Estimate", "log_likelihood"]

_START = (1 << 32) - 1  # a counter of noise that no cell has: where the states looked at begin


class Estimate(NamedTuple):
    """In nats. error: standard error of a bound; 0 and exact, or a bound whose every term was looked at"""

    value: float
    error: float
    exact: bool


_NEVER = Estimate(-math.inf, 0.0, False)  # of a text with a token that is never written


class Effort(NamedTuple):
    """orders: of insertion, at least 2   states: looked at in each, at most   batch_size: texts at once"""

    orders: int = 8
    states: int = 32
    seed: int = 0
    batch_size: int = 64


@torch.inference_mode()
def log_likelihood(family: Family, given: Sequence[int], target: Sequence[int], effort: Effort) -> Estimate:
    """log P(target | given), see above. Depends on its arguments and the model alone."""
    return _estimate(family, list(given), list(target), effort)


@singledispatch
def _estimate(family: Family, given: list[int], target: list[int], effort: Effort) -> Estimate:
    """By the type of the family: a new one registers what follows from its own way of writing."""
    raise InsertlmError("likelihoods: expected a model of the family ilm, arm or mdm; of others none is known")


# --- Exact


@_estimate.register
def _of_arm(family: ARM, given: list[int], target: list[int], effort: Effort) -> Estimate:
    words = torch.cat([family.writable, torch.tensor([family.specials.eos], device=family.device)])
    row = torch.tensor([family.specials.bos, *given, *target], device=family.device)
    packing = Packing(torch.ones_like(row, dtype=torch.bool)[None])
    places = torch.arange(len(row), device=family.device)
    with family.backbone.autocast():
        attention = PackedAttention(packing.segments, causal=True)
        hidden = family.backbone(row, places, attention, wanted=places[len(given) :])
    expected = torch.tensor([*target, family.specials.eos], device=family.device)
    score = (hidden * family.unembedding.weight[expected]).sum(-1)
    surprise = slot_logsumexp(hidden, family.unembedding.weight[words]) - score
    known = torch.isin(expected, words).all()
    return Estimate(-float(surprise.double().sum()) if known else -math.inf, 0.0, True)


# --- Bounds


@_estimate.register
def _of_ilm(family: ILM, given: list[int], target: list[int], effort: Effort) -> Estimate:
    look = _Insertions(family, given, target)
    if not look.writable:
        return _NEVER
    [end] = look(torch.zeros(1, len(target), dtype=torch.bool, device=family.device)).tolist()
    if not target:  # one way to write nothing, so this is all there is
        return Estimate(end, 0.0, True)
    value, error = _sum_over_states(look, len(target), family.device, effort)
    return Estimate(end + math.lgamma(len(target) + 1) + value, error, False)


@_estimate.register
def _of_mdm(family: MDM, given: list[int], target: list[int], effort: Effort) -> Estimate:
    cells = family.config.block - len(given)
    if len(target) > cells:
        raise InsertlmError(
            f"likelihoods: a text of {len(given) + len(target)} tokens; the block has {family.config.block}"
        )
    look = _Masks(family, given, target)
    if not look.writable:
        return _NEVER
    value, error = _sum_over_states(look, cells, family.device, effort)
    return Estimate(value, error, False)


def _sum_over_states(
    look: Callable[[Tensor], Tensor], cells: int, device: torch.device, effort: Effort
) -> tuple[float, float]:
    """The sum over n = 1 … cells of the mean term of states in which n cells are missing, and its standard error.
    look: [K, cells] bool, what is missing in each of some states, to their terms [K]"""
    if effort.orders < 2:
        raise InsertlmError(f"likelihoods: expected 2 orders or more, for a standard error, got {effort.orders}")
    if 2**cells <= effort.orders * min(effort.states, cells):
        return _all_states(look, cells, device, effort), 0.0
    return _some_states(look, cells, device, effort)


def _all_states(look: Callable[[Tensor], Tensor], cells: int, device: torch.device, effort: Effort) -> float:
    """Where there are no more of them than would be drawn."""
    numbers = torch.arange(1, 2**cells, device=device)
    states = (numbers[:, None] >> torch.arange(cells, device=device)) % 2 == 1
    terms = torch.cat([look(part) for part in torch.split(states, effort.batch_size)]).double()
    shares = torch.tensor([1 / math.comb(cells, n) for n in range(cells + 1)], dtype=torch.float64, device=device)
    return float((terms * shares[states.sum(1)]).sum())


def _some_states(
    look: Callable[[Tensor], Tensor], cells: int, device: torch.device, effort: Effort
) -> tuple[float, float]:
    shown = min(effort.states, cells)
    order = torch.arange(effort.orders, device=device)[:, None]
    draw = hash32(effort.seed, order, torch.arange(cells, device=device))
    rank = draw.argsort(dim=1, stable=True).argsort(dim=1)  # when each cell goes missing, the first is 0
    first = uniform(effort.seed, order, _START)
    missing = 1 + ((first + torch.arange(shown, device=device)) * (cells / shown)).long().clamp(max=cells - 1)
    states = (rank[:, None, :] < missing[:, :, None]).flatten(0, 1)
    terms = torch.cat([look(part) for part in torch.split(states, effort.batch_size)])
    totals = terms.double().view(effort.orders, shown).sum(1) * (cells / shown)
    return float(totals.mean()), float(totals.std() / math.sqrt(effort.orders))


class _Insertions:
    """An ILM on states of one text: rows `<stop> <bos> given target`, of which some of the target is missing."""

    def __init__(self, family: ILM, given: list[int], target: list[int]) -> None:
        self.family, self.given = family, len(given) + 2
        specials, device = family.specials, family.device
        self.tokens = torch.tensor([specials.stop, specials.bos, *given, *target], device=device)
        self.target = self.tokens[self.given :]
        self.words = family.unembedding.weight[family.writable]
        self.writable = bool(torch.isin(self.target, family.writable).all())

    def __call__(self, missing: Tensor) -> Tensor:
        """The logarithms of going on and of the insertion, a mean over what is missing; of ending, if nothing is.
        [K, L] to [K]"""
        family, count = self.family, missing.sum(1)
        keep = torch.cat([missing.new_ones(len(missing), self.given), ~missing], 1)
        packing = Packing(keep)
        tokens = packing.pack(self.tokens.expand_as(keep))
        positions = packing.pack(packing.where - packing.starts[:, None])
        with family.backbone.autocast():
            hidden = family.backbone(tokens, positions, PackedAttention(packing.segments))
        stop = family.stop(hidden.index_select(0, packing.starts)).log_softmax(-1)
        is_slot = keep[:, self.given - 1 :]  # the last token that is given, and those of the target
        slots = packing.where[:, self.given - 1 :]
        mass = torch.full_like(slots, -torch.inf, dtype=hidden.dtype)
        mass[is_slot] = slot_logsumexp(hidden[slots[is_slot]], self.words)
        word = family.unembedding.weight[self.target]
        score = (hidden[slots[:, 1:]] * word).sum(-1)
        inserted = score.masked_fill(~missing, 0.0).sum(1) / count.clamp(min=1) - mass.logsumexp(1)
        term: Tensor = torch.where(count > 0, stop[:, 1] + inserted, stop[:, 0])
        return term


class _Masks:
    """An MDM on states of one text: blocks of which some cells behind the given ones are masked."""

    def __init__(self, family: MDM, given: list[int], target: list[int]) -> None:
        block, pad, device = family.config.block, family.specials.pad, family.device
        self.family, self.given = family, len(given)
        self.block = torch.tensor([*given, *target, *[pad] * (block - len(given) - len(target))], device=device)
        self.writable = bool(torch.isin(self.block[len(given) :], family.words).all())

    def __call__(self, missing: Tensor) -> Tensor:
        """The mean over masked cells of the logarithm of what is right there. [K, N] to [K]"""
        family, count = self.family, len(missing)
        masked = torch.cat([missing.new_zeros(count, self.given), missing], 1)
        bos = torch.full((count, 1), family.specials.bos, device=missing.device)
        block = torch.where(masked, family.specials.mask, self.block)
        x = lay_out(bos, torch.ones_like(bos[:, 0]), block)
        with family.backbone.autocast():
            hidden = family.hidden(x, masked.float().mean(1), x.cells[:, self.given :].flatten())
        mass = slot_logsumexp(hidden, family.unembedding.weight[family.words])
        word = family.unembedding.weight[self.block[self.given :]]
        score = (hidden.view(count, *word.shape) * word).sum(-1)
        surprise = (mass.view_as(score) - score).masked_fill(~missing, 0.0)
        return -surprise.sum(1) / missing.sum(1)
