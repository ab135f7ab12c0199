"""The backbone is the published one, and a row's output depends on its own segment alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.noise import keep_mask
from insertlm.core.packing import Segments
from insertlm.nn import transformer
from insertlm.nn.attention import FullAttention
from insertlm.nn.transformer import PRESETS, ModelConfig, Transformer

Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

VOCABULARY = 7
TINY = ModelConfig(layers=2, width=12, heads=3, hidden=20)
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)


def build(config: ModelConfig = TINY, seed: int = 0) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(config, VOCABULARY).double()


def drawn(rows: int, seed: int, below: int) -> Tensor:
    return torch.randint(below, (rows,), generator=torch.Generator().manual_seed(seed))


def full(sizes: list[int]) -> FullAttention:
    return FullAttention(Segments(torch.tensor([0, *sizes]).cumsum(0).int(), max(sizes)))


# --- The whole


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: pair (i, i + half) of the first 64 dimensions turns by position / 10000^(i / half)."""
    half = min(64, x.shape[-1]) // 2
    angle = positions[:, None, None] / 10_000 ** (torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def textbook(model: Transformer, tokens: Tensor, positions: Tensor, heads: int, attention: Softmax) -> Tensor:
    """Pre-norm, ReLU, no norm at the end, no biases in attention; one sequence, everyone sees everyone."""
    weights = dict(model.named_parameters())
    everyone = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    x = weights["embedding.weight"][tokens]
    for layer in range(len(model.blocks)):
        w = {name.removeprefix(f"blocks.{layer}."): p for name, p in weights.items()}
        normed = F.layer_norm(x, x.shape[1:], w["attention_norm.weight"], w["attention_norm.bias"], 1e-5)
        q, k, v = (part.view(len(x), heads, -1) for part in (normed @ w["qkv.weight"].T).chunk(3, -1))
        mixed = attention(turned(q, positions), turned(k, positions), v, everyone).flatten(1)
        x = x + mixed @ w["out.weight"].T
        normed = F.layer_norm(x, x.shape[1:], w["hidden_norm.weight"], w["hidden_norm.bias"], 1e-5)
        x = x + (normed @ w["up.weight"].T + w["up.bias"]).relu() @ w["down.weight"].T + w["down.bias"]
    return x


WIDE = ModelConfig(layers=2, width=2 * 72, heads=2, hidden=8)  # the last 8 dimensions of each head do not turn


@given(lengths, seeds, st.sampled_from([TINY, WIDE]))
@settings(max_examples=30)
def test_the_textbook_says_the_same(
    softmax_attention: Softmax, sizes: list[int], seed: int, config: ModelConfig
) -> None:
    model = build(config, seed)
    tokens, positions = drawn(sum(sizes), seed, VOCABULARY), drawn(sum(sizes), seed + 1, 20)
    rows = zip(torch.split(tokens, sizes), torch.split(positions, sizes), strict=True)
    expected = torch.cat([textbook(model, t, p, config.heads, softmax_attention) for t, p in rows])
    # The model's cosines are float32.
    torch.testing.assert_close(model(tokens, positions, full(sizes)), expected, rtol=1e-5, atol=1e-5)


@given(lengths, seeds, st.integers(1, 400), st.sampled_from([TINY, WIDE]))
@settings(max_examples=30)
def test_only_distances_matter(sizes: list[int], seed: int, shift: int, config: ModelConfig) -> None:
    """Every segment may be shifted as a whole, each by another amount."""
    model = build(config)
    tokens, positions = drawn(sum(sizes), seed, VOCABULARY), drawn(sum(sizes), seed + 1, 20)
    moved = positions + shift * torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    here, there = (model(tokens, p, full(sizes)) for p in (positions, moved))
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@given(lengths, seeds, st.booleans())
@settings(max_examples=30)
def test_a_packed_batch_is_its_rows_one_by_one(sizes: list[int], seed: int, dropout: bool) -> None:
    model = build(msgspec.structs.replace(TINY, dropout=0.3))
    tokens, positions = drawn(sum(sizes), seed, VOCABULARY), drawn(sum(sizes), seed + 1, 50)
    keys = drawn(sum(sizes), seed + 2, 2**31).int() if dropout else None
    packed = torch.split(model(tokens, positions, full(sizes), keys=keys), sizes)
    parts = [torch.split(x, sizes) if x is not None else [None] * len(sizes) for x in (tokens, positions, keys)]
    for size, row, t, p, k in zip(sizes, packed, *parts, strict=True):
        torch.testing.assert_close(row, model(t, p, full([size]), keys=k), rtol=1e-11, atol=1e-11)


@given(st.integers(1, 8), seeds)
@settings(max_examples=30)
def test_rows_may_stand_anywhere_in_their_segment(count: int, seed: int) -> None:
    model = build()
    tokens, positions = drawn(count, seed, VOCABULARY), torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    found = model(tokens[order], positions[order], full([count]))
    torch.testing.assert_close(found, model(tokens, positions, full([count]))[order], rtol=1e-11, atol=1e-11)


@given(lengths, seeds, st.data())
@settings(max_examples=30)
def test_wanted_rows_are_those_of_all(sizes: list[int], seed: int, data: st.DataObject) -> None:
    model = build()
    tokens, positions = drawn(sum(sizes), seed, VOCABULARY), drawn(sum(sizes), seed + 1, 50)
    wanted = torch.tensor(data.draw(st.lists(st.sampled_from(range(sum(sizes))), min_size=1)))
    found = model(tokens, positions, full(sizes), wanted=wanted)
    torch.testing.assert_close(found, model(tokens, positions, full(sizes))[wanted], rtol=1e-11, atol=1e-11)


def test_positions_matter() -> None:
    model = build()
    tokens = torch.tensor([1, 2, 3])
    here, there = (model(tokens, torch.tensor(p), full([3])) for p in ([0, 1, 2], [0, 2, 1]))
    assert bool(((here - there).abs() > 0.01).any())


# --- Dropout


def test_without_keys_or_without_a_rate_nothing_is_dropped() -> None:
    tokens, positions, keys = torch.arange(5), torch.arange(5), torch.arange(5).int()
    plain, dropping = build(), build(msgspec.structs.replace(TINY, dropout=0.5))
    expected = plain(tokens, positions, full([5]))
    assert torch.equal(dropping(tokens, positions, full([5])), expected)
    assert torch.equal(plain(tokens, positions, full([5]), keys=keys), expected)
    assert not torch.equal(dropping(tokens, positions, full([5]), keys=keys), expected)
    assert not torch.equal(
        dropping(tokens, positions, full([5]), keys=keys + 9), dropping(tokens, positions, full([5]), keys=keys)
    )


def test_every_place_of_dropout_has_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []

    def spy(*arguments: Any) -> Tensor:
        masks.append(keep_mask(*arguments))
        return masks[-1]

    monkeypatch.setattr(transformer, "keep_mask", spy)
    count = 50
    model = build(msgspec.structs.replace(TINY, dropout=0.5))
    model(torch.zeros(count).long(), torch.arange(count), full([count]), keys=torch.arange(count).int())
    assert len(masks) == 2 * TINY.layers
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_dropout_keeps_the_mean_of_what_a_block_adds() -> None:
    """One layer, attention silenced: what is left is x + dropout(feed-forward(x)), many times."""
    model = build(ModelConfig(layers=1, width=12, heads=3, hidden=20, dropout=0.25))
    model.get_parameter("blocks.0.out.weight").data.zero_()
    count = 20_000
    tokens = torch.full((count,), 3)
    attention = full([1] * count)
    added = (model(tokens, tokens, attention, keys=torch.arange(count).int()) - model.embedding(tokens)).detach()
    whole = (model(tokens, tokens, attention) - model.embedding(tokens))[0].detach()
    kept = (added != 0).double().mean(0)
    assert float((kept - 0.75).abs().max()) < 0.025  # eight standard deviations
    torch.testing.assert_close(added, torch.where(added != 0, whole / 0.75, 0.0), rtol=1e-9, atol=1e-9)


# --- Configuration


def parameters(preset: str) -> int:
    with torch.device("meta"):
        model = Transformer(ModelConfig(**PRESETS[preset]), 64)
    return sum(p.numel() for p in model.blocks.parameters())


def test_presets_have_the_published_sizes() -> None:
    assert parameters("paper") == 85_017_600
    assert parameters("mini") == pytest.approx(2.4e6, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"width": 10}, "width 10 does not split into 4 heads of an even size"),
        ({"width": 12}, "width 12 does not split into 4 heads of an even size"),
        ({"dropout": 1.0}, r"< 1\.0 - at `\$\.dropout`"),
        ({"dropout": -0.1}, r">= 0\.0 - at `\$\.dropout`"),
    ],
)
def test_impossible_models_are_refused(keys: dict[str, float], line: str) -> None:
    good = {"layers": 1, "width": 16, "heads": 4, "hidden": 8}
    assert msgspec.convert(good, ModelConfig).width == 16
    with pytest.raises(msgspec.ValidationError, match=line):
        msgspec.convert({**good, **keys}, ModelConfig)
