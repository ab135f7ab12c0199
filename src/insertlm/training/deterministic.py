"""Steps that give the same bits for the same seed on the same device: `train.deterministic`.

On a CPU every step does. On a GPU these do not, unless this mode is on:
- Sums by atomic additions come in any order. The compiler makes them of the embedding's gradient, in which thousands of
  rows are added to one word, and of every gradient of an index_select or gather; torch's flash kernel makes them of the
  gradient of queries. With torch's deterministic algorithms these are sorted first, or take another kernel. Ours have
  none: the short attention sums in a program, losses add equal numbers, adaln multiplies by a matrix.
- The compiler times several shapes for its kernels that sum and takes the fastest; another adds in another order.
- cuBLAS may choose another algorithm if its workspace is of another size.
Corruption, order and dropout are functions of the seed in any case. Several processes add their gradients in an order
that NCCL chooses, which nothing here fixes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["deterministic"]


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Inside, if `on`, torch computes in a fixed order, and refuses an operation that cannot. Not for decoding, which
    draws by sums that torch would refuse."""
    if not on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first product; torch asks for it
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # we read none
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
