"""The masked diffusion model learns the bound on the likelihood. test_mdm_writing.py has the other half.

The reference takes one example at a time, in float64, with the whole table of probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from example_batches import as_examples, noise_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.data.order import Order
from insertlm.families.base import Noise
from insertlm.families.mdm import MDM, MdmConfig, lay_out, mask_cells, times, total_noise
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.tasks.base import Example
from insertlm.text.tokenizers import WordTokenizer
from insertlm.training.step import TrainStep, capacity_for

Fits = Callable[[Tensor, Tensor], bool]
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

WORDS, BLOCK = 6, 5
TOKENIZER = WordTokenizer(tuple(map(str, range(WORDS))), reserved=1)
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
batches = st.lists(
    st.builds(Example, st.lists(words, max_size=5), st.lists(words, max_size=BLOCK)), min_size=1, max_size=5
)
seeds = st.integers(0, 2**40)


def tiny_mdm(*, dropout: float = 0.0, awake: bool = True, stretch: float = 0.0) -> MDM:
    """A model of a few hundred weights in float64. awake: with weights where a new one has zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(layers=2, width=8, heads=2, hidden=12, dropout=dropout)
        mdm = MdmConfig(block=BLOCK, stretch=stretch).build(model, TOKENIZER).double().eval()
        if awake:
            for parameter in mdm.parameters():
                parameter.data += 0.4 * torch.randn_like(parameter)
    return mdm


def masks(noise: Noise, block: int = BLOCK) -> Tensor:
    return mask_cells(times(noise), block, noise)


def gradients(loss: Tensor, mdm: MDM) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(mdm.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(mdm.parameters(), found, strict=True)]


def assert_close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# --- Layout and noise


@given(batches, st.integers(0, 5))
def test_rows_hold_the_prefix_bos_and_a_padded_block(batch: list[Example], junk: int) -> None:
    mdm = tiny_mdm()
    rows = mdm.rows(as_examples(batch, junk))
    x = lay_out(rows.given, rows.given_length, rows.target)
    sizes = x.packing.lengths.tolist()
    assert torch.equal(mdm.visible(rows, noise_of(len(batch))), x.packing.lengths)
    positions = x.packing.pack(x.place)
    parts = (torch.split(part, sizes) for part in (x.tokens, positions, x.owner))
    for b, (example, tokens, place, owner) in enumerate(zip(batch, *parts, strict=True)):
        pads = [mdm.specials.pad] * (BLOCK - len(example.target))
        assert tokens.tolist() == [*example.prefix, mdm.specials.bos, *example.target, *pads]
        assert place.tolist() == list(range(len(tokens)))
        assert x.tokens[x.cells[b]].tolist() == [*example.target, *pads]
        assert owner.tolist() == [b] * len(tokens)


def test_times_are_uniform_and_masks_follow_them(fits: Fits) -> None:
    noise = noise_of(20_000, seed=3)
    time = times(noise)
    assert 1e-3 < float(time.min()) < 2e-3
    assert 0.999 < float(time.max()) < 1
    assert fits(torch.histc((time - 1e-3) / 0.999, 20, 0, 1), torch.ones(20))
    late = torch.full((20_000,), 0.3)
    counts = torch.bincount((mask_cells(late, 3, noise) * torch.tensor([1, 2, 4])).sum(1), minlength=8)
    chance = 0.3 * (1 - math.exp(-10))
    sizes = torch.tensor([bin(subset).count("1") for subset in range(8)])
    assert fits(counts, chance**sizes * (1 - chance) ** (3 - sizes))
    assert bool(mask_cells(torch.ones(100), 50, noise_of(100)).float().mean() > 0.998)


@given(st.integers(1, 5), seeds, st.integers(0, 9))
def test_noise_depends_on_seed_example_and_epoch_alone(count: int, seed: int, epoch: int) -> None:
    noise = noise_of(count, seed, 50, epoch)
    together = times(noise), masks(noise)
    for b in range(count):
        alone = noise_of(1, seed, 50 + b, epoch)
        assert torch.equal(times(alone)[0], together[0][b])
        assert torch.equal(masks(alone)[0], together[1][b])


def test_seed_example_and_epoch_all_matter() -> None:
    cases = [noise_of(1), noise_of(1, seed=1), noise_of(1, first=1), noise_of(1, epoch=1)]
    assert len({float(times(noise)) for noise in cases}) == len(cases)
    assert len({tuple(masks(noise, 60)[0].tolist()) for noise in cases}) == len(cases)


def test_the_total_noise_is_that_of_the_log_linear_schedule() -> None:
    time = torch.linspace(1e-3, 1, 50)
    expected = -torch.log1p(-(1 - math.exp(-10)) * time.double())
    torch.testing.assert_close(total_noise(time).double(), expected, rtol=1e-4, atol=0)
    assert float(total_noise(torch.ones(1))) == pytest.approx(10)


# --- The loss


def textbook(mdm: MDM, attention: Softmax, batch: list[Example], noise: Noise) -> tuple[Tensor, Tensor]:
    """The bound per cell, and the mean cross-entropy of masked cells."""
    assert mdm.time is not None and mdm.norm is not None
    allowed = torch.zeros(mdm.vocabulary, dtype=torch.bool)
    allowed[[*range(WORDS), mdm.specials.pad]] = True
    bound, lost = torch.zeros(()).double(), torch.zeros(()).double()
    for example, time, masked in zip(batch, times(noise), masks(noise), strict=True):
        block = [*example.target, *[mdm.specials.pad] * (BLOCK - len(example.target))]
        seen = [mdm.specials.mask if masked[cell] else block[cell] for cell in range(BLOCK)]
        row = torch.tensor([*example.prefix, mdm.specials.bos, *seen])
        everyone = torch.ones(len(row), len(row), dtype=torch.bool)
        condition = mdm.time(total_noise(time[None])), torch.zeros_like(row)
        place = torch.arange(len(row))
        x = mdm.backbone(
            row, place, lambda layer, q, k, v, mask=everyone: attention(q, k, v, mask), condition=condition
        )
        logits = mdm.norm(x, condition) @ mdm.unembedding.weight.T
        log_p = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)[-BLOCK:]
        cost = -(log_p[range(BLOCK), block] * masked).sum()
        bound, lost = bound + cost / time, lost + cost
    return bound / (len(batch) * BLOCK), lost / masks(noise).sum().clamp(min=1)


@given(batches, seeds)
@settings(HEAVY, max_examples=30)
def test_the_loss_and_all_gradients_are_the_textbooks(
    softmax_attention: Softmax, batch: list[Example], seed: int
) -> None:
    mdm, noise = tiny_mdm(), noise_of(len(batch), seed)
    found = mdm.losses(mdm.rows(as_examples(batch)), noise)
    bound, mean = textbook(mdm, softmax_attention, batch, noise)
    assert_close(found.total, bound)
    assert_close(found.parts["token_loss"], mean.detach())
    assert not found.parts["token_loss"].requires_grad
    for a, b in zip(gradients(found.total, mdm), gradients(bound, mdm), strict=True):
        assert_close(a, b)


def test_a_share_of_the_examples_is_masked_in_one_stretch_of_the_text() -> None:
    """Which is all the network is told: the time is the stretch's share of the block. Pads are not masked in it."""
    rows = tiny_mdm().rows(as_examples([Example([1], [2, 3, 4])] * 4000))
    noise = noise_of(4000)
    plain, half, every = (tiny_mdm(stretch=share).noised(rows, noise) for share in (0.0, 0.5, 1.0))
    assert not bool(every[1][:, 3:].any())
    assert {*every[1].sum(1).tolist()} == {1, 2, 3}
    torch.testing.assert_close(every[0], every[1].sum(1) / BLOCK)
    stretched = half[0] == every[0]
    assert float(stretched.float().mean()) == pytest.approx(0.5, abs=0.04)
    for found, by_chance, whole in zip(half, plain, every, strict=True):
        assert torch.equal(found[stretched], whole[stretched])
        assert torch.equal(found[~stretched], by_chance[~stretched])


def test_a_stretch_weighs_as_much_as_any_other_mask() -> None:
    """A new model guesses: log(words and <pad>) for every cell of it, over its share of the block."""
    mdm, noise = tiny_mdm(awake=False, stretch=1.0), noise_of(300)
    rows = mdm.rows(as_examples([Example([1], [2, 3, 4])] * 299 + [Example([1], [])]))
    time, masked = mdm.noised(rows, noise)
    assert float(time[-1]) == pytest.approx(1e-3)  # no text, no stretch
    assert not bool(masked[-1].any())
    losses = mdm.losses(rows, noise)
    assert float(losses.parts["token_loss"]) == pytest.approx(math.log(WORDS + 1))
    assert float(losses.total.detach()) == pytest.approx(math.log(WORDS + 1) * 299 / 300)


def test_gradients_reach_every_weight() -> None:
    mdm = tiny_mdm()
    rows = mdm.rows(as_examples([Example([1, 2], [3, 4, 5])] * 8))
    mdm.losses(rows, noise_of(8)).total.backward()  # type: ignore[no-untyped-call]
    for name, parameter in mdm.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-9, name


def test_a_new_model_pays_what_guessing_costs() -> None:
    """log(words and <pad>) per cell on average: the weights 1/t and the chances t cancel."""
    mdm = tiny_mdm(awake=False)
    rows = mdm.rows(as_examples([Example([1], [2, 3])] * 20_000))
    losses = mdm.losses(rows, noise_of(20_000))
    assert float(losses.parts["token_loss"]) == pytest.approx(math.log(WORDS + 1))
    # The weight of a cell has the variance E[1/t] − 1 = 5.9; this is five standard deviations of the mean.
    assert float(losses.total.detach()) == pytest.approx(math.log(WORDS + 1), rel=5 * math.sqrt(5.9 / 20_000 / BLOCK))


@given(batches, seeds, st.integers(0, 70), st.booleans())
@settings(HEAVY, max_examples=20)
def test_a_larger_buffer_changes_nothing(batch: list[Example], seed: int, spare: int, training: bool) -> None:
    mdm = tiny_mdm(dropout=0.2).train(training)
    rows, noise = mdm.rows(as_examples(batch)), noise_of(len(batch), seed)
    tight = mdm.losses(rows, noise)
    roomy = mdm.losses(rows, noise, int(mdm.visible(rows, noise).sum()) + spare)
    assert_close(roomy.total, tight.total)
    for a, b in zip(gradients(roomy.total, mdm), gradients(tight.total, mdm), strict=True):
        assert_close(a, b)


@given(batches, seeds, st.booleans())
@settings(HEAVY, max_examples=20)
def test_a_batch_is_the_mean_of_its_examples(batch: list[Example], seed: int, training: bool) -> None:
    """With dropout too: what is dropped belongs to the example. Padding means nothing."""
    mdm = tiny_mdm(dropout=0.2).train(training)
    rows, noise = mdm.rows(as_examples(batch)), noise_of(len(batch), seed)
    alone = [
        mdm.losses(rows.select(i), Noise(seed, noise.example[i], noise.epoch[i])).total
        for i in torch.arange(len(batch))[:, None]
    ]
    assert_close(mdm.losses(rows, noise).total, torch.stack(alone).mean())
    assert torch.equal(mdm.losses(mdm.rows(as_examples(batch, 5)), noise).total, mdm.losses(rows, noise).total)


def test_dropout_is_for_training_and_changes_with_the_epoch() -> None:
    mdm, plain = tiny_mdm(dropout=0.2), tiny_mdm()
    rows = mdm.rows(as_examples([Example([1, 2], [3, 4])] * 4))
    assert torch.equal(mdm.losses(rows, noise_of(4)).total, plain.losses(rows, noise_of(4)).total)
    mdm.train()
    first, again = (mdm.losses(rows, noise_of(4)).total for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain.losses(rows, noise_of(4)).total)


# --- Training


def backwards(prefix: list[int]) -> list[int]:
    """Three words, or the last two of them."""
    return prefix[: 0 if prefix[0] < WORDS // 2 else None : -1]


def reversing(steps: int, *, layers: int = 2, compiled: bool = False) -> TrainStep:
    prefixes = np.random.default_rng(0).integers(0, WORDS, (2000, 3)).tolist()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(layers=layers, width=32, heads=2, hidden=64)
        mdm = MdmConfig(block=3).build(model, TOKENIZER).train()
    rows = mdm.rows(as_examples([Example(prefix, backwards(prefix)) for prefix in prefixes]))
    optim = OptimConfig(learning_rate=3e-3, warmup=20, cooldown=0.5, ema=0.9)
    order = Order(len(prefixes), 64, 1)
    return TrainStep(mdm, rows, order, optim=optim, steps=steps, device=torch.device("cpu"), compiled=compiled)


@pytest.mark.usefixtures("fresh_compiler")
def test_traced_losses_are_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but its code generator, which is slow."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in (False, True):
        step = reversing(1, layers=1, compiled=compiled)
        batch = step.source.batch(0)
        losses = step._losses(batch.example, batch.epoch, capacity_for(batch.visible) if compiled else None)
        found.append([losses.total.detach(), *torch.autograd.grad(losses.total, list(step.family.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"


def test_it_learns_to_write_backwards() -> None:
    step = reversing(350)
    for number in range(350):
        step(number)
    prefixes = [[a, b, c] for a in range(WORDS) for b in (0, 4) for c in range(WORDS)]
    prompts = [Prompt(prefix, seed) for seed, prefix in enumerate(prefixes)]
    for order in ("random", "certainty", "margin"):
        texts = step.family.eval().decode(prompts, DecodeConfig(order=order))
        right = sum(text.ids == backwards(prefix) for text, prefix in zip(texts, prefixes, strict=True))
        assert right >= 0.95 * len(prefixes), order


# --- What cannot be


def test_a_block_must_hold_the_longest_target() -> None:
    assert MdmConfig(block=22).longest_row(113, 22) == 136
    with pytest.raises(ValueError, match=r"^family\.block is 21; the task has targets of 22 tokens$"):
        MdmConfig(block=21).longest_row(113, 22)


def test_prefix_rows_cannot_be_computed_once() -> None:
    model = ModelConfig(layers=1, width=8, heads=2, hidden=8, prefix_lm=True)
    with pytest.raises(InsertlmError, match=r"^model\.prefix_lm: expected false for an mdm: its prefix rows depend on"):
        MdmConfig(block=3).build(model, TOKENIZER)


@pytest.mark.parametrize(
    ("prompt", "changes", "line"),
    [
        (
            Prompt([1], start=[2], open=frozenset({1}), bounds={1: Bounds(1, 2)}),
            {},
            "an mdm infills a known number of tokens; expected least = most (--min, --max), gap 1",
        ),
        (
            Prompt([1], start=[2], open=frozenset({0})),
            {},
            "an mdm infills a known number of tokens; expected least = most (--min, --max), gap 0",
        ),
        (
            Prompt([1], start=[2, 3], open=frozenset({1}), bounds={1: Bounds(4, 4)}),
            {},
            "a prompt makes a text of 6 tokens; the block has 5",
        ),
        (
            Prompt([1], start=[2, tiny_mdm().specials.pad]),
            {},
            "a prompt of an mdm has a mask or padding in its text; expected words, and gaps",
        ),
        (
            Prompt([1], required=((2,),)),
            {},
            "an mdm can only be kept from writing single tokens; a word is required, or of several",
        ),
        (
            Prompt([1] * 3),
            {"max_length": 8},
            "a prompt makes a row of 9 tokens, its block included; 8 are allowed",
        ),
        (
            Prompt([1]),
            {"stop_threshold": 0},
            "decode.stop_threshold: this family ends without one; expected 0.5, got 0",
        ),
        (
            Prompt([1]),
            {"parallel": 2},
            "decode.parallel: expected 1 for a random order, where decode.max_steps says how many tokens come at once, "
            "got 2",
        ),
        (Prompt([1]), {"position_top_k": 0}, "decode.position_top_k: this family draws no places; expected 1, got 0"),
        (Prompt([1]), {"order": "mass"}, "decode.order: expected auto or random or certainty or margin, got mass"),
    ],
)
def test_what_cannot_be_written_is_named(prompt: Prompt, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_mdm().decode([Prompt([]), prompt], msgspec.structs.replace(DecodeConfig(), **changes))
    assert str(caught.value) == line
