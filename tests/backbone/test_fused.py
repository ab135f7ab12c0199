"""Gradients written out are those of the plain formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.backbone.fused import ROWS, layer_norm, linear

rows = st.integers(1, 9)
seeds = st.integers(0, 2**31)


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=noise, dtype=torch.float64) for shape in shapes]


def value_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out))]


def assert_same(
    found: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor
) -> None:
    left, right = (value_and_gradients(function, inputs, upstream) for function in (found, expected))
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b)


def relu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu()


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias, 1e-5)


@given(rows, seeds)
@settings(max_examples=20)
def test_layer_norm(count: int, seed: int) -> None:
    *inputs, upstream = drawn(seed, (count, 6), (6,), (6,), (count, 6))
    assert_same(layer_norm, plain_norm, inputs, upstream)


@given(rows, seeds, st.booleans())
@settings(max_examples=20)
def test_linear(count: int, seed: int, relu: bool) -> None:
    *inputs, upstream = drawn(seed, (count, 3), (5, 3), (5,), (count, 5))
    expected = relu_linear if relu else F.linear
    assert_same(lambda *xs: linear(*xs, relu=relu), expected, inputs, upstream)


def test_linear_follows_autocast() -> None:
    x, weight, bias = (part.float() for part in drawn(0, (4, 3), (5, 3), (5,)))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
        torch.testing.assert_close(linear(x, weight, bias, relu=True), F.linear(x, weight, bias).relu())
    assert linear(x, weight, bias).dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("count", [2 * ROWS, ROWS + 1])
def test_sums_in_blocks_of_rows_are_sums(count: int) -> None:
    shapes = (count, 6), (6,), (6,), (count, 6)
    *inputs, upstream = (part.cuda() for part in drawn(0, *shapes))
    assert_same(layer_norm, plain_norm, inputs, upstream)
    *inputs, upstream = (part.cuda() for part in drawn(0, (count, 3), (5, 3), (5,), (count, 5)))
    assert_same(linear, F.linear, inputs, upstream)
