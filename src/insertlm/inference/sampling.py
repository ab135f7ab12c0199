"""Choosing one of N with temperature, top-k and nucleus, from counter-based noise and without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from insertlm.core.noise import uniform

__all__ = ["choose", "choose_each", "draws", "nucleus", "top_k"]

_COLD = 1e-30  # temperatures below count as 0: logits would overflow


def top_k(logits: Tensor, k: int) -> Tensor:
    """Rule out all but the k largest of each row (ties with the k-th stay). logits: [B, N]"""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def nucleus(logits: Tensor, p: float) -> Tensor:
    """Rule out all but the fewest entries whose probability reaches p. logits: [B, N]

    The entry that crosses p stays, as is usual; the paper's code drops it.
    """
    if p >= 1.0:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    out = (before >= p) & (before > 0)  # the first stays, be p too small for a float
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, index, out), -torch.inf)


def choose(
    logits: Tensor, noise: Callable[[int], Tensor], temperature: float = 1.0, k: int = 0, p: float = 1.0
) -> Tensor:
    """One index per row, [B]; temperature 0 takes the largest. noise(N): [B, N], uniform on (0, 1)"""
    if temperature < _COLD or k == 1:
        return logits.argmax(-1)
    logits = nucleus(top_k(logits / temperature, k), p)
    return (logits - (-noise(logits.shape[-1]).log()).log()).argmax(-1)


def choose_each(logits: Tensor, noise: Callable[[int], Tensor], ways: Sequence[tuple[float, int, float]]) -> Tensor:
    """`choose` where every text has its own temperature, k and p. logits: [B*K, N], K rows for each of the B texts"""
    rows = torch.arange(len(logits), device=logits.device).view(len(ways), -1)
    chosen, drawn = torch.empty_like(rows).flatten(), cache(noise)

    def some(of: Tensor) -> Callable[[int], Tensor]:
        return lambda width: drawn(width)[of]

    for way in dict.fromkeys(ways):
        mine = rows[[text for text, other in enumerate(ways) if other == way]].flatten()
        chosen[mine] = choose(logits[mine], some(mine), *way)
    return chosen


def draws(stream: int, seed: Tensor, number: Tensor | int) -> Callable[[int], Tensor]:
    """Uniform noise for `choose` that depends on a text's seed, the step and what it is for; made only if needed.
    seed: [B], of 32 bits   number: of the step, or of each text's, [B]"""
    own = number if isinstance(number, int) else number[:, None]
    return lambda width: uniform(stream, seed[:, None], own, torch.arange(width, device=seed.device))
