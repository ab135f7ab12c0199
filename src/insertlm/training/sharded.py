"""Steps of processes that each hold a part of the model: FSDP2's `fully_shard` around every block and the whole.

Parameters, gradients, moments and average are spread over all processes. Steps run eagerly, because FSDP works by
hooks, which a captured graph would not call. The optimiser works on local shards, and copies them to where FSDP gathers
from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.families.base import Family
from insertlm.recipe import OptimConfig
from insertlm.training.optim import Optimizer
from insertlm.training.parallel import ParallelStep
from insertlm.training.rows import Batch
from insertlm.training.step import capacity_for

__all__ = ["ShardedStep"]


class ShardedStep(ParallelStep):
    """Every process has a share of the state, and gathers a block when it is needed."""

    optimizer: _ShardedOptimizer

    def __init__(self, *what: Any, processes: Processes, **settings: Any) -> None:
        super().__init__(*what, processes=processes, **{**settings, "compiled": False})
        self._graphs = None  # FSDP needs its hooks, which a captured graph would not call

    def _make_optimizer(self, optim: OptimConfig) -> Optimizer:
        if optim.matrices == "muon":
            raise InsertlmError("optim.matrices: expected adamw for a sharded model, muon needs whole matrices")
        _shard(self.family, self.processes, self.bf16)
        return _ShardedOptimizer(self.family, optim, self.steps, self.processes)

    def _run(self, batch: Batch) -> None:
        """With a capacity on a GPU, so that the host does not wait for the number of rows."""
        capacity = capacity_for(batch.visible) if self.device.type == "cuda" else None
        self._optimise(batch.example, batch.epoch, capacity)

    def _gradients(self, over: Tensor) -> list[Tensor]:
        return [gradient.div_(over) for gradient in self.optimizer.gradients()]

    @contextmanager
    def averaged(self) -> Iterator[Family]:
        """Every process has the whole model as long as this lasts, and may write other texts than the others."""
        # Writing calls parts of the model that are no FSDP modules, whose hooks would not gather anything. So all is
        # gathered before.
        modules = [module for module in self.family.modules() if isinstance(module, FSDPModule)]
        with super().averaged() as family:
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
            try:
                yield family
            finally:
                family.forget_graphs()
                for module in modules:
                    module.reshard()
                    module.set_reshard_after_forward(True, recurse=False)

    def to_save(self) -> dict[str, dict[str, Tensor]]:
        """The shards of this process, which may have none of a tensor with few rows."""
        state = self.state()
        return {part: {name: x for name, x in named.items() if len(x)} for part, named in state.items()}

    def _share(self, whole: Tensor) -> Tensor:
        """As FSDP cuts it."""
        parts = whole.chunk(self.processes.world)
        return parts[self.processes.rank] if self.processes.rank < len(parts) else whole[:0]


def _shard(family: Family, processes: Processes, bf16: bool) -> None:
    """bf16: blocks are gathered in bfloat16, half as many bytes, as their products read them. What is added up stays
    in float32: gradients, the residual stream (whose norms widen their weights again) and all of the heads."""
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    rounded = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*family.backbone.blocks, family):
        fully_shard(module, mesh=mesh, mp_policy=rounded if bf16 and module is not family else MixedPrecisionPolicy())
        module.set_gradient_divide_factor(1.0)  # sums, not means
        module.set_force_sum_reduction_for_comms(True)  # gloo does not know a scaled one
    register_fsdp_forward_method(family, "losses")


class _Shards(nn.Module):
    """Looks like a model to the optimiser, but holds copies of local shards."""

    def __init__(self, live: Mapping[str, Tensor], learning: Collection[str]) -> None:
        super().__init__()
        self._parts = {name: nn.Parameter(shard.clone(), name in learning) for name, shard in live.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parts.items()


class _ShardedOptimizer(Optimizer):
    """Works on the shards of this process; only the norm of the gradient is that of all processes."""

    def __init__(self, module: nn.Module, config: OptimConfig, steps: int, processes: Processes) -> None:
        self._module, self._processes = module, processes
        self._live = {name: _local(parameter) for name, parameter in module.named_parameters()}
        learning = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._stand_in = _Shards(self._live, learning)
        super().__init__(self._stand_in, config, steps)

    def zero_grad(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        shards = dict(self._stand_in.named_parameters())
        # FSDP puts a gradient on the parameter, sharded like it; the optimiser looks for it on the stand-in.
        for name, parameter in self._module.named_parameters():
            shards[name].grad = None if parameter.grad is None else _local(parameter.grad)
        return super().gradients()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        super().step(gradients)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        super().refresh()
        named = self.named([group.weights if group.copy is None else group.copy for group in self.groups])
        torch._foreach_copy_([self._live[name] for name in named], list(named.values()))

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        # Squares of shards add up to the square of the whole.
        squared = super()._norm(gradients).square()
        self._processes.sum(squared)
        return squared.sqrt()


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
