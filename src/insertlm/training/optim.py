"""The optimiser with its two rules, and the moving average of the weights.

Every parameter has one name, one state and one place in a checkpoint, also where two modules share it (tied weights):
the name is the first that `named_parameters` finds. Parameters that do not require gradients are kept with the others,
so that checkpoints are whole, but neither rule touches them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.recipe import OptimConfig

__all__ = ["Ema", "Optimizer", "freeze", "orthogonal", "rate_factors"]

_EPSILON = 1e-8
_AHEAD = 256  # steps whose rates go to the device together

# Muon, as published
_MOMENTUM = 0.95
_ITERATIONS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # of x, x³, x⁵
_ADAM_RMS = 0.2  # of the entries of a step of AdamW, in units of the rate


class Optimizer:
    """AdamW with clipping, over a few long tensors instead of hundreds of parameters; if the recipe says so, Muon for
    the matrices named in `hidden`.

    Parameters of a kind (precision, decay, rule, rate) share one tensor each for weights, moments and gradients, so a
    step is a handful of kernels. The weights proper are float32. Parameters named in `bf16` become bfloat16: what the
    network multiplies is a rounded copy, renewed at every step, and no product has to convert its weights first.

    groups: of all parameters   learning: those of them that learn, which have gradients
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        steps: int,
        bf16: Collection[str] = (),
        hidden: Collection[str] = (),
    ) -> None:
        factors = rate_factors([name for name, _ in module.named_parameters()], config.rates)
        kinds: dict[tuple[type[_Group], bool, bool, float], dict[str, nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            rule = _Muon if config.matrices == "muon" and name in hidden else _AdamW
            kind = (rule if parameter.requires_grad else _Frozen, name in bf16, parameter.dim() >= 2, factors[name])
            kinds.setdefault(kind, {})[name] = parameter
        self.groups = [
            rule(named, half, config.weight_decay if matrices else 0.0, factor)
            for (rule, half, matrices, factor), named in kinds.items()
        ]
        self.learning = [group for group in self.groups if not isinstance(group, _Frozen)]
        if not self.learning:
            raise InsertlmError("optim.rates: every rate is 0; expected parameters that learn")
        self.config = config
        self.weights = [group.weights for group in self.groups]
        device = self.weights[0].device
        self.steps, self._first = steps, -1
        self._ahead = torch.zeros(_AHEAD, 3, device=device, dtype=self.weights[0].dtype)
        self._now = self._ahead[0].clone()

    def zero_grad(self) -> None:
        for group in self.learning:
            for parameter in group.parameters.values():
                parameter.grad = None

    def set_step(self, step: int) -> None:
        """`step` counts from 0. What changes with it goes to the device for many steps at once; a captured graph reads
        the part of the present one."""
        first = step - step % _AHEAD
        if first != self._first:
            self._first = first
            self._ahead.copy_(torch.tensor([self.config.scalars(first + i, self.steps) for i in range(_AHEAD)]))
        self._now.copy_(self._ahead[step - first])

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """gradients: one for each group that learns; the parameters' own unless given."""
        gradients = self.gradients() if gradients is None else gradients
        norm = self._norm(gradients)
        shrink = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) if self.config.clip else torch.ones_like(norm)
        for group, gradient in zip(self.learning, gradients, strict=True):
            group.step(gradient, shrink, self._now, self.config)

    def gradients(self) -> list[Tensor]:
        return [group.gradient() for group in self.learning]

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm: Tensor = torch.stack([torch.linalg.vector_norm(x, dtype=self._now.dtype) for x in gradients]).norm()
        return norm

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Parts of long tensors, one for each group, by the names and in the shapes of the parameters."""
        return {
            name: part
            for group, value in zip(self.groups, values, strict=True)
            for name, part in group.split(value).items()
        }

    def moments(self) -> dict[str, Tensor]:
        """What the rules remember of every parameter: `<name>/exp_avg` and `<name>/exp_avg_sq`, or
        `<name>/momentum`."""
        return {
            f"{name}/{kind}": part
            for group in self.groups
            for kind, value in group.moments.items()
            for name, part in group.split(value).items()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """The network takes up the weights as they are now."""
        for group in self.groups:
            if group.copy is not None:
                group.copy.copy_(group.weights)

    @contextmanager
    def replaced(self, values: Sequence[Tensor]) -> Iterator[None]:
        """The network holds other weights inside this block (in place: captured graphs stay valid)."""
        saved = [weights.clone() for weights in self.weights]
        self._overwrite(values)
        try:
            yield
        finally:
            self._overwrite(saved)

    @torch.no_grad()
    def _overwrite(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.weights, list(values))
        self.refresh()


class _Group(ABC):
    """Parameters of one kind, and the rule they learn by. All tensors: [N], the parameters one after the other.

    remembers: names of what the rule keeps from step to step   factor: of the learning rate
    """

    remembers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: dict[str, nn.Parameter], bf16: bool, decay: float, factor: float) -> None:
        self.parameters, self.decay, self.factor = parameters, decay, factor
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self.moments = {name: torch.zeros_like(self.weights) for name in self.remembers}
        self.copy = self.weights.bfloat16() if bf16 else None
        live = self.split(self.weights if self.copy is None else self.copy)
        for name, parameter in parameters.items():
            parameter.data = live[name]

    @abstractmethod
    def step(self, gradient: Tensor, shrink: Tensor, now: Tensor, config: OptimConfig) -> None:
        """shrink: factor of the gradient   now: the `scalars` of the step"""

    def split(self, value: Tensor) -> dict[str, Tensor]:
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        parts = torch.split(value, [shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}

    def gradient(self) -> Tensor:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters.values()]
        return torch.cat([part.flatten() for part in parts])


class _Frozen(_Group):
    """Parameters that do not learn."""

    def step(self, gradient: Tensor, shrink: Tensor, now: Tensor, config: OptimConfig) -> None:
        raise AssertionError("a frozen parameter has no gradient")


class _AdamW(_Group):
    remembers = ("exp_avg", "exp_avg_sq")

    def __init__(self, parameters: dict[str, nn.Parameter], bf16: bool, decay: float, factor: float) -> None:
        super().__init__(parameters, bf16, decay, factor)
        self._update = _update
        if self.weights.is_cuda:  # one kernel, at work for a fifteenth of every step, and worth a search for its shape
            self._update = torch.compile(_update, options={"max_autotune_pointwise": True})

    def step(self, gradient: Tensor, shrink: Tensor, now: Tensor, config: OptimConfig) -> None:
        moments = self.moments["exp_avg"], self.moments["exp_avg_sq"]
        betas = config.beta1, config.beta2
        self._update(self.weights, *moments, self.copy, gradient, shrink, now, betas, self.decay, self.factor)


def _update(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    shrink: Tensor,
    now: Tensor,
    betas: tuple[float, float],
    decay: float,
    factor: float,
) -> None:
    rate, correction1, correction2 = now.unbind()
    rate = rate * factor
    gradient = gradient.to(weights.dtype) * shrink
    exp_avg.lerp_(gradient, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
    change = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + _EPSILON)
    weights.mul_(1.0 - rate * decay).sub_(rate * change)
    if copy is not None:
        copy.copy_(weights)


class _Muon(_Group):
    """Momentum whose singular values are all made about equal (Jordan et al. 2024), so that a step goes as far in rare
    directions as in common ones. It is scaled to the size that a step of AdamW has (arXiv 2502.16982): both rules share
    one rate and one decay. Of a layer that makes queries, keys and values at once each third is a matrix of its own.
    """

    remembers = ("momentum",)

    def step(self, gradient: Tensor, shrink: Tensor, now: Tensor, config: OptimConfig) -> None:
        gradient = gradient.to(self.weights.dtype) * shrink
        momentum = self.moments["momentum"].lerp_(gradient, 1.0 - _MOMENTUM)
        change = gradient.lerp_(momentum, _MOMENTUM)  # Nesterov's
        self._orthogonalise([matrix for whole in self.split(change).items() for matrix in _matrices(*whole)])
        rate = now[0] * self.factor
        self.weights.mul_(1.0 - rate * self.decay).sub_(rate * change)
        if self.copy is not None:
            self.copy.copy_(self.weights)

    @staticmethod
    def _orthogonalise(matrices: Sequence[Tensor]) -> None:
        """In place; those of one shape, or of one that is its transpose, all at once."""
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            lying = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            alike.setdefault(tuple(lying.shape), []).append(lying)
        for (_, longer), some in alike.items():
            changed = orthogonal(torch.stack(some)) * (_ADAM_RMS * longer**0.5)
            torch._foreach_copy_(some, list(changed.unbind()))


def _matrices(name: str, weight: Tensor) -> Sequence[Tensor]:
    return weight.chunk(3) if name.endswith("qkv.weight") else [weight]


def orthogonal(x: Tensor) -> Tensor:
    """Matrices with the singular vectors of these, and singular values between 0.7 and 1.2 or so: Newton and Schulz's
    iteration with the coefficients of Jordan et al. x: [..., m, n] with m ≤ n"""
    dtype, (a, b, c) = x.dtype, _QUINTIC
    x = x.bfloat16()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        y = x @ x.mT
        x = a * x + (b * y + c * (y @ y)) @ x
    return x.to(dtype)


def rate_factors(names: Sequence[str], rates: Mapping[str, float]) -> dict[str, float]:
    """The factor of the learning rate for each parameter. rates: of `optim.rates`, by the beginnings of names, in whole
    parts and with or without `backbone.`; of several that fit, the longest counts."""
    factors = dict.fromkeys(names, 1.0)
    for prefix, factor in sorted(rates.items(), key=lambda item: len(_whole(item[0]))):
        ours = [name for name in names if f"{name}.".startswith((f"{prefix}.", f"backbone.{prefix}."))]
        if not ours:
            known = ", ".join(dict.fromkeys(name.removeprefix("backbone.").split(".")[0] for name in names))
            raise InsertlmError(f"optim.rates: no parameter's name begins with {prefix}; expected one of {known}")
        factors.update(dict.fromkeys(ours, factor))
    return factors


def _whole(prefix: str) -> str:
    return prefix if f"{prefix}.".startswith("backbone.") else f"backbone.{prefix}"


def freeze(module: nn.Module, config: OptimConfig) -> None:
    """Parameters whose factor is 0 need no gradient."""
    factors = rate_factors([name for name, _ in module.named_parameters()], config.rates)
    for name, parameter in module.named_parameters():
        if factors[name] == 0.0:
            parameter.requires_grad_(False)


class Ema:
    """Exponential moving average of the weights, updated every few steps with the decay those steps would have had.

    The decay warms up as min(decay, (1+k)/(10+k)) at step k, as published.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float, every: int) -> None:
        self.decay, self.every, self.weights = decay, every, list(weights)
        self.average = [value.clone() for value in weights]

    @torch.no_grad()
    def update(self, step: int, *, last: bool = False) -> None:
        """After step number `step` (from 0); the last one of a run always counts."""
        done = step + 1
        if done % self.every and not last:
            return
        decay = min(self.decay, (1 + done) / (10 + done)) ** (done % self.every or self.every)
        torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)
