"""Linear layers in eight bits, for writing on a CPU.

A step of writing multiplies a few rows by every matrix of the model, and that takes as long as reading the matrices
does. In eight bits they are half as large as in bfloat16. The entry of a row that is farthest from 0 becomes ±127, and
each row has a factor in bfloat16; inputs and outputs are in bfloat16, sums in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EightBits", "product", "round_linears", "rounded", "supported"]

_FEW = 16  # rows; for more, torch's kernel takes longer than a product in bfloat16
_PIECE = 1 << 21  # entries that are widened or rounded at once: what is in between takes little memory
_COLUMNS = 32  # of a matrix, a multiple: torch's kernel reads whole registers, without looking where a row ends


class EightBits(nn.Module):
    """A linear layer without a gradient. In a state dict its weight is in float32, under its usual name."""

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """With the weights of this one, if it has any yet."""
        super().__init__()
        weight = linear.weight
        # Not by empty_like, for which torch would load a third of a second's worth of modules.
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scale = torch.empty(len(weight), dtype=torch.bfloat16, device=weight.device)
        self.register_buffer("scale", scale, persistent=False)  # no parameter, which whoever counts them would count
        self.bias = linear.bias
        if not weight.is_meta:
            self.take(weight)

    def take(self, weight: Tensor) -> None:
        """Become this weight. [N, K]"""
        self.weight.data, self.scale = rounded(weight)

    def forward(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """[T, K] to [T, N]"""
        out = product(x.bfloat16(), self.weight, self.scale)
        if self.bias is not None:
            out = out.add_(self.bias)
        return out.relu_() if relu else out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach() * self.scale.float()[:, None]


def round_linears(module: nn.Module) -> None:
    """Put EightBits in place of the linear layers in a module."""
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear) and child.in_features % _COLUMNS == 0:
                setattr(parent, name, EightBits(child))


@torch.no_grad()
def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] to int8 [N, K] and the factors of its rows, bfloat16 [N]"""
    codes = torch.empty_like(weight, dtype=torch.int8)
    scale = weight.new_empty(len(weight), dtype=torch.bfloat16)
    for part in _pieces(weight):
        rows = weight[part].float()
        factor = (rows.abs().amax(1) / 127).bfloat16()
        factor = torch.where(factor == 0, 1, factor)  # of zeros; any factor gives them back
        scale[part] = factor
        codes[part] = (rows / factor.float()[:, None]).round_()
    return codes, scale


def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x: bfloat16 [T, K]   codes, scale: as `rounded` returns them   Returns bfloat16 [T, N]"""
    if len(x) <= _FEW:
        return torch._weight_int8pack_mm(x.contiguous(), codes, scale)
    return torch.cat([F.linear(x, codes[part].bfloat16()) for part in _pieces(codes)], 1).mul_(scale)


def supported() -> bool:
    """Whether this torch has the kernel for this CPU."""
    try:
        row, codes = torch.ones(1, _COLUMNS, dtype=torch.bfloat16), torch.ones(1, _COLUMNS, dtype=torch.int8)
        return bool(torch._weight_int8pack_mm(row, codes, row[0, :1]) == _COLUMNS)
    except (AttributeError, RuntimeError):  # which NotImplementedError is, too
        return False


def _pieces(weight: Tensor) -> list[slice]:
    rows = max(1, _PIECE // weight.shape[1])
    return [slice(first, first + rows) for first in range(0, len(weight), rows)]
