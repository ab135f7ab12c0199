"""Slot × vocabulary cross-entropy that never builds the logits.

With h the hidden rows, W the unembedding and lse_k = logsumexp_v h_k·W_v, the loss of one sequence is
    logsumexp over its slots k of lse_k  −  mean over its deleted tokens j of h[slot(j)]·W[token(j)].
The first term needs one number per row, computed over chunks of rows and computed again in backward; the second is a
gather of as many dot products as there are deleted tokens.

Forward and backward are operators of their own, opaque to `torch.compile`: it would otherwise unroll the loop over
chunks for one number of rows, and compile again for every other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["row_chunks", "slot_logsumexp"]

_CHUNK_ELEMENTS = 1 << 25  # the largest piece of logits ever held: 128 MB in float32


def slot_logsumexp(hidden: Tensor, unembedding: Tensor) -> Tensor:
    """The log-mass of each slot over the vocabulary: [T, d] and [V, d] to [T], in the dtype of the operands."""
    mass: Tensor = _forward(hidden, unembedding) if torch.is_grad_enabled() else _masses(hidden, unembedding)
    return mass


def _masses(hidden: Tensor, unembedding: Tensor) -> Tensor:
    return torch.cat([(hidden[rows] @ unembedding.T).logsumexp(-1) for rows in row_chunks(hidden, unembedding)])


@torch.library.custom_op("insertlm::slot_logsumexp", mutates_args=())
def _forward(hidden: Tensor, unembedding: Tensor) -> Tensor:
    return _masses(hidden, unembedding)


@torch.library.custom_op("insertlm::slot_logsumexp_backward", mutates_args=())
def _backward(grad: Tensor, hidden: Tensor, unembedding: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    hidden_grad, unembedding_grad = torch.empty_like(hidden), torch.zeros_like(unembedding)
    for rows in row_chunks(hidden, unembedding):
        share = (hidden[rows] @ unembedding.T).sub_(lse[rows, None]).exp_().mul_(grad[rows, None])
        torch.mm(share, unembedding, out=hidden_grad[rows])
        unembedding_grad.addmm_(share.T, hidden[rows])
    return hidden_grad, unembedding_grad


def row_chunks(hidden: Tensor, unembedding: Tensor) -> list[slice]:
    """Rows in pieces whose logits are small enough to hold."""
    size = max(1, _CHUNK_ELEMENTS // len(unembedding))
    return [slice(first, first + size) for first in range(0, max(1, len(hidden)), size)]


@_forward.register_fake
def _(hidden: Tensor, unembedding: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0])


@_backward.register_fake
def _(grad: Tensor, hidden: Tensor, unembedding: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(unembedding)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _backward(grad, *ctx.saved_tensors)
    return gradients


_forward.register_autograd(_differentiate, setup_context=_save)
