"""The insertion language model learns from what the paper says it learns from.

The reference is written from the paper: one example at a time, in reading order, with the whole slot × vocabulary table
of probabilities and of targets, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.packed import corrupt
from insertlm.families.corruption.stretch import Stretch
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.tasks.base import Example, Examples
from insertlm.text.tokenizers import WordTokenizer

Fits = Callable[[Tensor, Tensor], bool]
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TinyIlm = Callable[..., ILM]

WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
examples_ = st.lists(
    st.builds(Example, st.lists(words, max_size=5), st.lists(words, max_size=5)), min_size=1, max_size=5
).filter(lambda batch: any(example.target for example in batch))
seeds = st.integers(0, 2**40)


def as_examples(batch: list[Example], junk: int = 0) -> Examples:
    """Padded with `junk`, which must not matter."""

    def matrix(rows: list[list[int]]) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], ...]:
        width = max(map(len, rows))
        return np.array([row + [junk] * (width - len(row)) for row in rows], dtype=np.int32).reshape(len(rows), -1), (
            np.array([len(row) for row in rows], dtype=np.int32)
        )

    prefix, prefix_length = matrix([example.prefix for example in batch])
    target, target_length = matrix([example.target for example in batch])
    return Examples(prefix, prefix_length, target, target_length)


def noise_of(count: int, seed: int = 0, first: int = 0, epoch: int = 0) -> Noise:
    return Noise(seed, torch.arange(first, first + count), torch.full((count,), epoch))


def equal_targets(ilm: ILM, length: int, count: int) -> Rows:
    return ilm.rows(as_examples([Example([1], list(range(length)))] * count))


# --- Corruption


@given(examples_, seeds, st.integers(0, 9), st.integers(0, 5))
def test_corruption_by_hand(tiny_ilm: TinyIlm, batch: list[Example], seed: int, epoch: int, junk: int) -> None:
    ilm = tiny_ilm()
    x = corrupt(ilm.rows(as_examples(batch, junk)), noise_of(len(batch), seed, epoch=epoch))
    pieces = [torch.split(part, x.packing.lengths.tolist()) for part in (x.tokens, x.positions)]
    for b, (example, tokens, positions) in enumerate(zip(batch, *pieces, strict=True)):
        deleted = x.deleted[b].tolist()
        survivors = [j for j in range(len(example.target)) if not deleted[j]]
        text = [example.target[j] for j in survivors]
        p = len(example.prefix)
        assert tokens.tolist() == [*example.prefix, ilm.specials.stop, ilm.specials.bos, *text]
        assert positions.tolist() == [*range(1, p + 1), 0, *range(p + 1, p + 2 + len(text))]
        assert not any(deleted[len(example.target) :])
        start = int(x.packing.starts[b])
        assert int(x.stop[b]) == start + p
        assert int(x.count[b]) == sum(deleted) == len(example.target) - len(text)
        for j in range(len(example.target)):
            before = sum(survivor < j for survivor in survivors)
            if deleted[j]:
                assert int(x.slots[b, j]) == start + p + 1 + before  # <bos>, or a token that survived


@given(examples_, seeds, st.integers(0, 9))
def test_corruption_depends_on_seed_example_and_epoch_alone(
    tiny_ilm: TinyIlm, batch: list[Example], seed: int, epoch: int
) -> None:
    """Not on the batch around an example, nor on its place there."""
    rows = tiny_ilm().rows(as_examples(batch))
    noise = noise_of(len(batch), seed, first=50, epoch=epoch)
    together = corrupt(rows, noise)
    keys = torch.split(together.dropout, together.packing.lengths.tolist())
    for b in reversed(range(len(batch))):
        index = torch.tensor([b])
        alone = corrupt(rows.select(index), Noise(seed, noise.example[index], noise.epoch[index]))
        assert torch.equal(alone.deleted[0], together.deleted[b])
        assert torch.equal(alone.dropout, keys[b])


def test_seed_example_and_epoch_all_matter(tiny_ilm: TinyIlm) -> None:
    rows = equal_targets(tiny_ilm(), 30, 1)
    cases = [noise_of(1), noise_of(1, seed=1), noise_of(1, first=1), noise_of(1, epoch=1)]
    assert len({tuple(corrupt(rows, noise).deleted[0].tolist()) for noise in cases}) == len(cases)
    for row in range(3):  # of the prefix, <stop> and <bos>
        assert len({int(corrupt(rows, noise).dropout[row]) for noise in cases}) == len(cases)


def test_dropout_has_another_key_for_every_token(tiny_ilm: TinyIlm) -> None:
    keys = corrupt(equal_targets(tiny_ilm(), 30, 20), noise_of(20)).dropout
    assert len(set(keys.tolist())) == len(keys)


@pytest.mark.parametrize("vary", ["example", "epoch"])
def test_the_number_deleted_is_uniform_from_none_to_all(tiny_ilm: TinyIlm, fits: Fits, vary: str) -> None:
    count = 7000
    run, still = torch.arange(count), torch.full((count,), 3)
    for length in (1, 6):
        rows = equal_targets(tiny_ilm(), length, count)
        noise = Noise(5, run, still) if vary == "example" else Noise(5, still, run)
        counts = torch.bincount(corrupt(rows, noise).count, minlength=length + 1)
        assert fits(counts, torch.ones(length + 1))


def test_every_subset_of_a_size_is_as_likely_as_any_other(tiny_ilm: TinyIlm, fits: Fits) -> None:
    length, count = 4, 20_000
    deleted = corrupt(equal_targets(tiny_ilm(), length, count), noise_of(count, seed=2)).deleted
    code = (deleted * 2 ** torch.arange(length)).sum(1)
    sizes = [bin(subset).count("1") for subset in range(2**length)]
    chances = [1 / (length + 1) / len(list(combinations(range(length), size))) for size in sizes]
    assert fits(torch.bincount(code, minlength=2**length), torch.tensor(chances))


def test_a_stretch_is_where_it_may_be_and_sometimes_the_whole(tiny_ilm: TinyIlm, fits: Fits) -> None:
    """Half of the examples: S uniform on 1 … L, anywhere on the ring, n uniform on 0 … S; the others as ever."""
    length, count = 5, 30_000
    rows = equal_targets(tiny_ilm(), length, count)
    deleted = corrupt(rows, noise_of(count, seed=2), corruption=Stretch(0.5)).deleted
    chances = torch.zeros(2**length)
    for size in range(1, length + 1):
        for first in range(length):
            ring = [(first + k) % length for k in range(size)]
            for gone in range(size + 1):
                subsets = list(combinations(ring, gone))
                for subset in subsets:
                    weight = 1 / (length * (size + 1) * len(subsets))
                    chances[sum(2**j for j in subset)] += weight * (0.5 / length + (0.5 if size == length else 0.0))
    code = (deleted * 2 ** torch.arange(length)).sum(1)
    assert fits(torch.bincount(code, minlength=2**length), chances)


@pytest.mark.parametrize("other", [Noise(1, torch.arange(9000), torch.ones(9000).long()), noise_of(9000, 1, first=1)])
def test_epochs_and_neighbours_are_independent(tiny_ilm: TinyIlm, fits: Fits, other: Noise) -> None:
    rows = equal_targets(tiny_ilm(), 3, 9000)
    here, there = corrupt(rows, noise_of(9000, 1)), corrupt(rows, other)
    assert fits(torch.bincount(here.count * 4 + there.count, minlength=16), torch.ones(16))
    first = [x.deleted[:, 0].long() for x in (here, there)]
    assert fits(torch.bincount(first[0] * 2 + first[1], minlength=4), torch.ones(4))


configs = [IlmConfig(stretch=share) for share in (0.0, 0.5, 1.0)]
configs += [IlmConfig(group=2, frame=0.5), IlmConfig(group=3, frame=1.0), IlmConfig(group=3, frame=0.0)]


@given(examples_, seeds, st.sampled_from(configs))
def test_visible_is_the_number_of_packed_rows(
    tiny_ilm: TinyIlm, batch: list[Example], seed: int, config: IlmConfig
) -> None:
    ilm = ILM(config, tiny_ilm().model, WordTokenizer(tuple("012345")))
    rows, noise = ilm.rows(as_examples(batch)), noise_of(len(batch), seed)
    assert torch.equal(ilm.visible(rows, noise), corrupt(rows, noise, corruption=config.corruption()).packing.lengths)


@given(examples_, st.integers(0, 5))
def test_rows_hold_the_prefix_and_the_two_special_tokens(tiny_ilm: TinyIlm, batch: list[Example], junk: int) -> None:
    ilm = tiny_ilm()
    rows = ilm.rows(as_examples(batch, junk))
    assert {part.dtype for part in vars(rows).values() if part is not None} == {torch.int64}
    for b, example in enumerate(batch):
        given_ = rows.given[b, : int(rows.given_length[b])].tolist()
        assert given_ == [*example.prefix, ilm.specials.stop, ilm.specials.bos]
        assert rows.target[b, : int(rows.target_length[b])].tolist() == example.target


# --- The loss


@dataclass(frozen=True)
class Variant:
    """What the softmax over slots takes in beside <bos> and the text."""

    prefix: bool = True
    stop: bool = False


@dataclass(frozen=True)
class Textbook:
    ilm: ILM
    attention: Softmax
    variant: Variant = Variant()

    def losses(
        self, batch: list[Example], deleted: list[list[bool]], wanted: list[list[bool]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token loss and stop loss, means over examples. wanted: of what is deleted; None: all of it"""
        parts = [self._example(*row) for row in zip(batch, deleted, wanted or deleted, strict=True)]
        token, stop = (torch.stack(part) for part in zip(*parts, strict=True))
        return token.mean(), stop.mean()

    def _example(self, example: Example, deleted: list[bool], asked: list[bool]) -> tuple[Tensor, Tensor]:
        special, (prefix, target) = self.ilm.specials, example
        visible = [special.stop, *prefix, special.bos]
        table = torch.zeros(len(visible) + len(target), self.ilm.vocabulary, dtype=torch.float64)
        for token, gone, now in zip(target, deleted, asked, strict=False):
            if gone:
                table[len(visible) - 1, token] += now
            else:
                visible.append(token)
        hidden = self._hidden(visible, len(prefix))
        first = 0 if self.variant.stop else 1 if self.variant.prefix else 1 + len(prefix)
        logits = (hidden @ self.ilm.unembedding.weight.T)[first:]
        wanted = table[first : len(visible)]
        count = wanted.sum()
        log_probability = logits - logits.flatten().logsumexp(0)
        token_loss = -(wanted / count * log_probability).sum() if count else torch.zeros((), dtype=torch.float64)
        complete, incomplete = self._stop(hidden[0]).log_softmax(-1)
        return token_loss, -(incomplete if count else complete)

    def _hidden(self, visible: list[int], prefix: int) -> Tensor:
        place = torch.arange(len(visible))
        inside = (place >= 1) & (place <= prefix)
        mask = torch.ones(len(visible), len(visible), dtype=torch.bool)
        if self.ilm.model.prefix_lm:
            mask = ~inside[:, None] | inside
        hidden: Tensor = self.ilm.backbone(
            torch.tensor(visible), place, lambda layer, q, k, v: self.attention(q, k, v, mask)
        )
        return hidden

    def _stop(self, h: Tensor) -> Tensor:
        w = dict(self.ilm.stop.named_parameters())
        normed = F.layer_norm(h, h.shape, w["norm.weight"], w["norm.bias"], 1e-5)
        inner = torch.tanh(w["up.weight"] @ normed + w["up.bias"])
        return w["out.weight"] @ (h + w["down.weight"] @ inner + w["down.bias"])


def gradients(loss: Tensor, ilm: ILM) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(ilm.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(ilm.parameters(), found, strict=True)]


def assert_close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@given(examples_, seeds, st.booleans(), st.sampled_from([1.0, 0.001, 0.0]))
@settings(HEAVY, max_examples=60)
def test_losses_and_all_gradients_are_those_of_the_paper(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, batch: list[Example], seed: int, prefix_lm: bool, weight: float
) -> None:
    ilm = tiny_ilm(prefix_lm=prefix_lm, config=IlmConfig(stop_weight=weight), seed=seed % 5)
    rows, noise = ilm.rows(as_examples(batch)), noise_of(len(batch), seed)
    found = ilm.losses(rows, noise)
    token, stop = Textbook(ilm, softmax_attention).losses(batch, corrupt(rows, noise).deleted.tolist())
    assert_close(found.parts["token_loss"], token.detach())
    assert_close(found.parts["stop_loss"], stop.detach())
    assert_close(found.total, token + weight * stop)
    assert not any(part.requires_grad for part in found.parts.values())
    for a, b in zip(gradients(found.total, ilm), gradients(token + weight * stop, ilm), strict=True):
        assert_close(a, b)


def mixed_batch(ilm: ILM, count: int = 40) -> tuple[list[Example], Rows, Noise]:
    """Prefixes and targets of many lengths, some of them complete."""
    generator = np.random.default_rng(0)
    batch = [
        Example(*(generator.integers(0, WORDS, generator.integers(low, 6)).tolist() for low in (1, 0)))
        for _ in range(count)
    ]
    return batch, ilm.rows(as_examples(batch)), noise_of(count, seed=3)


@pytest.mark.parametrize("prefix_lm", [False, True])
@pytest.mark.parametrize("wrong", [Variant(prefix=False), Variant(stop=True)], ids=["no prefix", "with stop"])
def test_prefix_slots_take_part_and_the_stop_token_does_not(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, prefix_lm: bool, wrong: Variant
) -> None:
    ilm = tiny_ilm(prefix_lm=prefix_lm)
    batch, rows, noise = mixed_batch(ilm)
    deleted = corrupt(rows, noise).deleted.tolist()
    found = ilm.losses(rows, noise).parts["token_loss"]
    assert_close(found, Textbook(ilm, softmax_attention).losses(batch, deleted)[0].detach())
    other = Textbook(ilm, softmax_attention, wrong).losses(batch, deleted)[0].detach()
    assert abs(float(found - other)) > 0.01


def test_of_groups_only_what_may_come_next_is_in_the_loss(tiny_ilm: TinyIlm, softmax_attention: Softmax) -> None:
    """And the mean is over that alone."""
    ilm = tiny_ilm(config=IlmConfig(group=2, frame=0.5))
    batch, rows, noise = mixed_batch(ilm)
    x = corrupt(rows, noise, corruption=ilm.corruption)
    assert 5 <= int((x.wanted != x.deleted).any(1).sum()) < len(batch)
    found = ilm.losses(rows, noise).parts
    token, stop = Textbook(ilm, softmax_attention).losses(batch, x.deleted.tolist(), x.wanted.tolist())
    assert_close(found["token_loss"], token.detach())
    assert_close(found["stop_loss"], stop.detach())


def test_complete_examples_have_no_token_loss_but_count_in_the_mean(tiny_ilm: TinyIlm) -> None:
    ilm = tiny_ilm()
    _, rows, noise = mixed_batch(ilm)
    count = corrupt(rows, noise).count
    assert 3 <= int((count == 0).sum()) < len(count)

    def some(which: Tensor) -> Tensor:
        index = which.nonzero().squeeze(1)
        part = ilm.losses(rows.select(index), Noise(noise.seed, noise.example[index], noise.epoch[index]))
        return part.parts["token_loss"]

    assert float(some(count == 0)) == 0.0
    share = (count > 0).double().mean()
    assert_close(ilm.losses(rows, noise).parts["token_loss"], share * some(count > 0))


@pytest.mark.parametrize("length", [0, 4])
def test_the_stop_head_learns_which_examples_are_complete(tiny_ilm: TinyIlm, length: int) -> None:
    """A head that always says `complete` with odds 9:1 pays -log 0.9 where nothing is deleted, else -log 0.1."""
    ilm = tiny_ilm()
    for parameter in ilm.stop.parameters():
        parameter.data.zero_()
    logits = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    ilm.stop.register_forward_hook(lambda module, inputs, output: output + logits)
    rows, noise = equal_targets(ilm, length, 200), noise_of(200)
    complete = (corrupt(rows, noise).count == 0).double().mean()
    assert bool(complete == 1) == (length == 0)
    assert_close(ilm.losses(rows, noise).parts["stop_loss"], -(complete * logits[0] + (1 - complete) * logits[1]))


@given(examples_, seeds, st.integers(0, 70), st.booleans(), st.booleans())
@settings(HEAVY, max_examples=40)
def test_a_larger_buffer_changes_nothing(
    tiny_ilm: TinyIlm, batch: list[Example], seed: int, spare: int, prefix_lm: bool, training: bool
) -> None:
    ilm = tiny_ilm(prefix_lm=prefix_lm, dropout=0.2).train(training)
    rows, noise = ilm.rows(as_examples(batch)), noise_of(len(batch), seed)
    tight = ilm.losses(rows, noise)
    roomy = ilm.losses(rows, noise, int(ilm.visible(rows, noise).sum()) + spare)
    assert_close(roomy.total, tight.total)
    for a, b in zip(gradients(roomy.total, ilm), gradients(tight.total, ilm), strict=True):
        assert_close(a, b)


@given(examples_, seeds, st.booleans(), st.booleans())
@settings(HEAVY, max_examples=40)
def test_a_batch_is_the_mean_of_its_examples(
    tiny_ilm: TinyIlm, batch: list[Example], seed: int, prefix_lm: bool, training: bool
) -> None:
    """With dropout too: what is dropped belongs to the example."""
    ilm = tiny_ilm(prefix_lm=prefix_lm, dropout=0.2).train(training)
    rows, noise = ilm.rows(as_examples(batch)), noise_of(len(batch), seed)
    alone = [
        ilm.losses(rows.select(i), Noise(seed, noise.example[i], noise.epoch[i])).total
        for i in torch.arange(len(batch))[:, None]
    ]
    assert_close(ilm.losses(rows, noise).total, torch.stack(alone).mean())


def test_padding_means_nothing(tiny_ilm: TinyIlm) -> None:
    ilm = tiny_ilm()
    batch = [Example([1, 2, 3], [4]), Example([], [1, 2, 3, 4]), Example([5], [])]
    here, there = (ilm.losses(ilm.rows(as_examples(batch, junk)), noise_of(3)).total for junk in (0, 5))
    assert torch.equal(here, there)


def test_dropout_is_for_training_and_changes_with_the_epoch(tiny_ilm: TinyIlm) -> None:
    ilm, plain = tiny_ilm(dropout=0.2), tiny_ilm()
    rows = equal_targets(ilm, 0, 4)  # nothing to delete: only dropout can tell the epochs apart
    assert torch.equal(ilm.losses(rows, noise_of(4)).total, plain.losses(rows, noise_of(4)).total)
    ilm.train()
    first, again, later = (ilm.losses(rows, noise_of(4, epoch=epoch)).total for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert len({float(x.detach()) for x in (first, later, plain.losses(rows, noise_of(4)).total)}) == 3
