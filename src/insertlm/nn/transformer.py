"""The transformer that every family uses, over packed rows.

What it is made of is described by spec.py; the defaults there are the paper's. Beyond that:
- pre-norm blocks;
- rotary positions on the first dimensions of each head, half-split pairs, looked up by the positions given, so a row
  can stand anywhere in memory;
- dropout on what each block adds (not on attention probabilities, see attention.py), drawn from a hash, see noise.py;
- PyTorch's default initialisation, except that a tied embedding starts smaller.
The module knows ids, positions and an attention object; it does not know batches, caches, tasks or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insertlm.core.noise import column_keys, keep_mask
from insertlm.nn.attention import Attention
from insertlm.nn.fused import embed, layer_norm, linear, rms_norm, rotate, swiglu
from insertlm.nn.spec import ModelConfig

__all__ = ["Block", "Condition", "Rotation", "Transformer", "make_norm", "rotations"]

# What blocks may depend on besides the rows: something for each sequence, [B, …], and the sequence of each row, [T].
Condition = tuple[Tensor, Tensor]
# Cosines and sines of all positions, each [P, rotary/2], and the position of each row, [T].
Rotation = tuple[Tensor, Tensor, Tensor]


def rotations(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, each [max_length, rotary/2]."""
    dims = min(config.rotary_dims, config.head_dim)
    # In float64, because the error of a frequency grows with the position.
    frequency = config.rotary_base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(config.max_length)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.empty(width)), epsilon
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class Linear(nn.Linear):
    def forward(self, x: Tensor, *, relu: bool = False) -> Tensor:
        return linear(x, self.weight, self.bias, relu=relu)


def make_norm(config: ModelConfig, bias: bool = True) -> LayerNorm | RMSNorm:
    """bias: of a layer norm; the other kind never has one."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_epsilon)
    return LayerNorm(config.width, config.norm_epsilon, bias=bias)


class Block(nn.Module):
    columns: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.layer, self.drop, self.activation = layer, config.dropout, config.feed_forward
        self.heads, self.key_heads = config.heads, config.key_heads
        rows = (config.heads + 2 * config.key_heads) * config.head_dim
        self.attention_norm = make_norm(config)
        # One product for queries, keys and values, and one for both halves of a SwiGLU: large products are faster.
        self.qkv = nn.Linear(width, rows, bias=config.attention_bias)
        self.out = nn.Linear(config.heads * config.head_dim, width, bias=config.attention_bias)
        self.hidden_norm = make_norm(config)
        self.up = Linear(width, 2 * hidden if self.activation == "swiglu" else hidden, bias=config.feed_forward_bias)
        self.down = Linear(hidden, width, bias=config.feed_forward_bias)
        self.register_buffer("columns", column_keys(width), persistent=False)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention: Attention,
        keys: Tensor | None,
        wanted: Tensor | None,
        condition: Condition | None = None,
    ) -> Tensor:
        """x: [T, width]; keys: [T] int32 for dropout, or None; wanted: the rows to return, None for all."""
        condition = self.prepare(condition)
        mixed = attention(self.layer, *self.project(x, rotation, condition))
        if wanted is not None:  # all rows are keys, but from here on no row needs another
            x, mixed = x.index_select(0, wanted), mixed.index_select(0, wanted)
            keys = None if keys is None else keys.index_select(0, wanted)
            condition = None if condition is None else (condition[0], condition[1].index_select(0, wanted))
        return self.update(x, mixed, keys, condition)

    def project(self, x: Tensor, rotation: Rotation, condition: Condition | None) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of attention: q, [T, heads, head_dim], k and v, [T, key_heads, head_dim]."""
        qkv = self.qkv(self.read(x, 0, condition)).view(len(x), self.heads + 2 * self.key_heads, -1)
        return rotate(qkv, self.key_heads, *rotation)

    def update(self, x: Tensor, mixed: Tensor, keys: Tensor | None, condition: Condition | None) -> Tensor:
        """Everything after attention."""
        x = self.add(x, self._dropout(self.out(mixed.flatten(1)), keys, 0), 0, condition)
        hidden = self.up(self.read(x, 1, condition), relu=self.activation == "relu")
        if self.activation == "gelu":
            hidden = F.gelu(hidden)
        elif self.activation == "swiglu":
            hidden = swiglu(hidden)
        return self.add(x, self._dropout(self.down(hidden), keys, 1), 1, condition)

    @classmethod
    def adopt(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts the weights of a model with another kind of block, by name. Weights that cannot be converted stay as
        they are, and loading names them."""
        return dict(weights)

    def prepare(self, condition: Condition | None) -> Condition | None:
        """Computes what this block needs of the condition, once for all its steps."""
        return condition

    def read(self, x: Tensor, site: int, condition: Condition | None) -> Tensor:
        """The input of attention (site 0) and of the feed-forward (site 1), from the residual stream."""
        normed: Tensor = (self.attention_norm, self.hidden_norm)[site](x)
        return normed

    def add(self, x: Tensor, change: Tensor, site: int, condition: Condition | None) -> Tensor:
        """Adds their output to the residual stream."""
        return x + change

    def _dropout(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        if keys is None or self.drop == 0.0:
            return x
        # Each of the two places in each layer has a stream of its own.
        keep = keep_mask(keys, self.columns, 2 * self.layer + site, self.drop)
        return torch.where(keep, x / (1.0 - self.drop), 0.0)


class Transformer(nn.Module):
    """recompute: whether a block keeps only its input for backward and computes the rest again there. That takes a
    third more time and a fraction of the memory."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, vocabulary: int, block: Callable[[ModelConfig, int], Block] = Block
    ) -> None:
        super().__init__()
        self.config, self.recompute = config, False
        self.embedding = nn.Embedding(vocabulary, config.width)
        if config.tied:  # else the first logits would be as large as the square root of the width
            nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        self.blocks = nn.ModuleList([block(config, layer) for layer in range(config.layers)])
        self.norm = make_norm(config) if config.final_norm else None
        cos, sin = rotations(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def unembedding(self) -> nn.Linear:
        """A layer from hidden rows to logits, which shares the embedding's weight if the model is tied."""
        vocabulary, width = self.embedding.weight.shape
        if not self.config.tied:
            return nn.Linear(width, vocabulary, bias=False)
        tied = nn.Linear(width, vocabulary, bias=False, device="meta")  # without drawing weights that nobody uses
        tied.weight = self.embedding.weight
        return tied

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
        x = embed(tokens, self.embedding.weight)
        rotation = self.cos, self.sin, positions
        for layer, block in enumerate(self.blocks, start=1):
            rest = rotation, attention, keys, wanted if layer == len(self.blocks) else None, condition
            if self.recompute and torch.is_grad_enabled():
                # Dropout is a hash of its keys, so there is no state of a generator to restore.
                x = checkpoint(block, x, *rest, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, *rest)
        return x if self.norm is None else self.norm(x)

    @property
    def precision(self) -> torch.dtype:
        """That of what the linear layers of the blocks read, outside of autocast."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        dtype = block.qkv.weight.dtype
        return torch.bfloat16 if dtype == torch.int8 else dtype

    def autocast(self) -> torch.autocast:
        """The precision for decoding: bf16 on a GPU, else that of the blocks."""
        device = self.embedding.weight.device.type
        bf16 = device == "cuda" or self.precision == torch.bfloat16
        return torch.autocast(device, torch.bfloat16, enabled=bf16)

    def compile_pieces(self) -> None:
        """Compile the parts between attention calls, once for all blocks and numbers of rows. This is for decoding,
        where the number of rows changes all the time and compiling the whole network would not pay."""
        for block in self.blocks:
            for name in ("project", "update"):
                setattr(block, name, torch.compile(getattr(block, name), dynamic=True))
