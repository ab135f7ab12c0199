"""One façade for attention over packed rows: kernels on CUDA, SDPA everywhere else.

On CUDA, rows in half precision take a kernel of our own where segments are short (attention_kernels.py), else torch's
varlen flash kernel; whatever else arrives goes through `scaled_dot_product_attention` on a padded copy. Tests pin each
to the other. None drops attention probabilities: the flash kernel cannot, and a model should not train differently on a
CPU.

A transformer block only calls `attention(layer, q, k, v)`; which rows see which is the business of the objects here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.packing import Packing, Segments

__all__ = [
    "Attention",
    "CachedAttention",
    "FewAttention",
    "FullAttention",
    "PrefixAttention",
    "PrefixCache",
    "attend",
    "attention_over",
]

_SHORT = 1100  # most rows of segments for which our own kernel is the faster one, measured on stories of 205 tokens
_HEAD_DIMS = (16, 32, 64)  # that it can


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: [T, heads, head_dim] of the current rows. Returns [T, heads, head_dim]."""
        ...


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool = False) -> Tensor:
    """Every query row of segment s attends to every key row of segment s; if causal, for which queries and keys must be
    the same rows, to none behind itself. q: [Tq, H, D], k and v: [Tk, H, D]."""
    if _has_kernel(q):
        if queries is keys and queries.longest <= _SHORT and q.shape[-1] in _HEAD_DIMS:
            from insertlm.nn.attention_kernels import short_attention

            return short_attention(q, k, v, queries.cu, queries.longest, causal)
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0 if causal else -1)  # how many keys to the left and to the right; -1 = all
        out = varlen_attn(q, k, v, queries.cu, keys.cu, queries.longest, keys.longest, window_size=window)
        assert isinstance(out, Tensor)
        return out
    if causal:  # padding lies behind all rows, so none of them sees it
        return _attend_dense(q, _pad(k, keys), _pad(v, keys), queries, None)
    visible = keys.valid.clone()
    visible[:, 0] = True  # an empty segment must not give NaN, not even in cells that nobody reads
    return _attend_dense(q, _pad(k, keys), _pad(v, keys), queries, visible[:, None, None, :])


def _has_kernel(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, queries: Segments, mask: Tensor | None) -> Tensor:
    """k, v: [S, Lk, H, D]; mask: broadcastable to [S, H, Lq, Lk], None for causal. Packed queries in, packed rows
    out."""
    count = len(q)
    q, k, v = (x.transpose(1, 2) for x in (_pad(q, queries), k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    rows = out.transpose(1, 2).flatten(0, 1)
    return rows if len(rows) == count else rows.index_select(0, queries.cells)


def _pad(x: Tensor, segments: Segments) -> Tensor:
    """[T, H, D] to [S, longest, H, D], zeros where no row is."""
    count, longest = len(segments.cu) - 1, segments.longest
    if len(x) < count * longest:  # else all segments are equally long, and this is a view
        x = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, segments.cells, x)
    return x.reshape(count, longest, *x.shape[1:])


@dataclass(frozen=True, eq=False)
class FullAttention:
    """Every row sees its whole segment; if causal, only what is not behind itself. `record`, if given, receives each
    layer's (k, v) for `CachedAttention`."""

    segments: Segments
    record: list[tuple[Tensor, Tensor]] | None = None
    causal: bool = False

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.record is not None:
            self.record.append((k, v))
        return attend(q, k, v, self.segments, self.segments, self.causal)


@dataclass(frozen=True, eq=False)
class PrefixAttention:
    """A segment is a prefix and texts behind it. Rows of the prefix see the prefix alone; those of a text see the
    prefix and their text, or, if causal, of the text what is not behind themselves. `record` as above.

    text: [T] int32, never falling within a segment: 0 for rows of the prefix, then 1, 2 …
    """

    segments: Segments
    text: Tensor
    record: list[tuple[Tensor, Tensor]] | None = None
    causal: bool = False

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.record is not None:
            self.record.append((k, v))
        if _has_kernel(q) and q.shape[-1] in _HEAD_DIMS:
            from insertlm.nn.attention_kernels import short_attention

            return short_attention(q, k, v, self.segments.cu, self.segments.longest, self.causal, self.text)
        return _attend_dense(q, _pad(k, self.segments), _pad(v, self.segments), self.segments, self._mask)

    @cached_property
    def _mask(self) -> Tensor:
        """[S, 1, queries, keys]"""
        text = _pad(self.text, self.segments)
        same = text[:, :, None] == text[:, None]
        seen = (text[:, None] == 0) | (same.tril() if self.causal else same)
        itself = torch.eye(text.shape[1], dtype=torch.bool, device=text.device)  # padding must not give NaN
        return (seen & self.segments.valid[:, None] | itself)[:, None]


def attention_over(
    packing: Packing,
    prefix: Tensor,
    prefix_lm: bool,
    *,
    record: list[tuple[Tensor, Tensor]] | None = None,
    causal: bool = False,
) -> FullAttention | PrefixAttention:
    """Which rows see which, when sequences and their prefixes are computed together. prefix: [B] lengths"""
    if not prefix_lm:
        return FullAttention(packing.segments, record, causal)
    column = torch.arange(packing.keep.shape[1], device=prefix.device)
    return PrefixAttention(packing.segments, packing.pack((column >= prefix[:, None]).int()), record, causal)


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """Keys and values of rows computed earlier, at least one in every sequence.

    layers: per layer (k, v), each [S, C, H, D]: a sequence's cached rows, then room for current ones
    length: [S] int32, cached rows   longest: no sequence has more
    """

    layers: list[tuple[Tensor, Tensor]]
    length: Tensor
    longest: int

    @classmethod
    def of(cls, record: list[tuple[Tensor, Tensor]], segments: Segments, room: int) -> PrefixCache:
        """record: what `FullAttention` recorded of the prefix rows; room: the most other rows a sequence will have"""
        layers = [tuple(F.pad(_pad(x, segments), (0, 0, 0, 0, 0, room)) for x in kv) for kv in record]
        return cls([(k, v) for k, v in layers], segments.lengths, segments.longest)

    def select(self, chosen: Tensor) -> PrefixCache:
        """Only these sequences; chosen: [S'] indices"""
        layers = [(k.index_select(0, chosen), v.index_select(0, chosen)) for k, v in self.layers]
        return PrefixCache(layers, self.length.index_select(0, chosen), self.longest)

    def join(self, other: PrefixCache, room: int) -> PrefixCache:
        """The sequences of both; room: the most other rows one will have"""
        longest = max(self.longest, other.longest)
        layers = [
            (_stack(k, their_k, longest + room), _stack(v, their_v, longest + room))
            for (k, v), (their_k, their_v) in zip(self.layers, other.layers, strict=True)
        ]
        return PrefixCache(layers, torch.cat([self.length, other.length]), longest)


def _stack(mine: Tensor, theirs: Tensor, cells: int) -> Tensor:
    """[S, C, H, D] and [S', C', H, D] to [S + S', cells, H, D]"""
    return torch.cat([F.pad(part, (0, 0, 0, 0, 0, cells - part.shape[1])) for part in (mine, theirs)])


@dataclass(frozen=True, eq=False)
class FewAttention:
    """Like CachedAttention, for a GPU and as many current rows in every sequence, of which some may be spare; the cache
    stays as it is. The flash kernel would work on 128 queries at a time, and most of them would be empty.

    used: [S] int32, how many rows of each sequence are to be seen, cached and current   rows: current ones of each
    """

    cache: PrefixCache
    used: Tensor
    rows: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from insertlm.nn.attention_kernels import few_queries

        return few_queries(q, k, v, self.cache.layers[layer], self.cache.length, self.used, self.rows)


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """The current rows attend to themselves and to their sequence's cached rows.

    Current keys are written right behind the cached ones of their sequence; no cached row is moved. The next current
    rows overwrite them, unless the next cache is `kept`.
    """

    cache: PrefixCache
    segments: Segments

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.layers[layer]
        for cells, rows in ((keys, k), (values, v)):
            cells.view(-1, *rows.shape[1:]).index_copy_(0, self._places, rows)
        if _has_kernel(q):
            # What varlen_attn calls; torch 2.11's does not hand on how many keys of each sequence are in use.
            used = self.kept.length
            starts = keys.shape[1] * torch.arange(len(used) + 1, dtype=torch.int32, device=q.device)
            sizes = self.segments.longest, self.kept.longest
            flash = torch.ops.aten._flash_attention_forward
            kv = keys.flatten(0, 1), values.flatten(0, 1)
            out = flash(q, *kv, self.segments.cu, starts, *sizes, 0.0, False, False, seqused_k=used)[0]
            assert isinstance(out, Tensor)
            return out
        return _attend_dense(q, keys[:, : self.kept.longest], values[:, : self.kept.longest], self.segments, self._mask)

    @cached_property
    def kept(self) -> PrefixCache:
        """The cache with the current rows among the cached ones, as soon as all layers have been called."""
        length = self.cache.length + self.segments.lengths
        return PrefixCache(self.cache.layers, length, self.cache.longest + self.segments.longest)

    @cached_property
    def _places(self) -> Tensor:
        """[T]: where in the cache, its sequences laid end to end, each current row goes."""
        sequence, offset = self.segments.cells // self.segments.longest, self.segments.cells % self.segments.longest
        return sequence * self.cache.layers[0][0].shape[1] + self.cache.length[sequence] + offset

    @cached_property
    def _mask(self) -> Tensor:
        """[S, 1, 1, keys]"""
        columns = torch.arange(self.kept.longest, device=self.kept.length.device)
        return (columns < self.kept.length[:, None])[:, None, None, :]
