"""Gradients written out are those of the plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.nn.fused import ROWS, layer_norm, linear, rms_norm, rotate, swiglu

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


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias, 1e-5)


@given(rows, seeds)
@settings(max_examples=20)
def test_layer_norm(count: int, seed: int) -> None:
    *inputs, upstream = drawn(seed, (count, 6), (6,), (6,), (count, 6))
    assert_same(layer_norm, plain_norm, inputs, upstream)


def test_layer_norm_without_bias() -> None:
    *inputs, upstream = drawn(0, (4, 6), (6,), (4, 6))
    plain = partial(plain_norm, bias=None)
    assert_same(partial(layer_norm, bias=None), plain, inputs, upstream)


@given(rows, seeds)
@settings(max_examples=20)
def test_rms_norm(count: int, seed: int) -> None:
    *inputs, upstream = drawn(seed, (count, 6), (6,), (count, 6))
    plain = partial(F.rms_norm, normalized_shape=(6,), eps=1e-3)
    assert_same(partial(rms_norm, epsilon=1e-3), lambda x, weight: plain(x, weight=weight), inputs, upstream)


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


def turned(qkv: Tensor, key_heads: int, angle: Tensor) -> Tensor:
    """Complex numbers say it best."""
    half, qk, v = angle.shape[-1], qkv[:, :-key_heads], qkv[:, -key_heads:]
    pairs = torch.complex(qk[..., :half], qk[..., half : 2 * half])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([torch.cat([pairs.real, pairs.imag, qk[..., 2 * half :]], -1), v], 1)


def assert_rotates(key_heads: int, qkv: Tensor, angle: Tensor, upstream: Tensor) -> None:
    positions = torch.arange(len(qkv), device=qkv.device) * 7 % len(angle)
    found = partial(rotate, key_heads=key_heads, cos=angle.cos(), sin=angle.sin(), positions=positions)
    expected = partial(turned, key_heads=key_heads, angle=angle[positions])
    assert_same(lambda x: torch.cat(found(x), 1), expected, [qkv], upstream)


@given(rows, seeds, st.sampled_from([4, 6]), st.sampled_from([1, 2, 4]))
@settings(max_examples=20)
def test_rotate(count: int, seed: int, width: int, key_heads: int) -> None:
    """Also with dimensions beyond those that turn, and with fewer heads of keys than of queries."""
    shape = count, 4 + 2 * key_heads, width
    assert_rotates(key_heads, *drawn(seed, shape, (20, 2), shape))


# --- On a GPU the kernels say the same

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device")


def test_linear_without_bias() -> None:
    *inputs, upstream = drawn(0, (4, 3), (5, 3), (4, 5))
    for relu, expected in ((False, F.linear), (True, lambda x, weight: F.linear(x, weight).relu())):
        assert_same(partial(linear, bias=None, relu=relu), expected, inputs, upstream)


@cuda
@pytest.mark.parametrize("count", [2 * ROWS, ROWS + 1])
def test_sums_in_blocks_of_rows_are_sums(count: int) -> None:
    *inputs, upstream = (part.cuda() for part in drawn(0, (count, 6), (6,), (6,), (count, 6)))
    assert_same(layer_norm, plain_norm, inputs, upstream)
    *inputs, upstream = (part.cuda() for part in drawn(0, (count, 3), (5, 3), (5,), (count, 5)))
    assert_same(linear, F.linear, inputs, upstream)


@cuda
@pytest.mark.parametrize("width", [5, 128, 200])
def test_the_kernel_of_relu(width: int) -> None:
    """In float32: its sums are."""
    shapes = (2 * ROWS, 3), (width, 3), (width,), (2 * ROWS, width)
    *inputs, upstream = (part.float().cuda() for part in drawn(0, *shapes))
    assert_same(lambda *xs: linear(*xs, relu=True), relu_linear, inputs, upstream)


@cuda
@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_kernel_of_the_rotation(width: int, key_heads: int) -> None:
    shape = 9, 4 + 2 * key_heads, width
    assert_rotates(key_heads, *(part.float().cuda() for part in drawn(0, shape, (20, 2), shape)))


@cuda
@torch.no_grad()
def test_relu_joins_the_product_in_writing_too() -> None:
    x, weight, bias = (value.cuda().bfloat16() for value in drawn(0, (70, 64), (96, 64), (96,)))
    torch.testing.assert_close(linear(x, weight, bias, relu=True), relu_linear(x, weight, bias))


def plain_swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * value


@given(rows, seeds)
@settings(max_examples=20)
def test_swiglu(count: int, seed: int) -> None:
    x, upstream = drawn(seed, (count, 10), (count, 5))
    assert_same(swiglu, plain_swiglu, [x], upstream)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("width", [5, 512, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_swiglu(width: int, dtype: torch.dtype) -> None:
    x, upstream = (part.cuda() for part in drawn(3, (300, 2 * width), (300, width)))
    found = value_and_gradients(swiglu, [x.to(dtype)], upstream.to(dtype))
    expected = value_and_gradients(plain_swiglu, [x.to(dtype).double()], upstream.to(dtype).double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
