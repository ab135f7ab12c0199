"""Blocks conditioned on time: adaptive layer norm, for families whose rows depend on a noise level.

Design choices, those of diffusion transformers (DiT) as the masked-diffusion literature uses them:
- one number per sequence becomes 128 cosines and 128 sines, and a small network turns them into features. It runs in
  full precision, because its inputs differ by little;
- in every block a linear layer computes shift, scale and gate from the features, for attention and for the
  feed-forward: x + gate · f(norm(x) · (1 + scale) + shift). The residual is the stream itself; the paper's release adds
  to the modulated input instead, which normalises the stream in every block;
- these layers start at zero, so that a new network passes its embeddings through unchanged;
- layer norms have no bias, because the shift is one;
- the features have the published 128 dimensions, or the width of the model if that is less.

Rows are packed, and all rows of a sequence share its modulation, so it is gathered by row. The gradient of a gather is
a sum over the rows of each sequence. torch computes it by atomic additions, a hundred or so to every address and in no
fixed order; a product with the membership matrix is faster and gives the same bits every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from insertlm.nn.spec import ModelConfig
from insertlm.nn.transformer import Block, Condition, make_norm

__all__ = ["AdaptiveBlock", "AdaptiveNorm", "TimeFeatures", "spread"]

_WAVES = 128
_LONGEST_WAVE = 10_000.0
_FEATURES = 128
_NORMS = ("attention_norm", "hidden_norm")  # of a plain block


class TimeFeatures(nn.Module):
    """Maps one number per sequence to the features that every block reads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(2 * _WAVES, _features(config.width))
        self.out = nn.Linear(_features(config.width), _features(config.width))

    def forward(self, number: Tensor) -> Tensor:
        """[B] to [B, features]"""
        place = torch.arange(_WAVES, device=number.device, dtype=self.up.weight.dtype)
        angle = number[:, None] * torch.exp(-math.log(_LONGEST_WAVE) / _WAVES * place)
        waves = torch.cat([angle.cos(), angle.sin()], 1)
        # In bf16 many noise levels would be the same number.
        with torch.autocast(number.device.type, enabled=False):
            return nn.functional.silu(self.out(nn.functional.silu(self.up(waves))))


class AdaptiveBlock(Block):
    """A block whose `condition` is the features of each sequence, [B, features], and the sequence of each row, [T]."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_norm = make_norm(config, bias=False)
        self.hidden_norm = make_norm(config, bias=False)
        self.modulation = _zero_linear(_features(config.width), 6 * config.width)

    @classmethod
    def adopt(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From plain blocks, with the same outputs: a norm's bias becomes a constant shift, and every gate is 1."""
        adopted = dict(weights)
        for name in [name for name in weights if name.endswith(f"{_NORMS[0]}.weight")]:
            block = name.removesuffix(f"{_NORMS[0]}.weight")
            if f"{block}modulation.bias" in weights:  # one of ours
                continue
            norms = [block + norm for norm in _NORMS]
            # An RMS norm has no bias, and so no shift.
            shifts = [adopted.pop(f"{norm}.bias", torch.zeros_like(weights[f"{norm}.weight"])) for norm in norms]
            # Shift, scale and gate, for attention and for the feed-forward.
            parts = [part for shift in shifts for part in (shift, torch.zeros_like(shift), torch.ones_like(shift))]
            bias = adopted[f"{block}modulation.bias"] = torch.cat(parts)
            adopted[f"{block}modulation.weight"] = bias.new_zeros(len(bias), _features(len(shifts[0])))
        return adopted

    def prepare(self, condition: Condition | None) -> Condition | None:
        assert condition is not None
        features, owner = condition
        return self.modulation(features), owner

    def read(self, x: Tensor, site: int, condition: Condition | None) -> Tensor:
        return _modulate(super().read(x, site, condition), self._part(condition, 3 * site, 3 * site + 2))

    def add(self, x: Tensor, change: Tensor, site: int, condition: Condition | None) -> Tensor:
        return x + self._part(condition, 3 * site + 2, 3 * site + 3) * change

    def _part(self, condition: Condition | None, first: int, last: int) -> Tensor:
        """Parts `first` to `last` of the six that modulation has, for every row: [T, (last − first) · width]"""
        assert condition is not None
        modulation, owner = condition
        width = modulation.shape[1] // 6
        return spread(modulation[:, first * width : last * width], owner)


class AdaptiveNorm(nn.Module):
    """The norm before the last linear layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config, bias=False)
        self.modulation = _zero_linear(_features(config.width), 2 * config.width)

    def forward(self, x: Tensor, condition: Condition) -> Tensor:
        """x: [T, width]; condition: as for a block"""
        features, owner = condition
        return _modulate(self.norm(x), spread(self.modulation(features), owner))


def spread(values: Tensor, owner: Tensor) -> Tensor:
    """Gives every row the values of its sequence: [B, d] and [T] to [T, d]."""
    rows: Tensor = _Spread.apply(values, owner)  # type: ignore[no-untyped-call]
    return rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Tensor) -> Tensor:
        ctx.save_for_backward(owner)
        ctx.count = len(values)
        return values.index_select(0, owner)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (owner,) = grads, ctx.saved_tensors
        # In the precision of the gradient, so that the product runs on tensor cores under autocast.
        member = owner == torch.arange(ctx.count, device=owner.device)[:, None]
        return member.to(grad.dtype) @ grad, None


def _modulate(x: Tensor, shift_and_scale: Tensor) -> Tensor:
    shift, scale = shift_and_scale.chunk(2, -1)
    return x + x * scale + shift  # 1 + scale would lose most of a small scale in bf16


def _features(width: int) -> int:
    return min(_FEATURES, width)


def _zero_linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    # A network that starts with gates of zero learns faster than one with random ones (DiT).
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
