"""The description of a transformer: the `model` section of a recipe.

Every model is one of these descriptions, those of the paper and pretrained ones alike. The defaults are the paper's
choices, so that a recipe names only what differs, and recipes written before a key existed still mean the same model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from insertlm.core.section import Count, Index, Section, Share

__all__ = ["PRESETS", "ModelConfig"]

_Positive = Annotated[float, msgspec.Meta(gt=0.0)]

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"layers": 12, "width": 768, "heads": 12, "hidden": 3072, "dropout": 0.1},
    "mini": {"layers": 12, "width": 128, "heads": 4, "hidden": 512, "dropout": 0.0},
    "zebra": {"layers": 8, "width": 576, "heads": 8, "hidden": 3456, "dropout": 0.1},  # the paper's for zebra puzzles
    "zebra-19m": {"layers": 8, "width": 384, "heads": 6, "hidden": 2304, "dropout": 0.1},
    "smollm2-135m": {
        "layers": 30,
        "width": 576,
        "heads": 9,
        "kv_heads": 3,
        "hidden": 1536,
        "feed_forward": "swiglu",
        "norm": "rms",
        "final_norm": True,
        "feed_forward_bias": False,
        "tied": True,
        "rotary_base": 100_000.0,
        "max_length": 8192,
    },
}


class ModelConfig(Section, frozen=True, kw_only=True):
    """The `model` section of a recipe."""

    layers: Count  # blocks of attention and feed-forward
    width: Count  # of the residual stream
    heads: Count  # of queries
    hidden: Count  # width of the feed-forward
    dropout: Share = 0.0  # of what a block adds to the residual stream
    prefix_lm: bool = False  # prefix rows see the prefix alone, so that decoding computes them once
    max_length: Count = 2048  # positions: the most tokens of a row, given and special ones included
    norm: Literal["layer", "rms"] = "layer"  # before attention and feed-forward
    norm_epsilon: _Positive = 1e-5  # added to the variance
    final_norm: bool = False  # after the last block; without it heads read the raw residual stream
    feed_forward: Literal["relu", "gelu", "swiglu"] = "relu"  # its activation; swiglu has a gate
    feed_forward_bias: bool = True  # of both its products
    attention_bias: bool = False  # of queries, keys, values and the output
    kv_heads: Index = 0  # of keys and values, each shared by as many heads of queries; 0 = as many as heads
    head_size: Index = 0  # dimensions of a head; 0 = width / heads
    rotary_dims: Count = 64  # the most dimensions of a head that are rotated
    rotary_base: _Positive = 10_000.0  # wavelengths of rotary positions reach to 2π times this
    tied: bool = False  # the unembedding is the embedding

    def __post_init__(self) -> None:
        if not self.head_size and self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of an even size")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads; expected a divisor of heads")
        for key, size in (("head_size", self.head_size), ("rotary_dims", self.rotary_dims)):
            if size % 2:  # rotations work on pairs
                raise ValueError(f"{key} is {size}; expected an even number")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads
