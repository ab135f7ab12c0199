"""Attention on a GPU for short sequences, where the tiles of flash kernels would be mostly empty.

- `short_attention`: segments of packed rows that are not much longer than a tile of keys. One program holds all keys of
  a tile and sums their gradients, so that backward is one kernel without atomic additions.
- `few_queries`: the current rows of a text against its cached ones.
Imported only where there is CUDA. Tests compare them with the plain formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["few_queries", "short_attention"]

_SPAN = 64  # queries or keys in a tile
# The most keys whose gradients are summed in one pass over the queries; the second where heads of queries share keys.
# On an H200, with SmolLM2's 9 heads on 3 and texts of 6 to 256 tokens, 128 takes a tenth longer than 64; 32 is worse.
_TILE, _SHARED_TILE = 128, 64


@triton.jit
def _look(q, k, v, place, inside, seen, scale, best, total, mix):  # type: ignore[no-untyped-def]
    """Take in a tile of keys. Returns the largest score, the sum of weights and the weighted sum of values so far.

    inside: which keys exist   seen: which of them each query sees
    """
    keys = tl.load(k + place, mask=inside[:, None], other=0.0)
    values = tl.load(v + place, mask=inside[:, None], other=0.0)
    score = tl.where(seen, tl.dot(q, tl.trans(keys)) * scale, float("-inf"))
    top = tl.maximum(best, tl.max(score, 1))
    level = tl.where(top == float("-inf"), 0.0, top)  # a query that has seen no key yet; -inf - -inf would be NaN
    weight = tl.exp2(score - level[:, None])
    shrink = tl.exp2(best - level)
    mix = mix * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
    return top, total * shrink + tl.sum(weight, 1), mix


def _works_apart(heads: int, key_heads: int, longest: int) -> bool:
    """Whether gradients are computed by a program for each tile. One for all tiles of a segment computes each score
    once instead of twice, but where segments are long, or heads share keys, most programs have long ended while a few
    still go through their tiles, 75 for 256 rows and 9 heads on 3: with these, 42 ms of a step of 119 on an H200."""
    return heads > key_heads or longest > 512


def _scale(dim: int) -> float:
    """The factor of a score, in base two: exp2 is the cheaper instruction."""
    return math.log2(math.e) / math.sqrt(dim)


# --- Short segments


@triton.jit
def _least(values, inside):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(inside, values, 2147483647), 0)


@triton.jit
def _most(values, inside):  # type: ignore[no-untyped-def]
    return tl.max(tl.where(inside, values, -1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _short_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu,
    text,
    order,
    out,
    mass,
    scale,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    dim: tl.constexpr,
    span: tl.constexpr,
    causal: tl.constexpr,
    texts: tl.constexpr,
    ordered: tl.constexpr,
):
    """`span` queries of one head of one segment per program. texts, ordered: whether there are texts and orders"""
    segment, head = tl.program_id(0), tl.program_id(2)
    key_head = head // (heads // key_heads)
    start = tl.load(cu + segment).to(tl.int64)
    length = (tl.load(cu + segment + 1) - start).to(tl.int32)
    first_query = tl.program_id(1) * span
    if first_query < length:
        query, d = first_query + tl.arange(0, span), tl.arange(0, dim)
        here = ((start + query[:, None]) * heads + head) * dim + d[None, :]
        x = tl.load(q + here, mask=(query < length)[:, None], other=0.0)
        if texts:
            my_text = tl.load(text + start + query, mask=query < length, other=0)
            first_text, last_text = _least(my_text, query < length), _most(my_text, query < length)
        if ordered:
            my_order = tl.load(order + start + query, mask=query < length, other=0)
            last_order = _most(my_order, query < length)
        best = tl.full([span], float("-inf"), tl.float32)
        total = tl.zeros([span], tl.float32)
        mix = tl.zeros([span, dim], tl.float32)
        end = tl.minimum(length, first_query + span) if causal else length
        for first in range(0, end, span):
            key = first + tl.arange(0, span)
            place = ((start + key[:, None]) * key_heads + key_head) * dim + d[None, :]
            inside = key < length
            if texts or ordered:
                needed = True  # whether some query may see some of these keys
                seen = inside[None, :]
                if causal:
                    seen = seen & (key[None, :] <= query[:, None])
                if texts:
                    their_text = tl.load(text + start + key, mask=inside, other=0)
                    low, high = _least(their_text, inside), _most(their_text, inside)
                    needed = (low == 0) | ((low <= last_text) & (first_text <= high))
                    seen = seen & ((their_text[None, :] == 0) | (their_text[None, :] == my_text[:, None]))
                if ordered:
                    their_order = tl.load(order + start + key, mask=inside, other=0)
                    needed = needed & (_least(their_order, inside) <= last_order)
                    seen = seen & (their_order[None, :] <= my_order[:, None])
                if needed:
                    best, total, mix = _look(x, k, v, place, inside, seen, scale, best, total, mix)
            else:
                seen = inside[None, :]
                if causal:
                    seen = seen & (key[None, :] <= query[:, None])
                best, total, mix = _look(x, k, v, place, inside, seen, scale, best, total, mix)
        tl.store(out + here, mix / total[:, None], mask=(query < length)[:, None])
        tl.store(mass + (start + query) * heads + head, best + tl.log2(total), mask=query < length)


@triton.jit
def _pair(keys, values, x, y, known, share, seen, scale):  # type: ignore[no-untyped-def]
    """Of every key and query the weight, and the gradient of the score. keys, values: of a tile of keys
    x, y, known, share: of a tile of queries the query, the gradient of its output, its product with the output, and the
    mass   seen: [keys, queries], which key each query sees"""
    weight = tl.where(seen, tl.exp2(tl.dot(keys, tl.trans(x)) * scale - share[None, :]), 0.0)
    return weight, (weight * (tl.dot(values, tl.trans(y)) - known[None, :])).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _short_gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915
    q,
    k,
    v,
    cu,
    text,
    order,
    out,
    mass,
    grad,
    q_grad,
    k_grad,
    v_grad,
    scale,
    slope,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    dim: tl.constexpr,
    tile: tl.constexpr,
    span: tl.constexpr,
    causal: tl.constexpr,
    texts: tl.constexpr,
    ordered: tl.constexpr,
    apart: tl.constexpr,
):
    """For each tile of keys it goes over all queries of all heads that share these keys. A program has one head of keys
    of one segment: all its tiles of keys, and it also sums the gradients of queries. apart: it has one tile alone, and
    those gradients are left to `_query_gradient_kernel`"""
    segment, key_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu + segment).to(tl.int64)
    length = (tl.load(cu + segment + 1) - start).to(tl.int32)
    d = tl.arange(0, dim)
    begin = tl.program_id(2) * tile if apart else 0
    end = tl.minimum(length, begin + tile) if apart else length
    for first_key in range(begin, end, tile):
        key = first_key + tl.arange(0, tile)
        place = ((start + key[:, None]) * key_heads + key_head) * dim + d[None, :]
        keys = tl.load(k + place, mask=(key < length)[:, None], other=0.0)
        values = tl.load(v + place, mask=(key < length)[:, None], other=0.0)
        if texts:
            their_text = tl.load(text + start + key, mask=key < length, other=0)
            first_text, last_text = _least(their_text, key < length), _most(their_text, key < length)
        if ordered:
            their_order = tl.load(order + start + key, mask=key < length, other=0)
            first_order = _least(their_order, key < length)
        k_sum = tl.zeros([tile, dim], tl.float32)
        v_sum = tl.zeros([tile, dim], tl.float32)
        for member in tl.static_range(heads // key_heads):
            head = key_head * (heads // key_heads) + member
            for first_query in range(0, length, span):
                query = first_query + tl.arange(0, span)
                needed = True
                if texts:
                    my_text = tl.load(text + start + query, mask=query < length, other=0)
                    low, high = _least(my_text, query < length), _most(my_text, query < length)
                    needed = (first_text == 0) | ((first_text <= high) & (low <= last_text))
                if ordered:
                    my_order = tl.load(order + start + query, mask=query < length, other=0)
                    needed = needed & (first_order <= _most(my_order, query < length))
                if (texts or ordered) and not apart:  # the first tile initialises all gradients of queries
                    needed = needed | (first_key == 0)
                if needed:
                    inside = (query < length)[:, None]
                    here = ((start + query[:, None]) * heads + head) * dim + d[None, :]
                    x = tl.load(q + here, mask=inside, other=0.0)
                    y = tl.load(grad + here, mask=inside, other=0.0)
                    known = tl.sum(y.to(tl.float32) * tl.load(out + here, mask=inside, other=0.0).to(tl.float32), 1)
                    share = tl.load(mass + (start + query) * heads + head, mask=query < length, other=0.0)
                    seen = (key < length)[:, None] & (query < length)[None, :]
                    if texts:
                        seen = seen & ((their_text[:, None] == 0) | (their_text[:, None] == my_text[None, :]))
                    if ordered:
                        seen = seen & (their_order[:, None] <= my_order[None, :])
                    if causal:
                        seen = seen & (key[:, None] <= query[None, :])
                    weight, score_grad = _pair(keys, values, x, y, known, share, seen, scale)
                    v_sum += tl.dot(weight.to(y.dtype), y)
                    k_sum += tl.dot(score_grad, x)
                    if not apart:
                        change = tl.dot(tl.trans(score_grad), keys) * slope
                        if first_key > 0:  # add to the sum of earlier tiles
                            tl.debug_barrier()
                            change += tl.load(q_grad + here, mask=inside, other=0.0).to(tl.float32)
                        tl.store(q_grad + here, change, mask=inside)
        tl.store(k_grad + place, k_sum * slope, mask=(key < length)[:, None])
        tl.store(v_grad + place, v_sum, mask=(key < length)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu,
    text,
    order,
    out,
    mass,
    grad,
    q_grad,
    scale,
    slope,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    dim: tl.constexpr,
    span: tl.constexpr,
    causal: tl.constexpr,
    texts: tl.constexpr,
    ordered: tl.constexpr,
):
    """The gradients of `span` queries of one head of one segment per program."""
    segment, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (heads // key_heads)
    start = tl.load(cu + segment).to(tl.int64)
    length = (tl.load(cu + segment + 1) - start).to(tl.int32)
    first_query = tl.program_id(2) * span
    if first_query < length:
        query, d = first_query + tl.arange(0, span), tl.arange(0, dim)
        inside = (query < length)[:, None]
        here = ((start + query[:, None]) * heads + head) * dim + d[None, :]
        x = tl.load(q + here, mask=inside, other=0.0)
        y = tl.load(grad + here, mask=inside, other=0.0)
        known = tl.sum(y.to(tl.float32) * tl.load(out + here, mask=inside, other=0.0).to(tl.float32), 1)
        share = tl.load(mass + (start + query) * heads + head, mask=query < length, other=0.0)
        if texts:
            my_text = tl.load(text + start + query, mask=query < length, other=0)
            first_text, last_text = _least(my_text, query < length), _most(my_text, query < length)
        if ordered:
            my_order = tl.load(order + start + query, mask=query < length, other=0)
            last_order = _most(my_order, query < length)
        total = tl.zeros([span, dim], tl.float32)
        end = tl.minimum(length, first_query + span) if causal else length
        for first_key in range(0, end, span):
            key = first_key + tl.arange(0, span)
            needed = True
            seen = (key < length)[:, None] & (query < length)[None, :]
            if causal:
                seen = seen & (key[:, None] <= query[None, :])
            if texts:
                their_text = tl.load(text + start + key, mask=key < length, other=0)
                low, high = _least(their_text, key < length), _most(their_text, key < length)
                needed = (low == 0) | ((low <= last_text) & (first_text <= high))
                seen = seen & ((their_text[:, None] == 0) | (their_text[:, None] == my_text[None, :]))
            if ordered:
                their_order = tl.load(order + start + key, mask=key < length, other=0)
                needed = needed & (_least(their_order, key < length) <= last_order)
                seen = seen & (their_order[:, None] <= my_order[None, :])
            if needed:
                place = ((start + key[:, None]) * key_heads + key_head) * dim + d[None, :]
                keys = tl.load(k + place, mask=(key < length)[:, None], other=0.0)
                values = tl.load(v + place, mask=(key < length)[:, None], other=0.0)
                _, score_grad = _pair(keys, values, x, y, known, share, seen, scale)
                total += tl.dot(tl.trans(score_grad), keys)
        tl.store(q_grad + here, total * slope, mask=inside)


@torch.library.custom_op("insertlm::short_attention", mutates_args=())
def _short(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, text: Tensor | None, order: Tensor | None, longest: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output of every row, [T, H, D], and the logarithm to base two of the sum of its weights, [T, H]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    rows, heads, dim = q.shape
    out, mass = torch.empty_like(q), q.new_empty(rows, heads, dtype=torch.float32)
    grid = (len(cu) - 1, triton.cdiv(longest, _SPAN), heads)
    sizes = (heads, k.shape[1], dim, _SPAN, causal, text is not None, order is not None)
    sight = (cu if text is None else text, cu if order is None else order)
    _short_kernel[grid](q, k, v, cu, *sight, out, mass, _scale(dim), *sizes, num_warps=4)
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
    order: Tensor | None,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    (_, heads, dim), key_heads = q.shape, k.shape[1]
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    most = _TILE if heads == key_heads else _SHARED_TILE
    tile, span = min(most, max(_SPAN, triton.next_power_of_2(longest))), _SPAN * 32 // max(32, dim)
    kinds = (causal, text is not None, order is not None)
    sight = (cu if text is None else text, cu if order is None else order)
    factors = (_scale(dim), dim**-0.5)
    apart = _works_apart(heads, key_heads, longest)
    grid = (len(cu) - 1, key_heads, triton.cdiv(longest, tile) if apart else 1)
    sizes = (heads, key_heads, dim, tile, span, *kinds, apart)
    _short_gradient_kernel[grid](q, k, v, cu, *sight, out, mass, grad, *gradients, *factors, *sizes, num_warps=4)
    if apart:
        grid, states = (len(cu) - 1, heads, triton.cdiv(longest, span)), (out, mass, grad, gradients[0], *factors)
        _query_gradient_kernel[grid](q, k, v, cu, *sight, *states, heads, key_heads, dim, span, *kinds, num_warps=4)
    return gradients


@_short.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@_short_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, cu, text, order, longest, causal = inputs
    ctx.longest, ctx.causal = longest, causal
    ctx.save_for_backward(*qkv, *output, cu, text, order)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_short_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.causal), None, None, None, None, None


_short.register_autograd(_differentiate, setup_context=_save)


def short_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    longest: int,
    causal: bool = False,
    text: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Every row attends to the rows of its segment that it sees; causal, text, order: see attention.PackedAttention

    q: [T, H, D] bfloat16, D a power of two from 16   k, v: [T, key heads, D], the number of which divides H
    cu: [S+1] int32, segments of at most `longest` rows
    """
    mixed: Tensor = _short(q, k, v, cu, text, order, longest, causal)[0]
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
    key_heads: tl.constexpr,
    dim: tl.constexpr,
    queries: tl.constexpr,
    span: tl.constexpr,
):
    """`queries` rows of one head of one text per program."""
    text, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (heads // key_heads)
    query, key, d = tl.program_id(2) * queries + tl.arange(0, queries), tl.arange(0, span), tl.arange(0, dim)
    here = ((text * rows + query[:, None]) * heads + head) * dim + d[None, :]
    x = tl.load(q + here, mask=(query < rows)[:, None], other=0.0)
    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mix = tl.zeros([queries, dim], tl.float32)
    before = tl.load(cached + text)
    for first in range(0, before, span):
        place = ((text * cells + first + key[:, None]) * key_heads + key_head) * dim + d[None, :]
        inside = first + key < before
        best, total, mix = _look(x, cached_k, cached_v, place, inside, inside[None, :], scale, best, total, mix)
    current = tl.load(used + text) - before
    for first in range(0, current, span):
        place = ((text * rows + first + key[:, None]) * key_heads + key_head) * dim + d[None, :]
        inside = first + key < current
        best, total, mix = _look(x, k, v, place, inside, inside[None, :], scale, best, total, mix)
    tl.store(out + here, mix / total[:, None], mask=(query < rows)[:, None])


def few_queries(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], cached: Tensor, used: Tensor, rows: int
) -> Tensor:
    """Every text's `rows` current rows attend to its cached rows and to the current ones in use.

    q: [S * rows, H, D]   k, v: [S * rows, key heads, D]   cache: keys and values, [S, C, key heads, D]
    cached, used: [S] int32, how many rows of a text are cached, and how many there are with the current ones in use; at
    least one
    """
    (texts, cells, key_heads, dim), heads = cache[0].shape, q.shape[1]
    out = torch.empty_like(q)
    queries = min(_SPAN, max(16, triton.next_power_of_2(rows)))  # tl.dot needs 16 rows
    grid = (texts, heads, triton.cdiv(rows, queries))
    states = (*cache, cached, used, out)
    sizes = (heads, key_heads, dim, queries, _SPAN)
    _few_kernel[grid](q, k, v, *states, rows, cells, _scale(dim), *sizes, num_warps=4)
    return out
