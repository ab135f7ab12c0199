"""Operations of a block with gradients written out, where the compiler's own would pass over memory more often.

- Gradients of biases and norms are sums over all rows. Summed in blocks of rows first, they take a third of the time.
- ReLU joins the product before it.
On a CPU, and for any number of rows, values and gradients are those of the plain formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["ROWS", "layer_norm", "linear"]

ROWS = 128  # of a block; buffers of a fixed capacity hold whole blocks
_EPSILON = 1e-5


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[T, width] to [T, width], in float32 at least."""
    normed: Tensor = _LayerNorm.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return normed


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False) -> Tensor:
    """[T, in] to [T, out], in the precision of autocast if that is on."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    if not torch.is_grad_enabled():
        out = F.linear(x, weight, bias)
        return out.relu_() if relu else out
    learning: Tensor = _Linear.apply(x, weight, bias, relu)  # type: ignore[no-untyped-call]
    return learning


def _column_sums(x: Tensor) -> Tensor:
    """[T, N] to [N], in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not x.is_cuda or x.shape[0] % ROWS:
        return x.sum(0, dtype=dtype)
    return x.view(-1, ROWS, x.shape[1]).sum(1, dtype=dtype).sum(0)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(x, x.shape[1:], weight, bias, _EPSILON)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        by_hand = grad.is_cuda
        x_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[1:], mean, scale, weight, bias, [True, not by_hand, not by_hand]
        )
        if by_hand:
            weight_grad, bias_grad = _column_sums(grad * ((x - mean) * scale)), _column_sums(grad)
        return x_grad, weight_grad, bias_grad


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
        if ctx.relu:
            grad = torch.where(out > 0, grad, 0.0)
        return grad @ weight, grad.T @ x, _column_sums(grad).to(grad.dtype), None


@torch.library.custom_op("insertlm::linear_relu", mutates_args=())
def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An operator of its own, because the compiler would take product and ReLU apart again."""
    return torch._addmm_activation(bias, x, weight.T)


@_linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
