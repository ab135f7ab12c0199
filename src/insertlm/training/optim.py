"""The optimiser, its learning-rate schedule, and the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from insertlm.section import Count, Fraction, Index, NonNegative, Section, Share

__all__ = ["Ema", "OptimConfig", "build_optimizer"]


class OptimConfig(Section, frozen=True, kw_only=True):
    """The `optim` section of a recipe."""

    learning_rate: NonNegative = 1e-4
    warmup: Index = 1000  # steps over which the rate rises from 0
    cooldown: Fraction = 0.0  # share of all steps, at the end, over which it falls back to 0
    weight_decay: NonNegative = 0.01  # of matrices; biases and norms are never decayed
    beta1: Share = 0.9
    beta2: Share = 0.999
    clip: NonNegative = 1.0  # largest norm of the gradient; 0 = no limit
    ema: Fraction = 0.9999  # of the weights, after a warm-up of its own
    ema_every: Count = 10  # steps between updates of the average

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step `step` (from 0) of `steps`."""
        rise = (step + 1) / self.warmup if self.warmup else 1.0
        fall = (steps - step) / (self.cooldown * steps) if self.cooldown else 1.0
        return self.learning_rate * min(1.0, rise, fall)


def build_optimizer(module: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW in one fused kernel; its rate is a tensor, so that a captured graph can see it change."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate = torch.zeros((), device=device)
    graphs = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), fused=True, capturable=graphs)


class Ema:
    """Exponential moving average of the weights, updated every few steps with the decay those steps would have had.

    The decay warms up as min(decay, (1+k)/(10+k)) at step k, as published.
    """

    def __init__(self, module: nn.Module, decay: float, every: int) -> None:
        self.decay, self.every = decay, every
        self.live = dict(module.named_parameters())
        self.average = {name: parameter.detach().clone() for name, parameter in self.live.items()}

    @torch.no_grad()
    def update(self, step: int, *, last: bool = False) -> None:
        """After step number `step` (from 0); the last one of a run always counts."""
        done = step + 1
        if done % self.every and not last:
            return
        decay = min(self.decay, (1 + done) / (10 + done)) ** (done % self.every or self.every)
        torch._foreach_lerp_(self._tensors(self.average), self._tensors(self.live), 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module holds the averaged weights inside this block (in place: captured graphs stay valid)."""
        saved = [parameter.detach().clone() for parameter in self.live.values()]
        self._copy(self._tensors(self.average))
        try:
            yield
        finally:
            self._copy(saved)

    @torch.no_grad()
    def _copy(self, source: list[Tensor]) -> None:
        torch._foreach_copy_(self._tensors(self.live), source)

    @staticmethod
    def _tensors(named: dict[str, nn.Parameter] | dict[str, Tensor]) -> list[Tensor]:
        return list(named.values())
