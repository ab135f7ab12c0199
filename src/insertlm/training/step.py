"""One optimisation step: eager on a CPU, and on CUDA one captured graph per buffer size.

Corruption deletes a different number of tokens every time. The host can compute how many rows will be left, because the
noise is a hash. It rounds the number up to a capacity and replays the graph captured for that: shapes are static, less
than one row in fifty is spare, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.data.order import Order
from insertlm.families.base import Family, Losses, Noise, Rows
from insertlm.nn.fused import ROWS
from insertlm.recipe import OptimConfig
from insertlm.tasks.base import Corpus
from insertlm.training.ledger import Ledger
from insertlm.training.optim import Ema, Optimizer
from insertlm.training.rows import Batch, Resident, Streamed

__all__ = ["TrainStep", "capacity_for"]

_BACKBONE = "backbone."  # how the names of its parameters begin
_EAGER_VISITS = 2  # steps before a capacity's graph is captured: libraries and compilers set themselves up in them


def capacity_for(visible: int) -> int:
    """`visible` rounded up to whole blocks of rows, by at most a thirty-second of it or one block."""
    # A unit that grows with the number keeps the capacities few, and so the graphs.
    unit = max(ROWS, 1 << max(0, visible.bit_length() - 6))
    return -(-visible // unit) * unit


class TrainStep:
    """The state of training, and how it changes by a step.

    rows: all of them, which go to the device, or a corpus to read them from
    ledger, source, bf16: read by the loop, for the log and for validation
    """

    def __init__(
        self,
        family: Family,
        rows: Rows | Corpus,
        order: Order,
        *,
        optim: OptimConfig,
        steps: int,
        device: torch.device,
        compiled: bool,
        precision: str = "auto",
    ) -> None:
        self.family, self.device = family, device
        self.bf16 = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
        self.steps, self.order = steps, order
        self.optimizer = self._make_optimizer(optim)
        self.ema = Ema(self.optimizer.weights, optim.ema, optim.ema_every)
        self.source = (
            Resident(family, rows, order, device) if isinstance(rows, Rows) else Streamed(family, rows, order, device)
        )
        self.ledger = Ledger()
        self._losses = self._compile() if compiled else self._eager_losses
        self._graphs = _Graphs(self._optimise, order.batch_size, device) if device.type == "cuda" else None

    def __call__(self, step: int, elapsed: float = 0.0) -> Batch:
        """step: from 0   elapsed: share of `train.minutes` that is over"""
        batch = self.source.batch(step)
        self.source.put(batch)
        self.optimizer.set_step(step, elapsed)
        if self._graphs is None:
            self._optimise(batch.example, batch.epoch, None)
        else:
            self._graphs.run(batch)
        self._count(step)
        return batch

    def _count(self, step: int) -> None:
        self.ema.update(step)
        if step + 1 == self.steps:
            self.ema.end(step)
        self.ledger.count_step()

    @contextmanager
    def averaged(self) -> Iterator[Family]:
        """The model with the averaged weights, as long as this block lasts."""
        with self.optimizer.replaced(self.ema.average):
            yield self.family

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All there is to save of a run besides the number of steps: named tensors, not copied."""
        named = self.optimizer.named
        return {
            "weights": named(self.optimizer.weights),
            "ema": named(self.ema.average),
            "optimizer": self.optimizer.moments(),
        }

    def to_save(self) -> dict[str, dict[str, Tensor]]:
        """What this process writes of the state."""
        return self.state()

    def begin_with(self, weights: Mapping[str, Tensor], akin: bool = False) -> None:
        """Start from these weights, with fresh moments. akin: they are another family's; only the backbone must fit, a
        head that they lack stays fresh, and a head that this family lacks is left out"""
        fresh: set[str] = set()
        if akin:
            weights, own = self.family.layer.adopt(weights), self.state()["weights"].keys()
            weights = {name: value for name, value in weights.items() if name in own or name.startswith(_BACKBONE)}
            fresh = {name for name in own - weights.keys() if not name.startswith(_BACKBONE)}
        known = ((key, weights.get(key.partition("/")[0])) for key in self.optimizer.moments())
        moments = {key: torch.zeros_like(value) for key, value in known if value is not None}
        self.load({"weights": weights, "ema": weights, "optimizer": moments}, fresh)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Mapping[str, Tensor]], fresh: Collection[str] = ()) -> None:
        """Go on from a saved state. fresh: parameters that are not in it"""
        for part, state in self.state().items():
            tensors = {name: tensor for name, tensor in state.items() if name.partition("/")[0] not in fresh}
            whole = saved[part]  # read now, so that only one part is in memory at a time
            if odd := sorted(tensors.keys() ^ whole.keys()):
                raise InsertlmError(f"a checkpoint of another architecture: {odd[0]} is in one of them only")
            for name, tensor in tensors.items():
                # A copy in place: optimiser, average and network hold parts of the same long tensors.
                share = self._share(whole[name])
                if share.shape != tensor.shape:
                    found, expected = tuple(whole[name].shape), tuple(tensor.shape)
                    raise InsertlmError(f"a checkpoint of another architecture: {name} is {found}, expected {expected}")
                tensor.copy_(share)
        self.optimizer.refresh()

    def _share(self, whole: Tensor) -> Tensor:
        """What this process holds of a tensor."""
        return whole

    def _make_optimizer(self, optim: OptimConfig) -> Optimizer:
        blocks = self.family.backbone.blocks
        linear = {f"{_BACKBONE}blocks.{name}" for name in _linear_parameters(blocks)}
        hidden: dict[str, Sequence[int]] = {name: () for name in linear if name.endswith(".weight")}
        for number, block in enumerate(blocks):
            hidden |= {f"{_BACKBONE}blocks.{number}.{name}.weight": rows for name, rows in _stacked(block).items()}
        return Optimizer(self.family, optim, self.steps, linear if self.bf16 else (), hidden)

    def _eager_losses(self, example: Tensor, epoch: Tensor, capacity: int | None) -> Losses:
        noise = Noise(self.order.seed, example, epoch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.family.losses(self.source.rows(example), noise, capacity)

    def _compile(self) -> Callable[[Tensor, Tensor, int | None], Losses]:
        """Compiled once for all capacities."""

        # A capacity that is a plain number would be a constant of the compiled code, and every new one would be
        # compiled anew. So it enters as the size of an empty tensor, in blocks, that is marked as dynamic.
        def with_room(example: Tensor, epoch: Tensor, room: Tensor) -> Losses:
            return self._eager_losses(example, epoch, (room.shape[0] - 1) * ROWS)

        fast = torch.compile(with_room, dynamic=False)

        def losses(example: Tensor, epoch: Tensor, capacity: int | None) -> Losses:
            if capacity is None:
                return self._eager_losses(example, epoch, None)
            # One more than the blocks, because the compiler makes a special case of a size of 1.
            room = torch.empty(capacity // ROWS + 1, 0, device=self.device)
            torch._dynamo.mark_dynamic(room, 0)
            return fast(example, epoch, room)

        return losses

    def _optimise(self, example: Tensor, epoch: Tensor, capacity: int | None) -> None:
        self.optimizer.zero_grad()
        losses = self._losses(example, epoch, capacity)
        losses.total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.ledger.write({"loss": losses.total.detach(), **losses.parts})


def _linear_parameters(module: nn.Module) -> Iterator[str]:
    """Names of the parameters of linear layers, which matrix products read."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            yield from (f"{name}.{part}" for part, _ in layer.named_parameters())


def _stacked(block: Any) -> dict[str, Sequence[int]]:
    """The rows of each matrix, for the linear layers of a block that hold several."""
    head_dim = len(block.qkv.weight) // (block.heads + 2 * block.key_heads)
    queries, keys = block.heads * head_dim, block.key_heads * head_dim
    gated = {"up": [len(block.up.weight) // 2] * 2} if block.activation == "swiglu" else {}
    return {"qkv": [queries, keys, keys], **gated}


class _Graphs:
    """A captured graph per capacity, all in one memory pool: they never run at the same time."""

    def __init__(self, run: Callable[[Tensor, Tensor, int], None], batch_size: int, device: torch.device) -> None:
        self._run = run
        # A graph reads its input where it was when it was captured, so batches are copied to there.
        self._example = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._epoch = torch.zeros_like(self._example)
        self._visits: dict[int, int] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # One pool for all graphs: only one of them runs at a time, so they may use the same memory.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, batch: Batch) -> None:
        self._example.copy_(batch.example)
        self._epoch.copy_(batch.epoch)
        capacity = capacity_for(batch.visible)
        if capacity not in self._graphs:
            self._visits[capacity] = self._visits.get(capacity, 0) + 1
            if self._visits[capacity] <= _EAGER_VISITS:
                self._run_aside(capacity)
                return
            self._capture(capacity)
        self._graphs[capacity].replay()

    def _run_aside(self, capacity: int) -> None:
        """Eagerly, on the stream that will capture, as torch asks for before a capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(self._example, self._epoch, capacity)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, capacity: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._run(self._example, self._epoch, capacity)
        self._graphs[capacity] = graph
