"""The transformer that every family uses, over packed rows.

Design choices, the published ones (`paper` preset) unless said:
- pre-norm blocks, LayerNorm with bias, ReLU feed-forward with biases, no biases in attention;
- rotary positions on the first 64 dimensions of each head, half-split pairs, computed from the positions given, so a
  row can stand anywhere in memory;
- no norm after the last block: heads read the raw residual stream;
- dropout on what each block adds (not on attention probabilities, see attention.py), drawn from a hash, see noise.py;
- PyTorch's default initialisation.
The module knows ids, positions and an attention object; not batches, caches, tasks or devices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from insertlm.backbone.attention import Attention
from insertlm.noise import keep_mask
from insertlm.section import Count, Section

__all__ = ["PRESETS", "ModelConfig", "Transformer"]

_ROTARY_DIMS = 64
_ROTARY_BASE = 10_000.0

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"layers": 12, "width": 768, "heads": 12, "hidden": 3072, "dropout": 0.1},
    "mini": {"layers": 12, "width": 128, "heads": 4, "hidden": 512, "dropout": 0.0},
}


class ModelConfig(Section, frozen=True, kw_only=True):
    """The `model` section of a recipe."""

    layers: Count
    width: Count
    heads: Count
    hidden: Count
    dropout: float = 0.0
    prefix_lm: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of an even size")


def rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, rotary/2] for positions [T]."""
    dims = min(_ROTARY_DIMS, head_dim)
    frequency = _ROTARY_BASE ** (-torch.arange(0, dims, 2, device=positions.device) / dims)
    angle = (positions[:, None] * frequency)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dimensions of each head; x: [T, H, D], the others pass."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.width
        self.layer, self.heads, self.drop = layer, config.heads, config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.hidden)
        self.down = nn.Linear(config.hidden, width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attention: Attention, keys: Tensor | None) -> Tensor:
        """x: [T, width]; keys: [T] int32 for dropout, or None."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), 3, self.heads, -1)
        q, k, v = qkv.unbind(1)
        mixed = attention(self.layer, rotate(q, *turn), rotate(k, *turn), v).flatten(1)
        x = x + self._dropout(self.out(mixed), keys, 2 * self.layer)
        return x + self._dropout(self.down(F.relu(self.up(self.hidden_norm(x)))), keys, 2 * self.layer + 1)

    def _dropout(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        if keys is None or self.drop == 0.0:
            return x
        return torch.where(keep_mask(keys, x.shape[-1], site, self.drop), x / (1.0 - self.drop), 0.0)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, keys: Tensor | None = None) -> Tensor:
        """tokens, positions: [T]; keys: [T] int32, what dropout depends on (None: no dropout). Returns [T, width]."""
        x = self.embedding(tokens)
        turn = rotation(positions, self.head_dim)
        for block in self.blocks:
            x = block(x, turn, attention, keys)
        return x
