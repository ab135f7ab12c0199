"""Which slot next: scores of slots from what a model expects in them, as plain functions.

Each takes logits over what may be written, [S, V], and their normaliser, [S], and gives a score, [S]; the slot with the
highest gets the next token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from insertlm.nn.losses import row_chunks, slot_logsumexp

__all__ = ["PLAUSIBLE", "Policy", "best_pair", "certainty", "look", "margin", "mass", "plausible"]

Policy = Callable[[Tensor, Tensor], Tensor]

# A slot in which a model expects little may be one where nothing is missing, and the model may well be certain of what
# would stand there. Where a policy looks at tokens, slots below this share of the heaviest one's mass are not in play.
# Chosen on validation puzzles, see docs/log.md.
PLAUSIBLE = 0.5


def mass(logits: Tensor, normaliser: Tensor) -> Tensor:
    """How much is expected in a slot: the paper's choice."""
    return normaliser


def certainty(logits: Tensor, normaliser: Tensor) -> Tensor:
    """How likely its likeliest token is, given that the slot is chosen; as a logarithm."""
    return logits.amax(-1) - normaliser


def margin(logits: Tensor, normaliser: Tensor, rival: Tensor | None = None) -> Tensor:
    """By how much its likeliest token leads the next one. rival: [S], the logit of something that is never written but
    may be that next one"""
    best, *others = logits.topk(min(2, logits.shape[-1])).values.unbind(-1)
    second = others[0] if others else torch.full_like(best, -torch.inf)
    second = second if rival is None else torch.maximum(second, rival)
    return (best - normaliser).exp() - (second - normaliser).exp()


def best_pair(logits: Tensor, normaliser: Tensor) -> Tensor:
    """The slot of the likeliest pair of slot and token."""
    return logits.amax(-1)


def look(rows: Tensor, words: Tensor, policy: Policy, barred: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mass and the score of slots, [S] each, from their hidden rows [S, d] and an unembedding [V, d]. No more
    logits are held at once than in training. barred: [S, V] bool, what may not be written; None: all may"""
    if policy is mass and barred is None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):  # as the rows were made
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
    """Which slots are in play, [B, C] bool. masses: [B, C], log-masses, −inf where there is no slot"""
    return masses >= masses.amax(1, keepdim=True) + math.log(PLAUSIBLE)
