"""The optimiser with its two rules, and the moving average of the weights.

Every parameter has one name, one state and one place in a checkpoint, also where two modules share it (tied weights):
the name is the first that `named_parameters` finds. Parameters that do not require gradients are kept with the others,
so that checkpoints are whole, but neither rule touches them.

torch's own optimisers do not serve: with hundreds of parameters their step is many kernels, and they do not keep the
bfloat16 copies that the network multiplies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.recipe import OptimConfig
from insertlm.storage.weights import GROUP, bits_of, rounded

__all__ = ["Ema", "Optimizer", "freeze", "orthogonal", "rate_factors"]

_EPSILON = 1e-8
_AHEAD = 256  # steps whose rates go to the device together

# Muon, as published.
_MOMENTUM = 0.95
_ITERATIONS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of x, x³ and x⁵
_ADAM_RMS = 0.2  # root mean square of an AdamW step, in units of the learning rate


class Optimizer:
    """AdamW with clipping, over a few long tensors instead of hundreds of parameters; if the recipe says so, Muon for
    the matrices in `hidden`.

    Parameters of a kind (rule, precision, decay, rate) share one tensor each for weights, moments and gradients, so a
    step is a handful of kernels. The optimiser's weights are float32. Parameters named in `bf16` become bfloat16: the
    network multiplies a rounded copy, renewed at every step, and no product has to convert its weights first.

    In the last steps, `optim.rounded`, the network sees matrices as a release in groups will store them, and their
    gradient counts as that of the weights before rounding ("straight through"). So training, which still moves the
    weights by less than a step of the grid, finds those that lose little when they are packed.

    hidden: names of matrices, and the rows of each matrix where one parameter holds several, stacked
    groups: of all parameters   learning: the groups that learn, which have gradients
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        steps: int,
        bf16: Collection[str] = (),
        hidden: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        hidden = hidden or {}
        factors = rate_factors([name for name, _ in module.named_parameters()], config.rates)
        kinds: dict[tuple[type[_Group], bool, bool, float, int], dict[str, nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            rule: type[_Group] = _Muon if config.matrices == "muon" and name in hidden else _AdamW
            rule = rule if parameter.requires_grad else _Frozen
            bits = bits_of(name, parameter.shape) if config.rounded else 0
            kind = rule, name in bf16, parameter.dim() >= 2, factors[name], bits
            kinds.setdefault(kind, {})[name] = parameter
        self.groups = [
            rule(named, half, config.weight_decay if matrices else 0.0, factor, bits)
            for (rule, half, matrices, factor, bits), named in kinds.items()
        ]
        for group in self.groups:
            if isinstance(group, _Muon):
                group.stacked = hidden
        self.learning = [group for group in self.groups if not isinstance(group, _Frozen)]
        # Without a gradient there would be no norm, and nothing to do.
        if not self.learning:
            raise InsertlmError("optim.rates: every rate is 0; expected parameters that learn")
        self.config = config
        self.weights = [group.weights for group in self.groups]
        device = self.weights[0].device
        self.steps, self._first, self.rounding, self.rate = steps, -1, False, 0.0
        self._ahead = torch.zeros(_AHEAD, 3, device=device, dtype=self.weights[0].dtype)
        self._now = self._ahead[0].clone()

    def zero_grad(self) -> None:
        for group in self.learning:
            for parameter in group.parameters.values():
                parameter.grad = None

    def set_step(self, step: int, elapsed: float = 0.0) -> None:
        """Set what changes from step to step: the rate and the corrections of the moments. step: from 0
        elapsed: share of `train.minutes` that is over"""
        # They go to the device for many steps at once, because a transfer takes as long as the update itself. The copy
        # to `_now` stays on the device, at the address that a captured graph reads.
        first = step - step % _AHEAD
        if first != self._first:
            self._first = first
            self._ahead.copy_(torch.tensor([self.config.scalars(first + i, self.steps) for i in range(_AHEAD)]))
        self._now.copy_(self._ahead[step - first])
        self.rate = self.config.rate(step, self.steps, elapsed)
        if elapsed:  # nobody knew it ahead; the number travels with the kernel, not in a transfer of its own
            self._now[0].fill_(self.rate)
        # Before the step and outside of its captured graph: so it depends on step and clock alone, also in a run that
        # goes on from a checkpoint, and nothing is captured anew when rounding begins.
        before, self.rounding = self.rounding, self.config.rounds(step, self.steps, elapsed)
        if before or self.rounding:
            self.refresh()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """gradients: one for each group that learns; the parameters' own unless given."""
        gradients = self.gradients() if gradients is None else gradients
        norm = self._norm(gradients)
        # As clip_grad_norm_ has it, without an `if` on the norm: the host would have to wait for it.
        shrink = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) if self.config.clip else torch.ones_like(norm)
        for group, gradient in zip(self.learning, gradients, strict=True):
            group.step(gradient, shrink, self._now, self.config)

    def gradients(self) -> list[Tensor]:
        return [group.gradient() for group in self.learning]

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm: Tensor = torch.stack([torch.linalg.vector_norm(x, dtype=self._now.dtype) for x in gradients]).norm()
        return norm

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Long tensors, one for each group, cut into parts with the names and shapes of the parameters."""
        return {
            name: part
            for group, value in zip(self.groups, values, strict=True)
            for name, part in group.split(value).items()
        }

    def moments(self) -> dict[str, Tensor]:
        """What the rules remember of each parameter: `<name>/exp_avg` and `<name>/exp_avg_sq`, or `<name>/momentum`."""
        return {
            f"{name}/{kind}": part
            for group in self.groups
            for kind, value in group.moments.items()
            for name, part in group.split(value).items()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the network see the weights as they are now, rounded if that has begun."""
        for group in self.groups:
            group.refresh(self.rounding)

    @contextmanager
    def replaced(self, values: Sequence[Tensor]) -> Iterator[None]:
        """The network holds other weights inside this block."""
        # In place, because captured graphs know the addresses.
        # Float32 copies, since the network's own may be rounded.
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
    """Parameters of one kind and the rule they learn by. All tensors: [N], the parameters one after the other.

    remembers: names of what the rule keeps from step to step   factor: of the learning rate
    bits: of an entry in a release in groups, where the network shall see it so; else 0
    copy: the weights as the network sees them, in bfloat16 or rounded to few bits, where they are not the weights
    """

    remembers: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, parameters: dict[str, nn.Parameter], bf16: bool, decay: float, factor: float, bits: int = 0
    ) -> None:
        self.parameters, self.decay, self.factor, self.bits = parameters, decay, factor, bits
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self.moments = {name: torch.zeros_like(self.weights) for name in self.remembers}
        self.copy = self.weights.to(torch.bfloat16 if bf16 else None, copy=True) if bf16 or bits else None
        # From here on the network reads its parameters out of the long tensor.
        live = self.split(self.weights if self.copy is None else self.copy)
        for name, parameter in parameters.items():
            parameter.data = live[name]

    @abstractmethod
    def step(self, gradient: Tensor, shrink: Tensor, now: Tensor, config: OptimConfig) -> None:
        """shrink: factor of the gradient   now: the `scalars` of the step"""

    def refresh(self, rounding: bool) -> None:
        """Renew the copy. rounding: whether to few bits"""
        if self.copy is None:
            return
        if rounding and self.bits:
            # Rows are whole groups, and so are the matrices one after the other. Not compiled: torch 2.11 takes the
            # number of bits for a variable and fails, and it is 2 % of a step.
            self.copy.copy_(rounded(self.weights.view(-1, GROUP), self.bits).view(-1))
        else:
            self.copy.copy_(self.weights)

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

    def __init__(
        self, parameters: dict[str, nn.Parameter], bf16: bool, decay: float, factor: float, bits: int = 0
    ) -> None:
        super().__init__(parameters, bf16, decay, factor, bits)
        self._update = _update
        # Compiled it is one kernel. It takes a fifteenth of a step, so it is worth a search for its shape.
        if self.weights.is_cuda:
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
    directions as in common ones. It is scaled to the size of an AdamW step (arXiv 2502.16982), so that both rules share
    one rate and one decay.

    stacked: the rows of each matrix, for parameters that hold several
    """

    remembers = ("momentum",)
    stacked: Mapping[str, Sequence[int]]

    def step(self, gradient: Tensor, shrink: Tensor, now: Tensor, config: OptimConfig) -> None:
        gradient = gradient.to(self.weights.dtype) * shrink
        momentum = self.moments["momentum"].lerp_(gradient, 1.0 - _MOMENTUM)
        change = gradient.lerp_(momentum, _MOMENTUM)  # Nesterov's
        # Queries, keys and values come from one layer, but are matrices of their own.
        parts = [torch.split(x, list(self.stacked[name]) or len(x)) for name, x in self.split(change).items()]
        self._orthogonalise(list(chain.from_iterable(parts)))
        rate = now[0] * self.factor
        self.weights.mul_(1.0 - rate * self.decay).sub_(rate * change)
        if self.copy is not None:
            self.copy.copy_(self.weights)

    @staticmethod
    def _orthogonalise(matrices: Sequence[Tensor]) -> None:
        """In place. Matrices of one shape, or its transpose, go through the iteration together."""
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            lying = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            alike.setdefault(tuple(lying.shape), []).append(lying)
        for (_, longer), some in alike.items():
            changed = orthogonal(torch.stack(some)) * (_ADAM_RMS * longer**0.5)
            torch._foreach_copy_(some, list(changed.unbind()))


def orthogonal(x: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values between about 0.7 and 1.2: the Newton-Schulz
    iteration with the coefficients of Jordan et al. x: [..., m, n] with m ≤ n"""
    dtype, (a, b, c) = x.dtype, _QUINTIC
    x = x.bfloat16()  # the iteration corrects itself, so that rounding does no harm
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        y = x @ x.mT
        x = a * x + (b * y + c * (y @ y)) @ x
    return x.to(dtype)


def rate_factors(names: Sequence[str], rates: Mapping[str, float]) -> dict[str, float]:
    """The factor of the learning rate of each parameter. rates: the recipe's `optim.rates`, whose keys are the first
    parts of names, with or without `backbone.`; if several fit, the longest one counts."""
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
    """Parameters whose rate is 0 need no gradient, which saves its computation and its sum over processes."""
    factors = rate_factors([name for name, _ in module.named_parameters()], config.rates)
    for name, parameter in module.named_parameters():
        if factors[name] == 0.0:
            parameter.requires_grad_(False)


class Ema:
    """Exponential moving average of the weights.

    The decay warms up as min(decay, (1+k)/(10+k)) at step k, as published. An update every few steps, with the decay
    that those steps would have had together, is as good and costs a fraction of the memory traffic.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float, every: int) -> None:
        self.decay, self.every, self.weights = decay, every, list(weights)
        self.average = [value.clone() for value in weights]

    def update(self, step: int) -> None:
        """After step number `step` (from 0)."""
        if (step + 1) % self.every == 0:
            self._update(step + 1, self.every)

    def end(self, step: int) -> None:
        """After the update of a run's last step: the steps since the last average count too."""
        if (step + 1) % self.every:
            self._update(step + 1, (step + 1) % self.every)

    @torch.no_grad()
    def _update(self, done: int, steps: int) -> None:
        decay = min(self.decay, (1 + done) / (10 + done)) ** steps
        torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)
