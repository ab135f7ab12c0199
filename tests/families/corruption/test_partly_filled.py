"""Blanks that are partly filled in, and the leftmost of what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.blanks import BlanksConfig, cut
from insertlm.families.corruption.leftmost import Leftmost
from insertlm.families.corruption.partly_filled import PartlyFilled
from insertlm.families.corruption.uniform import Uniform
from insertlm.families.ilm import IlmConfig
from insertlm.text.units import STARTS_WORD

Fits = Callable[[Tensor, Tensor], bool]
TRAITS = torch.full((9,), STARTS_WORD, dtype=torch.uint8)
BLANKS_ALONE = BlanksConfig(suffix=0.0, everything=0.0, share=1.0)


def equal(length: int, count: int) -> tuple[Rows, Noise]:
    given = torch.tensor([[7, 8]]).repeat(count, 1)
    target = (torch.arange(length) % 6).repeat(count, 1)
    rows = Rows(given, torch.full((count,), 2), target, torch.full((count,), length))
    return rows, Noise(3, torch.arange(count), torch.zeros(count, dtype=torch.int64))


def test_of_every_gap_any_number_is_missing_and_all_of_a_number_alike(fits: Fits) -> None:
    rows, noise = equal(11, 60_000)
    blanks = cut(rows.target, rows.target_length, TRAITS, BLANKS_ALONE, noise)
    deleted = PartlyFilled(1.0, TRAITS, BLANKS_ALONE).deleted(rows, noise)
    assert not deleted[blanks.gap_of(11) == 0].any()
    two = (blanks.count == 2) & (blanks.end - blanks.begin)[:, :2].eq(torch.tensor([2, 2])).all(1)
    column = torch.arange(11)
    codes = []
    for gap in (0, 1):
        inside = deleted[two][(column >= blanks.begin[two, gap, None]) & (column < blanks.end[two, gap, None])]
        codes.append(inside.view(-1, 2).long() @ torch.tensor([1, 2]))
    # Of two tokens none, one of the two, or both are missing, each with a third; and gaps are independent.
    chances = torch.tensor([1 / 3, 1 / 6, 1 / 6, 1 / 3])
    assert fits(torch.bincount(codes[0] * 4 + codes[1], minlength=16), chances[:, None] * chances)


def test_open_are_the_slots_of_gaps_empty_ones_too() -> None:
    rows, noise = equal(9, 500)
    blanks = cut(rows.target, rows.target_length, TRAITS, BLANKS_ALONE, noise)
    assert ((blanks.begin == blanks.end) & blanks.used).any()
    for open_, *gaps in zip(
        PartlyFilled(1.0, TRAITS, BLANKS_ALONE).open(rows, noise).tolist(),
        *(part.tolist() for part in blanks.__dict__.values()),
        strict=True,
    ):
        count, begin, end, _ = gaps
        expected = {slot for gap in range(count) for slot in range(begin[gap], end[gap] + 1)}
        assert {slot for slot, is_open in enumerate(open_) if is_open} == expected


def test_the_others_are_the_papers() -> None:
    rows, noise = equal(9, 4000)
    some, all_ = (PartlyFilled(share, TRAITS, BLANKS_ALONE) for share in (0.25, 1.0))
    uniform, blanked, found = (each.deleted(rows, noise) for each in (Uniform(), all_, some))
    assert ((found == uniform).all(1) | (found == blanked).all(1)).all()
    told_apart = (uniform != blanked).any(1)
    share = ((found == blanked).all(1) & told_apart).sum() / told_apart.sum()
    assert share == pytest.approx(0.25, abs=0.03)
    assert some.open(rows, noise)[~(found == blanked).all(1)].all()


def test_the_leftmost_of_every_slot_is_asked_for() -> None:
    deleted = torch.tensor([[True, True, False, True, False, False, True, True, True]])
    wanted = Leftmost(Uniform()).wanted(deleted, torch.tensor([9]))
    assert Counter(wanted.nonzero()[:, 1].tolist()) == Counter([0, 3, 6])


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"blanks": 0.5, "stretch": 0.5},
            "blanks and stretch are two ways to choose what is deleted; expected stretch 0",
        ),
        ({"blanks": 0.5, "group": 3}, "blanks and group are two ways to choose what is deleted; expected group 1"),
        ({"blanks": 0.5, "solver": 0.5}, "blanks and solver are two ways to choose what is deleted; expected solver 0"),
        ({"targets": "first", "group": 3}, "group says itself which tokens are asked for; expected targets any"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, float], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        IlmConfig(**keys)  # type: ignore[arg-type]
