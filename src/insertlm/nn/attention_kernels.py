"""Attention on a GPU where the flash kernels, made for long sequences, would mostly work on nothing.

- `short_attention`: segments of packed rows, not much longer than a tile of keys. One program has all keys of a tile
  and its gradient sums; so the gradient takes one kernel, without sums over memory in float32.
- `few_queries`: the current rows of a text against its cached ones.
Only imported where there is CUDA. Tests compare them with the plain formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["few_queries", "short_attention"]

_SPAN = 64  # queries or keys looked at together
_TILE = 128  # most keys whose gradients one pass sums


@triton.jit
def _look(q, k, v, place, inside, seen, scale, best, total, mix):  # type: ignore[no-untyped-def]
    """Some keys more: the largest score, the sum of weights and the weighted sum of values so far.

    inside: which keys there are   seen: which of them each query sees
    """
    keys = tl.load(k + place, mask=inside[:, None], other=0.0)
    values = tl.load(v + place, mask=inside[:, None], other=0.0)
    score = tl.where(seen, tl.dot(q, tl.trans(keys)) * scale, float("-inf"))
    top = tl.maximum(best, tl.max(score, 1))
    level = tl.where(top == float("-inf"), 0.0, top)  # of a query that has seen nothing yet
    weight = tl.exp2(score - level[:, None])
    shrink = tl.exp2(best - level)
    mix = mix * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
    return top, total * shrink + tl.sum(weight, 1), mix


def _scale(dim: int) -> float:
    """Of a score, as an exponent of two."""
    return math.log2(math.e) / math.sqrt(dim)


# --- Short segments


@triton.jit  # type: ignore[untyped-decorator]
def _meet(text, first_query, queries: tl.constexpr, first_key, keys: tl.constexpr, length):  # type: ignore[no-untyped-def]
    """Whether any of some queries may see any of some keys: the keys begin in the prefix, or they have a text in
    common."""
    last_query = tl.load(text + tl.minimum(first_query + queries, length) - 1)
    last_key = tl.load(text + tl.minimum(first_key + keys, length) - 1)
    key = tl.load(text + first_key)
    return (key == 0) | ((key <= last_query) & (tl.load(text + first_query) <= last_key))


@triton.jit  # type: ignore[untyped-decorator]
def _in_sight(text, query, key, length, causal: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which queries see which keys of their segment, as far as texts and their order go."""
    theirs = tl.load(text + key, mask=key < length, other=0)
    same = theirs == tl.load(text + query, mask=query < length, other=0)
    if causal:
        same = same & (key <= query)
    return same | (theirs == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _short_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu,
    text,
    out,
    mass,
    scale,
    heads: tl.constexpr,
    dim: tl.constexpr,
    span: tl.constexpr,
    causal: tl.constexpr,
    texts: tl.constexpr,
):
    """`span` queries of one head of one segment per program. texts: whether a segment has a prefix and texts"""
    segment, head = tl.program_id(0), tl.program_id(2)
    start = tl.load(cu + segment).to(tl.int64)
    length = (tl.load(cu + segment + 1) - start).to(tl.int32)
    first_query = tl.program_id(1) * span
    if first_query < length:
        query, d = first_query + tl.arange(0, span), tl.arange(0, dim)
        here = ((start + query[:, None]) * heads + head) * dim + d[None, :]
        x = tl.load(q + here, mask=(query < length)[:, None], other=0.0)
        best = tl.full([span], float("-inf"), tl.float32)
        total = tl.zeros([span], tl.float32)
        mix = tl.zeros([span, dim], tl.float32)
        end = length
        if not texts:
            end = tl.minimum(length, first_query + span) if causal else length
        for first in range(0, end, span):
            key = first + tl.arange(0, span)
            place = ((start + key[:, None]) * heads + head) * dim + d[None, :]
            inside = key < length
            if texts:
                if _meet(text + start, first_query, span, first, span, length):
                    seen = inside[None, :] & _in_sight(text + start, query[:, None], key[None, :], length, causal)
                    best, total, mix = _look(x, k, v, place, inside, seen, scale, best, total, mix)
            else:
                seen = inside[None, :]
                if causal:
                    seen = seen & (key[None, :] <= query[:, None])
                best, total, mix = _look(x, k, v, place, inside, seen, scale, best, total, mix)
        tl.store(out + here, mix / total[:, None], mask=(query < length)[:, None])
        tl.store(mass + (start + query) * heads + head, best + tl.log2(total), mask=query < length)


@triton.jit  # type: ignore[untyped-decorator]
def _short_gradient_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu,
    text,
    out,
    mass,
    grad,
    q_grad,
    k_grad,
    v_grad,
    scale,
    slope,
    heads: tl.constexpr,
    dim: tl.constexpr,
    tile: tl.constexpr,
    span: tl.constexpr,
    causal: tl.constexpr,
    texts: tl.constexpr,
):
    """One head of one segment per program: for each tile of keys, all queries, some at a time."""
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu + segment).to(tl.int64)
    length = (tl.load(cu + segment + 1) - start).to(tl.int32)
    d = tl.arange(0, dim)
    for first_key in range(0, length, tile):
        key = first_key + tl.arange(0, tile)
        place = ((start + key[:, None]) * heads + head) * dim + d[None, :]
        keys = tl.load(k + place, mask=(key < length)[:, None], other=0.0)
        values = tl.load(v + place, mask=(key < length)[:, None], other=0.0)
        k_sum = tl.zeros([tile, dim], tl.float32)
        v_sum = tl.zeros([tile, dim], tl.float32)
        for first_query in range(0, length, span):
            needed = True
            if texts:  # the first tile sets the gradients of all queries
                needed = (first_key == 0) | _meet(text + start, first_query, span, first_key, tile, length)
            if needed:
                query = first_query + tl.arange(0, span)
                inside = (query < length)[:, None]
                here = ((start + query[:, None]) * heads + head) * dim + d[None, :]
                x = tl.load(q + here, mask=inside, other=0.0)
                y = tl.load(grad + here, mask=inside, other=0.0)
                known = tl.sum(y.to(tl.float32) * tl.load(out + here, mask=inside, other=0.0).to(tl.float32), 1)
                share = tl.load(mass + (start + query) * heads + head, mask=query < length, other=0.0)
                seen = (key < length)[:, None] & (query < length)[None, :]
                if texts:
                    seen = seen & _in_sight(text + start, query[None, :], key[:, None], length, causal)
                elif causal:
                    seen = seen & (key[:, None] <= query[None, :])
                weight = tl.where(seen, tl.exp2(tl.dot(keys, tl.trans(x)) * scale - share[None, :]), 0.0)
                v_sum += tl.dot(weight.to(y.dtype), y)
                score_grad = (weight * (tl.dot(values, tl.trans(y)) - known[None, :])).to(x.dtype)
                k_sum += tl.dot(score_grad, x)
                change = tl.dot(tl.trans(score_grad), keys) * slope
                if first_key > 0:  # what an earlier tile has left there
                    tl.debug_barrier()
                    change += tl.load(q_grad + here, mask=inside, other=0.0).to(tl.float32)
                tl.store(q_grad + here, change, mask=inside)
        tl.store(k_grad + place, k_sum * slope, mask=(key < length)[:, None])
        tl.store(v_grad + place, v_sum, mask=(key < length)[:, None])


@torch.library.custom_op("insertlm::short_attention", mutates_args=())
def _short(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, text: Tensor | None, longest: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """What every row mixes, [T, H, D], and the logarithm of the sum of its weights, [T, H] (of base two)."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    rows, heads, dim = q.shape
    out, mass = torch.empty_like(q), q.new_empty(rows, heads, dtype=torch.float32)
    grid = (len(cu) - 1, triton.cdiv(longest, _SPAN), heads)
    sizes = (heads, dim, _SPAN, causal, text is not None)
    _short_kernel[grid](q, k, v, cu, cu if text is None else text, out, mass, _scale(dim), *sizes, num_warps=4)
    return out, mass


@torch.library.custom_op("insertlm::short_attention_backward", mutates_args=())
def _short_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mass: Tensor,
    cu: Tensor,
    text: Tensor | None,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    _, heads, dim = q.shape
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tile, span = min(_TILE, max(_SPAN, triton.next_power_of_2(longest))), _SPAN * 32 // max(32, dim)
    sizes = (heads, dim, tile, span, causal, text is not None)
    states = (out, mass, grad, *gradients, _scale(dim), dim**-0.5)
    _short_gradient_kernel[(len(cu) - 1, heads)](
        q, k, v, cu, cu if text is None else text, *states, *sizes, num_warps=4
    )
    return gradients


@_short.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, text: Tensor | None, longest: int, causal: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@_short_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mass: Tensor,
    cu: Tensor,
    text: Tensor | None,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, cu, text, longest, causal = inputs
    ctx.longest, ctx.causal = longest, causal
    ctx.save_for_backward(*qkv, *output, cu, text)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_short_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.causal), None, None, None, None


_short.register_autograd(_differentiate, setup_context=_save)


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, causal: bool, text: Tensor | None = None
) -> Tensor:
    """Every row attends to all rows of its segment, or to none behind itself.

    q, k, v: [T, H, D] bfloat16, D a power of two from 16   cu: [S+1] int32, segments of at most `longest` rows
    text: [T] int32, where segments are a prefix and texts behind it, see attention.PrefixAttention
    """
    mixed: Tensor = _short(q, k, v, cu, text, longest, causal)[0]
    return mixed


# --- Attention of few queries


@triton.jit  # type: ignore[untyped-decorator]
def _few_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cached_k,
    cached_v,
    cached,
    used,
    out,
    rows,
    cells,
    scale,
    heads: tl.constexpr,
    dim: tl.constexpr,
    queries: tl.constexpr,
    span: tl.constexpr,
):
    """One head of one text per program."""
    text, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query, key, d = tl.arange(0, queries), tl.arange(0, span), tl.arange(0, dim)
    here = ((text * rows + query[:, None]) * heads + head) * dim + d[None, :]
    x = tl.load(q + here, mask=(query < rows)[:, None], other=0.0)
    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mix = tl.zeros([queries, dim], tl.float32)
    before = tl.load(cached + text)
    for first in range(0, before, span):
        place = ((text * cells + first + key[:, None]) * heads + head) * dim + d[None, :]
        inside = first + key < before
        best, total, mix = _look(x, cached_k, cached_v, place, inside, inside[None, :], scale, best, total, mix)
    current = tl.load(used + text) - before
    for first in range(0, current, span):
        place = ((text * rows + first + key[:, None]) * heads + head) * dim + d[None, :]
        inside = first + key < current
        best, total, mix = _look(x, k, v, place, inside, inside[None, :], scale, best, total, mix)
    tl.store(out + here, mix / total[:, None], mask=(query < rows)[:, None])


def few_queries(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], cached: Tensor, used: Tensor, rows: int
) -> Tensor:
    """Every text's `rows` current rows attend to its cached rows and to the current ones in use.

    q, k, v: [S * rows, H, D]   cache: keys and values, [S, C, H, D]   cached, used: [S] int32, how many rows of a text
    are cached, and how many there are with the current ones in use; at least one
    """
    texts, cells, heads, dim = cache[0].shape
    out = torch.empty_like(q)
    queries = max(16, triton.next_power_of_2(rows))  # a product has sixteen rows at least
    states = (*cache, cached, used, out)
    _few_kernel[(texts, heads)](q, k, v, *states, rows, cells, _scale(dim), heads, dim, queries, _SPAN, num_warps=4)
    return out
