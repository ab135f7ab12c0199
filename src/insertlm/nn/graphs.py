"""The backbone over cached prefixes, replayed from CUDA graphs.

A step of cached decoding computes a few rows per text with hundreds of small kernels; launching them one by one takes
the host longer than running them takes the device. So the numbers of texts and rows are rounded up a little, and the
whole backbone is captured once for each pair of numbers. All graphs share one cache, whose address never changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from insertlm.nn.attention import FewAttention, PrefixCache
from insertlm.nn.transformer import Transformer

__all__ = ["CachedBackbone"]

_TEXTS, _ROWS = 64, 4  # numbers are rounded up to multiples of these


class _Graph(NamedTuple):
    """A graph and its tensors. tokens, positions: [B, N]   prefix, used: [B] int32   hidden: [B*N, d]"""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    prefix: Tensor
    used: Tensor
    hidden: Tensor


class CachedBackbone:
    """Serves one batch at a time. texts: the most texts   cells: the most rows of a prefix"""

    def __init__(self, backbone: Transformer, texts: int, cells: int) -> None:
        self.backbone = backbone
        self.texts, self.cells = _up(texts, _TEXTS), cells
        shape = self.texts, self.cells, backbone.config.key_heads, backbone.config.head_dim
        empty = torch.zeros(shape, dtype=torch.bfloat16, device=backbone.embedding.weight.device)
        self.layers = [(empty.clone(), empty.clone()) for _ in backbone.blocks]
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def takes(backbone: Transformer) -> bool:
        """Whether the kernel for few queries supports the size of its heads."""
        size = backbone.config.head_dim
        return backbone.embedding.weight.is_cuda and size >= 16 and size & (size - 1) == 0

    def load(self, cache: PrefixCache) -> None:
        """Copy cached prefixes into the cache of the graphs."""
        for mine, theirs in zip(self.layers, cache.layers, strict=True):
            for cells, rows in zip(mine, theirs, strict=True):
                cells[: rows.shape[0], : cache.longest] = rows[:, : cache.longest]

    def select(self, chosen: Tensor) -> None:
        """Keep only these texts. chosen: [S] indices, ascending"""
        for cells in (part for layer in self.layers for part in layer):
            cells[: len(chosen)] = cells.index_select(0, chosen)

    def run(self, tokens: Tensor, positions: Tensor, prefix: Tensor, used: Tensor) -> Tensor:
        """Hidden rows after the cached ones. tokens, positions: [B, N]   prefix, used: [B], how many rows of each text
        are cached, and how many there are with the current ones. Returns [B, N, d]"""
        texts, rows = tokens.shape
        size = _up(texts, _TEXTS), _up(rows, _ROWS)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(*size)
        # Rows beyond these hold what an earlier call left there: nobody reads what comes of them.
        graph.tokens[:texts, :rows] = tokens
        graph.positions[:texts, :rows] = positions
        graph.prefix[:texts] = prefix
        graph.used[:texts] = used
        graph.graph.replay()
        return graph.hidden.view(*size, -1)[:texts, :rows]

    def _capture(self, texts: int, rows: int) -> _Graph:
        device = self.layers[0][0].device
        tokens = torch.zeros(texts, rows, dtype=torch.int64, device=device)
        positions = torch.zeros_like(tokens)
        prefix, used = (torch.ones(texts, dtype=torch.int32, device=device) for _ in range(2))
        layers = [(k[:texts], v[:texts]) for k, v in self.layers]

        def run() -> Tensor:
            attention = FewAttention(PrefixCache(layers, prefix, self.cells), used, rows)
            with self.backbone.autocast():
                hidden: Tensor = self.backbone(tokens.flatten(), positions.flatten(), attention)
            return hidden

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # libraries and compilers set themselves up in the first call, which cannot be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            hidden = run()
        return _Graph(graph, tokens, positions, prefix, used, hidden)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
