"""Every epoch is a permutation, and which one is a pure function of seed and epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.data.order import Order, ProcessOrder

Fits = Callable[[Tensor, Tensor], bool]

counts = st.integers(1, 300)
seeds = st.integers(0, 2**63)


def epoch_of(count: int, seed: int, epoch: int) -> list[int]:
    """All examples of one epoch, one per step."""
    examples, epochs = Order(count, 1, seed).batches(epoch * count, count)
    assert set(epochs.ravel().tolist()) == {epoch}
    return [int(place) for place in examples.ravel()]


@given(counts, seeds, st.integers(0, 10**6))
@example(1, 0, 0)
@example(2, 0, 1)
@example(3, 0, 2)
@example(4, 0, 0)
@example(5, 0, 0)
@example(64, 0, 0)
@example(65, 0, 0)
def test_every_epoch_visits_every_example_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(count, seed, epoch)) == list(range(count))


@given(counts, st.integers(1, 50), seeds, st.integers(0, 100), st.integers(1, 10))
def test_steps_are_the_same_however_many_are_asked_for(
    count: int, batch_size: int, seed: int, first: int, steps: int
) -> None:
    order = Order(count, batch_size, seed)
    together = order.batches(first, steps)
    for part in together:
        assert part.shape == (steps, batch_size)
        assert part.dtype == np.int64
    for step in range(steps):
        for part, alone in zip(together, Order(count, batch_size, seed).batches(first + step, 1), strict=True):
            assert part[step].tolist() == alone[0].tolist()


@given(counts, st.integers(1, 50), seeds)
def test_batches_run_through_one_epoch_after_the_other(count: int, batch_size: int, seed: int) -> None:
    steps = -(-3 * count // batch_size)
    examples, epochs = (part.ravel()[: 3 * count].tolist() for part in Order(count, batch_size, seed).batches(0, steps))
    assert epochs == [epoch for epoch in range(3) for _ in range(count)]
    assert examples == [place for epoch in range(3) for place in epoch_of(count, seed, epoch)]


@given(st.integers(30, 300), seeds, st.integers(0, 100))
def test_epochs_and_seeds_differ(count: int, seed: int, epoch: int) -> None:
    orders = [
        epoch_of(count, seed, epoch),
        epoch_of(count, seed, epoch + 1),
        epoch_of(count, seed + 1, epoch),
        list(range(count)),
    ]
    assert len(set(map(tuple, orders))) == len(orders)


def test_every_example_is_as_likely_in_every_place(fits: Fits) -> None:
    count = 20
    examples, _ = Order(count, count, 3).batches(0, 10_000)
    for place in (0, 1, 13, count - 1):
        assert fits(torch.bincount(torch.from_numpy(examples[:, place])), torch.ones(count))
    pairs = torch.bincount(torch.from_numpy(examples[:, 0] * count + examples[:, 1]), minlength=count**2)
    assert fits(pairs, 1 - torch.eye(count))


def test_the_next_epoch_does_not_follow_from_this_one(fits: Fits) -> None:
    count = 20
    examples, _ = Order(count, count, 3).batches(0, 10_000)
    pairs = torch.from_numpy(examples[:-1, 0] * count + examples[1:, 0])
    assert fits(torch.bincount(pairs, minlength=count**2), torch.ones(count**2))


def test_millions_of_examples_take_no_memory_and_no_time() -> None:
    examples, _ = Order(3_000_000_000, 64, 1).batches(10**6, 100)
    assert len(np.unique(examples)) == examples.size
    assert int(examples.min()) >= 0
    assert int(examples.max()) < 3_000_000_000


@given(counts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), seeds, st.integers(0, 100), st.integers(1, 5))
def test_pieces_make_up_every_batch(
    count: int, world: int, accumulate: int, size: int, seed: int, first: int, steps: int
) -> None:
    """Nothing is lost and nothing is seen twice, whichever pieces are asked for together."""
    order = Order(count, world * accumulate * size, seed)
    shares = [
        ProcessOrder(order, rank, world, accumulate).batches(first * accumulate, steps * accumulate)
        for rank in range(world)
    ]
    for number, whole in enumerate(order.batches(first, steps)):
        parts = [share[number].reshape(steps, accumulate * size) for share in shares]
        assert np.array_equal(np.concatenate(parts, 1), whole)
    alone = ProcessOrder(order, 0, world, accumulate).batches(first * accumulate + 1, 1)
    if steps * accumulate > 1:
        assert np.array_equal(alone[0][0], shares[0][0][1])
