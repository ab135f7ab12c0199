"""Slot × vocabulary cross-entropy that never builds the logits.

With h the hidden rows, W the unembedding and lse_k = logsumexp_v h_k·W_v, the loss of one sequence is
    logsumexp over its slots k of lse_k  −  mean over its deleted tokens j of h[slot(j)]·W[token(j)].
The first term needs one number per row, computed over chunks of rows and computed again in backward; the second is a
gather of as many dot products as there are deleted tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["slot_logsumexp"]

_CHUNK_ELEMENTS = 1 << 25  # the largest piece of logits ever held: 128 MB in float32


class _SlotLogsumexp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, unembedding: Tensor) -> Tensor:
        lse = torch.cat([(rows @ unembedding.T).logsumexp(-1) for rows in _chunks(hidden, unembedding)])
        ctx.save_for_backward(hidden, unembedding, lse)
        return lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden, unembedding, lse = ctx.saved_tensors
        size = _chunk_rows(hidden, unembedding)
        hidden_grad, unembedding_grad = [], torch.zeros_like(unembedding)
        for rows, row_lse, row_grad in zip(hidden.split(size), lse.split(size), grad.split(size), strict=True):
            share = (rows @ unembedding.T - row_lse[:, None]).exp() * row_grad[:, None]
            hidden_grad.append(share @ unembedding)
            unembedding_grad = unembedding_grad + share.T @ rows
        return torch.cat(hidden_grad), unembedding_grad


def _chunk_rows(hidden: Tensor, unembedding: Tensor) -> int:
    return max(1, min(len(hidden), _CHUNK_ELEMENTS // len(unembedding)))


def _chunks(hidden: Tensor, unembedding: Tensor) -> tuple[Tensor, ...]:
    return hidden.split(_chunk_rows(hidden, unembedding))


def slot_logsumexp(hidden: Tensor, unembedding: Tensor) -> Tensor:
    """The log-mass of each slot over the vocabulary: [T, d] and [V, d] to [T], in the dtype of the operands."""
    result: Tensor = _SlotLogsumexp.apply(hidden, unembedding)
    return result
