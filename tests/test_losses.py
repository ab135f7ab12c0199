"""The fused loss is the dense one, in value and gradient, however it is cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm import losses
from insertlm.losses import rounded, slot_logsumexp

seeds = st.integers(0, 2**31)
chunk_sizes = st.sampled_from([1, 5, 12, 30, 1 << 25])


def drawn(rows: int, words: int, width: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, unembedding, and a weight for each row's result."""
    generator = torch.Generator().manual_seed(seed)
    hidden, words_, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, width), (words, width), (rows,))
    )
    return (scale * hidden).requires_grad_(), words_.requires_grad_(), weight


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 5), seeds, chunk_sizes)
def test_value_and_gradient_are_dense(rows: int, words: int, width: int, seed: int, chunk: int) -> None:
    hidden, unembedding, weight = drawn(rows, words, width, seed)
    expected = (hidden @ unembedding.T).logsumexp(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
        found = slot_logsumexp(hidden, unembedding)
        gradients = torch.autograd.grad(found @ weight, (hidden, unembedding))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients, torch.autograd.grad(expected @ weight, (hidden, unembedding)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 14, 1 << 25])
def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    hidden, unembedding, _ = drawn(5, 7, 3, seed=0)
    assert torch.autograd.gradcheck(slot_logsumexp, (hidden, unembedding))


def test_huge_logits_neither_overflow_nor_vanish() -> None:
    hidden, unembedding, weight = drawn(6, 9, 4, seed=1, scale=1e4)
    found = slot_logsumexp(hidden, unembedding)
    torch.testing.assert_close(found, (hidden @ unembedding.T).logsumexp(-1), rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(found @ weight, (hidden, unembedding))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_stay(dtype: torch.dtype) -> None:
    hidden, unembedding = (x.detach().to(dtype).requires_grad_() for x in drawn(3, 4, 2, seed=0)[:2])
    found = slot_logsumexp(hidden, unembedding)
    gradients = torch.autograd.grad(found.sum(), (hidden, unembedding))
    assert {found.dtype, *(gradient.dtype for gradient in gradients)} == {dtype}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="products of bfloat16 that give float32 need CUDA")
@pytest.mark.parametrize(("rows", "words"), [(7, 5), (300, 30_522)])
def test_half_precision_is_as_good_as_its_operands(rows: int, words: int) -> None:
    """Against float64 on the rounded operands: what is lost beyond the rounding is small."""
    hidden, unembedding, weight = (x.detach().cuda() for x in drawn(rows, words, 64, seed=0))
    rounded = [(x / 3).bfloat16().float().requires_grad_() for x in (hidden, unembedding)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    with torch.autocast("cuda", torch.bfloat16):
        found = slot_logsumexp(*rounded)
    expected = (exact[0] @ exact[1].T).logsumexp(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    gradients = torch.autograd.grad(found @ weight.float(), rounded)
    for a, b in zip(gradients, torch.autograd.grad(expected @ weight, exact), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="rounds on CUDA alone")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_certain_token_has_no_gradient_left(compiled: bool) -> None:
    """Compiled too, where conversions there and back are left out."""

    def loss(hidden: Tensor, unembedding: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x, words = rounded(hidden), rounded(unembedding)
            mass = slot_logsumexp(x, words)
        return (mass - (x * words[0]).sum(-1)).sum()

    hidden, unembedding = (x.detach().float().cuda() for x in drawn(4, 9, 64, seed=3)[:2])
    hidden = (unembedding[0] + 0.01 * hidden).requires_grad_()  # about 60 for the first word, at most 30 for others
    gradients = torch.autograd.grad(
        (torch.compile(loss) if compiled else loss)(hidden, unembedding.requires_grad_()), (hidden, unembedding)
    )
    assert all(float(gradient.abs().max()) < 1e-5 for gradient in gradients)
