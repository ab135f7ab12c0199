"""The masked diffusion model as a rival at infilling: without time or padding, shifted, and with blanks masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_batches import as_examples, noise_of
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ArmConfig
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.families.mdm import MDM, MdmConfig
from insertlm.inference.score import Completion
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Example
from insertlm.text.tokenizers import WordTokenizer
from insertlm.training.step import capacity_for

Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
WORDS = 6
TOKENIZER = WordTokenizer(tuple(map(str, range(WORDS))), reserved=1)
MODEL = ModelConfig(layers=2, width=8, heads=2, hidden=12)
BATCH = [Example([1], [2, 3, 4]), Example([], [5, 0, 1, 1, 2, 3, 4]), Example([3, 3], []), Example([], [4])]
BLOCK = 8


def mdm(**keys: Any) -> MDM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MdmConfig(block=BLOCK, **keys).build(MODEL, TOKENIZER).double().eval()
        for parameter in model.parameters():
            parameter.data += 0.4 * torch.randn_like(parameter)
    return model


def textbook(model: MDM, attention: Softmax, shift: int) -> float:
    """The bound per token: every example alone, its text with masks, and a dense softmax over words and <pad>."""
    rows, noise = model.rows(as_examples(BATCH)), noise_of(len(BATCH))
    times, masked = model.noised(rows, noise)
    banned = torch.ones(model.vocabulary, dtype=torch.bool)
    banned[[*range(WORDS), model.specials.pad]] = False
    bound = 0.0
    for example, time, hidden_cells in zip(BATCH, times.tolist(), masked.tolist(), strict=True):
        seen = [
            model.specials.mask if gone else token
            for token, gone in zip(example.target, hidden_cells[: len(example.target)], strict=True)
        ]
        row = torch.tensor([*example.prefix, model.specials.bos, *seen])
        everyone = torch.ones(len(row), len(row), dtype=torch.bool)
        x = model.backbone(row, torch.arange(len(row)), lambda layer, q, k, v, m=everyone: attention(q, k, v, m))
        logits = (x @ model.unembedding.weight.T).masked_fill(banned, -torch.inf)
        for cell, token in enumerate(example.target):
            if hidden_cells[cell]:
                place = len(example.prefix) + 1 + cell - shift
                bound += F.cross_entropy(logits[place], torch.tensor(token)).item() / time
    return bound / sum(len(example.target) for example in BATCH)


@pytest.mark.parametrize("shift", [False, True])
def test_without_time_and_padding_the_loss_is_the_bound_per_token(softmax_attention: Softmax, shift: bool) -> None:
    model = mdm(time=False, padded=False, shift=shift)
    rows, noise = model.rows(as_examples(BATCH)), noise_of(len(BATCH))
    found = model.losses(rows, noise)
    assert found.total.item() == pytest.approx(textbook(model, softmax_attention, int(shift)), rel=1e-9)
    visible = int(model.visible(rows, noise).sum())
    assert visible == sum(len(example.prefix) + 1 + len(example.target) for example in BATCH)
    assert found.over is not None and found.over["loss"].item() == 11
    spare = model.losses(rows, noise, capacity_for(visible))
    torch.testing.assert_close(spare.total, found.total)


def test_without_time_all_weights_are_those_of_a_causal_model() -> None:
    arm = ArmConfig().build(MODEL, TOKENIZER)
    assert mdm(time=False).state_dict().keys() == arm.state_dict().keys()
    assert mdm().state_dict().keys() != arm.state_dict().keys()


def test_without_time_only_what_is_masked_counts() -> None:
    model = mdm(time=False)
    block = torch.tensor([[1, 2, model.specials.mask, 4] + [model.specials.pad] * 4])
    given, length = torch.tensor([[model.specials.bos]]), torch.tensor([1])
    cell = torch.tensor([[2]])
    early, late = (
        model.states(given, length, block, torch.tensor([time]), cell, torch.tensor([9]).numpy()) for time in (0.1, 0.9)
    )
    assert torch.equal(early, late)


def test_a_share_of_the_examples_is_masked_in_blanks_alone() -> None:
    """There each token is masked with the chance that the time says, as far as the example's share goes."""
    text = [0, 1, 2, 3, 4, 5, 0]
    rows = mdm(blanks=0.6).rows(as_examples([Example([], text)] * 3000))
    noise = noise_of(3000)
    plain, some, every = (mdm(blanks=share).noised(rows, noise) for share in (0.0, 0.6, 1.0))
    assert not bool(every[1][:, len(text) :].any())  # padding is in no blank
    chosen = (some[0] == every[0]) & (some[0] != plain[0])
    assert chosen.float().mean().item() == pytest.approx(0.6, abs=0.04)
    for mixed, inside, anywhere in zip(some, every, plain, strict=True):
        assert torch.equal(mixed[chosen], inside[chosen])
        assert torch.equal(mixed[~chosen], anywhere[~chosen])
    assert every[1].sum().item() / BLOCK == pytest.approx(every[0].sum().item(), rel=0.05)


def test_it_writes_as_many_tokens_as_it_is_told_whoever_is_beside_it() -> None:
    model = mdm(time=False, padded=False, shift=True, blanks=0.5)
    prompts = [
        Prompt([], 1, [0, 1, 2], frozenset({1, 3}), {1: Bounds(2, 2), 3: Bounds(1, 1)}),
        Prompt([], 2, [3], frozenset({0}), {0: Bounds(4, 4)}),
        Prompt([], 3, bounds={0: Bounds(3, 3)}),
        Prompt([], 4, [1, 1], frozenset({1}), {1: Bounds(0, 0)}),
    ]
    for order in ("random", "certainty"):
        settings = DecodeConfig(order=order, temperature=1.0)
        together = model.decode(prompts, settings)
        assert [len(text.events) for text in together] == [3, 4, 3, 0]
        assert all(text.complete for text in together)
        assert [text.ids for text in together] == [model.decode([prompt], settings)[0].ids for prompt in prompts]


def test_without_padding_it_cannot_tell_how_long_a_text_is() -> None:
    model = mdm(padded=False)
    with pytest.raises(InsertlmError, match=r"learnt no lengths \(family\.padded: false\)"):
        model.decode([Prompt([], 0)], DecodeConfig())
    with pytest.raises(InsertlmError, match=r"learnt no lengths; expected one with family\.padded: true"):
        log_likelihoods(model, [Completion.behind([], [1, 2])], Effort())


def test_shares_add_up_to_one_at_most() -> None:
    with pytest.raises(ValueError, match=r"expected 1 or less together, got 1\.1"):
        MdmConfig(block=4, stretch=0.6, blanks=0.5)
