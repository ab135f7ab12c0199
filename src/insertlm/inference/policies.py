"""Which slot gets the next token: functions that score slots by what the model expects in them.

Each takes logits over what may be written, [S, V], and their normaliser, [S], and returns scores, [S]. The slot with
the highest score is written to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from insertlm.nn.losses import row_chunks, slot_logsumexp

__all__ = ["PLAUSIBLE", "Policy", "best_of_each", "best_pair", "certainty", "look", "margin", "mass", "plausible"]

Policy = Callable[[Tensor, Tensor], Tensor]

# In a slot where nothing is missing a model may still be certain of the token that would be there. So policies that
# look at tokens consider only slots with at least this share of the largest slot's mass. The value was chosen on
# validation puzzles, see docs/log.md.
PLAUSIBLE = 0.5


def mass(logits: Tensor, normaliser: Tensor) -> Tensor:
    """How much is expected in a slot. This is the paper's policy."""
    return normaliser


def certainty(logits: Tensor, normaliser: Tensor) -> Tensor:
    """The log-probability of the slot's likeliest token, given the slot."""
    return logits.amax(-1) - normaliser


def margin(logits: Tensor, normaliser: Tensor, rival: Tensor | None = None) -> Tensor:
    """How much more probable the slot's likeliest token is than the second. rival: [S], the logit of something that is
    never written but may be that second, such as an end token"""
    best, *others = logits.topk(min(2, logits.shape[-1])).values.unbind(-1)
    second = others[0] if others else torch.full_like(best, -torch.inf)
    second = second if rival is None else torch.maximum(second, rival)
    return (best - normaliser).exp() - (second - normaliser).exp()


def best_pair(logits: Tensor, normaliser: Tensor) -> Tensor:
    """The slot of the likeliest (slot, token) pair has the largest logit."""
    return logits.amax(-1)


def look(rows: Tensor, words: Tensor, policy: Policy, barred: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mass and the score of slots, [S] each, from their hidden rows [S, d] and an unembedding [V, d]. Works in
    chunks, so that the logits of all slots are never in memory. barred: [S, V] bool, what must not be written"""
    if policy is mass and barred is None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):  # as the rows were computed
            total = slot_logsumexp(rows, words)
        return total, total
    parts = []
    for piece in row_chunks(rows, words):
        logits = rows[piece] @ words.T
        if barred is not None:
            logits = logits.masked_fill(barred[piece], -torch.inf)
        total = logits.logsumexp(-1)
        parts.append((total, policy(logits, total)))
    masses, scores = zip(*parts, strict=True)
    return torch.cat(masses), torch.cat(scores)


def plausible(masses: Tensor) -> Tensor:
    """Which slots to consider, [B, C] bool. masses: [B, C], log-masses, −inf where there is no slot"""
    return masses >= masses.amax(1, keepdim=True) + math.log(PLAUSIBLE)


def best_of_each(score: Tensor, gap: Tensor) -> Tensor:
    """The scores of the best slot of each gap, −inf elsewhere, [B, C]. gap: [B, C], the gap of each slot, 0 … C - 1"""
    order = score.argsort(dim=1, stable=True, descending=True)
    place = order.argsort(dim=1)  # by place and not by score, so that of equal ones a single one is the best
    first = torch.full_like(place, score.shape[1]).scatter_reduce(1, gap, place, "amin")
    return score.masked_fill(place != first.gather(1, gap), -torch.inf)
