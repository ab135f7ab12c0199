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
from insertlm.nn.attention import PackedAttention
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.nn.transformer import Transformer

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


def full(sizes: list[int]) -> PackedAttention:
    return PackedAttention(Segments(torch.tensor([0, *sizes]).cumsum(0).int(), max(sizes)))


# --- The whole


def turned(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """Rotary positions: pair (i, i + half) of the first dimensions turns by position / base^(i / half)."""
    half = min(config.rotary_dims, x.shape[-1]) // 2
    angle = positions[:, None, None] / config.rotary_base ** (torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def textbook(model: Transformer, tokens: Tensor, positions: Tensor, attention: Softmax) -> Tensor:
    """Pre-norm; one sequence, everyone sees everyone."""
    config, weights = model.config, dict(model.named_parameters())
    everyone = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    queries, keys = config.heads * config.head_dim, config.key_heads * config.head_dim

    def normed(x: Tensor, name: str) -> Tensor:
        weight, epsilon = weights[f"{name}.weight"], config.norm_epsilon
        if config.norm == "rms":
            return x / (x.square().mean(1, keepdim=True) + epsilon).sqrt() * weight
        return F.layer_norm(x, x.shape[1:], weight, weights[f"{name}.bias"], epsilon)

    def product(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = weights["embedding.weight"][tokens]
    for layer in range(len(model.blocks)):
        at = f"blocks.{layer}"
        parts = torch.split(product(normed(x, f"{at}.attention_norm"), f"{at}.qkv"), [queries, keys, keys], 1)
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in parts)
        mixed = attention(turned(q, positions, config), turned(k, positions, config), v, everyone).flatten(1)
        x = x + product(mixed, f"{at}.out")
        inner = product(normed(x, f"{at}.hidden_norm"), f"{at}.up")
        if config.feed_forward == "swiglu":
            inner = F.silu(inner[:, : config.hidden]) * inner[:, config.hidden :]
        else:
            inner = F.gelu(inner) if config.feed_forward == "gelu" else inner.relu()
        x = x + product(inner, f"{at}.down")
    return normed(x, "norm") if config.final_norm else x


WIDE = ModelConfig(layers=2, width=2 * 72, heads=2, hidden=8)  # the last 8 dimensions of each head do not turn
LLAMA = ModelConfig(
    **{
        **PRESETS["smollm2-135m"],
        "layers": 2,
        "width": 12,
        "heads": 6,
        "kv_heads": 2,
        "hidden": 20,
        "max_length": 2048,
    },
    head_size=8,  # the heads together are wider than the stream
)
MIXED = ModelConfig(
    layers=2,
    width=12,
    heads=2,
    kv_heads=1,
    hidden=5,
    feed_forward="gelu",
    rotary_dims=4,
    attention_bias=True,
    feed_forward_bias=False,
    final_norm=True,
    norm_epsilon=0.1,
)


@given(lengths, seeds, st.sampled_from([TINY, WIDE, LLAMA, MIXED]))
@settings(max_examples=40)
def test_the_textbook_says_the_same(
    softmax_attention: Softmax, sizes: list[int], seed: int, config: ModelConfig
) -> None:
    model = build(config, seed)
    tokens, positions = drawn(sum(sizes), seed, VOCABULARY), drawn(sum(sizes), seed + 1, 20)
    rows = zip(torch.split(tokens, sizes), torch.split(positions, sizes), strict=True)
    expected = torch.cat([textbook(model, t, p, softmax_attention) for t, p in rows])
    # The model's cosines are float32.
    torch.testing.assert_close(model(tokens, positions, full(sizes)), expected, rtol=1e-5, atol=1e-5)


@given(lengths, seeds, st.integers(1, 400), st.sampled_from([TINY, WIDE, LLAMA]))
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


# --- Gradients


@pytest.mark.parametrize("config", [msgspec.structs.replace(TINY, dropout=0.3), LLAMA], ids=["tiny", "llama"])
def test_blocks_computed_again_have_the_same_gradients(config: ModelConfig) -> None:
    model = build(config)
    keys = torch.arange(5).int()

    def gradients() -> tuple[Tensor, ...]:
        hidden = model(torch.arange(5), torch.arange(5), full([2, 3]), keys=keys, wanted=torch.tensor([0, 3]))
        return torch.autograd.grad(hidden.square().sum(), list(model.parameters()))

    plain, calls = gradients(), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.recompute = True
    for a, b in zip(gradients(), plain, strict=True):
        assert torch.equal(a, b)
    assert len(calls) == 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["tiny", "llama"])
def test_blocks_computed_again_are_one_graph(config: ModelConfig) -> None:
    """Without attention, which on a CPU asks the device, and without the code generator, which is slow."""
    model = build(config)
    tokens = torch.arange(6)

    def gradients(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def alone(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

        return torch.autograd.grad(call(tokens, tokens, alone).square().sum(), list(model.parameters()))

    plain = gradients(model)
    model.recompute = True
    for a, b in zip(gradients(torch.compile(model, backend="aot_eager", fullgraph=True)), plain, strict=True):
        torch.testing.assert_close(a, b)


# --- Configuration


def parameters(preset: str) -> int:
    with torch.device("meta"):
        model = Transformer(ModelConfig(**PRESETS[preset]), 64)
    return sum(p.numel() for p in model.blocks.parameters())


def test_presets_have_the_published_sizes() -> None:
    assert parameters("paper") == 85_017_600
    assert parameters("mini") == pytest.approx(2.4e6, rel=0.02)
    assert parameters("smollm2-135m") + 49_152 * 576 + 576 == 134_515_008


@pytest.mark.parametrize("preset", ["paper", "mini", "zebra", "zebra-19m"])
def test_older_presets_have_the_weights_they_had(preset: str) -> None:
    config = ModelConfig(**PRESETS[preset])
    with torch.device("meta"):
        weights = Transformer(config, 64).state_dict()
    width, hidden = config.width, config.hidden
    norms = {f"{norm}.{part}": (width,) for norm in ("attention_norm", "hidden_norm") for part in ("weight", "bias")}
    matrices = {"qkv.weight": (3 * width, width), "out.weight": (width, width)}
    feed_forward = {"up": (hidden, width), "down": (width, hidden)}
    matrices |= {f"{name}.weight": shape for name, shape in feed_forward.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in feed_forward.items()}
    blocks = {
        f"blocks.{layer}.{name}": shape
        for layer in range(config.layers)
        for name, shape in {**norms, **matrices, **biases}.items()
    }
    assert {name: tuple(value.shape) for name, value in weights.items()} == {"embedding.weight": (64, width), **blocks}


def test_a_tied_model_has_one_matrix_of_words() -> None:
    model = build(msgspec.structs.replace(TINY, tied=True))
    assert model.unembedding().weight is model.embedding.weight
    assert build().unembedding().weight is not build().embedding.weight
    logits = model.unembedding()(model(torch.arange(5), torch.arange(5), full([5])))
    assert float(logits.detach().std()) < 3  # not the square root of the width times that


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"width": 10}, "width 10 does not split into 4 heads of an even size"),
        ({"width": 12}, "width 12 does not split into 4 heads of an even size"),
        ({"kv_heads": 3}, "4 heads cannot share 3 kv_heads; expected a divisor of heads"),
        ({"kv_heads": 8}, "4 heads cannot share 8 kv_heads; expected a divisor of heads"),
        ({"head_size": 3}, "head_size is 3; expected an even number"),
        ({"rotary_dims": 7}, "rotary_dims is 7; expected an even number"),
        ({"norm": "batch"}, r"Invalid enum value 'batch' - at `\$\.norm`"),
        ({"norm_epsilon": 0.0}, r"> 0\.0 - at `\$\.norm_epsilon`"),
        ({"dropout": 1.0}, r"< 1\.0 - at `\$\.dropout`"),
        ({"dropout": -0.1}, r">= 0\.0 - at `\$\.dropout`"),
    ],
)
def test_impossible_models_are_refused(keys: dict[str, Any], line: str) -> None:
    good = {"layers": 1, "width": 16, "heads": 4, "hidden": 8}
    assert msgspec.convert(good, ModelConfig).width == 16
    with pytest.raises(msgspec.ValidationError, match=line):
        msgspec.convert({**good, **keys}, ModelConfig)
