"""The probability that a model writes a given text: exactly, or as a lower bound with a standard error.

The question is the same for every family: a text begins with `given`, which may be empty, and the model continues at
its end. What is the probability that it writes `target` and ends there? The end counts, because an insertion model
gives probabilities to whole texts only.

**ARM: exact.** The sum of the log-probabilities of the target's tokens and <eos>, among words and <eos>.

**ILM: a bound.** The model as a distribution: at a text x it ends with probability s(x), the stop classifier's, or it
inserts a token v after the k-th token with probability p(k, v | x), the softmax over the open slots and the words.
(The decoder with `joint` at temperature 1 draws from this p; it compares s with a threshold instead of drawing.)
A target of L tokens is written by inserting its tokens in some order σ. The slots determine σ, as the indices of
`list.insert` determine a permutation, so there are L! ways to write the target, one for each order, even if some of its
tokens are equal. With x_t the given text and the first t tokens of σ, in reading order,

    P(target) = s(x_L) Σ_σ w(σ),   w(σ) = Π_{t<L} (1 − s(x_t)) p(the next token of σ, in its slot | x_t).

The sum is L! times a mean, and the logarithm of a mean is at least the mean of the logarithms (Jensen):

    log P(target) ≥ log s(x_L) + log L! + E_σ log w(σ),   σ uniform.

In E_σ the t-th term depends on the set of the first t tokens and on the next token. The set is uniform among those of
its size, and the next token is uniform among the n = L − t missing ones. The mean over the next token is computed
exactly; it is minus the token loss of training. (So the training loss with stop_weight 1, times L + 1, minus log L!, is
this bound on −log P, apart from the slots and words that decoding leaves out.)

**MDM: a bound.** The N positions of the block after the given text, pads included, are unmasked one by one in a uniform
random order, with the masked share of the block as the network's time. Given the order, P is a product, so log P ≥
E_σ Σ_t log p. There is no L!, because the order is drawn before the tokens and every order can produce the text. The
mean over the next position is exact again. This is the training bound in discrete time.

**Monte Carlo.** Each of several orders gives an estimate of the bound from `states` of its N states, evenly spaced from
a random start, which keeps the estimate unbiased. The value is the mean over orders, and the error its standard error.
Orders come from a hash of the seed, so texts of one length share them. A target with no more states than would be drawn
gets all of them, and its bound has no error.
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

_START = (1 << 32) - 1  # a counter of the noise that no token has; it draws where the evaluated states start


class Estimate(NamedTuple):
    """In nats. error: the standard error of a bound; 0 if it is exact or all of its states were evaluated"""

    value: float
    error: float
    exact: bool


_NEVER = Estimate(-math.inf, 0.0, False)  # for a text with a token that the model never writes


class Effort(NamedTuple):
    """orders: insertion orders, at least 2   states: most states evaluated in each   batch_size: states at once"""

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
    # Decoding chooses among the words only, so the probabilities are normalised over them.
    known = torch.isin(expected, words).all()
    return Estimate(-float(surprise.double().sum()) if known else -math.inf, 0.0, True)


# --- Bounds


@_estimate.register
def _of_ilm(family: ILM, given: list[int], target: list[int], effort: Effort) -> Estimate:
    if family.gated:
        raise InsertlmError("likelihoods: expected an ilm with family.stop text; of one with slots none is known")
    terms_of = _Insertions(family, given, target)
    if not terms_of.writable:
        return _NEVER
    [end] = terms_of(torch.zeros(1, len(target), dtype=torch.bool, device=family.device)).tolist()
    if not target:  # there is one way to write nothing, so the bound is tight
        return Estimate(end, 0.0, True)
    value, error = _sum_over_states(terms_of, len(target), family.device, effort)
    # lgamma(L + 1) = log L!, see above
    return Estimate(end + math.lgamma(len(target) + 1) + value, error, False)


@_estimate.register
def _of_mdm(family: MDM, given: list[int], target: list[int], effort: Effort) -> Estimate:
    size = family.config.block - len(given)
    if len(target) > size:
        raise InsertlmError(
            f"likelihoods: a text of {len(given) + len(target)} tokens; the block has {family.config.block}"
        )
    terms_of = _Masks(family, given, target)
    if not terms_of.writable:
        return _NEVER
    value, error = _sum_over_states(terms_of, size, family.device, effort)
    return Estimate(value, error, False)


def _sum_over_states(
    terms_of: Callable[[Tensor], Tensor], size: int, device: torch.device, effort: Effort
) -> tuple[float, float]:
    """The sum over n = 1 … size of the mean term of states in which n tokens are missing, and its standard error.
    terms_of: from states, [K, size] bool with True for missing tokens, to their terms [K]"""
    if effort.orders < 2:
        raise InsertlmError(f"likelihoods: expected 2 orders or more, for a standard error, got {effort.orders}")
    if 2**size <= effort.orders * min(effort.states, size):
        return _all_states(terms_of, size, device, effort), 0.0
    return _some_states(terms_of, size, device, effort)


def _all_states(terms_of: Callable[[Tensor], Tensor], size: int, device: torch.device, effort: Effort) -> float:
    """Exactly, by evaluating every state."""
    numbers = torch.arange(1, 2**size, device=device)
    states = (numbers[:, None] >> torch.arange(size, device=device)) % 2 == 1
    terms = torch.cat([terms_of(part) for part in torch.split(states, effort.batch_size)]).double()
    # The term of a state counts as the mean over all states with as many missing tokens.
    shares = torch.tensor([1 / math.comb(size, n) for n in range(size + 1)], dtype=torch.float64, device=device)
    return float((terms * shares[states.sum(1)]).sum())


def _some_states(
    terms_of: Callable[[Tensor], Tensor], size: int, device: torch.device, effort: Effort
) -> tuple[float, float]:
    """An estimate from `count` states of every order, evenly spaced from a random start."""
    count = min(effort.states, size)
    order = torch.arange(effort.orders, device=device)[:, None]
    draw = hash32(effort.seed, order, torch.arange(size, device=device))
    rank = draw.argsort(dim=1, stable=True).argsort(dim=1)  # tokens go missing in this order
    first = uniform(effort.seed, order, _START)
    missing = 1 + ((first + torch.arange(count, device=device)) * (size / count)).long().clamp(max=size - 1)
    states = (rank[:, None, :] < missing[:, :, None]).flatten(0, 1)
    terms = torch.cat([terms_of(part) for part in torch.split(states, effort.batch_size)])
    totals = terms.double().view(effort.orders, count).sum(1) * (size / count)
    return float(totals.mean()), float(totals.std() / math.sqrt(effort.orders))


class _Insertions:
    """The terms of an ILM for states of one text: rows `<stop> <bos> given target` with target tokens missing."""

    def __init__(self, family: ILM, given: list[int], target: list[int]) -> None:
        self.family, self.given = family, len(given) + 2
        specials, device = family.specials, family.device
        self.tokens = torch.tensor([specials.stop, specials.bos, *given, *target], device=device)
        self.target = self.tokens[self.given :]
        self.words = family.unembedding.weight[family.writable]
        self.writable = bool(torch.isin(self.target, family.writable).all())

    def __call__(self, missing: Tensor) -> Tensor:
        """The log-probability of not ending plus the mean one of inserting a missing token; if none is missing, the
        log-probability of ending. [K, L] to [K]"""
        family, count = self.family, missing.sum(1)
        keep = torch.cat([missing.new_ones(len(missing), self.given), ~missing], 1)
        packing = Packing(keep)
        tokens = packing.pack(self.tokens.expand_as(keep))
        positions = packing.pack(packing.where - packing.starts[:, None])  # survivors are numbered without gaps
        with family.backbone.autocast():
            hidden = family.backbone(tokens, positions, PackedAttention(packing.segments))
        stop = family.stop(hidden.index_select(0, packing.starts)).log_softmax(-1)
        is_slot = keep[:, self.given - 1 :]  # the slots after the last given token and after those of the target
        slots = packing.where[:, self.given - 1 :]
        mass = torch.full_like(slots, -torch.inf, dtype=hidden.dtype)
        mass[is_slot] = slot_logsumexp(hidden[slots[is_slot]], self.words)
        word = family.unembedding.weight[self.target]
        score = (hidden[slots[:, 1:]] * word).sum(-1)
        inserted = score.masked_fill(~missing, 0.0).sum(1) / count.clamp(min=1) - mass.logsumexp(1)
        term: Tensor = torch.where(count > 0, stop[:, 1] + inserted, stop[:, 0])
        return term


class _Masks:
    """The terms of an MDM for states of one text: blocks with some positions after the given ones masked."""

    def __init__(self, family: MDM, given: list[int], target: list[int]) -> None:
        block, pad, device = family.config.block, family.specials.pad, family.device
        self.family, self.given = family, len(given)
        self.block = torch.tensor([*given, *target, *[pad] * (block - len(given) - len(target))], device=device)
        self.writable = bool(torch.isin(self.block[len(given) :], family.words).all())

    def __call__(self, missing: Tensor) -> Tensor:
        """The mean over masked positions of the log-probability of the right token. [K, N] to [K]"""
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
