"""Top-k, nucleus and temperature do what their definitions say, and draws follow the probabilities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.noise import uniform
from insertlm.inference import sampling
from insertlm.inference.sampling import NoiseOf, choose, choose_each, nucleus, top_k

Fits = Callable[[Tensor, Tensor], bool]

ROW = torch.tensor([0.3, -1.0, 1.2, 0.9, -torch.inf, 0.0, -2.0], dtype=torch.float64)
scores = st.floats(-5, 5, allow_subnormal=False).map(lambda x: round(x, 2))
rows = st.lists(st.one_of(scores, st.just(-torch.inf)), min_size=1, max_size=8).filter(lambda row: max(row) > -9)
seeds = st.integers(0, 2**31)


def as_batch(row: list[float]) -> Tensor:
    """The row with another one beside it."""
    return torch.tensor([row, row[::-1]], dtype=torch.float64)


def noise_of(seed: int = 0) -> NoiseOf:
    return lambda row, column: uniform(seed, row, column)


def kept(logits: Tensor) -> list[bool]:
    return (logits > -torch.inf).tolist()


# --- What stays


@given(rows, st.integers(0, 10))
def test_top_k_keeps_what_is_no_smaller_than_the_kth(row: list[float], k: int) -> None:
    found = top_k(as_batch(row), k)
    ordered = sorted(row, reverse=True)
    least = ordered[k - 1] if 0 < k <= len(row) else -torch.inf
    expected = [x if x >= least else -torch.inf for x in row]
    assert found.tolist() == [expected, expected[::-1]]


@given(rows.filter(lambda row: len(set(row)) == len(row)), st.floats(0.01, 1.0))
def test_nucleus_keeps_the_fewest_that_reach_p(row: list[float], p: float) -> None:
    probability = torch.tensor(row, dtype=torch.float64).softmax(0).tolist()
    reached, expected = 0.0, [False] * len(row)
    for place in sorted(range(len(row)), key=lambda i: -probability[i]):
        assume(abs(reached - p) > 1e-9)
        if reached >= p:
            break
        expected[place] = row[place] > -torch.inf
        reached += probability[place]
    found = nucleus(as_batch(row), p)
    assert [kept(found[0]), kept(found[1])] == [expected, expected[::-1]]
    assert all(x == y for x, y in zip(found[0].tolist(), row, strict=True) if x > -torch.inf)


def test_one_keeps_everything() -> None:
    assert torch.equal(nucleus(ROW[None], 1.0), ROW[None])


def test_the_entry_that_crosses_p_stays() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert [kept(nucleus(logits, p)[0]) for p in (0.1, 0.499, 0.501, 0.79, 0.81)] == [
        [True, False, False],
        [True, False, False],
        [True, True, False],
        [True, True, False],
        [True, True, True],
    ]


# --- What is drawn


@pytest.mark.parametrize(
    ("temperature", "k", "p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7), (1.5, 4, 0.8)],
)
def test_draws_follow_the_probabilities(fits: Fits, temperature: float, k: int, p: float) -> None:
    count = 20_000
    drawn = choose(ROW.expand(count, -1), noise_of(), temperature, k, p)
    chances = nucleus(top_k(ROW[None] / temperature, k), p).softmax(-1)
    assert fits(torch.bincount(drawn, minlength=len(ROW)), chances)


def test_top_p_applies_to_what_top_k_and_temperature_left() -> None:
    """0.4 of 0.7 is enough for p = 0.5 only once the third entry is out."""
    logits = torch.tensor([0.4, 0.3, 0.3 - 1e-6]).double().log()
    assert set(choose(logits.expand(500, -1), noise_of(), 1.0, 2, 0.5).tolist()) == {0}
    assert set(choose(logits.expand(500, -1), noise_of(), 1.0, 0, 0.5).tolist()) == {0, 1}
    assert set(choose(logits.expand(500, -1), noise_of(), 0.1, 0, 0.8).tolist()) == {0}


@given(rows, seeds)
def test_temperature_zero_and_top_one_take_the_largest(row: list[float], seed: int) -> None:
    logits = as_batch(row)
    expected = logits.argmax(-1)
    assert torch.equal(choose(logits, noise_of(seed), temperature=0.0), expected)
    assert torch.equal(choose(logits, noise_of(seed), k=1), expected)


@pytest.mark.parametrize(("temperature", "p"), [(1e-31, 1.0), (1e-46, 1.0), (1e-300, 0.5), (1.0, 1e-50), (1.0, 1e-300)])
def test_settings_too_small_for_a_float_take_the_largest(temperature: float, p: float) -> None:
    assert set(choose(ROW.float().expand(50, -1), noise_of(), temperature, 0, p).tolist()) == {int(ROW.argmax())}


@given(rows, seeds, st.data())
def test_what_is_ruled_out_is_never_drawn(row: list[float], seed: int, data: st.DataObject) -> None:
    """Not with the most extreme noise there is, either."""
    extremes = st.sampled_from([2.0**-25, 0.5, 1 - 2.0**-24])
    extreme = torch.tensor([[data.draw(extremes) for _ in row]] * 2)
    for noise in (lambda *cells: extreme[cells], noise_of(seed)):
        for draw, row_ in zip(choose(as_batch(row), noise).tolist(), as_batch(row).tolist(), strict=True):
            assert row_[draw] > -torch.inf


@given(st.lists(rows.map(lambda row: (row * 8)[:8]), min_size=2, max_size=5), seeds)
def test_rows_do_not_see_each_other(batch: list[list[float]], seed: int) -> None:
    logits, noise = torch.tensor(batch, dtype=torch.float64), noise_of(seed)
    together = choose(logits, noise, 0.9, 5, 0.9)
    for b, row in enumerate(logits):
        alone = choose(row[None], lambda _, column: noise(torch.tensor(b), column), 0.9, 5, 0.9)  # noqa: B023 (called at once)
        assert together[b] == alone[0]


@given(st.lists(st.sampled_from([(0.0, 0, 1.0), (0.7, 2, 1.0), (1.5, 0, 0.6)]), min_size=1, max_size=4), seeds)
def test_every_text_has_its_own_way_in_all_of_its_rows(ways: list[tuple[float, int, float]], seed: int) -> None:
    logits, noise = ROW.repeat(2 * len(ways), 1), noise_of(seed)
    found = choose_each(logits, noise, ways).view(-1, 2)
    assert [pair.tolist() for pair in found] == [
        choose(logits, noise, *way).view(-1, 2)[text].tolist() for text, way in enumerate(ways)
    ]


@pytest.mark.parametrize("p", [0.003, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("spread", [0.1, 5.0])
def test_a_nucleus_of_many_words_is_the_same_without_sorting_all(
    p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = spread * torch.randn(3, 9000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    short = sampling.nucleus(logits, p)
    monkeypatch.setattr(sampling, "_MANY", 10**6)
    assert torch.equal(short, sampling.nucleus(logits, p))
