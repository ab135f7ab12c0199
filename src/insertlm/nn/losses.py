"""Slot × vocabulary cross-entropy that never holds all logits.

With h the hidden rows, W the unembedding and lse_k = logsumexp_v h_k·W_v, the loss of one sequence is
    logsumexp over its slots k of lse_k  −  mean over its deleted tokens j of h[slot(j)]·W[token(j)].
`slot_scores` gives both kinds of numbers, the mass lse of every row and the logits of a few cells. It looks at chunks
of rows, and computes their logits again in backward.

Forward and backward are operators of their own, opaque to `torch.compile`: it would otherwise unroll the loop over
chunks for one number of rows, and compile again for every other.

On a GPU under autocast the products take bfloat16 and give float32; the rest is one pass over each chunk. What the
gradient of a logit gets from its row's mass and from its own score is added up before it is rounded. Rounded apart, the
two would not cancel for a token that is certain already, and what is left would drive the weights on and on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.nn.fused import ROWS

__all__ = ["row_chunks", "slot_logsumexp", "slot_scores"]

# Logits held at once, 256 MB or 1 GB in float32. A GPU wants large products: every chunk also passes over the gradient
# of all words and over all cells.
_CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 28}
_ALIGNMENT = 64  # products are several times slower on rows that end anywhere


def slot_logsumexp(hidden: Tensor, unembedding: Tensor) -> Tensor:
    """The log-mass of each slot over the vocabulary, for reading alone: [T, d] and [V, d] to [T]."""
    halved = _halved(hidden)
    x, words = _operands(hidden, unembedding, halved)
    chunks = row_chunks(x, words)
    return torch.cat([_logsumexp(_product(x[rows], words.T), len(unembedding), halved) for rows in chunks])


def slot_scores(hidden: Tensor, unembedding: Tensor, row: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The log-mass of each slot over the vocabulary, and the logits of some cells, both in full precision.

    hidden: [T, d]   unembedding: [V, d]   row, token: [N], the cells   Returns [T] and [N]
    """
    halved = _halved(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        mass, score = _forward(hidden, unembedding, row, token, halved)
    return mass, score


def row_chunks(hidden: Tensor, unembedding: Tensor) -> list[slice]:
    """Rows in pieces whose logits are small enough to hold."""
    size = max(1, _CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26) // len(unembedding))
    if hidden.is_cuda and size > ROWS:
        size -= size % ROWS  # whole tiles of a product
    return [slice(first, first + size) for first in range(0, max(1, len(hidden)), size)]


def _halved(x: Tensor) -> bool:
    return x.is_cuda and torch.is_autocast_enabled("cuda")


@torch.library.custom_op("insertlm::slot_scores", mutates_args=())
def _forward(hidden: Tensor, unembedding: Tensor, row: Tensor, token: Tensor, halved: bool) -> tuple[Tensor, Tensor]:
    x, words = _operands(hidden, unembedding, halved)
    mass, score = hidden.new_empty(len(hidden)), hidden.new_empty(len(row))
    for rows in row_chunks(x, words):
        logits = _product(x[rows], words.T)
        mass[rows] = _logsumexp(logits, len(unembedding), halved)
        cell, inside = _cells(logits, rows, row, token)
        score = torch.where(inside, logits.flatten()[cell], score)
    return mass, score


@torch.library.custom_op("insertlm::slot_scores_backward", mutates_args=())
def _backward(
    mass_grad: Tensor,
    score_grad: Tensor,
    hidden: Tensor,
    unembedding: Tensor,
    row: Tensor,
    token: Tensor,
    mass: Tensor,
    halved: bool,
) -> tuple[Tensor, Tensor]:
    x, words = _operands(hidden, unembedding, halved)
    hidden_grad, words_grad = torch.empty_like(hidden), torch.zeros_like(words, dtype=unembedding.dtype)
    for rows in row_chunks(x, words):
        logits = _product(x[rows], words.T)
        cell, inside = _cells(logits, rows, row, token)
        extra = torch.where(inside, score_grad, 0.0)
        shares = _shares_halved if halved else _shares
        share = shares(logits, mass[rows], mass_grad[rows], cell, extra, len(unembedding))
        hidden_grad[rows] = _product(share, words)
        words_grad += _product(share.T, x[rows])
    return hidden_grad, words_grad[: len(unembedding)]


def _operands(hidden: Tensor, unembedding: Tensor, halved: bool) -> tuple[Tensor, Tensor]:
    """As they are, or rounded, with empty words at the end."""
    if not halved:
        return hidden, unembedding
    return hidden.bfloat16(), F.pad(unembedding.bfloat16(), (0, 0, 0, -len(unembedding) % _ALIGNMENT))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 and a.is_cuda else a @ b


def _logsumexp(logits: Tensor, words: int, halved: bool) -> Tensor:
    """Of the first `words` columns."""
    if not halved:
        return logits.logsumexp(-1)
    from insertlm.nn import kernels

    return kernels.row_logsumexp(logits, words)


def _cells(logits: Tensor, rows: slice, row: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cells lie in this chunk, flattened, and which of them lie there. Others point to some cell too."""
    here = row - rows.start
    inside = (here >= 0) & (here < len(logits))
    return here.clamp(0, len(logits) - 1) * logits.shape[1] + token, inside


def _shares(logits: Tensor, mass: Tensor, weight: Tensor, cell: Tensor, extra: Tensor, words: int) -> Tensor:
    """exp(logits − mass) · weight, and `extra` more in some cells; cells may occur several times."""
    share = logits.sub_(mass[:, None]).exp_().mul_(weight[:, None])
    share.view(-1).scatter_add_(0, cell, extra)
    return share


def _shares_halved(logits: Tensor, mass: Tensor, weight: Tensor, cell: Tensor, extra: Tensor, words: int) -> Tensor:
    """The same in bfloat16. The cells are summed up in the logits, which nobody needs any more."""
    from insertlm.nn import kernels

    share = kernels.row_shares(logits, mass, weight, words)
    exact, row = logits.view(-1), cell // logits.shape[1]
    exact.scatter_(0, cell, (exact[cell] - mass[row]).exp() * weight[row]).scatter_add_(0, cell, extra)
    share.view(-1).scatter_(0, cell, exact[cell].bfloat16())
    return share


@_forward.register_fake
def _(hidden: Tensor, unembedding: Tensor, row: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape[0]), hidden.new_empty(row.shape[0])


@_backward.register_fake
def _(mass_grad: Tensor, score_grad: Tensor, hidden: Tensor, unembedding: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(unembedding)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.halved = inputs
    ctx.save_for_backward(*tensors, output[0])


def _differentiate(ctx: Any, mass_grad: Tensor, score_grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(mass_grad, score_grad, *ctx.saved_tensors, ctx.halved), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
