"""Released weights in small files: a byte for every entry of a matrix.

A matrix is rounded row by row: the largest entry of a row becomes ±127, and the factor of each row is stored as
`<matrix>/scale`. Vectors are stored in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

_SCALE = "/scale"


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to int8 and a factor per row, the rest to bfloat16."""
    packed = {}
    for name, value in weights.items():
        if value.dim() < 2:
            packed[name] = value.bfloat16()
            continue
        # A row of zeros has no largest entry; any factor gives it back.
        scale = value.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        packed[name] = (value.float() / scale).round().to(torch.int8)
        packed[name + _SCALE] = scale
    return packed


def unpack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack`; weights that were not packed stay as they are."""
    return {
        name: value * weights[name + _SCALE] if name + _SCALE in weights else value
        for name, value in weights.items()
        if not name.endswith(_SCALE)
    }
