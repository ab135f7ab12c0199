"""Operations of a block for which torch.compile generates more passes over a GPU's memory than necessary.

- Gradients of biases and norms are sums over all rows. Summing blocks of rows first takes half the time.
- ReLU is fused into the product before it; its backward computes the bias gradient in the same pass.
- The rotation reads q, k and v from one tensor and writes three; its backward does the reverse.
- The backward of SwiGLU writes both halves at once. torch.compile joins them with a concatenation that reads everything
  twice and takes nearly twice the time.
The plain formulas are here too, for CPUs and for shapes that the kernels (kernels.py) do not support.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["ROWS", "embed", "layer_norm", "linear", "rms_norm", "rotate", "swiglu", "whole_blocks"]

ROWS = 128  # rows of a block; buffers of a fixed capacity hold whole blocks


def whole_blocks(rows: int) -> int:
    """The number of rows, rounded up to whole blocks."""
    return -(-rows // ROWS) * ROWS


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """[T, width] to [T, width], in float32 at least."""
    normed: Tensor = _LayerNorm.apply(x, _widened(weight, x), _widened(bias, x), epsilon)  # type: ignore[no-untyped-call]
    return normed


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[T, width] to [T, width], in float32 at least."""
    if (
        not torch.is_grad_enabled() and not x.is_cuda
    ):  # of a single row, an autograd function takes longer than the norm
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + epsilon) * weight
    normed: Tensor = _RMSNorm.apply(x, _widened(weight, x), epsilon)  # type: ignore[no-untyped-call]
    return normed


def _widened(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """FSDP gathers the parameters of a block in bfloat16, but the residual stream is in float32."""
    return None if weight is None else weight.to(torch.promote_types(weight.dtype, x.dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """[T, in] to [T, out], in the precision of autocast if that is on."""
    if bias is None:  # the fused backward is about the bias gradient
        out = F.linear(x, weight)
        return out.relu() if relu else out
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    if not torch.is_grad_enabled():  # decoding does not need the saved tensors of an autograd function
        if relu and x.is_cuda:
            joined: Tensor = _linear_relu(x, weight, bias)
            return joined
        out = F.linear(x, weight, bias)
        return out.relu_() if relu else out
    learning: Tensor = _Linear.apply(x, weight, bias, relu)  # type: ignore[no-untyped-call]
    return learning


def swiglu(x: Tensor) -> Tensor:
    """The SiLU of the first half of the columns, times the second half. [T, 2N] to [T, N]"""
    if x.is_cuda:
        from insertlm.nn import kernels

        gated: Tensor = kernels.swiglu(x)
        return gated
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """[T] to [T, width]. Where torch's deterministic algorithms are asked for, rows of a word are sorted before their
    gradients are added; the compiler would add them one by one, which takes long where words are few."""
    if not torch.are_deterministic_algorithms_enabled():
        return F.embedding(tokens, weight)
    rows: Tensor = _Embedding.apply(tokens, weight)  # type: ignore[no-untyped-call]
    return rows


def rotate(qkv: Tensor, key_heads: int, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split into q, k and v, and rotate q and k: pairs (i, i + rotary/2) of each head's first dimensions, by the angles
    of the row's position. The other dimensions stay as they are.

    qkv: [T, heads + 2 key_heads, head_dim]   cos, sin: [P, rotary/2] for positions 0 … P-1   positions: [T]
    """
    half = cos.shape[1]
    if qkv.is_cuda and 2 * half == qkv.shape[-1]:
        from insertlm.nn import kernels

        q, k, v = kernels.rotate(qkv, key_heads, cos, sin, positions)
        return q, k, v
    c, s = cos[positions][:, None], sin[positions][:, None]
    heads = qkv.shape[1] - 2 * key_heads
    qk, v = torch.split(qkv, [heads + key_heads, key_heads], 1)
    wide = qk.to(torch.promote_types(qk.dtype, cos.dtype))  # at once, or every product below would do it
    a, b, rest = torch.split(wide, [half, half, qkv.shape[-1] - 2 * half], -1)
    q, k = torch.split(torch.cat([a * c - b * s, b * c + a * s, rest], -1).to(qkv.dtype), [heads, key_heads], 1)
    return q, k, v


def _column_sums(x: Tensor) -> Tensor:
    """[T, N] to [N], in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not x.is_cuda or x.shape[0] % ROWS:
        return x.sum(0, dtype=dtype)
    return x.view(-1, ROWS, x.shape[1]).sum(1, dtype=dtype).sum(0)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.words = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, _sums_by_word(grad, tokens, ctx.words)


@torch.library.custom_op("insertlm::sums_by_word", mutates_args=())
def _sums_by_word(grad: Tensor, tokens: Tensor, words: int) -> Tensor:
    """A custom operator, because the compiler would replace torch's kernel, which sorts, by atomic additions."""
    return torch.ops.aten.embedding_dense_backward(grad, tokens, words, -1, False)  # type: ignore[no-any-return]


@_sums_by_word.register_fake
def _(grad: Tensor, tokens: Tensor, words: int) -> Tensor:
    return grad.new_empty(words, grad.shape[1])


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(x, x.shape[1:], weight, bias, epsilon)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        # On a GPU torch's own sums over rows are the slow part, see above.
        wanted = [True, not grad.is_cuda, not grad.is_cuda and bias is not None]
        x_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[1:], mean, scale, weight, bias, wanted
        )
        if grad.is_cuda:
            weight_grad = _column_sums(grad * ((x - mean) * scale))
            bias_grad = None if bias is None else _column_sums(grad)
        return x_grad, weight_grad, bias_grad if bias is not None else None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return wide * scale * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # cheaper to compute again than to keep
        inner = grad * weight
        x_grad = scale * (inner - normed * (inner * normed).mean(1, keepdim=True))
        return x_grad.to(x.dtype), _column_sums(grad * normed).to(weight.dtype), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = _linear_relu(x, weight, bias) if relu else torch.addmm(bias, x, weight.T)
        ctx.relu = relu
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, out = ctx.saved_tensors
        # The kernel sums whole blocks of rows; captured training steps have no other numbers of rows.
        if ctx.relu and grad.is_cuda and grad.shape[0] % ROWS == 0:
            from insertlm.nn import kernels

            grad, sums = kernels.relu_backward(grad, out)
            return grad @ weight, grad.T @ x, sums.sum(0).to(grad.dtype), None
        if ctx.relu:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        return grad @ weight, grad.T @ x, _column_sums(grad).to(grad.dtype), None


@torch.library.custom_op("insertlm::linear_relu", mutates_args=())
def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A custom operator, because the compiler would separate the product from the ReLU again."""
    return torch._addmm_activation(bias, x, weight.T)


@_linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
