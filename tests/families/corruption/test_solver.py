"""Corruptions in which somebody who solves the task has found what is left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.families.base import Noise
from insertlm.families.corruption.packed import corrupt
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.tasks.base import Examples

TinyIlm = Callable[..., ILM]
LONGEST = 12
lengths = st.lists(st.sampled_from(range(0, LONGEST + 1, 3)), min_size=1, max_size=6).filter(any)


def solved(sizes: list[int], group: int, seed: int) -> Examples:
    """Targets whose groups of tokens are found in a random order."""
    generator = np.random.default_rng(seed)
    found = np.array([generator.permutation(LONGEST // group).repeat(group) for _ in sizes], np.int32)
    words = generator.integers(0, 6, (len(sizes), LONGEST)).astype(np.int32)
    nothing = np.zeros((len(sizes), 0), np.int32)
    return Examples(nothing, np.zeros(len(sizes), np.int32), words, np.array(sizes, np.int32), found)


def noise_of(count: int, seed: int) -> Noise:
    return Noise(seed, torch.arange(count), torch.zeros(count, dtype=torch.int64))


@given(lengths, st.sampled_from([1, 3]), st.integers(0, 2**40))
def test_what_is_found_last_is_missing(tiny_ilm: TinyIlm, sizes: list[int], group: int, seed: int) -> None:
    config = IlmConfig(group=group, solver=1.0, frame=0.0)
    ilm, examples, noise = tiny_ilm(config=config), solved(sizes, group, seed), noise_of(len(sizes), seed)
    rows = ilm.rows(examples)
    x = corrupt(rows, noise, corruption=config.corruption())
    assert examples.solving_order is not None
    for found, size, count, deleted in zip(
        examples.solving_order,
        sizes,
        config.corruption().count(rows, noise).tolist(),
        x.deleted,
        strict=True,
    ):
        ends = [column for column in range(size) if (column + 1) % group == 0]
        last = sorted(ends, key=lambda column: -found[column])[:count]
        assert deleted.nonzero().flatten().tolist() == sorted(last)
    assert torch.equal(ilm.visible(rows, noise), x.packing.lengths)


def test_of_the_others_chance_decides_as_ever(tiny_ilm: TinyIlm) -> None:
    """And several corruptions of one example differ in whether it does."""
    count, times = 500, 3
    examples = solved([LONGEST] * count, 3, 0)

    def deleted(share: float) -> Tensor:
        ilm = tiny_ilm(config=IlmConfig(group=3, solver=share))
        return corrupt(ilm.rows(examples), noise_of(count, 1), corruption=ilm.corruption, times=times).deleted

    none, some, all_ = map(deleted, (0.0, 0.25, 1.0))
    random, by_solver = (some == none).all(1), (some == all_).all(1)
    assert (random | by_solver).all()
    told_apart = (none != all_).any(1)
    share = (by_solver & told_apart).sum() / told_apart.sum()
    assert share == pytest.approx(0.25, abs=0.04)
    whole = by_solver.view(count, times)
    assert (whole.any(1) & ~whole.all(1)).any()
