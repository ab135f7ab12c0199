"""What every corruption promises, whatever it deletes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.base import Corruption
from insertlm.families.corruption.blanks import BlanksConfig
from insertlm.families.corruption.groups import Groups
from insertlm.families.corruption.leftmost import Leftmost
from insertlm.families.corruption.packed import corrupt, packed_length
from insertlm.families.corruption.partly_filled import PartlyFilled
from insertlm.families.corruption.solver import SolverStates
from insertlm.families.corruption.stretch import Stretch
from insertlm.families.corruption.uniform import Uniform
from insertlm.tasks.base import Examples
from insertlm.text.units import ENDS_SENTENCE, MARKS, STARTS_WORD

COUNT, WIDTH = 200, 12
SOLVER = SolverStates(0.5)
TRAITS = torch.full((9,), STARTS_WORD, dtype=torch.uint8)
TRAITS[0], TRAITS[1] = 0, MARKS | ENDS_SENTENCE
EVERY = [
    Uniform(),
    Uniform(SOLVER),
    Stretch(0.5),
    Stretch(1.0, SOLVER),
    Groups(3, 0.3),
    Groups(2, 0.5, SOLVER),
    Leftmost(Uniform()),
    PartlyFilled(0.7, TRAITS, BlanksConfig()),
    Leftmost(PartlyFilled(1.0, TRAITS, BlanksConfig(suffix=0.5))),
]


def rows() -> Rows:
    """Targets of 0 … 12 tokens, with junk behind them, in which a solver finds tokens in a random order."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, (COUNT, WIDTH)).astype(np.int32)
    length = rng.integers(0, WIDTH + 1, COUNT).astype(np.int32)
    order = rng.permuted(np.tile(np.arange(WIDTH, dtype=np.int32), (COUNT, 1)), axis=1)
    return Rows.of(Examples(ids[:, :3], length % 4, ids, length, order), 10, 11, solving_order=True)


def noise(seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(COUNT), torch.full((COUNT,), 2))


@pytest.mark.parametrize("corruption", EVERY)
def test_as_many_are_deleted_as_the_host_is_told(corruption: Corruption) -> None:
    texts = rows()
    deleted = corruption.deleted(texts, noise())
    assert torch.equal(deleted.sum(1), corruption.count(texts, noise()))
    assert not (deleted & ~texts.real).any()
    assert torch.equal(
        packed_length(texts, noise(), corruption, 2), corrupt(texts, noise(), None, corruption, 2).packing.lengths
    )


@pytest.mark.parametrize("corruption", EVERY)
def test_what_is_asked_for_is_missing_and_there_is_something_wherever_anything_is(corruption: Corruption) -> None:
    texts = rows()
    deleted = corruption.deleted(texts, noise())
    wanted = corruption.wanted(deleted, texts.target_length)
    assert not (wanted & ~deleted).any()
    assert torch.equal(wanted.any(1), deleted.any(1))


@pytest.mark.parametrize("corruption", EVERY)
def test_slots_with_something_missing_are_open_and_none_is_only_for_blanks(corruption: Corruption) -> None:
    texts = rows()
    deleted, open_ = corruption.deleted(texts, noise()), corruption.open(texts, noise())
    assert open_.any(1).all()
    for gone, slots in zip(deleted.tolist(), open_.tolist(), strict=True):
        slot = 0  # of the last token that is still there
        for place, missing in enumerate(gone, start=1):
            slot = slot if missing else place
            assert not missing or slots[slot]
    blanks = isinstance(corruption, PartlyFilled) or isinstance(getattr(corruption, "of", None), PartlyFilled)
    assert open_.all() != blanks


@pytest.mark.parametrize("corruption", EVERY)
def test_what_is_deleted_depends_on_the_example_and_its_noise_alone(corruption: Corruption) -> None:
    texts, some = rows(), torch.tensor([7, 3, 150])
    part = Noise(0, noise().example[some], noise().epoch[some])
    deleted = corruption.deleted(texts, noise())
    assert torch.equal(corruption.deleted(texts.select(some), part), deleted[some])
    assert not torch.equal(corruption.deleted(texts, noise(seed=1)), deleted)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("corruption", EVERY)
def test_with_a_capacity_nothing_is_asked_of_the_device_and_shapes_are_static(corruption: Corruption) -> None:
    """So a step can be captured. Without torch.compile's code generator, which is slow."""

    def packed(epoch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = corrupt(texts, Noise(0, noise().example, epoch), 2 * COUNT * (WIDTH + 6), corruption, times=2)
        return x.tokens, x.dropout, x.wanted, x.open

    texts, epoch = rows(), noise().epoch
    traced = torch.compile(packed, backend="aot_eager", fullgraph=True)
    for found, expected in zip(traced(epoch), packed(epoch), strict=True):
        assert torch.equal(found, expected)


def test_a_solver_needs_to_be_there() -> None:
    texts = rows()
    without = Rows(texts.given, texts.given_length, texts.target, texts.target_length)
    with pytest.raises(ValueError, match="solving order"):
        Uniform(SOLVER).deleted(without, noise())
