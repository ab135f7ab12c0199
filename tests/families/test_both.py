"""One set of weights, taught both ways: it learns and writes as a filler and an ILM with the same weights do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family, Noise
from insertlm.families.both import Both, BothConfig
from insertlm.families.fill import FillConfig, Filler
from insertlm.families.ilm import ILM
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer

WORDS = WordTokenizer(tuple("abcdefghij"))
MODEL = ModelConfig(layers=2, width=16, heads=2, hidden=32, max_length=128)
CONFIG = BothConfig(jump=8, insertion=3.0)


def alike(both: Both) -> tuple[Filler, ILM]:
    """A filler and an ILM with its weights."""
    filler = FillConfig(jump=8).build(MODEL, WORDS)
    ilm = both.config.ilm.build(MODEL, WORDS)
    for family in (filler, ilm):
        own, state = family.state_dict(), both.state_dict()
        family.load_state_dict({name: state[name][: len(value)] for name, value in own.items()})
        family.eval()
    ilm.unembedding = both.unembedding  # with the rows for hints, which an ILM by itself does not have
    return filler, ilm


@pytest.fixture
def both() -> Both:
    torch.manual_seed(1)
    family = CONFIG.build(MODEL, WORDS).eval()
    with torch.no_grad():  # gates that say something
        family.stop.out.weight.normal_(0.0, 1.0)
    return family


def examples(count: int) -> Examples:
    rng = np.random.default_rng(0)
    length = rng.integers(1, 14, count).astype(np.int32)
    prefix_length = rng.integers(0, 3, count).astype(np.int32)
    tokens, prefix = (rng.integers(0, len(WORDS.writable), (count, width)).astype(np.int32) for width in (14, 3))
    return Examples(prefix, prefix_length, tokens, length)


def noise_of(count: int, turn: int) -> Noise:
    """That of one of the two ways in the first epoch."""
    return Noise(7, torch.arange(count), torch.full((count,), turn))


@pytest.mark.parametrize("capacity", [None, 1024])
def test_its_loss_is_that_of_a_filler_and_of_an_ilm_of_the_same_texts(both: Both, capacity: int | None) -> None:
    count = 24
    filler, ilm = alike(both)
    batch = examples(count)
    rows, noise = both.rows(batch), noise_of(count, 0)
    if capacity is not None:
        capacity = -(-int(both.visible(rows, noise).sum()) // 128) * 128
    found = both.losses(rows, noise, capacity)
    fills = filler.losses(filler.rows(batch), noise_of(count, 0))
    insertions = ilm.losses(ilm.rows(batch), noise_of(count, 1))
    assert fills.over is not None
    of_texts = (insertions.parts["token_loss"] + insertions.parts["stop_loss"]) * count
    torch.testing.assert_close(found.total, fills.total + CONFIG.insertion * of_texts / fills.over["loss"])
    torch.testing.assert_close(found.parts["gate_loss"], insertions.parts["stop_loss"])
    torch.testing.assert_close(found.parts["insertion_loss"], insertions.parts["token_loss"])
    torch.testing.assert_close(found.parts["end_loss"], fills.parts["end_loss"])


def test_the_rows_that_it_announces_are_those_of_both_ways(both: Both) -> None:
    filler, ilm = alike(both)
    batch = examples(24)
    fills = filler.visible(filler.rows(batch), noise_of(24, 0))
    insertions = ilm.visible(ilm.rows(batch), noise_of(24, 1))
    assert torch.equal(both.visible(both.rows(batch), noise_of(24, 0)), fills + insertions)


PROMPTS = [Prompt([1], 3, [2, 5, 4, 1], frozenset({1, 3})), Prompt([], 4, [2, 2, 7], frozenset({0, 3}))]


def written(family: Family, settings: DecodeConfig) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(text.ids, text.order) for text in family.decode(PROMPTS, settings)]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_it_writes_from_left_to_right_as_a_filler_and_in_another_order_as_an_ilm(
    both: Both, temperature: float
) -> None:
    filler, ilm = alike(both)
    left_to_right = DecodeConfig(temperature=temperature, max_steps=12)
    anywhere = DecodeConfig(temperature=temperature, max_steps=12, order="mass")
    assert written(both, left_to_right) == written(filler, left_to_right)
    assert written(both, anywhere) == written(ilm, anywhere)
    assert written(both, anywhere) != written(both, left_to_right)


def test_its_likelihoods_are_the_fillers(both: Both) -> None:
    filler, _ = alike(both)
    completions = [Completion(PROMPTS[0], [[3, 3], []])]
    [mine], [theirs] = (log_likelihoods(family, completions, Effort()) for family in (both, filler))
    assert mine.value == pytest.approx(theirs.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DecodeConfig(joint=True), "decode.joint: this family has no distribution over pairs"),
        (DecodeConfig(parallel=3), "a filler writes a token a step"),
        (DecodeConfig(order="random"), "decode.order: expected auto or mass or certainty or margin, got random"),
        (DecodeConfig(order="margin", joint=True), "decode.joint: expected false with decode.order margin"),
    ],
)
def test_what_only_the_other_way_can_do_is_refused(both: Both, settings: DecodeConfig, message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        both.check(PROMPTS, settings)


def test_hints_are_for_writing_from_left_to_right(both: Both) -> None:
    hinted = Prompt([], 0, [1, 2], frozenset({1}), words={1: 4})
    both.check([hinted], DecodeConfig())
    with pytest.raises(InsertlmError, match=r"^decode.order: hints about words need auto, from left to right$"):
        both.check([hinted], DecodeConfig(order="mass"))


def test_layouts_that_an_ilm_does_not_share_are_refused() -> None:
    with pytest.raises(ValueError, match="expected sight: both and positions: blank"):
        BothConfig(sight="before")
