"""Several corruptions of an example behind one prefix: what they would be one by one, computed together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Noise
from insertlm.families.corruption.packed import corrupt
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer

WORDS = 6
TinyIlm = Callable[..., ILM]
batches = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=5).filter(
    lambda sizes: any(length for _, length in sizes)
)
groups = st.sampled_from([1, 3])


def examples_of(sizes: list[tuple[int, int]], seed: int) -> Examples:
    generator = np.random.default_rng(seed)
    prefix, target = (np.array(lengths, np.int32) for lengths in zip(*sizes, strict=True))
    words = [generator.integers(0, WORDS, (len(sizes), lengths.max())).astype(np.int32) for lengths in (prefix, target)]
    return Examples(words[0], prefix, words[1], target)


def with_family(ilm: ILM, config: IlmConfig) -> ILM:
    """The same weights, another way of corrupting."""
    ilm.config = config
    ilm.corruption = ilm.corruption_on_host = config.corruption()
    return ilm


@given(batches, groups, st.integers(1, 4), st.integers(0, 2**40), st.integers(0, 9))
@settings(max_examples=60)
def test_losses_and_gradients_are_means_over_single_ones(
    tiny_ilm: TinyIlm, sizes: list[tuple[int, int]], group: int, times: int, seed: int, epoch: int
) -> None:
    """As many epochs of one corruption are one of several."""
    ilm = with_family(tiny_ilm(prefix_lm=True), IlmConfig(group=group, deletions=times))
    rows, example = ilm.rows(examples_of(sizes, seed)), torch.arange(len(sizes))
    together = ilm.losses(rows, Noise(seed, example, torch.full_like(example, epoch)))
    weights = list(ilm.parameters())
    expected = torch.autograd.grad(together.total, weights, allow_unused=True, materialize_grads=True)
    with_family(ilm, IlmConfig(group=group))
    single = [
        ilm.losses(rows, Noise(seed, example, torch.full_like(example, epoch * times + turn))) for turn in range(times)
    ]
    for name, value in together.parts.items():
        torch.testing.assert_close(value, sum(losses.parts[name] for losses in single) / times)
    total = sum((losses.total for losses in single), torch.zeros(())) / times
    found = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(batches, groups, st.integers(2, 4), st.integers(0, 2**40))
def test_a_prefix_is_there_once_and_every_text_stands_right_behind_it(
    tiny_ilm: TinyIlm, sizes: list[tuple[int, int]], group: int, times: int, seed: int
) -> None:
    config = IlmConfig(group=group, deletions=times)
    ilm = with_family(tiny_ilm(prefix_lm=True), config)
    examples = examples_of(sizes, seed)
    rows, noise = ilm.rows(examples), Noise(seed, torch.arange(len(sizes)), torch.zeros(len(sizes), dtype=torch.int64))
    x = corrupt(rows, noise, corruption=config.corruption(), times=config.deletions)
    assert torch.equal(ilm.visible(rows, noise), x.packing.lengths)
    pieces = [torch.split(part, x.packing.lengths.tolist()) for part in (x.tokens, x.positions, x.text)]
    for b, (tokens, positions, text) in enumerate(zip(*pieces, strict=True)):
        p, length = sizes[b]
        prefix, target = examples.prefix[b, :p].tolist(), examples.target[b, :length]
        wanted_tokens, wanted_positions, wanted_text = list(prefix), list(range(1, p + 1)), [0] * p
        for turn in range(times):
            left = target[~x.deleted[b * times + turn, :length].numpy()].tolist()
            assert int(x.stop[b * times + turn]) == int(x.packing.starts[b]) + len(wanted_tokens)
            wanted_tokens += [ilm.specials.stop, ilm.specials.bos, *left]
            wanted_positions += [0, *range(p + 1, p + 2 + len(left))]
            wanted_text += [turn + 1] * (2 + len(left))
        assert tokens.tolist() == wanted_tokens
        assert positions.tolist() == wanted_positions
        assert text.tolist() == wanted_text


def test_corruptions_of_one_step_differ(tiny_ilm: TinyIlm) -> None:
    rows = tiny_ilm().rows(examples_of([(3, 30)], 0))
    nothing = torch.zeros(1, dtype=torch.int64)
    x = corrupt(rows, Noise(0, nothing, nothing), times=8)
    assert len({tuple(row) for row in x.deleted.tolist()}) == 8


def test_dropout_keys_of_all_rows_differ(tiny_ilm: TinyIlm) -> None:
    rows = tiny_ilm().rows(examples_of([(5, 20)] * 10, 0))
    noise = Noise(0, torch.arange(10), torch.zeros(10, dtype=torch.int64))
    keys = corrupt(rows, noise, times=3).dropout
    assert len(set(keys.tolist())) == len(keys)


def test_without_a_prefix_of_its_own_there_is_one_corruption() -> None:
    model = ModelConfig(layers=1, width=8, heads=2, hidden=12)
    with pytest.raises(InsertlmError, match=r"^family\.deletions: expected 1 unless model\.prefix_lm is true, got 2$"):
        IlmConfig(deletions=2).build(model, WordTokenizer(tuple("012345")))
