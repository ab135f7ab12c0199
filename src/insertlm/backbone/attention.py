"""One façade for attention over packed rows: the varlen flash kernel on CUDA, SDPA everywhere else.

The kernel takes half-precision CUDA tensors only; whatever else arrives goes through `scaled_dot_product_attention` on
a padded copy. Tests pin one to the other. Neither drops attention probabilities: the kernel cannot, and a model should
not train differently on a CPU.

A transformer block only calls `attention(layer, q, k, v)`; which rows see which is the business of the objects here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.packing import Segments

__all__ = ["Attention", "CachedAttention", "FullAttention", "PrefixAttention", "attend"]


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: [T, heads, head_dim] of the current rows. Returns [T, heads, head_dim]."""
        ...


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments) -> Tensor:
    """Every query row of segment s attends to every key row of segment s. q: [Tq, H, D], k and v: [Tk, H, D]."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, queries.cu, keys.cu, queries.longest, keys.longest)
        assert isinstance(out, Tensor)
        return out
    return _attend_padded(q, k, v, queries, keys, keys.valid[:, None, None, :])


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, mask: Tensor) -> Tensor:
    """mask: broadcastable to [S, H, longest query, longest key]; a row that sees nothing is not read back."""
    mask = mask.clone()
    mask[..., 0] = True  # an empty segment must not give NaN, not even in cells that nobody reads
    out = F.scaled_dot_product_attention(_pad(q, queries), _pad(k, keys), _pad(v, keys), attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, queries.cells)


def _pad(x: Tensor, segments: Segments) -> Tensor:
    """[T, H, D] to [S, H, longest, D], zeros where no row is."""
    count = len(segments.cu) - 1
    dense = x.new_zeros(count * segments.longest, *x.shape[1:]).index_copy(0, segments.cells, x)
    return dense.unflatten(0, (count, segments.longest)).transpose(1, 2)


@dataclass(frozen=True)
class FullAttention:
    """Every row sees its whole segment. `record`, if given, receives each layer's (k, v) for `CachedAttention`."""

    segments: Segments
    record: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.record is not None:
            self.record.append((k, v))
        return attend(q, k, v, self.segments, self.segments)


@dataclass(frozen=True)
class PrefixAttention:
    """Rows of the prefix, the first `prefix[s]` of each segment, see the prefix alone; the rest see everything.

    The kernel has no such mask, so it runs twice: once with every segment cut in two at the end of its prefix (right
    for prefix rows), once whole (right for the others).

    halves: `segments` with every one cut in two   in_prefix: [T] bool
    """

    segments: Segments
    halves: Segments
    in_prefix: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        within = attend(q, k, v, self.halves, self.halves)
        whole = attend(q, k, v, self.segments, self.segments)
        return torch.where(self.in_prefix[:, None, None], within, whole)


@dataclass(frozen=True)
class CachedAttention:
    """The current rows attend to themselves and to prefix rows computed earlier.

    cache: per layer the (k, v) of the prefix rows, [Tp, H, D]   rows: [Tk], the key rows of all segments, as indices
    into the cached rows followed by the current ones
    """

    cache: list[tuple[Tensor, Tensor]]
    rows: Tensor
    queries: Segments
    keys: Segments

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached_k, cached_v = self.cache[layer]
        k = torch.cat([cached_k, k]).index_select(0, self.rows)
        v = torch.cat([cached_v, v]).index_select(0, self.rows)
        return attend(q, k, v, self.queries, self.keys)
