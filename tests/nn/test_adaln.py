"""Blocks that know the time are the textbook's, and every row knows the time of its own sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from insertlm.core.noise import column_keys, keep_mask
from insertlm.core.packing import Segments
from insertlm.nn.adaln import AdaptiveBlock, AdaptiveNorm, TimeFeatures, spread
from insertlm.nn.attention import Attention, PackedAttention
from insertlm.nn.fused import rotate
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.nn.transformer import Transformer

Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

VOCABULARY = 7
TINY = ModelConfig(layers=2, width=12, heads=3, hidden=20, dropout=0.3)
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


class Network(nn.Module):
    """All of adaln.py put together."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.backbone = Transformer(config, VOCABULARY, AdaptiveBlock)
        self.time, self.norm = TimeFeatures(config), AdaptiveNorm(config)

    def forward(
        self, tokens: Tensor, sizes: list[int], noise: Tensor, keys: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        features = self.time(noise)
        x = self.backbone(tokens, places(sizes), full(sizes), keys=keys, wanted=wanted, condition=(features, owner))
        normed: Tensor = self.norm(x, (features, owner if wanted is None else owner[wanted]))
        return normed


def full(sizes: list[int]) -> Attention:
    return PackedAttention(Segments(torch.tensor([0, *sizes]).cumsum(0).int(), max(sizes)))


def places(sizes: list[int]) -> Tensor:
    return torch.cat([torch.arange(size) for size in sizes])


def build(config: ModelConfig = TINY, *, awake: bool = True) -> Network:
    """awake: with weights where a new network has zeros"""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Network(config).double()
        if awake:
            for parameter in network.parameters():
                parameter.data += 0.3 * torch.randn_like(parameter)
    return network


def drawn(sizes: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, noise and dropout keys."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (sum(sizes),), generator=generator)
    noise = 10 * torch.rand(len(sizes), generator=generator)
    return tokens, noise, torch.randint(2**31, (sum(sizes),), generator=generator).int()


# --- The whole


def textbook(network: Network, tokens: Tensor, noise: Tensor, keys: Tensor | None, attention: Softmax) -> Tensor:
    """One sequence, from the names of the weights alone."""
    w = dict(network.named_parameters())
    wave = noise * 10_000 ** (-torch.arange(128).double() / 128)
    c = F.silu(w["time.up.weight"] @ torch.cat([wave.cos(), wave.sin()]) + w["time.up.bias"])
    c = F.silu(w["time.out.weight"] @ c + w["time.out.bias"])

    def normed(x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] * (1 + scale) + shift

    def dropped(x: Tensor, site: int) -> Tensor:
        return (
            x if keys is None else x * keep_mask(keys, column_keys(x.shape[1]), site, TINY.dropout) / (1 - TINY.dropout)
        )

    backbone, everyone = network.backbone, torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    turn = backbone.cos, backbone.sin, torch.arange(len(tokens))
    x = w["backbone.embedding.weight"][tokens]
    for layer in range(TINY.layers):
        at = f"backbone.blocks.{layer}"
        six = (w[f"{at}.modulation.weight"] @ c + w[f"{at}.modulation.bias"]).chunk(6)
        read = normed(x, f"{at}.attention_norm", *six[:2]) @ w[f"{at}.qkv.weight"].T
        qkv = read.view(len(x), 3 * TINY.heads, -1)
        mixed = attention(*rotate(qkv, TINY.heads, *turn), everyone).flatten(1)
        x = x + six[2] * dropped(mixed @ w[f"{at}.out.weight"].T, 2 * layer)
        read = normed(x, f"{at}.hidden_norm", *six[3:5])
        inner = (read @ w[f"{at}.up.weight"].T + w[f"{at}.up.bias"]).relu()
        x = x + six[5] * dropped(inner @ w[f"{at}.down.weight"].T + w[f"{at}.down.bias"], 2 * layer + 1)
    return normed(x, "norm.norm", *(w["norm.modulation.weight"] @ c + w["norm.modulation.bias"]).chunk(2))


def gradients(value: Tensor, network: Network) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(network.parameters())))


@given(lengths, seeds, st.booleans())
@settings(max_examples=20)
def test_the_textbook_says_the_same_and_learns_the_same(
    softmax_attention: Softmax, sizes: list[int], seed: int, dropout: bool
) -> None:
    network = build()
    tokens, noise, keys = drawn(sizes, seed)
    parts = zip(*(torch.split(part, sizes) for part in (tokens, keys)), noise, strict=True)
    expected = torch.cat([textbook(network, t, n, k if dropout else None, softmax_attention) for t, k, n in parts])
    found = network(tokens, sizes, noise, keys if dropout else None)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed)).double()
    for a, b in zip(
        gradients((found * weight).sum(), network), gradients((expected * weight).sum(), network), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@given(lengths, seeds, st.data())
@settings(max_examples=20)
def test_wanted_rows_are_those_of_all(sizes: list[int], seed: int, data: st.DataObject) -> None:
    network = build()
    tokens, noise, keys = drawn(sizes, seed)
    wanted = torch.tensor(data.draw(st.lists(st.sampled_from(range(sum(sizes))), min_size=1)))
    found = network(tokens, sizes, noise, keys, wanted)
    torch.testing.assert_close(found, network(tokens, sizes, noise, keys)[wanted], rtol=1e-11, atol=1e-11)


def test_a_new_network_passes_its_embeddings_through() -> None:
    network = build(awake=False)
    tokens, noise, keys = drawn([4, 3], 0)
    condition = network.time(noise), torch.tensor([0] * 4 + [1] * 3)
    hidden = network.backbone(tokens, places([4, 3]), full([4, 3]), keys=keys, condition=condition)
    assert torch.equal(hidden, network.backbone.embedding(tokens))
    torch.testing.assert_close(network.norm(hidden, condition), F.layer_norm(hidden, hidden.shape[1:]))


def test_every_sequence_has_its_own_time() -> None:
    network = build()
    tokens, noise, _ = drawn([3, 3], 1)
    here, there = (network(tokens, [3, 3], noise + torch.tensor([0.0, late])) for late in (0.0, 0.5))
    torch.testing.assert_close(here[:3], there[:3], rtol=1e-12, atol=1e-12)
    assert float((here[3:] - there[3:]).detach().abs().min()) > 1e-6


def test_pieces_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but its code generator, which is slow."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled = (build(msgspec.structs.replace(TINY, layers=1)) for _ in range(2))
    compiled.backbone.compile_pieces()
    with torch.inference_mode():
        for sizes in ([3, 2], [4, 1, 2]):
            tokens, noise, _ = drawn(sizes, 2)
            torch.testing.assert_close(compiled(tokens, sizes, noise), plain(tokens, sizes, noise))
    torch._dynamo.reset()


# --- Parts


@given(st.integers(1, 5), st.integers(0, 9), seeds)
def test_spreading_is_a_gather_and_its_gradient_the_sum_over_rows(count: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3, generator=generator).double().requires_grad_()
    owner = torch.randint(count, (rows,), generator=generator)
    found = spread(values, owner)
    assert torch.equal(found, values[owner])
    weight = torch.randn(rows, 3, generator=generator).double()
    (gradient,) = torch.autograd.grad((found * weight).sum(), values)
    torch.testing.assert_close(gradient, torch.zeros(count, 3).double().index_add(0, owner, weight))


def test_features_are_in_full_precision_whatever_surrounds_them() -> None:
    time = TimeFeatures(TINY)
    noise = torch.tensor([0.001, 0.0011, 10.0])
    with torch.autocast("cpu", torch.bfloat16):
        inside = time(noise)
    assert torch.equal(inside, time(noise))
    assert len(set(inside[:, 0].tolist())) == 3


def test_small_scales_survive_half_precision() -> None:
    norm = AdaptiveNorm(TINY)
    nn.init.constant_(norm.modulation.bias[12:], 1e-3)
    x, condition = torch.randn(5, 12), (torch.zeros(1, 12), torch.zeros(5).long())
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x, condition).float()
    plain = F.layer_norm(x, (12,))
    torch.testing.assert_close(found / plain, torch.full_like(x, 1.001), rtol=2e-5, atol=0)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_sizes_are_the_published_ones() -> None:
    """92.13 M in the blocks, of which the modulation has 7.13 M, and 0.25 M beside them."""
    config = ModelConfig(**PRESETS["paper"])
    with torch.device("meta"):
        blocks = Transformer(config, 64, AdaptiveBlock).blocks
        beside = parameters(TimeFeatures(config)) + parameters(AdaptiveNorm(config))
    assert parameters(blocks) == 92_132_352
    assert sum(parameters(module) for name, module in blocks.named_modules() if "modulation" in name) == 7_133_184
    assert beside == 256 * 128 + 128 + 128 * 128 + 128 + 768 + 2 * 768 * 129


@pytest.mark.parametrize(("width", "features"), [(64, 64), (128, 128), (256, 128)])
def test_features_are_no_wider_than_the_model(width: int, features: int) -> None:
    config = msgspec.structs.replace(TINY, width=width, heads=2)
    assert TimeFeatures(config)(torch.zeros(3)).shape == (3, features)


def test_waves_have_the_published_lengths() -> None:
    """Seen through layers that pass waves on: silu is turned into a line by a large bias."""
    time = TimeFeatures(msgspec.structs.replace(TINY, width=128, heads=2)).double()
    for wave, expected in ((0, math.cos(2.0)), (64, math.cos(0.02)), (128, math.sin(2.0)), (192, math.sin(0.02))):
        time.up.weight.data.zero_()[0, wave] = 1.0
        time.up.bias.data.fill_(60.0)
        time.out.weight.data.zero_()[0, 0] = 1.0
        time.out.bias.data.zero_()
        assert float(time(torch.tensor([2.0]))[0, 0].detach()) - 60.0 == pytest.approx(expected, abs=1e-6)


@given(lengths, seeds)
@settings(max_examples=30)
def test_plain_blocks_are_adopted_whole(sizes: list[int], seed: int) -> None:
    """Whatever the time, and with biases that are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = Transformer(TINY, VOCABULARY).double()
        for parameter in plain.parameters():
            nn.init.normal_(parameter, std=0.3)
        tokens, noise = torch.randint(VOCABULARY, (sum(sizes),)), torch.rand(len(sizes), dtype=torch.float64)
    network = build().double()
    network.backbone.load_state_dict(AdaptiveBlock.adopt(plain.state_dict()))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    found = network.backbone(tokens, places(sizes), full(sizes), condition=(network.time(noise), owner))
    torch.testing.assert_close(found, plain(tokens, places(sizes), full(sizes)), rtol=1e-10, atol=1e-10)


def test_adaptive_blocks_are_adopted_as_they_are() -> None:
    weights = build().backbone.state_dict()
    assert AdaptiveBlock.adopt(weights) == weights
