"""Slot × vocabulary cross-entropy that never holds all logits.

With h the hidden rows, W the unembedding and lse_k = logsumexp_v h_k·W_v, the loss of one sequence is
    logsumexp over its slots k of lse_k  −  mean over its deleted tokens j of h[slot(j)]·W[token(j)].
`slot_scores` returns both terms: the mass lse of every row and the logits of a few cells. It works on chunks of rows
and recomputes their logits in backward.

Forward and backward are custom operators, opaque to `torch.compile`. Otherwise it would unroll the loop over chunks for
one number of rows and recompile for every other.

Under autocast, products take bf16 inputs, on a CPU only where gradients are wanted. On a GPU they return float32, and
the rest is one pass over each chunk; a CPU rounds what they return to bf16. The gradient of a logit has two terms, from
its row's mass and from its own score. They are added before rounding to bf16: rounded separately, they would not cancel
for a token that is already certain, and the difference would keep moving the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.nn.fused import ROWS

__all__ = ["row_chunks", "slot_logsumexp", "slot_scores"]

# Logits held at once, 256 MB or 1 GB in float32. Large chunks are faster on a GPU, because each chunk also makes a pass
# over the gradient of all words and over all cells.
_CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 28}
_MEASURED = 1 << 24  # on a CPU without a gradient, where large chunks have no use
_ALIGNMENT = 64  # products are several times slower when the number of columns is not a multiple of this


def slot_logsumexp(hidden: Tensor, unembedding: Tensor, barred: Tensor | None = None) -> Tensor:
    """The log-mass of each slot over the vocabulary, without a gradient: [T, d] and [V, d] to [T].

    barred: [N], ids that take no part
    """
    bf16 = _use_bf16(hidden)
    x, words = _operands(hidden, unembedding, bf16)
    masses = []
    for rows in row_chunks(x, words, None if x.is_cuda else _MEASURED):
        logits = _product(x[rows], words.T)
        if barred is not None:
            logits.index_fill_(1, barred, -torch.inf)
        masses.append(_logsumexp(logits, len(unembedding), bf16))
    return torch.cat(masses)


def slot_scores(hidden: Tensor, unembedding: Tensor, row: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The log-mass of each slot over the vocabulary, and the logits of some cells, both in float32 at least.

    hidden: [T, d]   unembedding: [V, d]   row, token: [N], the cells   Returns [T] and [N]
    """
    bf16 = _use_bf16(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # the operators choose the precision of each product
        mass, score = _forward(hidden, unembedding, row, token, bf16)
    return mass, score


def row_chunks(hidden: Tensor, unembedding: Tensor, most: int | None = None) -> list[slice]:
    """Pieces of the rows whose logits fit into a chunk, or are so many at most."""
    size = max(1, (most or _CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26)) // len(unembedding))
    if hidden.is_cuda and size > ROWS:
        size -= size % ROWS  # products work on whole tiles
    return [slice(first, first + size) for first in range(0, max(1, len(hidden)), size)]


def _use_bf16(x: Tensor) -> bool:
    """Under autocast. On a CPU only where gradients are wanted: what is measured there is measured in full."""
    return torch.is_autocast_enabled(x.device.type) and (x.is_cuda or x.requires_grad)


@torch.library.custom_op("insertlm::slot_scores", mutates_args=())
def _forward(hidden: Tensor, unembedding: Tensor, row: Tensor, token: Tensor, bf16: bool) -> tuple[Tensor, Tensor]:
    x, words = _operands(hidden, unembedding, bf16)
    mass, score = hidden.new_empty(len(hidden)), hidden.new_empty(len(row))
    for rows in row_chunks(x, words):
        logits = _product(x[rows], words.T)
        mass[rows] = _logsumexp(logits, len(unembedding), bf16)
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
    bf16: bool,
) -> tuple[Tensor, Tensor]:
    x, words = _operands(hidden, unembedding, bf16)
    # The sum over chunks is in float32: in bf16 late chunks would be lost.
    hidden_grad, words_grad = torch.empty_like(hidden), torch.zeros_like(words, dtype=unembedding.dtype)
    for rows in row_chunks(x, words):
        logits = _product(x[rows], words.T)  # again: keeping them all would take gigabytes
        cell, inside = _cells(logits, rows, row, token)
        extra = torch.where(inside, score_grad, 0.0)
        shares = _shares_bf16 if bf16 and logits.is_cuda else _shares
        share = shares(logits, mass[rows], mass_grad[rows], cell, extra, len(unembedding)).to(x.dtype)
        hidden_grad[rows] = _product(share, words)
        words_grad += _product(share.T, x[rows])
    return hidden_grad, words_grad[: len(unembedding)]


def _operands(hidden: Tensor, unembedding: Tensor, bf16: bool) -> tuple[Tensor, Tensor]:
    """Unchanged, or in bf16; on a GPU with the vocabulary padded to a multiple of _ALIGNMENT."""
    if not bf16:
        return hidden, unembedding
    spare = -len(unembedding) % _ALIGNMENT if hidden.is_cuda else 0
    return hidden.bfloat16(), F.pad(unembedding.bfloat16(), (0, 0, 0, spare))


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else (a @ b).float()


def _logsumexp(logits: Tensor, words: int, bf16: bool) -> Tensor:
    """Of the first `words` columns."""
    if not bf16 or not logits.is_cuda:
        return logits.logsumexp(-1)
    from insertlm.nn import kernels

    return kernels.row_logsumexp(logits, words)


def _cells(logits: Tensor, rows: slice, row: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The flat index of each cell in this chunk, and which cells are inside. The others get some valid index, because
    selecting them would need their number on the host."""
    here = row - rows.start
    inside = (here >= 0) & (here < len(logits))
    return here.clamp(0, len(logits) - 1) * logits.shape[1] + token, inside


def _shares(logits: Tensor, mass: Tensor, weight: Tensor, cell: Tensor, extra: Tensor, words: int) -> Tensor:
    """exp(logits − mass) · weight, plus `extra` in some cells; a cell may occur several times."""
    share = logits.sub_(mass[:, None]).exp_().mul_(weight[:, None])
    share.view(-1).scatter_add_(0, cell, extra)
    return share


def _shares_bf16(logits: Tensor, mass: Tensor, weight: Tensor, cell: Tensor, extra: Tensor, words: int) -> Tensor:
    """The same in bf16. The cells are summed in float32, in the memory of the logits, which are no longer needed."""
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
    *tensors, ctx.bf16 = inputs
    ctx.save_for_backward(*tensors, output[0])  # the masses, so that backward needs no second softmax


def _differentiate(ctx: Any, mass_grad: Tensor, score_grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(mass_grad, score_grad, *ctx.saved_tensors, ctx.bf16), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
