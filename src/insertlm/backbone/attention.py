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

__all__ = ["Attention", "CachedAttention", "FullAttention", "PrefixAttention", "PrefixCache", "attend"]


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: [T, heads, head_dim] of the current rows. Returns [T, heads, head_dim]."""
        ...


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments) -> Tensor:
    """Every query row of segment s attends to every key row of segment s. q: [Tq, H, D], k and v: [Tk, H, D]."""
    if has_kernel(q):
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, queries.cu, keys.cu, queries.longest, keys.longest)
        assert isinstance(out, Tensor)
        return out
    visible = keys.valid.clone()
    visible[:, 0] = True  # an empty segment must not give NaN, not even in cells that nobody reads
    return _attend_dense(q, _pad(k, keys), _pad(v, keys), queries, visible[:, None, None, :])


def has_kernel(q: Tensor) -> bool:
    """Whether the varlen kernel takes it."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _attend_with_mass(q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments) -> tuple[Tensor, Tensor]:
    """`attend` by the kernel, and the log of each query's softmax denominator, [Tq, H, 1]."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    aux = AuxRequest(lse=True)
    out, lse = varlen_attn(q, k, v, queries.cu, keys.cu, queries.longest, keys.longest, return_aux=aux)
    return out, lse.T[:, :, None]


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, queries: Segments, mask: Tensor) -> Tensor:
    """k, v: [S, H, Lk, D]; mask: broadcastable to [S, H, Lq, Lk]. Packed queries in, packed rows out."""
    out = F.scaled_dot_product_attention(_pad(q, queries), k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, queries.cells)


def _pad(x: Tensor, segments: Segments) -> Tensor:
    """[T, H, D] to [S, H, longest, D], zeros where no row is."""
    count = len(segments.cu) - 1
    dense = x.new_zeros(count * segments.longest, *x.shape[1:]).index_copy(0, segments.cells, x)
    return dense.view(count, segments.longest, *x.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class FullAttention:
    """Every row sees its whole segment. `record`, if given, receives each layer's (k, v) for `CachedAttention`."""

    segments: Segments
    record: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.record is not None:
            self.record.append((k, v))
        return attend(q, k, v, self.segments, self.segments)


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """Keys and values of prefix rows computed earlier, none of whose segments is empty.

    layers: per layer (k, v), packed [Tp, H, D] where the kernel runs, else padded [S, H, longest, D]
    """

    layers: list[tuple[Tensor, Tensor]]
    segments: Segments

    @classmethod
    def of(cls, record: list[tuple[Tensor, Tensor]], segments: Segments) -> PrefixCache:
        """record: what `FullAttention` recorded of the prefix rows"""
        if has_kernel(record[0][0]):
            return cls(record, segments)
        return cls([(_pad(k, segments), _pad(v, segments)) for k, v in record], segments)

    def select(self, chosen: Tensor) -> PrefixCache:
        """Only these sequences; chosen: [S'] indices"""
        segments, rows = self.segments.select(chosen)
        index = rows if has_kernel(self.layers[0][0]) else chosen
        return PrefixCache([(k.index_select(0, index), v.index_select(0, index)) for k, v in self.layers], segments)


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """The current rows attend to themselves and to their sequence's cached prefix.

    The kernel attends to one and to the other, and the results are mixed by their softmax denominators: no key is
    moved. Elsewhere the padded keys of both are put side by side.
    """

    cache: PrefixCache
    segments: Segments

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past_k, past_v = self.cache.layers[layer]
        if has_kernel(q):
            past, past_mass = _attend_with_mass(q, past_k, past_v, self.segments, self.cache.segments)
            present, mass = _attend_with_mass(q, k, v, self.segments, self.segments)
            return torch.lerp(present, past, torch.sigmoid(past_mass - mass).to(q.dtype))
        keys = torch.cat([past_k, _pad(k, self.segments)], 2)
        values = torch.cat([past_v, _pad(v, self.segments)], 2)
        valid = torch.cat([self.cache.segments.valid, self.segments.valid], 1)
        return _attend_dense(q, keys, values, self.segments, valid[:, None, None, :])
