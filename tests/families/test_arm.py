"""The left-to-right model learns the next token.

The reference is written from the definition: one sequence at a time, with the textbook's attention, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from insertlm import load
from insertlm.core.processes import Processes
from insertlm.families.arm import ARM, pack
from insertlm.families.base import Noise
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.fused import ROWS
from insertlm.recipe import parse_recipe
from insertlm.tasks.base import Example, Examples
from insertlm.training.loop import train

NextLogits = Callable[[ARM, list[int], list[int]], Tensor]
TinyArm = Callable[..., ARM]

CPU = torch.device("cpu")
WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
texts = st.lists(words, max_size=5)
batches = st.lists(st.builds(Example, texts, texts), min_size=1, max_size=5)
seeds = st.integers(0, 2**40)


def as_examples(batch: list[Example], junk: int = 0) -> Examples:
    """Padded with `junk`, which must not matter."""

    def matrix(rows: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        ids = np.full((len(rows), lengths.max()), junk, dtype=np.int32)
        for row, line in zip(rows, ids, strict=True):
            line[: len(row)] = row
        return ids, lengths

    return Examples(*matrix([prefix for prefix, _ in batch]), *matrix([target for _, target in batch]))


def noise_of(count: int, seed: int = 0, first: int = 0, epoch: int = 0) -> Noise:
    return Noise(seed, torch.arange(first, first + count), torch.full((count,), epoch))


def gradients(loss: Tensor, arm: ARM) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(arm.parameters())))


def assert_close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# --- Rows


@given(batches, st.integers(0, 5))
def test_rows_hold_the_prefix_and_end_with_special_tokens(tiny_arm: TinyArm, batch: list[Example], junk: int) -> None:
    arm = tiny_arm()
    rows = arm.rows(as_examples(batch, junk))
    assert {part.dtype for part in vars(rows).values() if part is not None} == {torch.int64}
    for b, (prefix, target) in enumerate(batch):
        assert rows.given[b, : int(rows.given_length[b])].tolist() == [*prefix, arm.specials.bos]
        assert rows.target[b, : int(rows.target_length[b])].tolist() == [*target, arm.specials.eos]


@given(batches, seeds, st.integers(0, 5), st.none() | st.integers(0, 30))
def test_packing_by_hand(tiny_arm: TinyArm, batch: list[Example], seed: int, junk: int, spare: int | None) -> None:
    arm = tiny_arm()
    rows, noise = arm.rows(as_examples(batch, junk)), noise_of(len(batch), seed)
    lengths = [len(prefix) + 1 + len(target) for prefix, target in batch]
    assert arm.visible(rows, noise).tolist() == lengths
    x = pack(rows, noise, None if spare is None else sum(lengths) + spare)
    assert len(x.tokens) == sum(lengths) + (spare or 0)
    assert x.tokens[: sum(lengths)].tolist() == [t for p, q in batch for t in (*p, arm.specials.bos, *q)]
    assert x.positions[: sum(lengths)].tolist() == [place for length in lengths for place in range(length)]
    assert x.words[x.real].tolist() == [t for _, target in batch for t in (*target, arm.specials.eos)]
    starts = [sum(lengths[:b]) + len(prefix) for b, (prefix, _) in enumerate(batch)]
    rows_asked = [start + j for start, (_, target) in zip(starts, batch, strict=True) for j in range(len(target) + 1)]
    assert x.rows[x.real].tolist() == rows_asked
    assert len(x.real) <= min(len(x.tokens), rows.target.numel() + ROWS - 1)  # no logits for long prefixes


@given(batches, seeds, st.integers(0, 9))
def test_dropout_depends_on_seed_example_epoch_and_place(
    tiny_arm: TinyArm, batch: list[Example], seed: int, epoch: int
) -> None:
    """Not on the batch around an example, nor on its place there."""
    rows, noise = tiny_arm().rows(as_examples(batch)), noise_of(len(batch), seed, first=50, epoch=epoch)
    together = pack(rows, noise)
    assert len(set(together.dropout.tolist())) == len(together.dropout)
    keys = torch.split(together.dropout, together.packing.lengths.tolist())
    for b in reversed(range(len(batch))):
        index = torch.tensor([b])
        alone = pack(rows.select(index), Noise(seed, noise.example[index], noise.epoch[index]))
        assert torch.equal(alone.dropout, keys[b])
    for other in (noise_of(len(batch), seed + 1, 50, epoch), noise_of(len(batch), seed, 50, epoch + 1)):
        assert not set(pack(rows, other).dropout.tolist()) & set(together.dropout.tolist())


# --- The loss


def textbook(arm: ARM, next_logits: NextLogits, batch: list[Example]) -> Tensor:
    """−log P(token), the mean over all tokens."""
    found = []
    for prefix, target in batch:
        log_probability = next_logits(arm, prefix, target).log_softmax(-1)
        found += [-log_probability[j, token] for j, token in enumerate([*target, arm.specials.eos])]
    return torch.stack(found).mean()


@given(batches, seeds, st.none() | st.integers(0, 70), st.booleans())
@settings(HEAVY, max_examples=60)
def test_loss_and_all_gradients_are_the_textbooks(
    tiny_arm: TinyArm, next_logits: NextLogits, batch: list[Example], seed: int, spare: int | None, prefix_lm: bool
) -> None:
    arm = tiny_arm(seed=seed % 5, prefix_lm=prefix_lm)
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch), seed)
    found = arm.losses(rows, noise, None if spare is None else int(arm.visible(rows, noise).sum()) + spare)
    expected = textbook(arm, next_logits, batch)
    assert_close(found.total, expected)
    assert found.parts.keys() == {"token_loss"}
    assert_close(found.parts["token_loss"], expected.detach())
    assert not found.parts["token_loss"].requires_grad
    for a, b in zip(gradients(found.total, arm), gradients(expected, arm), strict=True):
        assert_close(a, b)


@given(batches, seeds, st.integers(0, 70))
@settings(HEAVY, max_examples=30)
def test_a_larger_buffer_changes_nothing_with_dropout_either(
    tiny_arm: TinyArm, batch: list[Example], seed: int, spare: int
) -> None:
    arm = tiny_arm(dropout=0.2).train()
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch), seed)
    tight, roomy = (arm.losses(rows, noise, c).total for c in (None, int(arm.visible(rows, noise).sum()) + spare))
    assert_close(roomy, tight)
    for a, b in zip(gradients(roomy, arm), gradients(tight, arm), strict=True):
        assert_close(a, b)


@given(batches, seeds, st.booleans())
@settings(HEAVY, max_examples=30)
def test_a_batch_is_the_mean_over_its_tokens(
    tiny_arm: TinyArm, batch: list[Example], seed: int, training: bool
) -> None:
    """With dropout too: what is dropped belongs to the example."""
    arm = tiny_arm(dropout=0.2).train(training)
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch), seed)
    total = torch.zeros((), dtype=torch.float64)
    for i in torch.arange(len(batch))[:, None]:
        alone = arm.losses(rows.select(i), Noise(seed, noise.example[i], noise.epoch[i])).total
        total = total + alone * rows.target_length[i].squeeze()
    assert_close(arm.losses(rows, noise).total, total / rows.target_length.sum())


def test_padding_means_nothing(tiny_arm: TinyArm) -> None:
    arm = tiny_arm()
    batch = [Example([1, 2, 3], [4]), Example([], [1, 2, 3, 4]), Example([5], [])]
    here, there = (arm.losses(arm.rows(as_examples(batch, junk)), noise_of(3)).total for junk in (0, 5))
    assert torch.equal(here, there)


def test_every_weight_learns_and_dropout_changes_with_the_epoch(tiny_arm: TinyArm) -> None:
    arm, plain = tiny_arm(dropout=0.2), tiny_arm()
    rows = arm.rows(as_examples([Example([1, 2, 3], [4, 5]), Example([], [0])]))
    assert all(bool(gradient.any()) for gradient in gradients(plain.losses(rows, noise_of(2)).total, plain))
    assert torch.equal(arm.losses(rows, noise_of(2)).total, plain.losses(rows, noise_of(2)).total)
    arm.train()
    first, again, later = (float(arm.losses(rows, noise_of(2, epoch=epoch)).total.detach()) for epoch in (0, 0, 1))
    assert first == again
    assert first != later


def test_losses_are_one_graph_for_every_capacity(tiny_arm: TinyArm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the device, and no shape depends on the data, whichever bound on predicting rows is lower.
    Without torch.compile's code generator, which is slow, and without attention, which on a CPU does ask."""
    monkeypatch.setattr("insertlm.nn.attention.attend", lambda q, k, v, *rest: v)
    arm = tiny_arm(dropout=0.1, dtype=torch.float32).train()
    batch = [Example([1, 2], [0] * 40), *(Example([n], [1, 2]) for n in range(6))]
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch))
    assert 256 < rows.target.numel() < 384
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def traced(room: Tensor) -> Tensor:
        return arm.losses(rows, noise, room.shape[0] * ROWS).total

    def value_and_gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *gradients(loss, arm)]

    expected = value_and_gradients(arm.losses(rows, noise).total)
    for capacity in (256, 384, 512):
        room = torch.empty(capacity // ROWS, 0)
        torch._dynamo.mark_dynamic(room, 0)
        for a, b in zip(value_and_gradients(traced(room)), expected, strict=True):
            assert_close(a, b, 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# --- All of it


def test_it_learns_to_count_down_and_to_stop(tiny_arm: TinyArm) -> None:
    batch = [Example([n], list(range(n, -1, -1))) for n in range(WORDS)]
    arm = tiny_arm(dtype=torch.float32).train()
    rows, optimizer = arm.rows(as_examples(batch)), torch.optim.AdamW(arm.parameters(), 1e-2)
    for epoch in range(200):
        optimizer.zero_grad()
        arm.losses(rows, noise_of(len(batch), epoch=epoch)).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    written = arm.eval().decode([Prompt([n]) for n in range(WORDS)], DecodeConfig(max_steps=20))
    assert [t.ids for t in written] == [target for _, target in batch]
    assert all(t.complete and (t.stop_probability or 0) > 0.5 for t in written)


def test_a_recipe_trains_and_loads(tmp_path: Path) -> None:
    """With no more positions than rows have."""
    small = {"degree": 2, "min_nodes": 3, "max_nodes": 3, "min_plan": 2, "nodes": 8, "train": 200, "validation": 9}
    tree = {
        "task": {"name": "star", **small, "order": "reversed"},
        "family": {"name": "arm"},
        "model": {"layers": 1, "width": 32, "heads": 2, "hidden": 64, "dropout": 0.1, "max_length": 15},
        "optim": {"learning_rate": 3e-3, "warmup": 5, "ema": 0.9},
        "train": {"steps": 120, "batch_size": 16, "log_every": 30, "validate_every": 120},
        "decode": {"max_steps": 8},
    }
    run, recipe = tmp_path / "run", parse_recipe(tree, "test")
    assert recipe.family.longest_row(recipe.task.longest_prefix, recipe.task.longest_target) == 15
    train(recipe, run, Processes(CPU), Console(quiet=True))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["token_loss"] for line in lines if "loss" in line]
    assert losses == [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.75 * losses[0]
    assert "validation_sequence_accuracy" in lines[-1]
    model = load(run, "cpu")
    assert isinstance(model.family, ARM)
    assert model.recipe == recipe
    [example] = recipe.task.examples("test", 1)
    [written] = model.generate([recipe.task.render(example).rpartition("\n")[0]])
    assert written.prefix == example.prefix
    assert written.ids[0] == example.prefix[-1]  # so much it has learnt: the path is written from its goal
