"""The left-to-right model learns the next token, and writes what it would write if every step began from nothing.

The references are one sequence at a time, with the textbook's attention, in float64; the one for writing has no cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from insertlm import load
from insertlm.backbone.fused import ROWS
from insertlm.backbone.transformer import ModelConfig
from insertlm.config import parse_recipe
from insertlm.decoding.sampling import choose, draws
from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Insertion, Trajectory
from insertlm.errors import InsertlmError
from insertlm.families.arm import ARM, ArmConfig, pack
from insertlm.families.base import Noise
from insertlm.tasks.base import Example, Examples
from insertlm.tokenizers import WordTokenizer
from insertlm.training.distributed import Processes
from insertlm.training.loop import train

Fits = Callable[[Tensor, Tensor], bool]
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

CPU = torch.device("cpu")
WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
texts = st.lists(words, max_size=5)
batches = st.lists(st.builds(Example, texts, texts), min_size=1, max_size=5)
seeds = st.integers(0, 2**40)


def tiny_arm(
    *,
    words: int = WORDS,
    layers: int = 2,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    prefix_lm: bool = False,
) -> ARM:
    """Not trained, ready to decode. Words are ids 0 … words-1."""
    model = ModelConfig(layers=layers, width=8, heads=2, hidden=12, dropout=dropout, prefix_lm=prefix_lm)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        arm = ArmConfig().build(model, WordTokenizer(tuple(map(str, range(words))), reserved=1))
    return arm.to(dtype).eval()


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
def test_rows_hold_the_prefix_and_end_with_special_tokens(batch: list[Example], junk: int) -> None:
    arm = tiny_arm()
    rows = arm.rows(as_examples(batch, junk))
    assert {getattr(rows, field.name).dtype for field in fields(rows)} == {torch.int64}
    for b, (prefix, target) in enumerate(batch):
        assert rows.given[b, : int(rows.given_length[b])].tolist() == [*prefix, arm.specials.bos]
        assert rows.target[b, : int(rows.target_length[b])].tolist() == [*target, arm.specials.eos]


@given(batches, seeds, st.integers(0, 5), st.none() | st.integers(0, 30))
def test_packing_by_hand(batch: list[Example], seed: int, junk: int, spare: int | None) -> None:
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
def test_dropout_depends_on_seed_example_epoch_and_place(batch: list[Example], seed: int, epoch: int) -> None:
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


@dataclass(frozen=True)
class Textbook:
    arm: ARM
    attention: Softmax

    def logits(self, prefix: list[int], text: list[int]) -> Tensor:
        """Of the token behind <bos> and behind every token of the text: [len(text) + 1, vocabulary]"""
        row = torch.tensor([*prefix, self.arm.specials.bos, *text])
        mask = torch.ones(len(row), len(row), dtype=torch.bool).tril()
        if self.arm.model.prefix_lm:
            mask[: len(prefix) + 1, : len(prefix) + 1] = True
        hidden = self.arm.backbone(row, torch.arange(len(row)), lambda layer, q, k, v: self.attention(q, k, v, mask))
        logits: Tensor = hidden[len(prefix) :] @ self.arm.unembedding.weight.T
        return logits

    def loss(self, batch: list[Example]) -> Tensor:
        """−log P(token), the mean over all tokens."""
        found = []
        for prefix, target in batch:
            log_probability = self.logits(prefix, target).log_softmax(-1)
            found += [-log_probability[j, token] for j, token in enumerate([*target, self.arm.specials.eos])]
        return torch.stack(found).mean()


@given(batches, seeds, st.none() | st.integers(0, 70), st.booleans())
@settings(HEAVY, max_examples=60)
def test_loss_and_all_gradients_are_the_textbooks(
    softmax_attention: Softmax, batch: list[Example], seed: int, spare: int | None, prefix_lm: bool
) -> None:
    arm = tiny_arm(seed=seed % 5, prefix_lm=prefix_lm)
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch), seed)
    found = arm.losses(rows, noise, None if spare is None else int(arm.visible(rows, noise).sum()) + spare)
    expected = Textbook(arm, softmax_attention).loss(batch)
    assert_close(found.total, expected)
    assert found.parts.keys() == {"token_loss"}
    assert_close(found.parts["token_loss"], expected.detach())
    assert not found.parts["token_loss"].requires_grad
    for a, b in zip(gradients(found.total, arm), gradients(expected, arm), strict=True):
        assert_close(a, b)


@given(batches, seeds, st.integers(0, 70))
@settings(HEAVY, max_examples=30)
def test_a_larger_buffer_changes_nothing_with_dropout_either(batch: list[Example], seed: int, spare: int) -> None:
    arm = tiny_arm(dropout=0.2).train()
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch), seed)
    tight, roomy = (arm.losses(rows, noise, c).total for c in (None, int(arm.visible(rows, noise).sum()) + spare))
    assert_close(roomy, tight)
    for a, b in zip(gradients(roomy, arm), gradients(tight, arm), strict=True):
        assert_close(a, b)


@given(batches, seeds, st.booleans())
@settings(HEAVY, max_examples=30)
def test_a_batch_is_the_mean_over_its_tokens(batch: list[Example], seed: int, training: bool) -> None:
    """With dropout too: what is dropped belongs to the example."""
    arm = tiny_arm(dropout=0.2).train(training)
    rows, noise = arm.rows(as_examples(batch)), noise_of(len(batch), seed)
    total = torch.zeros((), dtype=torch.float64)
    for i in torch.arange(len(batch))[:, None]:
        alone = arm.losses(rows.select(i), Noise(seed, noise.example[i], noise.epoch[i])).total
        total = total + alone * rows.target_length[i].squeeze()
    assert_close(arm.losses(rows, noise).total, total / rows.target_length.sum())


def test_padding_means_nothing() -> None:
    arm = tiny_arm()
    batch = [Example([1, 2, 3], [4]), Example([], [1, 2, 3, 4]), Example([5], [])]
    here, there = (arm.losses(arm.rows(as_examples(batch, junk)), noise_of(3)).total for junk in (0, 5))
    assert torch.equal(here, there)


def test_every_weight_learns_and_dropout_changes_with_the_epoch() -> None:
    arm, plain = tiny_arm(dropout=0.2), tiny_arm()
    rows = arm.rows(as_examples([Example([1, 2, 3], [4, 5]), Example([], [0])]))
    assert all(bool(gradient.any()) for gradient in gradients(plain.losses(rows, noise_of(2)).total, plain))
    assert torch.equal(arm.losses(rows, noise_of(2)).total, plain.losses(rows, noise_of(2)).total)
    arm.train()
    first, again, later = (float(arm.losses(rows, noise_of(2, epoch=epoch)).total.detach()) for epoch in (0, 0, 1))
    assert first == again
    assert first != later


def test_losses_are_one_graph_for_every_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the device, and no shape depends on the data, whichever bound on predicting rows is lower.
    Without torch.compile's code generator, which is slow, and without attention, which on a CPU does ask."""
    monkeypatch.setattr("insertlm.backbone.attention.attend", lambda q, k, v, *rest: v)
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


# --- Writing, from nothing in every step


@dataclass(frozen=True)
class Plain:
    """A loop that computes the whole row in every step."""

    textbook: Textbook

    def ask(self, prompt: Prompt, text: list[int]) -> Tensor:
        """Logits of words and then <eos>, [words + 1]"""
        arm = self.textbook.arm
        logits = self.textbook.logits(prompt.prefix, text)[-1]
        return torch.stack([logits[i] for i in [*range(len(arm.writable)), arm.specials.eos]])

    @torch.no_grad()
    def decode(self, prompt: Prompt, config: DecodeConfig) -> Trajectory:
        text, events, seed = [*prompt.start], list[Insertion](), torch.tensor([prompt.seed])
        while True:
            logits = self.ask(prompt, text)
            log_probability = logits.log_softmax(-1)
            stop = float(log_probability[-1].exp())
            noise = draws(0, seed, len(events))
            word = int(choose(logits[None], noise, config.temperature, config.top_k, config.top_p))
            complete = word == len(logits) - 1
            full = len(prompt.prefix) + 1 + len(text) == config.max_length or len(events) == config.max_steps
            if complete or full:
                return Trajectory(prompt.prefix, prompt.start, events, stop, complete)
            events.append(Insertion(len(events), len(text), word, float(log_probability[word]), stop))
            text.append(word)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    prefix, start = draw(texts), draw(st.lists(words, max_size=4))
    return Prompt(prefix, draw(seeds), start, draw(st.sampled_from([None, frozenset({len(start)})])))


configs = st.builds(
    DecodeConfig,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    max_steps=st.integers(1, 6),
    max_length=st.integers(10, 16),
)
prompt_batches = st.lists(prompts(), min_size=1, max_size=5)
GREEDY = DecodeConfig(max_steps=8)
HOT = DecodeConfig(max_steps=8, temperature=1.0)


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    """The same tokens in the same places; probabilities to the last few bits."""
    for a, b in zip(left, right, strict=True):
        assert [event[:3] for event in a.events] == [event[:3] for event in b.events]
        assert (a.prefix, a.start, a.complete) == (b.prefix, b.start, b.complete)
        numbers = [[t.stop_probability, *(x for e in t.events for x in e[3:])] for t in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-9)


@given(prompt_batches, configs, st.integers(0, 3), st.booleans())
@settings(HEAVY, max_examples=60)
def test_a_cache_changes_no_token_and_no_probability(
    softmax_attention: Softmax, batch: list[Prompt], config: DecodeConfig, seed: int, prefix_lm: bool
) -> None:
    arm = tiny_arm(seed=seed, prefix_lm=prefix_lm)
    plain = Plain(Textbook(arm, softmax_attention))
    written = arm.decode(batch, config)
    assert_same(written, [plain.decode(prompt, config) for prompt in batch])
    for prompt, trajectory in zip(batch, written, strict=True):
        assert trajectory.ids[: len(prompt.start)] == prompt.start
        assert set(trajectory.ids) <= set(range(WORDS))


@given(prompt_batches, configs, st.randoms(use_true_random=False), st.booleans())
@settings(HEAVY, max_examples=30)
def test_a_row_does_not_depend_on_its_batch(
    batch: list[Prompt], config: DecodeConfig, random: Any, prefix_lm: bool
) -> None:
    arm = tiny_arm(prefix_lm=prefix_lm)
    together = arm.decode(batch, config)
    assert_same([arm.decode([prompt], config)[0] for prompt in batch], together)
    company = [*batch, *(replace(prompt, prefix=[2, *prompt.prefix[1:]], seed=prompt.seed + 1) for prompt in batch)]
    order = random.sample(range(len(company)), len(company))
    shuffled = arm.decode([company[i] for i in order], config)
    assert_same([shuffled[order.index(i)] for i in range(len(batch))], together)


def test_each_token_is_computed_once_and_finished_texts_leave() -> None:
    arm, sizes = tiny_arm(), list[int]()
    arm.unembedding.weight.data[arm.specials.eos] = 0.0  # with logits of both signs beside it, never the largest
    arm.backbone.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    batch = [Prompt([0] * 1), Prompt([0] * 4, start=[1, 2]), Prompt([0] * 6)]
    written = arm.decode(batch, DecodeConfig(max_length=10))
    assert [len(t.events) for t in written] == [8, 3, 3]
    assert sizes == [2 + 7 + 7, 3, 3, 3, 1, 1, 1, 1, 1]


def test_special_tokens_are_never_written_however_likely() -> None:
    arm = tiny_arm(words=3)
    special = torch.randn(arm.vocabulary - 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    special[arm.specials.eos - 3] = 0.0
    arm.unembedding.weight.data[3:] = 1e3 * special  # all but <eos>; of six, some are huge whatever the hidden row
    batch = [Prompt([0, 1], seed) for seed in range(50)]
    for trajectory in arm.decode(batch, HOT):
        assert set(trajectory.ids) <= {0, 1, 2}
        assert all(event.log_probability > -30 for event in trajectory.events)  # they take no mass either


def test_seeds_make_the_difference_only_where_something_is_drawn() -> None:
    arm = tiny_arm()
    batch = [Prompt([1, 2], seed) for seed in range(20)]
    for config, several in ((GREEDY, False), (DecodeConfig(max_steps=8, temperature=1.0, top_k=1), False), (HOT, True)):
        written = arm.decode(batch, config)
        assert written == arm.decode(batch, config)
        assert (len({(*t.ids, t.complete) for t in written}) > 1) == several


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_texts_come_as_often_as_they_should(softmax_attention: Softmax, fits: Fits, temperature: float) -> None:
    """Texts of at most two tokens: that <eos> is drawn like any word, and that the steps' draws are independent."""
    arm, prompt = tiny_arm(words=3, seed=1), Prompt([2], start=[1])
    plain = Plain(Textbook(arm, softmax_attention))
    counts = dict.fromkeys([(), *product(range(3)), *product(range(3), repeat=2)], 0)
    for trajectory in arm.decode(
        [replace(prompt, seed=seed) for seed in range(6000)], DecodeConfig(max_steps=2, temperature=temperature)
    ):
        counts[tuple(event.token for event in trajectory.events)] += 1

    @torch.no_grad()
    def chance(text: tuple[int, ...]) -> float:
        steps = [(plain.ask(prompt, [1, *text[:n]]) / temperature).softmax(-1) for n in range(len(text) + 1)]
        found = float(torch.stack([p[word] for p, word in zip(steps, text, strict=False)]).prod()) if text else 1.0
        return found if len(text) == 2 else found * float(steps[-1][3])

    expected = [chance(text) for text in counts]
    assert sum(expected) == pytest.approx(1)
    assert fits(torch.tensor(list(counts.values())), torch.tensor(expected))


@pytest.mark.parametrize(
    ("start", "gaps", "expected"), [([2], {0}, "[1]"), ([2], {0, 1}, "[1]"), ([2, 3], set(), "[2]"), ([], set(), "[0]")]
)
def test_only_the_end_may_be_open(start: list[int], gaps: set[int], expected: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_arm().decode([Prompt([1, 2, 3]), Prompt([1], start=start, open=frozenset(gaps))], GREEDY)
    reason = f"this family writes at the end of the text alone, expected {expected}"
    assert str(caught.value) == f"a prompt opens the gaps {sorted(gaps)}; {reason}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"order": "mass"}, "decode.order: expected auto, got mass"),
        ({"parallel": 2}, "decode.parallel: this family writes one token a step, got 2"),
    ],
)
def test_what_it_cannot_do_is_named(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_arm().decode([Prompt([1])], DecodeConfig(**changes))
    assert str(caught.value) == line


# --- All of it


def test_it_learns_to_count_down_and_to_stop() -> None:
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
