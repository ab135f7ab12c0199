"""The Insertion Transformer learns, slot by slot, what is missing there.

The reference is written from the definition: one example at a time, in reading order, with the whole table of
probabilities, in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.data.order import Order
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.packed import corrupt
from insertlm.families.corruption.slots import slots_of
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import IT, ItConfig
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.fused import whole_blocks
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.tasks.base import Example, Examples
from insertlm.text.tokenizers import WordTokenizer
from insertlm.training.step import TrainStep

SlotRows = Callable[[IT, list[int], list[int]], Tensor]
TinyIt = Callable[..., IT]

WORDS = 6
CPU = torch.device("cpu")
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
examples_ = st.lists(
    st.builds(Example, st.lists(words, max_size=5), st.lists(words, max_size=6)), min_size=1, max_size=5
).filter(lambda batch: any(example.target for example in batch))
seeds = st.integers(0, 2**40)


def tokenizer(count: int) -> WordTokenizer:
    return WordTokenizer(tuple(map(str, range(count))), reserved=1)


def as_examples(batch: list[Example]) -> Examples:
    def matrix(rows: list[list[int]]) -> tuple[Any, Any]:
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        padded = [row + [0] * (int(lengths.max()) - len(row)) for row in rows]
        return np.array(padded, dtype=np.int32).reshape(len(rows), -1), lengths

    return Examples(*matrix([example.prefix for example in batch]), *matrix([example.target for example in batch]))


def noise_of(count: int, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(count), torch.zeros(count).long())


def capacity_of(it: IT, rows: Rows, noise: Noise, spare: int | None) -> int | None:
    return None if spare is None else int(it.visible(rows, noise).sum()) + spare


# --- Targets


@given(examples_, seeds, st.none() | st.integers(0, 70))
def test_targets_are_what_is_missing_in_each_slot(
    tiny_it: TinyIt, batch: list[Example], seed: int, spare: int | None
) -> None:
    it = tiny_it()
    rows, noise = it.rows(as_examples(batch)), noise_of(len(batch), seed)
    capacity = capacity_of(it, rows, noise, spare)
    x = corrupt(rows, noise, capacity)
    slots = slots_of(x, capacity)
    first = 0
    for b, example in enumerate(batch):
        expected, visible = [Counter[int]()], [it.specials.bos]
        for token, gone in zip(example.target, x.deleted[b].tolist(), strict=False):
            if gone:
                expected[-1][token] += 1
            else:
                expected.append(Counter())
                visible.append(token)
        found = [Counter[int]() for _ in visible]
        for j in x.deleted[b].nonzero().flatten().tolist():
            found[int(slots.of[b, j]) - first][example.target[j]] += 1
        mine = slice(first, first + len(visible))
        assert found == expected
        assert slots.missing[mine].tolist() == [counter.total() for counter in expected]
        assert x.tokens[slots.rows[mine]].tolist() == visible
        assert int(slots.packing.lengths[b]) == len(visible)
        first += len(visible)
    assert not slots.missing[first:].any()
    blocks = whole_blocks(slots.packing.keep.numel())
    assert len(slots.missing) == (first if capacity is None else min(capacity, blocks))


def test_rows_and_their_number_are_those_of_the_ilm(tiny_it: TinyIt) -> None:
    it = tiny_it()
    ilm = IlmConfig().build(it.model, tokenizer(WORDS))
    batch = as_examples([Example([1, 2, 3], [4]), Example([], [1, 2, 3, 4]), Example([5], [])])
    ours, theirs, noise = it.rows(batch), ilm.rows(batch), noise_of(3)
    torch.testing.assert_close(vars(ours), vars(theirs), rtol=0, atol=0)
    assert torch.equal(it.visible(ours, noise), ilm.visible(theirs, noise))
    assert torch.equal(it.visible(ours, noise), corrupt(ours, noise).packing.lengths)
    assert ItConfig().longest_row(5, 7) == IlmConfig().longest_row(5, 7) == 14


# --- The loss


def textbook(it: IT, slot_rows: SlotRows, batch: list[Example], deleted: list[list[bool]]) -> Tensor:
    """What slots with something missing and what empty ones add, means over examples: [2]"""
    total = torch.zeros(2, dtype=torch.float64)
    for example, row in zip(batch, deleted, strict=True):
        text, missing = list[int](), [list[int]()]
        for token, gone in zip(example.target, row, strict=False):
            if gone:
                missing[-1].append(token)
            else:
                text.append(token)
                missing.append([])
        hidden = slot_rows(it, example.prefix, text)
        surprise = -(hidden @ it.unembedding.weight.T).log_softmax(-1)
        for slot, tokens in zip(surprise, missing, strict=True):
            loss = slot[tokens].mean() if tokens else slot[it.specials.eos]
            total = total + loss / len(missing) * torch.tensor([bool(tokens), not tokens])
    return total / len(batch)


def gradients(loss: Tensor, it: IT) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(it.parameters()), allow_unused=True, materialize_grads=True))


def assert_close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@given(examples_, seeds, st.booleans(), st.none() | st.integers(0, 70))
@settings(HEAVY, max_examples=60)
def test_losses_and_all_gradients_are_those_of_the_definition(
    tiny_it: TinyIt, slot_rows: SlotRows, batch: list[Example], seed: int, prefix_lm: bool, spare: int | None
) -> None:
    it = tiny_it(prefix_lm=prefix_lm, seed=seed % 5)
    rows, noise = it.rows(as_examples(batch)), noise_of(len(batch), seed)
    found = it.losses(rows, noise, capacity_of(it, rows, noise, spare))
    expected = textbook(it, slot_rows, batch, corrupt(rows, noise).deleted.tolist())
    assert_close(torch.stack([found.parts["token_loss"], found.parts["end_loss"]]), expected.detach())
    assert_close(found.total, expected.sum())
    for a, b in zip(gradients(found.total, it), gradients(expected.sum(), it), strict=True):
        assert_close(a, b)


@given(examples_, seeds, st.booleans(), st.integers(0, 70))
@settings(HEAVY, max_examples=30)
def test_a_batch_is_the_mean_of_its_examples(
    tiny_it: TinyIt, batch: list[Example], seed: int, prefix_lm: bool, spare: int
) -> None:
    """With dropout and a static buffer too: what is dropped belongs to the example."""
    it = tiny_it(prefix_lm=prefix_lm, dropout=0.2).train()
    rows, noise = it.rows(as_examples(batch)), noise_of(len(batch), seed)
    alone = [
        it.losses(rows.select(i), Noise(seed, noise.example[i], noise.epoch[i])).total
        for i in torch.arange(len(batch))[:, None]
    ]
    assert_close(it.losses(rows, noise, capacity_of(it, rows, noise, spare)).total, torch.stack(alone).mean())


def test_every_slot_counts_the_same_and_the_last_one_is_taught_to_end(tiny_it: TinyIt) -> None:
    """A head that says the same everywhere, <eos> with 0.5 and each of 12 others with 1/24: the defects of the release
    would show as other weights."""
    it = tiny_it()
    it.unembedding.weight.data.zero_()
    it.unembedding.weight.data[it.specials.eos, 0] = math.log(12)
    it.backbone.register_forward_hook(lambda module, inputs, hidden: torch.ones_like(hidden))
    for length in (0, 1, 5):
        rows, noise = it.rows(as_examples([Example([1] * 9, list(range(length)))] * 50)), noise_of(50)
        empty = []
        for gone in corrupt(rows, noise).deleted.tolist():
            runs = "".join("x" if deleted else " " for deleted in gone).split(" ")
            empty.append(sum(not run for run in runs) / len(runs))
        share = sum(empty) / 50
        found = it.losses(rows, noise)
        assert (share == 1) == (length == 0)
        assert float(found.parts["end_loss"]) == pytest.approx(share * math.log(2))
        assert float(found.parts["token_loss"]) == pytest.approx((1 - share) * math.log(24))


# --- Learning


def counting(longest: int) -> list[Example]:
    """Given n, count from 0 to n."""
    return [Example([n], list(range(n + 1))) for n in range(longest)]


def training(longest: int, *, layers: int = 2, steps: int = 1, compiled: bool = False) -> TrainStep:
    model = ModelConfig(layers=layers, width=32, heads=2, hidden=64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        it = ItConfig().build(model, tokenizer(longest)).train()
    optim = OptimConfig(learning_rate=5e-3, warmup=20, cooldown=0.5)
    rows, order = it.rows(as_examples(counting(longest))), Order(longest, 4 * longest, seed=1)
    return TrainStep(it, rows, order, optim=optim, steps=steps, device=CPU, compiled=compiled)


def test_it_learns_to_count_and_to_stop() -> None:
    longest, steps = 8, 300
    train = training(longest, steps=steps)
    for number in range(steps):
        train(number)
    it = train.family.eval()
    batch = [Prompt(example.prefix) for example in counting(longest)]
    turns = {}
    for parallel in (1, 0):
        written = it.decode(batch, DecodeConfig(parallel=parallel))
        assert [(t.ids, t.complete) for t in written] == [(example.target, True) for example in counting(longest)]
        turns[parallel] = [1 + max(event.step for event in t.events) for t in written]
    assert turns[1] == list(range(1, longest + 1))
    assert turns[0][-1] < longest  # eight tokens in fewer than eight steps


@pytest.mark.usefixtures("fresh_compiler")
def test_losses_are_one_graph_for_every_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the device, and no shape depends on the data. Without torch.compile's code generator, which
    is slow, and without attention, which on a CPU does ask."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr("insertlm.nn.attention.attend", lambda q, k, v, *which: v)
    traced, eager = training(6, layers=1, compiled=True), training(6, layers=1)
    example, epoch = (torch.from_numpy(part[0]) for part in eager.order.batches(0, 1))

    def value_and_gradients(step: TrainStep, capacity: int | None) -> list[Tensor]:
        total = step._losses(example, epoch, capacity).total
        return [total.detach(), *torch.autograd.grad(total, list(step.family.parameters()))]

    expected = value_and_gradients(eager, None)
    for capacity in (128, 256, 384):
        for found, value in zip(value_and_gradients(traced, capacity), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
