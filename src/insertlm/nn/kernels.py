"""Triton kernels, each for a step that torch.compile would spread over several passes through memory.

Imported only where there is CUDA. The plain formulas are in fused.py and losses.py; tests compare the two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from insertlm.nn.fused import ROWS

__all__ = ["relu_backward", "rotate", "row_logsumexp", "row_shares"]

_COLUMNS = 128  # of the matrix, for one program
_WORDS = 2048  # logits that one program reads at a time


# --- Rotation of q and k


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q,
    k,
    v,
    cos,
    sin,
    positions,
    width: tl.constexpr,
    key_width: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    inverse: tl.constexpr,
):
    """One row per program: qkv [T, width + 2 key_width] to q, k, v, or the gradients of these to that of qkv."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, block)
    angle = tl.load(positions + row) * half + pair % half
    c = tl.load(cos + angle, mask=pair < width // 2)
    s = tl.load(sin + angle, mask=pair < width // 2)
    first = pair // half * (2 * half) + pair % half
    together = qkv + row * (width + 2 * key_width) + first
    for part in tl.static_range(3):
        size = width if part == 0 else key_width
        inside = pair < size // 2
        here = together + (0 if part == 0 else width + (part - 1) * key_width)
        there = (q if part == 0 else k if part == 1 else v) + row * size + first
        source, target = (there, here) if inverse else (here, there)
        a = tl.load(source, mask=inside).to(tl.float32)
        b = tl.load(source + half, mask=inside).to(tl.float32)
        if part < 2:
            turn = -s if inverse else s
            a, b = a * c - b * turn, b * c + a * turn
        tl.store(target, a, mask=inside)
        tl.store(target + half, b, mask=inside)


def _launch_rotation(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool
) -> None:
    width, key_width, half = q.shape[1] * q.shape[2], k.shape[1] * k.shape[2], cos.shape[1]
    block = triton.next_power_of_2(width // 2)
    _rotate_kernel[(len(q),)](qkv, q, k, v, cos, sin, positions, width, key_width, half, block, inverse, num_warps=4)


@torch.library.custom_op("insertlm::rotate", mutates_args=())
def rotate(qkv: Tensor, key_heads: int, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See fused.rotate. qkv: [T, heads + 2 key_heads, head_dim]   cos, sin: [P, head_dim/2]   positions: [T]"""
    q, k, v = _empty_parts(qkv, key_heads)
    _launch_rotation(qkv.contiguous(), q, k, v, cos, sin, positions, False)
    return q, k, v


@torch.library.custom_op("insertlm::rotate_backward", mutates_args=())
def _rotate_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    qkv = _empty_whole(q, k)
    _launch_rotation(qkv, q.contiguous(), k.contiguous(), v.contiguous(), cos, sin, positions, True)
    return qkv


def _empty_parts(qkv: Tensor, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, dim = qkv.shape
    keys = rows, key_heads, dim
    return qkv.new_empty(rows, heads - 2 * key_heads, dim), qkv.new_empty(keys), qkv.new_empty(keys)


def _empty_whole(q: Tensor, k: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] + 2 * k.shape[1], q.shape[2])


@rotate.register_fake
def _(qkv: Tensor, key_heads: int, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_parts(qkv, key_heads)


@_rotate_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    return _empty_whole(q, k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2:])


def _differentiate(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _rotate_backward(q, k, v, *ctx.saved_tensors), None, None, None, None


rotate.register_autograd(_differentiate, setup_context=_save)


# --- Gradient through ReLU


@triton.jit  # type: ignore[untyped-decorator]
def _relu_kernel(  # type: ignore[no-untyped-def]
    grad, out, masked, sums, width, span: tl.constexpr, columns: tl.constexpr, chunk: tl.constexpr
):
    """`span` rows of `columns` columns per program, `chunk` rows at a time."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (column < width)[None, :]
    cell = tl.arange(0, chunk)[:, None] * width + column[None, :]
    first = block * span * width
    total = tl.zeros([chunk, columns], tl.float32)
    for start in range(0, span, chunk):
        here = first + start * width + cell
        value = tl.load(grad + here, mask=inside, other=0.0)
        value = tl.where(tl.load(out + here, mask=inside, other=0.0) > 0, value, 0.0)
        tl.store(masked + here, value, mask=inside)
        total += value.to(tl.float32)
    tl.store(sums + block * width + column, tl.sum(total, 0), mask=column < width)


@torch.library.custom_op("insertlm::relu_backward", mutates_args=())
def relu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient where `out` is positive, and its sums over blocks of ROWS rows: [T, N], [T / ROWS, N] float32"""
    masked, sums = torch.empty_like(out), out.new_empty(len(out) // ROWS, out.shape[1], dtype=torch.float32)
    grid = (len(sums), triton.cdiv(out.shape[1], _COLUMNS))
    _relu_kernel[grid](grad.contiguous(), out, masked, sums, out.shape[1], ROWS, _COLUMNS, 16)
    return masked, sums


@relu_backward.register_fake
def _(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), out.new_empty(out.shape[0] // ROWS, out.shape[1], dtype=torch.float32)


# --- SwiGLU


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_kernel(x, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some columns of one row per program. width: of a half"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_gradient_kernel(grad, x, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same; both halves of the gradient are written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(out + row * 2 * width + column, given * value * share * (1 + gate * (1 - share)), mask=inside)
    tl.store(out + row * 2 * width + width + column, given * gate * share, mask=inside)


_GATED = 512  # columns of a program: 16 bytes of bf16 a thread


@torch.library.custom_op("insertlm::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """[T, 2N] to [T, N]"""
    out = x.new_empty(len(x), x.shape[1] // 2)
    _swiglu_kernel[(len(x), triton.cdiv(out.shape[1], _GATED))](x.contiguous(), out, out.shape[1], _GATED, num_warps=2)
    return out


@torch.library.custom_op("insertlm::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    out, width = torch.empty_like(x), grad.shape[1]
    grid = (len(x), triton.cdiv(width, _GATED))
    _swiglu_gradient_kernel[grid](grad.contiguous(), x, out, width, _GATED, num_warps=2)
    return out


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@_swiglu_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save_gated(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0].contiguous())


def _differentiate_gated(ctx: Any, grad: Tensor) -> Tensor:
    gradient: Tensor = _swiglu_backward(grad, *ctx.saved_tensors)
    return gradient


swiglu.register_autograd(_differentiate_gated, setup_context=_save_gated)


# --- Logits


@triton.jit  # type: ignore[untyped-decorator]
def _logsumexp_kernel(logits, out, words, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row per program. Every lane keeps its largest logit so far, and a sum of exponentials relative to it: lanes
    meet only once, at the end."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    best = tl.full([block], -1e30, tl.float32)  # a lane without logits weighs nothing at the end; -inf would give NaN
    total = tl.zeros([block], tl.float32)
    for first in range(0, words, block):
        x = tl.load(logits + row * width + first + column, mask=first + column < words, other=-1e30)
        top = tl.maximum(best, x)
        total = total * tl.exp(best - top) + tl.exp(x - top)
        best = top
    top = tl.max(best, 0)
    tl.store(out + row, top + tl.log(tl.sum(total * tl.exp(best - top), 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _shares_kernel(logits, lse, weight, out, words, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """`block` columns of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(logits + row * width + column, mask=column < words, other=float("-inf"))
    share = tl.exp(x - tl.load(lse + row)) * tl.load(weight + row)
    tl.store(out + row * width + column, share, mask=column < width)


def row_logsumexp(logits: Tensor, words: int) -> Tensor:
    """Of the first `words` columns. [T, N] to [T], float32"""
    out = logits.new_empty(len(logits))
    _logsumexp_kernel[(len(logits),)](logits, out, words, logits.shape[1], _WORDS, num_warps=8)
    return out


def row_shares(logits: Tensor, lse: Tensor, weight: Tensor, words: int) -> Tensor:
    """exp(logits - lse) * weight in bf16, and 0 after the first `words` columns. [T, N], [T] and [T] to [T, N]"""
    out = torch.empty_like(logits, dtype=torch.bfloat16)
    grid = (len(logits), triton.cdiv(logits.shape[1], _WORDS))
    _shares_kernel[grid](logits, lse, weight.contiguous(), out, words, logits.shape[1], _WORDS, num_warps=4)
    return out
