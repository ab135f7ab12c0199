"""Scores of slots against the definition, in pieces or in one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.inference.policies import Policy, best_of_each, best_pair, certainty, look, margin, mass, plausible
from insertlm.nn import losses

seeds = st.integers(0, 2**31)


def expected(policy: Policy, logits: list[float]) -> float:
    """Of one slot, by hand."""
    weights = [math.exp(logit) for logit in logits]
    best, *others = sorted((weight / sum(weights) for weight in weights), reverse=True)
    if policy is mass:
        return math.log(sum(weights))
    if policy is best_pair:
        return max(logits)
    return math.log(best) if policy is certainty else best - max(others, default=0.0)


@pytest.mark.parametrize("policy", [mass, certainty, margin, best_pair])
@given(seeds, st.integers(1, 7), st.integers(1, 5), st.integers(1, 40))
def test_scores_are_what_they_say_however_few_logits_are_held(
    policy: Policy, seed: int, slots: int, vocabulary: int, room: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, words = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (slots, vocabulary))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": room})
        masses, scores = look(rows, words, policy)
    logits = (rows @ words.T).tolist()
    assert masses.tolist() == pytest.approx([expected(mass, row) for row in logits], abs=1e-9)
    assert scores.tolist() == pytest.approx([expected(policy, row) for row in logits], abs=1e-9)


@pytest.mark.parametrize("policy", [mass, certainty, margin, best_pair])
def test_each_slot_has_words_of_its_own_that_are_out_of_play(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, words = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (7, 4))
    barred = torch.arange(4) == (torch.arange(7) % 4)[:, None]
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": 8})  # two slots at once
    masses, scores = look(rows, words, policy, barred)
    left = [row[~out].tolist() for row, out in zip(rows @ words.T, barred, strict=True)]
    assert masses.tolist() == pytest.approx([expected(mass, row) for row in left], abs=1e-9)
    assert scores.tolist() == pytest.approx([expected(policy, row) for row in left], abs=1e-9)


def test_never_more_logits_than_training_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def note(logits: Tensor, normaliser: Tensor) -> Tensor:
        held.append(logits.numel())
        return normaliser

    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": 20})
    look(torch.zeros(11, 2), torch.zeros(4, 2), note)
    assert held == [20, 20, 4]


def test_a_rival_that_is_never_written_narrows_the_margin() -> None:
    logits = torch.tensor([[0.6, 0.3], [0.6, 0.1]]).log()
    rival = torch.tensor([0.1, 0.3]).log()
    assert margin(logits, torch.zeros(2), rival).tolist() == pytest.approx([0.3, 0.3])


def test_slots_with_little_mass_are_not_in_play() -> None:
    masses = torch.tensor([[0.5, 0.251, 0.249, 0.0], [0.001, 0.001, 0.0, 0.0]]).log()
    assert plausible(masses).tolist() == [[True, True, False, False], [True, True, False, False]]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=9))
def test_the_best_of_each_gap_is_one_however_many_are_equal(slots: list[tuple[int, int]]) -> None:
    gap, score = torch.tensor(slots).T[:, None]
    gap = gap.clamp(max=len(slots) - 1)
    found = best_of_each(score.double(), gap)[0]
    for number in gap.unique().tolist():
        mine = (gap[0] == number).nonzero().squeeze(1)
        kept = mine[found[mine] > -torch.inf]
        assert kept.tolist() == [int(mine[score[0, mine].argmax()])]
