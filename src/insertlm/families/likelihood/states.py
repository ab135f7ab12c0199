"""What a likelihood is estimated with, and lower bounds from states of a text in which some tokens are missing.

A text of N tokens is written in some order σ. Given the order, the probability is a product over the N states on the
way, and the logarithm of a mean over orders is at least the mean of the logarithms (Jensen). In that mean over uniform
σ, the t-th term depends on the set of the first t tokens and on the next token. The set is uniform among those of its
size, and the next token is uniform among the missing ones. The mean over the next token is computed exactly: this is
the term of a state.

**Monte Carlo.** Each of several orders gives an estimate of the bound from `states` of its N states, evenly spaced from
a random start, which keeps the estimate unbiased. The value is the mean over orders, and the error its standard error.
Orders come from a hash of the seed, so texts of one length share them. A text with no more states than would be drawn
gets all of them, and its bound has no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import hash32, uniform

__all__ = ["IMPOSSIBLE", "MOST_EXACT", "Effort", "Estimate", "all_states", "sum_over_states"]

MOST_EXACT = 16  # tokens: 65,536 states
_START = (1 << 32) - 1  # a counter of the noise that no token has; it draws where the evaluated states start


class Estimate(NamedTuple):
    """In nats. error: the standard error of a bound; 0 if it is exact or all of its states were evaluated
    fills: of each fill, given those to its left; None where fills are not written one after the other"""

    value: float
    error: float
    exact: bool
    fills: tuple[float, ...] | None = None


IMPOSSIBLE = Estimate(-math.inf, 0.0, True)  # for a text with a token that the model never writes


class Effort(NamedTuple):
    """exact: the most tokens of which an ILM's probability is summed up over all 2^n states
    Of bounds: orders, at least 2, and the most states evaluated in each; seed of the orders
    batch_size: texts or states at once. Results do not depend on it"""

    exact: int = 12
    orders: int = 8
    states: int = 32
    seed: int = 0
    batch_size: int = 64

    def check(self) -> None:
        if not 0 <= self.exact <= MOST_EXACT:
            raise InsertlmError(f"likelihoods: expected exact from 0 to {MOST_EXACT} tokens, got {self.exact}")
        if self.orders < 2:
            raise InsertlmError(f"likelihoods: expected 2 orders or more, for a standard error, got {self.orders}")
        if min(self.states, self.batch_size) < 1:
            raise InsertlmError(
                f"likelihoods: expected 1 state and a batch of 1 or more, got {self.states} and {self.batch_size}"
            )


def sum_over_states(
    terms_of: Callable[[Tensor], Tensor], size: int, device: torch.device, effort: Effort
) -> tuple[float, float]:
    """The sum over n = 1 … size of the mean term of states in which n tokens are missing, and its standard error.
    terms_of: from states, [K, size] bool with True for missing tokens, to their terms [K]"""
    if 2**size <= effort.orders * min(effort.states, size):
        return _all_states(terms_of, size, device, effort), 0.0
    return _some_states(terms_of, size, device, effort)


def all_states(size: int, device: torch.device) -> Tensor:
    """[2^size, size] bool. In row k the tokens are missing whose bits are set in k."""
    numbers = torch.arange(2**size, device=device)
    return (numbers[:, None] >> torch.arange(size, device=device)) % 2 == 1


def _all_states(terms_of: Callable[[Tensor], Tensor], size: int, device: torch.device, effort: Effort) -> float:
    """Exactly, by evaluating every state."""
    states = all_states(size, device)[1:]
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
