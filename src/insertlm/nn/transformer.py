"""The transformer that every family uses, over packed rows.

Design choices, the published ones (`paper` preset) unless said:
- pre-norm blocks, LayerNorm with bias, ReLU feed-forward with biases, no biases in attention;
- rotary positions on the first 64 dimensions of each head, half-split pairs, looked up by the positions given, so a
  row can stand anywhere in memory;
- no norm after the last block: heads read the raw residual stream;
- dropout on what each block adds (not on attention probabilities, see attention.py), drawn from a hash, see noise.py;
- PyTorch's default initialisation.
The module knows ids, positions and an attention object; not batches, caches, tasks or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from insertlm.core.noise import column_keys, keep_mask
from insertlm.core.section import Count, Section, Share
from insertlm.nn.attention import Attention
from insertlm.nn.fused import layer_norm, linear, rotate

__all__ = ["PRESETS", "Block", "Condition", "ModelConfig", "Transformer"]

# What a kind of block may know of each sequence, [B, …], and which sequence each row belongs to, [T].
Condition = tuple[Tensor, Tensor]

_ROTARY_DIMS = 64
_ROTARY_BASE = 10_000.0

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"layers": 12, "width": 768, "heads": 12, "hidden": 3072, "dropout": 0.1},
    "mini": {"layers": 12, "width": 128, "heads": 4, "hidden": 512, "dropout": 0.0},
    "zebra": {"layers": 8, "width": 576, "heads": 8, "hidden": 3456, "dropout": 0.1},  # the paper's for zebra puzzles
    "zebra-19m": {"layers": 8, "width": 384, "heads": 6, "hidden": 2304, "dropout": 0.1},
}


class ModelConfig(Section, frozen=True, kw_only=True):
    """The `model` section of a recipe."""

    layers: Count
    width: Count
    heads: Count
    hidden: Count
    dropout: Share = 0.0  # of what each block adds
    prefix_lm: bool = False  # prefix rows see the prefix alone, so that decoding computes them once
    max_length: Count = 2048  # positions: the most tokens of a row, given and special ones included

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of an even size")


def rotations(count: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 … count-1, each [count, rotary/2]."""
    dims = min(_ROTARY_DIMS, head_dim)
    frequency = _ROTARY_BASE ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(count)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class Block(nn.Module):
    columns: Tensor

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
        self.register_buffer("columns", column_keys(width), persistent=False)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor, Tensor],
        attention: Attention,
        keys: Tensor | None,
        wanted: Tensor | None,
        condition: Condition | None = None,
    ) -> Tensor:
        """x: [T, width]; keys: [T] int32 for dropout, or None; wanted: the rows to return, None for all."""
        condition = self.heed(condition)
        mixed = attention(self.layer, *self.project(x, turn, condition))
        if wanted is not None:
            x, mixed = x.index_select(0, wanted), mixed.index_select(0, wanted)
            keys = None if keys is None else keys.index_select(0, wanted)
            condition = None if condition is None else (condition[0], condition[1].index_select(0, wanted))
        return self.update(x, mixed, keys, condition)

    def project(
        self, x: Tensor, turn: tuple[Tensor, Tensor, Tensor], condition: Condition | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What attention mixes: q, k, v, each [T, heads, head_dim]."""
        return rotate(self.qkv(self.read(x, 0, condition)).view(len(x), 3, self.heads, -1), *turn)

    def update(self, x: Tensor, mixed: Tensor, keys: Tensor | None, condition: Condition | None) -> Tensor:
        """Everything after attention."""
        x = self.add(x, self._dropout(self.out(mixed.flatten(1)), keys, 0), 0, condition)
        hidden = linear(self.read(x, 1, condition), self.up.weight, self.up.bias, relu=True)
        change = linear(hidden, self.down.weight, self.down.bias)
        return self.add(x, self._dropout(change, keys, 1), 1, condition)

    @classmethod
    def adopt(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Named weights of a model with blocks of another kind, as a model with these has them; what there is no way
        for stays as it is."""
        return dict(weights)

    def heed(self, condition: Condition | None) -> Condition | None:
        """What this block makes of it, once for all that follows."""
        return condition

    def read(self, x: Tensor, site: int, condition: Condition | None) -> Tensor:
        """What attention (site 0) and the feed-forward (site 1) read of the residual stream."""
        norm = (self.attention_norm, self.hidden_norm)[site]
        return layer_norm(x, norm.weight, norm.bias)

    def add(self, x: Tensor, change: Tensor, site: int, condition: Condition | None) -> Tensor:
        """How what they give is added to it."""
        return x + change

    def _dropout(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        if keys is None or self.drop == 0.0:
            return x
        keep = keep_mask(keys, self.columns, 2 * self.layer + site, self.drop)
        return torch.where(keep, x / (1.0 - self.drop), 0.0)


class Transformer(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, vocabulary: int, block: Callable[[ModelConfig, int], Block] = Block
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList([block(config, layer) for layer in range(config.layers)])
        cos, sin = rotations(config.max_length, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        *,
        keys: Tensor | None = None,
        wanted: Tensor | None = None,
        condition: Condition | None = None,
    ) -> Tensor:
        """tokens, positions: [T]; keys: [T] int32, what dropout depends on (None: no dropout). Returns [T, width], or
        only the rows `wanted`, which saves most of the last block."""
        x: Tensor = self.embedding(tokens)
        turn = self.cos, self.sin, positions
        for layer, block in enumerate(self.blocks, start=1):
            x = block(x, turn, attention, keys, wanted if layer == len(self.blocks) else None, condition)
        return x

    def autocast(self) -> torch.autocast:
        """The precision for writing: bfloat16 on a GPU, else that of the weights."""
        weight = next(module.weight for module in self.blocks.modules() if isinstance(module, nn.Linear))
        halved = weight.is_cuda or weight.dtype == torch.bfloat16
        return torch.autocast(weight.device.type, torch.bfloat16, enabled=halved)

    def compile_pieces(self) -> None:
        """Compile what lies between attention calls, once for all blocks and all numbers of rows: for decoding, where
        rows come and go and a whole compiled network would not pay."""
        for block in self.blocks:
            for name in ("project", "update"):
                setattr(block, name, torch.compile(getattr(block, name), dynamic=True))
