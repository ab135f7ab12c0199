"""One façade for attention over packed rows. What each row may see is data, and several backends compute it.

A transformer block only calls `attention(layer, q, k, v)`. While a batch is computed as a whole, `PackedAttention` says
which row sees which; while texts are written, the classes with a cache let the current rows see those computed before.
No backend drops attention probabilities: the flash kernel cannot, and a model should not train differently on a CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.packing import Packing, Segments

__all__ = [
    "ROOM",
    "Attention",
    "Backend",
    "CachedAttention",
    "FewAttention",
    "PackedAttention",
    "PrefixCache",
    "attend",
    "attention_over",
    "choose_backend",
]

_SHORT = 1100  # segments of up to so many rows are faster with our own kernel, measured on stories of 205 tokens
_EACH = 512  # for backward every pair of rows keeps its weight, which takes too much memory in longer segments
_HEAD_DIMS = (16, 32, 64)  # sizes of heads that it supports
ROOM = 128  # rows that a cache has room for at first, and that it grows by, where few texts need the most they may have


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, heads, head_dim] of the current rows   k, v: [T, key_heads, head_dim]; each of these heads serves as
        many consecutive heads of queries. Returns [T, heads, head_dim]."""
        ...


class Backend(StrEnum):
    """Ways to compute the same numbers; tests hold each to the plain formula."""

    SDPA = "sdpa"  # torch's own attention on a padded copy: any device, precision and sight
    EACH = "each"  # the plain formula, one segment after the other: any sight; for training on a CPU in bf16
    SHORT = "short"  # our kernel for short segments (attention_kernels.py): CUDA and bf16, any sight
    FLASH = "flash"  # torch's kernel for packed rows: CUDA and bf16, full or causal


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """Row i sees row j if both belong to one segment and whatever is given here allows it:

    text: [T] int32. j belongs to i's text, or to text 0, which all texts of a segment share
    order: [T] int32, not negative. j comes no later than i
    causal: j comes no later than i in memory. An order of 0, 1, 2 … means the same, but is slower

    For example, a prefix that does not see the rows after it has order 0, and these rows have order 1. Several texts
    after one prefix are texts 1, 2, …, and the prefix is text 0. Tokens written one after the other into a given text
    have orders 1, 2, …, and the given rows have order 0.

    record: if given, receives each layer's (k, v) for `PrefixCache`
    """

    segments: Segments
    text: Tensor | None = None
    order: Tensor | None = None
    causal: bool = False
    record: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.record is not None:
            self.record.append((k, v))
        return attend(q, k, v, self)

    @property
    def plain(self) -> bool:
        """Whether all rows of a segment see each other, up to `causal`."""
        return self.text is None and self.order is None

    @cached_property
    def mask(self) -> Tensor | None:
        """[S, 1, 1 or queries, keys], for padded rows; None for causal: padding lies behind all rows, and none of them
        sees it."""
        valid = self.segments.valid
        if self.plain:
            if self.causal:
                return None
            visible = valid.clone()
            visible[:, 0] = True  # an empty segment must not give NaN, not even in cells that nobody reads
            return visible[:, None, None, :]
        seen = valid[:, None]
        if self.text is not None:
            text = _pad(self.text, self.segments)
            seen = seen & ((text[:, None] == 0) | (text[:, None] == text[:, :, None]))
        if self.order is not None:
            order = _pad(self.order, self.segments)
            seen = seen & (order[:, None] <= order[:, :, None])
        if self.causal:
            seen = seen & torch.ones_like(seen[0]).tril()
        itself = torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)  # padding must not give NaN
        return (seen | itself)[:, None]

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each segment, and of the spare tail."""
        sizes: list[int] = self.segments.lengths.tolist()
        return sizes

    @cached_property
    def biases(self) -> list[Tensor]:
        """Of each segment, what is added to its scores, [rows, rows]: 0 or, where a row is not seen, -inf."""
        nothing = [None] * len(self.sizes)
        parts = [nothing if x is None else torch.split(x, self.sizes) for x in (self.text, self.order)]
        return [self._bias(size, *rest) for size, *rest in zip(self.sizes, *parts, strict=True)]

    def _bias(self, rows: int, text: Tensor | None, order: Tensor | None) -> Tensor:
        hidden = torch.zeros(rows, rows, dtype=torch.bool, device=self.segments.cu.device)
        if text is not None:
            hidden |= (text != 0) & (text != text[:, None])
        if order is not None:
            hidden |= order > order[:, None]
        if self.causal:
            hidden |= torch.ones_like(hidden).triu(1)
        return torch.zeros(rows, rows, device=hidden.device).masked_fill_(hidden, -torch.inf)


def choose_backend(q: Tensor, attention: PackedAttention) -> Backend:
    """The fastest backend that supports these rows."""
    if not _on_gpu(q):
        # With texts of 50 rows, the longest of 140, torch's kernel on a padded copy takes half of a step on a CPU.
        learning = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad
        return Backend.EACH if learning and attention.segments.longest <= _EACH else Backend.SDPA
    ours = q.shape[-1] in _HEAD_DIMS
    if not attention.plain:
        return Backend.SHORT if ours else Backend.SDPA
    return Backend.SHORT if ours and attention.segments.longest <= _SHORT else Backend.FLASH


def attend(q: Tensor, k: Tensor, v: Tensor, attention: PackedAttention) -> Tensor:
    """q: [T, H, D], k and v: [T, key heads, D]. Returns [T, H, D]."""
    backend, segments = choose_backend(q, attention), attention.segments
    if backend is Backend.SDPA:
        return _attend_dense(q, _pad(k, segments), _pad(v, segments), segments, attention.mask)
    if backend is Backend.EACH:
        return _attend_each(q, k, v, attention)
    if backend is Backend.SHORT:
        from insertlm.nn.attention_kernels import short_attention

        sight = attention.causal, attention.text, attention.order
        return short_attention(q, k, v, segments.cu, segments.longest, *sight)
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0 if attention.causal else -1)  # how many keys to the left and to the right; -1 = all
    # torch 2.11's takes as many heads of keys as of queries.
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    cu, longest = segments.cu, segments.longest
    out = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=window)
    assert isinstance(out, Tensor)
    return out


def _on_gpu(q: Tensor) -> bool:
    """Whether the kernels support this device and precision."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, queries: Segments, mask: Tensor | None) -> Tensor:
    """k, v: [S, Lk, key heads, D]; mask: broadcastable to [S, H, Lq, Lk], None for causal. Packed queries in, packed
    rows out."""
    count, dtype = len(q), q.dtype
    # For a few queries torch's kernel takes several times as long in bfloat16, and for many no less.
    widened = q.device.type == "cpu" and dtype == torch.bfloat16 and not q.requires_grad
    q, k, v = (x.float() if widened else x for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (_pad(q, queries), k, v))
    shared = q.shape[1] != k.shape[1]
    with torch.autocast("cpu", enabled=False) if widened else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shared)
    rows = out.to(dtype).transpose(1, 2).flatten(0, 1)
    return rows if len(rows) == count else rows.index_select(0, queries.cells)


def _attend_each(q: Tensor, k: Tensor, v: Tensor, attention: PackedAttention) -> Tensor:
    """The formula, without padding. torch's own kernel takes three times as long backward, for segments so short."""
    (_, heads, size), shared = q.shape, k.shape[1]
    mixed = []
    for queries, keys, values, bias in zip(
        *(torch.split(x, attention.sizes) for x in (q, k, v)), attention.biases, strict=True
    ):
        rows = len(queries)  # 0 in an empty segment, so no size below is left for torch to guess
        each = queries.view(rows, shared, heads // shared, size).permute(1, 2, 0, 3)
        each = each.reshape(shared, heads // shared * rows, size)
        scores = each @ keys.permute(1, 2, 0)
        weights = (scores.view(heads, rows, rows).float() * size**-0.5 + bias).softmax(-1).to(v.dtype)
        sums = weights.view(shared, heads // shared * rows, rows) @ values.transpose(0, 1)
        mixed.append(sums.view(heads, rows, size).transpose(0, 1))
    return torch.cat(mixed)


def _pad(x: Tensor, segments: Segments) -> Tensor:
    """[T, …] to [S, longest, …], zeros where no row is."""
    count, longest = len(segments.cu) - 1, segments.longest
    if len(x) < count * longest:  # else all segments are equally long, and this is a view
        x = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, segments.cells, x)
    return x.reshape(count, longest, *x.shape[1:])


def attention_over(
    packing: Packing,
    prefix: Tensor,
    prefix_lm: bool,
    *,
    record: list[tuple[Tensor, Tensor]] | None = None,
    causal: bool = False,
) -> PackedAttention:
    """What rows see when sequences and their prefixes are computed together. prefix: [B] lengths
    prefix_lm: rows of the prefix see all of the prefix, and nothing behind it"""
    if not prefix_lm:
        return PackedAttention(packing.segments, causal=causal, record=record)
    column = torch.arange(packing.keep.shape[1], device=prefix.device)
    order = torch.where(column < prefix[:, None], 0, column + 1 if causal else 1)
    return PackedAttention(packing.segments, order=packing.pack(order).int(), record=record)


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """Keys and values of rows computed earlier, at least one row in every sequence.

    layers: (k, v) of each layer, each [S, C, key heads, D]: the cached rows of a sequence, then room for current ones
    length: [S] int32, cached rows of each sequence   longest: the most of them
    """

    layers: list[tuple[Tensor, Tensor]]
    length: Tensor
    longest: int

    @property
    def cells(self) -> int:
        """Those of a sequence."""
        return self.layers[0][0].shape[1]

    @classmethod
    def of(cls, record: list[tuple[Tensor, Tensor]], segments: Segments, room: int) -> PrefixCache:
        """record: what `PackedAttention` recorded of the prefix rows; room: the most other rows a sequence will have"""
        layers = [tuple(F.pad(_pad(x, segments), (0, 0, 0, 0, 0, room)) for x in kv) for kv in record]
        return cls([(k, v) for k, v in layers], segments.lengths, segments.longest)

    def with_room(self, rows: int) -> PrefixCache:
        """For so many more rows of every sequence, and if there was none, for more than that."""
        if self.longest + rows <= self.cells:
            return self
        more = (0, 0, 0, 0, 0, max(rows, ROOM))
        return replace(self, layers=[(F.pad(k, more), F.pad(v, more)) for k, v in self.layers])

    def select(self, chosen: Tensor) -> PrefixCache:
        """Only these sequences. chosen: [S'] indices"""
        layers = [(k.index_select(0, chosen), v.index_select(0, chosen)) for k, v in self.layers]
        return PrefixCache(layers, self.length.index_select(0, chosen), self.longest)

    def without(self, gone: Tensor) -> PrefixCache:
        """The same without some rows; those behind them move up. gone: [S, C] bool"""
        order = gone.int().argsort(dim=1, stable=True)
        layers = [tuple(x.gather(1, order[..., None, None].expand_as(x)) for x in kv) for kv in self.layers]
        length = self.length - gone.sum(1).int()
        return PrefixCache([(k, v) for k, v in layers], length, self.longest)

    def join(self, other: PrefixCache, room: int) -> PrefixCache:
        """The sequences of both. room: the most other rows that a sequence will have"""
        longest = max(self.longest, other.longest)
        layers = [
            (_stack(k, their_k, longest + room), _stack(v, their_v, longest + room))
            for (k, v), (their_k, their_v) in zip(self.layers, other.layers, strict=True)
        ]
        return PrefixCache(layers, torch.cat([self.length, other.length]), longest)


def _stack(mine: Tensor, theirs: Tensor, cells: int) -> Tensor:
    """[S, C, key heads, D] and [S', C', key heads, D] to [S + S', cells, key heads, D]"""
    return torch.cat([F.pad(part, (0, 0, 0, 0, 0, cells - part.shape[1])) for part in (mine, theirs)])


@dataclass(frozen=True, eq=False)
class FewAttention:
    """Like CachedAttention, but for CUDA graphs: every sequence has the same number of current rows, some of them
    unused, and the cache is not written to. The flash kernel works on 128 queries at a time; most would be empty.

    used: [S] int32, rows of each sequence that are seen, cached and current   rows: current rows of each sequence
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

    Current keys are written right after the cached ones of their sequence; no cached row is moved. The next current
    rows overwrite them, unless `kept` becomes the next cache.
    """

    cache: PrefixCache
    segments: Segments

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.layers[layer]
        for cells, rows in ((keys, k), (values, v)):
            cells.view(-1, *rows.shape[1:]).index_copy_(0, self._places, rows)
        if _on_gpu(q):
            # varlen_attn calls this, but torch 2.11's cannot pass on how many keys of each sequence are in use.
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
        """The cache including the current rows. Valid once all layers have been called."""
        length = self.cache.length + self.segments.lengths
        longest = min(self.cache.cells, self.cache.longest + self.segments.longest)
        return PrefixCache(self.cache.layers, length, longest)

    @cached_property
    def _places(self) -> Tensor:
        """[T]: where each current row goes in the cache, with its sequences end to end."""
        sequence, offset = self.segments.cells // self.segments.longest, self.segments.cells % self.segments.longest
        return sequence * self.cache.cells + self.cache.length[sequence] + offset

    @cached_property
    def _mask(self) -> Tensor:
        """[S, 1, 1, keys]"""
        columns = torch.arange(self.kept.longest, device=self.kept.length.device)
        return (columns < self.kept.length[:, None])[:, None, None, :]
