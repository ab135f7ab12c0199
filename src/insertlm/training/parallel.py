"""Steps that several processes take together, and steps in several pieces: the same examples, the same corruption and,
but for rounding, the same result as one process's step.

A batch is cut into pieces (order.py). A piece's loss counts by what it is a mean of (`Losses.over`): its gradient is
that of a sum, all sums are added up, and what they are divided by comes last and is the whole batch's.

Design choices:
- `ReplicatedStep`: every process has all of the state. Gradients are added up in one long tensor and reduced by one
  collective a step, outside of the captured graph. DistributedDataParallel would reduce piece by piece while backward
  runs, but from hooks that a replayed graph does not call: a step of the paper's model takes 9 ms as a graph and 23 ms
  without, and its 340 MB of gradients about 1.5 ms within a node. The losses travel with the gradients.
- `ShardedStep`: FSDP2's `fully_shard` around every block and the whole, so parameters, gradients, moments and average
  are spread over all processes. It runs as written: its hooks are not for graphs either. The optimiser works on local
  shards, and copies what it has made of them to where FSDP gathers from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from insertlm.families.base import Family, Losses, Rows
from insertlm.tasks.base import Corpus
from insertlm.training.distributed import Processes
from insertlm.training.optim import AdamW, OptimConfig
from insertlm.training.order import Order, Pieces
from insertlm.training.rows import Batch
from insertlm.training.step import TrainStep, capacity_for

__all__ = ["ParallelStep", "ReplicatedStep", "ShardedStep"]

_NAMES = 8  # losses of a family, at most


class ParallelStep(TrainStep):
    """What both kinds share. `settings` are those of TrainStep."""

    def __init__(
        self,
        family: Family,
        rows: Rows | Corpus,
        order: Order,
        *,
        processes: Processes,
        accumulate: int = 1,
        **settings: Any,
    ) -> None:
        self.processes, self.accumulate = processes, accumulate
        super().__init__(family, rows, Pieces(order, processes.rank, processes.world, accumulate), **settings)
        like = self.optimizer.weights[0]
        self.sums = torch.zeros(self._extra() + 2 * _NAMES, dtype=like.dtype, device=like.device)
        self._tally = self.sums[self._extra() :].view(2, _NAMES)  # the losses' sums, and what they are over
        self._names: list[str] = []

    def __call__(self, step: int) -> Batch:
        """Returns this process's last piece."""
        self.optimizer.set_step(step)
        self.optimizer.zero_grad()
        self.sums.zero_()
        for piece in range(step * self.accumulate, (step + 1) * self.accumulate):
            batch = self.source.batch(piece)
            self.source.put(batch)
            self._run(batch)
        self.processes.sum(self.sums)
        self.optimizer.step(self._gradients(self._tally[1, 0]))
        values = self._tally[0] / self._tally[1].clamp(min=1)
        self.ledger.write(dict(zip(self._names, values[: len(self._names)].unbind(), strict=True)))
        self.ema.update(step, last=step + 1 == self.steps)
        self.ledger.turn()
        return batch

    def _extra(self) -> int:
        """Room in `sums` before the losses."""
        return 0

    def _run(self, batch: Batch) -> None:
        if self._graphs is None:
            self._optimise(batch.example, batch.epoch, None)
        else:
            self._graphs.run(batch)

    def _optimise(self, example: Tensor, epoch: Tensor, capacity: int | None) -> None:
        """Of a piece: add its gradient and its losses to the sums."""
        losses = self._losses(example, epoch, capacity)
        values = {"loss": losses.total.detach(), **losses.parts}
        self._names = list(values)
        over = _over(losses, self._names, len(example)).to(self._tally.dtype)
        (losses.total * over[0]).backward()  # type: ignore[no-untyped-call]
        self._tally[:, : len(over)] += torch.stack([torch.stack(list(values.values())) * over, over])

    def _gradients(self, over: Tensor) -> list[Tensor]:
        """Of the whole batch. over: what the loss is a mean of"""
        raise NotImplementedError


def _over(losses: Losses, names: Sequence[str], examples: int) -> Tensor:
    known = losses.over or {}
    plain = torch.full_like(losses.total.detach(), examples)
    return torch.stack([known[name].to(plain) if name in known else plain for name in names])


class ReplicatedStep(ParallelStep):
    def _extra(self) -> int:
        return sum(len(weights) for weights in self.optimizer.weights)

    def _parts(self) -> Sequence[Tensor]:
        """Of `sums`: one for each group of parameters."""
        sizes = [len(weights) for weights in self.optimizer.weights]
        return torch.split(self.sums[: self._extra()], sizes)

    def _optimise(self, example: Tensor, epoch: Tensor, capacity: int | None) -> None:
        self.optimizer.zero_grad()
        super()._optimise(example, epoch, capacity)
        for part, gradient in zip(self._parts(), self.optimizer.gradients(), strict=True):
            part.add_(gradient)

    def _gradients(self, over: Tensor) -> list[Tensor]:
        return [part.div_(over) for part in self._parts()]

    def to_save(self) -> dict[str, dict[str, Tensor]]:
        """Whole tensors, about as many bytes for every process."""
        return {part: self._own(named) for part, named in self.state().items()}

    def _own(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        loads = [0] * self.processes.world
        own: dict[str, Tensor] = {}
        for name, tensor in sorted(named.items(), key=lambda item: -item[1].nbytes):
            rank = loads.index(min(loads))
            loads[rank] += tensor.nbytes
            if rank == self.processes.rank:
                own[name] = tensor
        return own


class ShardedStep(ParallelStep):
    optimizer: _ShardedAdamW

    def __init__(self, *what: Any, processes: Processes, **settings: Any) -> None:
        super().__init__(*what, processes=processes, **{**settings, "compiled": False})
        self._graphs = None

    def _make_optimizer(self, optim: OptimConfig) -> AdamW:
        _shard(self.family, self.processes)
        return _ShardedAdamW(self.family, optim, self.steps, self.processes)

    def _run(self, batch: Batch) -> None:
        """On a GPU with a capacity, since the host does not wait then."""
        capacity = capacity_for(batch.visible) if self.device.type == "cuda" else None
        self._optimise(batch.example, batch.epoch, capacity)

    def _gradients(self, over: Tensor) -> list[Tensor]:
        return [gradient.div_(over) for gradient in self.optimizer.gradients()]

    @contextmanager
    def averaged(self) -> Iterator[Family]:
        """Gathered: every process has the whole model as long as this lasts, and may use it in its own way."""
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
        """Its shards; of a tensor with few rows it may have none."""
        state = self.state()
        return {part: {name: x for name, x in named.items() if len(x)} for part, named in state.items()}

    def _share(self, whole: Tensor) -> Tensor:
        """As FSDP cuts it."""
        parts = whole.chunk(self.processes.world)
        return parts[self.processes.rank] if self.processes.rank < len(parts) else whole[:0]


def _shard(family: Family, processes: Processes) -> None:
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for module in (*family.backbone.blocks, family):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # sums, not means
        module.set_force_sum_reduction_for_comms(True)  # gloo does not know a scaled one
    register_fsdp_forward_method(family, "losses")


class _Shards(nn.Module):
    """Stands for a model where only names, shapes and values of local shards count."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parts = {name: nn.Parameter(shard.clone()) for name, shard in live.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parts.items()


class _ShardedAdamW(AdamW):
    """AdamW over this process's shards; only the norm of the gradient is everyone's."""

    def __init__(self, module: nn.Module, config: OptimConfig, steps: int, processes: Processes) -> None:
        self._module, self._processes = module, processes
        self._live = {name: _local(parameter) for name, parameter in module.named_parameters()}
        self._stand_in = _Shards(self._live)
        super().__init__(self._stand_in, config, steps)

    def zero_grad(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        shards = dict(self._stand_in.named_parameters())
        for name, parameter in self._module.named_parameters():
            shards[name].grad = None if parameter.grad is None else _local(parameter.grad)
        return super().gradients()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        super().step(gradients)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        named = self.named(self.weights)
        torch._foreach_copy_([self._live[name] for name in named], list(named.values()))

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squared = super()._norm(gradients).square()
        self._processes.sum(squared)
        return squared.sqrt()


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
