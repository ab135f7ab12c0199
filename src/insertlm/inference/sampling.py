"""Sampling one of N with temperature, top-k and nucleus, from counter-based noise and without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from insertlm.core.noise import uniform

__all__ = ["NoiseOf", "choose", "choose_each", "draws", "nucleus", "top_k"]

# Noise of some logits, uniform on (0, 1), by their rows and columns, which broadcast.
NoiseOf = Callable[[Tensor, Tensor], Tensor]

_MANY = 8192  # logits of a row
_FEW = 128, 2048  # of these, tried one after the other
_COLD = 1e-30  # lower temperatures count as 0, because logits divided by them would overflow


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep only the k largest logits of each row, and ties with the k-th. logits: [B, N]"""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def nucleus(logits: Tensor, p: float) -> Tensor:
    """Keep only the fewest entries whose probability together reaches p. logits: [B, N]

    The entry that crosses p is kept, as is usual; the paper's code drops it.
    """
    if p >= 1.0:
        return logits
    if not logits.is_cuda and logits.shape[-1] > _MANY:
        # On a CPU sorting many logits takes as long as a small network's row, and few of them matter.
        probability = logits.softmax(-1)
        for count in _FEW:
            mass, index = probability.topk(count, dim=-1)
            before = mass.cumsum(-1) - mass
            if (before[:, -1] >= p).all():
                few = logits.gather(-1, index).masked_fill((before >= p) & (before > 0), -torch.inf)
                return torch.full_like(logits, -torch.inf).scatter(-1, index, few)
    ordered, index = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    out = (before >= p) & (before > 0)  # the first is kept, even if p rounds to 0
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, index, out), -torch.inf)


def choose(logits: Tensor, noise: NoiseOf, temperature: float = 1.0, k: int = 0, p: float = 1.0) -> Tensor:
    """One index per row, [B]; temperature 0 takes the largest. logits: [B, N]"""
    if temperature < _COLD or k == 1:
        return logits.argmax(-1)
    logits = nucleus(top_k(logits / temperature, k), p)
    # The Gumbel trick: an argmax of noisy logits is a sample from their softmax, without a cumulative sum.
    if logits.is_cuda:
        rows, columns = (torch.arange(count, device=logits.device) for count in logits.shape)
        return (logits - (-noise(rows[:, None], columns).log()).log()).argmax(-1)
    # On a CPU the noise of a whole vocabulary takes as long as a small network's row.
    cells = (logits > -torch.inf).nonzero(as_tuple=True)
    logits[cells] -= (-noise(*cells).log()).log()
    return logits.argmax(-1)


def choose_each(logits: Tensor, noise: NoiseOf, ways: Sequence[tuple[float, int, float]]) -> Tensor:
    """`choose` with a temperature, k and p for each text. logits: [B*K, N], K rows for each of the B texts"""
    rows = torch.arange(len(logits), device=logits.device).view(len(ways), -1)
    chosen = torch.empty_like(rows).flatten()

    def some(of: Tensor) -> NoiseOf:
        return lambda row, column: noise(of[row], column)

    for way in dict.fromkeys(ways):
        mine = rows[[text for text, other in enumerate(ways) if other == way]].flatten()
        chosen[mine] = choose(logits[mine], some(mine), *way)
    return chosen


def draws(stream: int, seed: Tensor, number: Tensor | int) -> NoiseOf:
    """Uniform noise for `choose`, made only if needed. It depends on the text's seed, its step and the stream, which
    keeps apart what the draws are for. seed: [B], 32 bits   number: of the step, for all texts or for each, [B]"""
    return lambda row, column: uniform(stream, seed[row], number if isinstance(number, int) else number[row], column)
