"""The fused loss is the dense one, in value and gradient, however it is cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.nn import losses
from insertlm.nn.losses import slot_logsumexp, slot_scores

seeds = st.integers(0, 2**31)
chunk_sizes = st.sampled_from([1, 5, 12, 30, 1 << 25])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="products of bfloat16 that give float32")


def drawn(rows: int, words: int, width: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Hidden rows and unembedding."""
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    unembedding = torch.randn(words, width, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), unembedding.requires_grad_()


def cells(rows: int, words: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Some cells, a few of them several times."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(rows, (count,), generator=generator), torch.randint(words, (count,), generator=generator)


def weights(rows: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of each row's mass and each cell's score."""
    generator = torch.Generator().manual_seed(seed)
    of_mass = torch.randn(rows, generator=generator, dtype=torch.float64)
    return of_mass, torch.randn(count, generator=generator, dtype=torch.float64)


def dense(hidden: Tensor, unembedding: Tensor, row: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden @ unembedding.T
    return logits.logsumexp(-1), logits[row, token]


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 5), st.integers(0, 12), seeds, chunk_sizes)
def test_values_and_gradients_are_dense(rows: int, words: int, width: int, count: int, seed: int, chunk: int) -> None:
    operands, where = drawn(rows, words, width, seed), cells(rows, words, count, seed)
    of_mass, of_score = weights(rows, count, seed)
    expected = dense(*operands, *where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": chunk, "cuda": chunk})
        found = slot_scores(*operands, *where)
        gradients = torch.autograd.grad(found[0] @ of_mass + found[1] @ of_score, operands)
        read = slot_logsumexp(*operands)
    for a, b in zip((*found, read), (*expected, expected[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    total = expected[0] @ of_mass + expected[1] @ of_score
    for a, b in zip(gradients, torch.autograd.grad(total, operands), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 14, 1 << 25])
def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": chunk, "cuda": chunk})
    row, token = cells(5, 7, 9, seed=0)
    assert torch.autograd.gradcheck(lambda x, words: slot_scores(x, words, row, token), drawn(5, 7, 3, seed=0))


def test_huge_logits_neither_overflow_nor_vanish() -> None:
    operands, where = drawn(6, 9, 4, seed=1, scale=1e4), cells(6, 9, 4, seed=1)
    mass, score = slot_scores(*operands, *where)
    torch.testing.assert_close(mass, (operands[0] @ operands[1].T).logsumexp(-1), rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(mass.sum() - score.sum(), operands)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_stay(dtype: torch.dtype) -> None:
    hidden, unembedding = (x.detach().to(dtype).requires_grad_() for x in drawn(3, 4, 2, seed=0))
    found = slot_scores(hidden, unembedding, *cells(3, 4, 2, seed=0))
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, unembedding))
    assert {x.dtype for x in (*found, *gradients)} == {dtype}


def test_a_loss_that_is_only_measured_is_in_full_precision_on_a_cpu() -> None:
    hidden, unembedding = (x.detach().float() for x in drawn(5, 7, 8, seed=0))
    row, token = cells(5, 7, 4, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        found = slot_scores(hidden, unembedding, row, token)
    for a, b in zip(found, dense(hidden, unembedding, row, token), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [3000, 1 << 25])
def test_half_precision_on_a_cpu_is_close(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": chunk})
    hidden, unembedding = ((x.detach() / 3).float().requires_grad_() for x in drawn(40, 301, 64, seed=0))
    where, (of_mass, of_score) = cells(40, 301, 80, seed=0), (x.float() for x in weights(40, 80, seed=0))
    with torch.autocast("cpu", torch.bfloat16):
        found = slot_scores(hidden, unembedding, *where)
    expected = dense(hidden, unembedding, *where)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-2)
    assert not torch.allclose(found[1], expected[1], rtol=0, atol=1e-4)  # else its products were in float32
    gradients = torch.autograd.grad(found[0] @ of_mass + found[1] @ of_score, (hidden, unembedding))
    total = expected[0] @ of_mass + expected[1] @ of_score
    for a, b in zip(gradients, torch.autograd.grad(total, (hidden, unembedding)), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 2e-2


@needs_cuda
@pytest.mark.parametrize(("rows", "words", "chunk"), [(7, 5, 1 << 26), (300, 30_522, 1 << 26), (300, 700, 100_000)])
def test_half_precision_is_as_good_as_its_operands(
    monkeypatch: pytest.MonkeyPatch, rows: int, words: int, chunk: int
) -> None:
    """Against float64 on the rounded operands: what is lost beyond the rounding is small."""
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": chunk, "cuda": chunk})
    halves = ((x.detach().cuda() / 3).bfloat16().float() for x in drawn(rows, words, 64, seed=0))
    hidden, unembedding = (x.requires_grad_() for x in halves)
    exact, exact_words = (x.detach().double().requires_grad_() for x in (hidden, unembedding))
    row, token = (x.cuda() for x in cells(rows, words, 2 * rows, seed=0))
    of_mass, of_score = (x.cuda() for x in weights(rows, 2 * rows, seed=0))
    with torch.autocast("cuda", torch.bfloat16):
        found = slot_scores(hidden, unembedding, row, token)
        read = slot_logsumexp(hidden, unembedding)
    expected = dense(exact, exact_words, row, token)
    for a, b in zip((*found, read), (*expected, expected[0]), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    loss = found[0] @ of_mass.float() + found[1] @ of_score.float()
    gradients = torch.autograd.grad(loss, (hidden, unembedding))
    total = expected[0] @ of_mass + expected[1] @ of_score
    for a, b in zip(gradients, torch.autograd.grad(total, (exact, exact_words)), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2


@pytest.mark.parametrize("share", [1.0, 1 / 7, 0.3])
@pytest.mark.parametrize(
    ("device", "compiled"),
    [("cpu", False), pytest.param("cuda", False, marks=needs_cuda), pytest.param("cuda", True, marks=needs_cuda)],
)
def test_a_certain_token_has_no_gradient_left(device: str, compiled: bool, share: float) -> None:
    """Whatever it weighs, rounded or not."""

    def loss(hidden: Tensor, unembedding: Tensor, row: Tensor, token: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            mass, score = slot_scores(hidden, unembedding, row, token)
        return share * (mass - score).sum()

    hidden, unembedding = (x.detach().float().to(device) for x in drawn(4, 9, 64, seed=3))
    hidden = (unembedding[0] + 0.01 * hidden).requires_grad_()  # about 60 for the first word, at most 30 for others
    row = torch.arange(4, device=device)
    run = torch.compile(loss) if compiled else loss
    gradients = torch.autograd.grad(
        run(hidden, unembedding.requires_grad_(), row, torch.zeros_like(row)), (hidden, unembedding)
    )
    assert all(float(gradient.abs().max()) < 1e-5 for gradient in gradients)
