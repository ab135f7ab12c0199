"""Slot × vocabulary cross-entropy that never builds the logits.

With h the hidden rows, W the unembedding and lse_k = logsumexp_v h_k·W_v, the loss of one sequence is
    logsumexp over its slots k of lse_k  −  mean over its deleted tokens j of h[slot(j)]·W[token(j)].
The first term needs one number per row, computed over chunks of rows and computed again in backward; the second is a
gather of as many dot products as there are deleted tokens.

Forward and backward are operators of their own, opaque to `torch.compile`: it would otherwise unroll the loop over
chunks for one number of rows, and compile again for every other.

On a GPU under autocast the products take bfloat16 and give float32; the rest is one pass over each chunk. Both terms
must then see the same rounded operands, see `rounded`. Else the gradients of a token that is certain already do not
cancel, and what is left of them drives the weights on and on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["rounded", "row_chunks", "slot_logsumexp"]

_CHUNK_ELEMENTS = 1 << 26  # the largest piece of logits ever held: 256 MB in float32
_ALIGNMENT = 64  # products are several times slower on rows that end anywhere


def slot_logsumexp(hidden: Tensor, unembedding: Tensor) -> Tensor:
    """The log-mass of each slot over the vocabulary: [T, d] and [V, d] to [T], in the dtype of the operands."""
    if _halved(hidden):
        mass: Tensor = _forward_halved(hidden, unembedding)
    else:
        mass = _forward(hidden, unembedding) if torch.is_grad_enabled() else _masses(hidden, unembedding)
    return mass


def rounded(x: Tensor) -> Tensor:
    """What `slot_logsumexp` sees of an operand, in the type of the operand; gradients pass as they are."""
    if not _halved(x):
        return x
    value: Tensor = _round(x)
    return value


def _halved(x: Tensor) -> bool:
    return x.is_cuda and torch.is_autocast_enabled("cuda")


@torch.library.custom_op("insertlm::round", mutates_args=())
def _round(x: Tensor) -> Tensor:
    """Opaque to the compiler too, which leaves out conversions there and back."""
    return x.bfloat16().to(x.dtype)


_round.register_fake(torch.empty_like)
_round.register_autograd(lambda ctx, grad: grad)


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


# --- The same in half precision


@torch.library.custom_op("insertlm::slot_logsumexp_halved", mutates_args=())
def _forward_halved(hidden: Tensor, unembedding: Tensor) -> Tensor:
    from insertlm.backbone import kernels

    x, words = hidden.bfloat16(), _aligned(unembedding)
    chunks = row_chunks(x, words)
    return torch.cat([kernels.row_logsumexp(_product(x[rows], words.T), len(unembedding)) for rows in chunks])


@torch.library.custom_op("insertlm::slot_logsumexp_halved_backward", mutates_args=())
def _backward_halved(grad: Tensor, hidden: Tensor, unembedding: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    from insertlm.backbone import kernels

    x, words = hidden.bfloat16(), _aligned(unembedding)
    hidden_grad, words_grad = torch.empty_like(hidden), torch.zeros_like(words, dtype=unembedding.dtype)
    for rows in row_chunks(x, words):
        share = kernels.row_shares(_product(x[rows], words.T), lse[rows], grad[rows], len(unembedding))
        hidden_grad[rows] = _product(share, words)
        words_grad += _product(share.T, x[rows])
    return hidden_grad, words_grad[: len(unembedding)]


def _aligned(unembedding: Tensor) -> Tensor:
    """Rounded, with empty words at the end."""
    return F.pad(unembedding.bfloat16(), (0, 0, 0, -len(unembedding) % _ALIGNMENT))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def row_chunks(hidden: Tensor, unembedding: Tensor) -> list[slice]:
    """Rows in pieces whose logits are small enough to hold."""
    size = max(1, _CHUNK_ELEMENTS // len(unembedding))
    return [slice(first, first + size) for first in range(0, max(1, len(hidden)), size)]


def _fake_mass(hidden: Tensor, unembedding: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0])


def _fake_gradients(grad: Tensor, hidden: Tensor, unembedding: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(unembedding)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


for _op, _gradient in ((_forward, _backward), (_forward_halved, _backward_halved)):
    _op.register_fake(_fake_mass)
    _gradient.register_fake(_fake_gradients)

    def _differentiate(ctx: Any, grad: Tensor, gradient: Any = _gradient) -> tuple[Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor] = gradient(grad, *ctx.saved_tensors)
        return gradients

    _op.register_autograd(_differentiate, setup_context=_save)
