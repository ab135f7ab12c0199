"""The backbone over cached prefixes, replayed from CUDA graphs.

A step of cached decoding is a few rows per text and hundreds of small kernels: launched one by one they would keep the
host busy for longer than the device. So the numbers of texts and of rows are rounded up a little, and for each pair of
them the whole backbone is captured once. All graphs work on one cache, whose place in memory never changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from insertlm.nn.attention import FewAttention, PrefixCache
from insertlm.nn.transformer import Transformer

__all__ = ["CachedBackbone"]

_TEXTS, _ROWS = 64, 4  # what numbers are rounded up to


class _Graph(NamedTuple):
    """What a graph reads and writes. tokens, positions: [B, N]   prefix, used: [B] int32   hidden: [B*N, d]"""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    prefix: Tensor
    used: Tensor
    hidden: Tensor


class CachedBackbone:
    """Serves one batch at a time. texts: how many at most   cells: the most rows of a prefix"""

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
        """Whether there are kernels for such heads."""
        size = backbone.config.head_dim
        return backbone.embedding.weight.is_cuda and size >= 16 and size & (size - 1) == 0

    def load(self, cache: PrefixCache) -> None:
        """Take over cached prefixes."""
        for mine, theirs in zip(self.layers, cache.layers, strict=True):
            for cells, rows in zip(mine, theirs, strict=True):
                cells[: rows.shape[0], : cache.longest] = rows[:, : cache.longest]

    def select(self, chosen: Tensor) -> None:
        """Only these texts; chosen: [S'] indices, ascending"""
        for cells in (part for layer in self.layers for part in layer):
            cells[: len(chosen)] = cells.index_select(0, chosen)

    def run(self, tokens: Tensor, positions: Tensor, prefix: Tensor, used: Tensor) -> Tensor:
        """Hidden rows behind the cached ones. tokens, positions: [B, N]   prefix, used: [B], how many rows of each text
        are cached, and how many there are with the current ones. Returns [B, N, d]"""
        texts, rows = tokens.shape
        size = _up(texts, _TEXTS), _up(rows, _ROWS)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(*size)
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
            run()  # lets libraries and compilers set up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            hidden = run()
        return _Graph(graph, tokens, positions, prefix, used, hidden)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
