"""Noise is a pure function of its counters, and looks like noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.noise import chance, column_keys, hash32, keep_mask, randint, stretch, uniform

Fits = Callable[[Tensor, Tensor], bool]

seeds = st.integers(0, 2**63 - 1)
counters = st.integers(0, 2**32 - 1)
lists = st.lists(counters, min_size=1, max_size=6)
keys = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6)

# Counters for which hash32(1, ·) lies in the highest, and in the lowest, 256 of all 2^32 values.
HIGHEST = [2510428, 17033549, 18533861, 21942731, 57409307]
LOWEST = [8520435]


def histogram(values: Tensor, bins: int) -> Tensor:
    return torch.bincount(values.flatten(), minlength=bins)


def even(bins: int) -> Tensor:
    return torch.ones(bins) / bins


# --- Hash


@given(seeds, lists, lists)
def test_counters_broadcast_and_each_value_stands_alone(seed: int, first: list[int], second: list[int]) -> None:
    table = hash32(seed, torch.tensor(first)[:, None], 7, torch.tensor(second))
    assert table.shape == (len(first), len(second))
    assert table.dtype == torch.int64
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            assert table[i, j] == hash32(seed, a, 7, b)


@given(seeds, counters, counters, st.sampled_from([torch.int32, torch.int64]))
def test_values_repeat_whatever_holds_the_counter(seed: int, a: int, b: int, dtype: torch.dtype) -> None:
    a &= 2**31 - 1
    assert hash32(seed, torch.tensor([a], dtype=dtype), b) == hash32(seed, a, b)
    assert 0 <= int(hash32(seed, a, b)) < 2**32


def test_the_function_is_this_one() -> None:
    """Runs, released samples and resumed training depend on these very values."""
    expected = [[2339934983, 2903704621, 3422772672], [4153238872, 963249945, 221940373]]
    assert hash32(1, torch.tensor([0, 1])[:, None], torch.arange(3)).tolist() == expected


def test_all_bits_of_a_seed_matter() -> None:
    assert len({int(hash32(seed, 2)) for seed in (1, 1 + (1 << 31), 1 + (1 << 33), 1 + (1 << 62))}) == 4


def test_order_and_number_of_counters_matter() -> None:
    assert len({int(hash32(1, *c)) for c in [(2,), (2, 0), (0, 2), (2, 3), (3, 2), (2, 3, 0)]}) == 6


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform_whichever_counter_runs(fits: Fits, shift: int) -> None:
    run = torch.arange(1 << 16)
    for values in (hash32(3, run), hash32(3, run, 5), hash32(3, 5, run), hash32(3, 5, 0, run << 16)):
        assert fits(histogram((values >> shift) & 255, 256), even(256))


def test_a_changed_bit_changes_half_of_the_others() -> None:
    base = torch.arange(4096)
    for place in range(3):
        for bit in range(32):
            before: list[Tensor | int] = [5, 6, 7]
            after: list[Tensor | int] = [5, 6, 7]
            before[place], after[place] = base, base ^ (1 << bit)
            flipped = ((hash32(1, *before) ^ hash32(1, *after))[:, None] >> torch.arange(32)) & 1
            assert float((flipped.double().mean(0) - 0.5).abs().max()) < 0.055  # seven standard deviations


@pytest.mark.parametrize(
    "pair",
    [
        (lambda c: hash32(1, c), lambda c: hash32(1, c + 1)),
        (lambda c: hash32(1, c), lambda c: hash32(2, c)),
        (lambda c: hash32(1, c, 0), lambda c: hash32(1, c, 1)),
        (lambda c: hash32(1, c, 0), lambda c: hash32(1, 0, c)),
        (lambda c: hash32(1, c, 0), lambda c: hash32(1, c)),
    ],
    ids=["neighbours", "seeds", "streams", "places", "depths"],
)
def test_streams_are_independent(fits: Fits, pair: tuple[Callable[[Tensor], Tensor], ...]) -> None:
    run = torch.arange(1 << 16)
    high = [stream(run) >> 28 for stream in pair]
    assert fits(histogram(high[0] * 16 + high[1], 256), even(256))
    low = [stream(run) & 15 for stream in pair]
    assert fits(histogram(low[0] * 16 + low[1], 256), even(256))


# --- Uniform


def test_uniform_is_uniform(fits: Fits) -> None:
    values = uniform(1, torch.arange(1 << 16))
    assert fits(histogram((values * 200).long(), 200), even(200))


def test_uniform_never_reaches_its_ends() -> None:
    """At 0 or 1 the Gumbel trick would choose what is ruled out."""
    assert all(int(hash32(1, c)) >= 2**32 - 256 for c in HIGHEST)
    assert all(int(hash32(1, c)) < 256 for c in LOWEST)
    values = uniform(1, torch.tensor(HIGHEST + LOWEST))
    assert bool((values > 0).all())
    assert bool((values < 1).all())
    assert bool((-(-values.log()).log()).isfinite().all())


# --- Chances


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_chance_is_as_often_true_as_it_says(share: float) -> None:
    found = chance(share, 1, torch.arange(20_000))
    assert float(found.float().mean()) == pytest.approx(share, abs=0.015)
    assert share not in (0.0, 1.0) or bool((found == bool(share)).all())


# --- Integers


@given(seeds, lists, st.integers(1, 2**31))
def test_randint_stays_in_range(seed: int, run: list[int], high: int) -> None:
    values = randint(torch.tensor(high), seed, torch.tensor(run))
    assert bool(((values >= 0) & (values < high)).all())


def test_randint_reaches_both_ends_and_no_further() -> None:
    assert randint(torch.tensor(10), 1, torch.tensor(HIGHEST)).tolist() == [9] * len(HIGHEST)
    assert randint(torch.tensor(10), 1, torch.tensor(LOWEST)).tolist() == [0] * len(LOWEST)
    assert randint(torch.tensor(1), 1, torch.arange(50)).tolist() == [0] * 50


@pytest.mark.parametrize("high", [2, 7, 100])
def test_randint_is_uniform(fits: Fits, high: int) -> None:
    assert fits(histogram(randint(torch.tensor(high), 4, torch.arange(1 << 15)), high), even(high))


def test_randint_takes_a_range_per_row() -> None:
    high = torch.tensor([1, 5, 90])
    rows = randint(high, 1, torch.arange(3), 8)
    assert rows.tolist() == [int(randint(h, 1, i, 8)) for i, h in enumerate(high)]


def test_a_stretch_begins_anywhere_and_has_its_size(fits: Fits) -> None:
    """In the first four of six cells: every beginning is as likely as any other, and the run goes on at the front."""
    count = 20_000
    example = torch.arange(count)
    size = example % 4 + 1
    found = stretch(torch.full((count,), 4), size, 6, 3, example)
    assert torch.equal(found.sum(1), size)
    assert not bool(found[:, 4:].any())
    codes = (found[:, :4] * torch.tensor([1, 2, 4, 8])).sum(1)
    runs = [sum(1 << (first + i) % 4 for i in range(length)) for first in range(4) for length in range(1, 5)]
    assert fits(torch.bincount(codes, minlength=16), torch.bincount(torch.tensor(runs), minlength=16) / 16)
    assert not bool(stretch(torch.zeros(3).long(), torch.ones(3), 6, 3, torch.arange(3)).any())


# --- Dropout


@given(keys, st.integers(1, 40), st.integers(0, 50), st.sampled_from([0.1, 0.5, 0.9]))
def test_each_row_of_a_mask_stands_alone(run: list[int], width: int, site: int, drop: float) -> None:
    mask = keep_mask(torch.tensor(run, dtype=torch.int32), column_keys(width), site, drop)
    assert mask.shape == (len(run), width)
    for key, row in zip(run, mask, strict=True):
        alone = keep_mask(torch.tensor([key], dtype=torch.int32), column_keys(40), site, drop)
        assert torch.equal(alone[0, :width], row)


@given(keys, st.integers(0, 50))
@settings(max_examples=20)
def test_masks_nest_and_no_dropout_keeps_all(run: list[int], site: int) -> None:
    row = torch.tensor(run, dtype=torch.int32)
    assert bool(keep_mask(row, column_keys(64), site, 0.0).all())
    assert not bool((keep_mask(row, column_keys(64), site, 0.5) & ~keep_mask(row, column_keys(64), site, 0.1)).any())


@pytest.fixture(params=["sequential", "hashed"])
def many_keys(request: pytest.FixtureRequest) -> Tensor:
    run = torch.arange(1024)
    return (run if request.param == "sequential" else hash32(1, run)).int()


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_rate_of_rows_columns_and_all(fits: Fits, many_keys: Tensor, drop: float) -> None:
    mask = keep_mask(many_keys, column_keys(512), 3, drop)
    assert fits(torch.stack([mask.sum(), (~mask).sum()]), torch.tensor([1 - drop, drop]))
    assert fits((~mask).sum(0), even(512))
    assert fits((~mask).sum(1), even(1024))


def correlations(left: Tensor, right: Tensor, drop: float) -> Tensor:
    """Of every row of one mask with every row of the other, in standard deviations of the chance value."""
    variance = torch.tensor(drop * (1 - drop) * left.shape[1]).double()
    a, b = (mask.double() - (1 - drop) for mask in (left, right))
    return a @ b.T / (variance * drop * (1 - drop)).sqrt()


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_rows_columns_and_sites_do_not_correlate(many_keys: Tensor, drop: float) -> None:
    mask, other = (keep_mask(many_keys, column_keys(768), site, drop) for site in (0, 1))
    pairs = [(mask[::2], mask[1::2]), (mask.T[::2], mask.T[1::2]), (mask, other), (mask.T, other.T)]
    for left, right in pairs:
        chance = correlations(left, right, drop)
        assert float(chance.abs().max()) < 8
        assert float(chance.square().mean()) == pytest.approx(1, abs=0.03)
