"""Targets of groups: which tokens are deleted, and which of these are asked for. Their loss: see test_ilm.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from insertlm.families.base import Noise
from insertlm.families.corruption.groups import Groups
from insertlm.families.corruption.packed import corrupt
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.tasks.base import Examples

Fits = Callable[[Tensor, Tensor], bool]
TinyIlm = Callable[..., ILM]


def test_of_groups_the_ends_go_first_then_the_frame_from_the_right(tiny_ilm: TinyIlm, fits: Fits) -> None:
    """Groups of two in five tokens: for a third of the examples 3 … 5 of them go, for the others 0 … 2 of the ends."""
    length, count, ends = 5, 30_000, (1, 3)
    target = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    examples = Examples(target[:, :1], np.ones(count, np.int32), target, np.full(count, length, np.int32))
    noise = Noise(2, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    x = corrupt(tiny_ilm().rows(examples), noise, corruption=Groups(size=2, unfinished=1 / 3))
    chances = torch.zeros(2**length)
    for size in range(3):
        subsets = list(combinations(ends, size))
        for subset in subsets:
            chances[sum(2**j for j in subset)] += 2 / 3 / 3 / len(subsets)
    asked_for = {}
    for frame in ((4,), (2, 4), (0, 2, 4)):
        everything = sum(2**j for j in (*ends, *frame))
        chances[everything] += 1 / 3 / 3
        asked_for[everything] = 2 ** frame[0]
    bits = 2 ** torch.arange(length)
    deleted, wanted = (x.deleted * bits).sum(1), (x.wanted * bits).sum(1)
    assert fits(torch.bincount(deleted, minlength=2**length), chances)
    assert wanted.tolist() == [asked_for.get(code, code) for code in deleted.tolist()]
    assert torch.equal(x.count, x.wanted.sum(1))


def test_groups_leave_no_room_for_stretches() -> None:
    with pytest.raises(ValueError, match="two ways to choose what is deleted; expected stretch 0 or group 1"):
        IlmConfig(group=3, stretch=0.1)
