"""Steps that several processes take together, and steps in several pieces: the same examples, the same corruption and,
but for rounding, the same result as one process's step.

A batch is cut into pieces (order.py). A loss is a mean over some number of things (`Losses.over`), and pieces differ in
that number. So each piece computes the gradient of a sum, the sums are added up, and only then divided by the number of
the whole batch.

Here every process has all of the state; sharded.py is the other way. Gradients are added up in one long tensor and
reduced by one collective per step, outside of the captured graph. DistributedDataParallel would reduce them piecemeal
during the backward pass, but from hooks that a replayed graph does not call. A step of the paper's model takes 9 ms as
a compiled graph, and 350 MB of gradients should take less than 2 ms within a node. The losses travel with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insertlm.core.processes import Processes
from insertlm.data.order import Order, ProcessOrder
from insertlm.families.base import Family, Rows
from insertlm.recipe import Recipe, build_family
from insertlm.tasks.base import Corpus, Examples
from insertlm.training.optim import freeze
from insertlm.training.rows import Batch
from insertlm.training.step import TrainStep

__all__ = ["ParallelStep", "ReplicatedStep", "build_step"]

_NAMES = 8  # the most losses that a family has


class ParallelStep(TrainStep, ABC):
    """What replicated and sharded steps share. settings: those of TrainStep"""

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
        super().__init__(family, rows, ProcessOrder(order, processes.rank, processes.world, accumulate), **settings)
        like = self.optimizer.weights[0]
        self.sums = torch.zeros(self._extra() + 2 * _NAMES, dtype=like.dtype, device=like.device)
        # The sums of the losses, and over how many things: in the same tensor as the gradients, for one collective.
        self._tally = self.sums[self._extra() :].view(2, _NAMES)
        self._names: list[str] = []

    def __call__(self, step: int, elapsed: float = 0.0) -> Batch:
        """Returns the last piece of this process."""
        self.optimizer.set_step(step, elapsed)
        self.optimizer.zero_grad()
        self.sums.zero_()
        for piece in range(step * self.accumulate, (step + 1) * self.accumulate):
            batch = self.source.batch(piece)
            self.source.put(batch)
            self._run(batch)
        # The only collective of a step: one long sum is faster than many short ones.
        self.processes.sum(self.sums)
        self.optimizer.step(self._gradients(self._tally[1, 0]))
        # A loss that was over nothing in the whole batch is 0, not 0/0.
        values = self._tally[0] / self._tally[1].clamp(min=1)
        self.ledger.write(dict(zip(self._names, values[: len(self._names)].unbind(), strict=True)))
        self._count(step)
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
        """Add the gradient and the losses of a piece to the sums."""
        losses = self._losses(example, epoch, capacity)
        values = {"loss": losses.total.detach(), **losses.parts}
        self._names = list(values)
        # A mean times what it is over is a sum again.
        over = torch.stack([losses.size(name, len(example)) for name in self._names]).to(self._tally.dtype)
        (losses.total * over[0]).backward()  # type: ignore[no-untyped-call]
        self._tally[:, : len(over)] += torch.stack([torch.stack(list(values.values())) * over, over])

    @abstractmethod
    def _gradients(self, over: Tensor) -> list[Tensor]:
        """Of the whole batch, for each group that learns. over: the number of things the loss is a mean of"""


class ReplicatedStep(ParallelStep):
    """Every process has the whole state."""

    def _extra(self) -> int:
        return sum(len(group.weights) for group in self.optimizer.learning)

    def _parts(self) -> Sequence[Tensor]:
        """Of `sums`: one for each group of parameters that learn."""
        sizes = [len(group.weights) for group in self.optimizer.learning]
        return torch.split(self.sums[: self._extra()], sizes)

    def _optimise(self, example: Tensor, epoch: Tensor, capacity: int | None) -> None:
        self.optimizer.zero_grad()
        super()._optimise(example, epoch, capacity)
        for part, gradient in zip(self._parts(), self.optimizer.gradients(), strict=True):
            part.add_(gradient)

    def _gradients(self, over: Tensor) -> list[Tensor]:
        return [part.div_(over) for part in self._parts()]

    def to_save(self) -> dict[str, dict[str, Tensor]]:
        """Some of the tensors, whole, about as many bytes in every process."""
        return {part: self._own(named) for part, named in self.state().items()}

    def _own(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # The largest first, each to the process with the least: all processes come to the same result.
        loads = [0] * self.processes.world
        own: dict[str, Tensor] = {}
        for name, tensor in sorted(named.items(), key=lambda item: -item[1].nbytes):
            rank = loads.index(min(loads))
            loads[rank] += tensor.nbytes
            if rank == self.processes.rank:
                own[name] = tensor
        return own


def build_step(recipe: Recipe, data: Examples | Corpus, order: Order, processes: Processes) -> TrainStep:
    """One process and one piece: a step of its own, captured as a whole. Else steps in pieces."""
    config = recipe.train
    sharded = config.parallel == "fsdp" and processes.world > 1
    family = build_family(recipe)
    freeze(family, recipe.optim)
    if not sharded:  # shards go to the device one by one
        family.to(processes.device)
    rows = family.rows(data) if isinstance(data, Examples) else data
    settings: dict[str, Any] = {
        "optim": recipe.optim,
        "steps": config.steps,
        "device": processes.device,
        "compiled": config.compile and processes.device.type == "cuda",  # elsewhere its import alone takes seconds
        "precision": config.precision,
    }
    if processes.world * config.accumulate == 1:
        return TrainStep(family, rows, order, **settings)
    kind: type[ParallelStep] = ReplicatedStep
    if sharded:
        from insertlm.training.sharded import ShardedStep  # slow to import

        kind = ShardedStep
    return kind(family, rows, order, **settings, processes=processes, accumulate=config.accumulate)
